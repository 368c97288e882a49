//! Against the formula written out, and every way to cut and to store the same update.

use super::*;
use crate::slot::BLOCK;

/// Awkward values of both signs and many magnitudes.
fn data(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..n).map(|i| next() * 10f32.powi(i as i32 % 9 - 4)).collect()
}

/// A block of the state.
#[derive(Clone, Debug, PartialEq)]
struct State {
    moments: Moments,
    main: Vec<f32>,
    /// The sections' bytes, aligned.
    avg: Vec<u64>,
    sq: Vec<u64>,
}

impl State {
    /// A block whose elements `range` hold values.
    fn new(moments: Moments, range: Range<usize>) -> State {
        let words = moments.block_bytes() / 8;
        let mut state = State { moments, main: data(BLOCK, 2), avg: vec![0; words], sq: vec![0; words] };
        let avg = data(range.len(), 3);
        let sq: Vec<f32> = data(range.len(), 4).iter().map(|x| x * x).collect();
        for (moment, section, values) in
            [(Moment::First, &mut state.avg, avg), (Moment::Second, &mut state.sq, sq)]
        {
            let bytes = bytemuck::cast_slice_mut(section);
            moments.fill_zero(moment, bytes);
            moments.encode(moment, &values, bytes, range.clone());
        }
        state
    }

    fn block(&mut self) -> BlockMut<'_> {
        let (avg, sq) = (bytemuck::cast_slice_mut(&mut self.avg), bytemuck::cast_slice_mut(&mut self.sq));
        BlockMut { moments: self.moments, main: &mut self.main, avg, sq }
    }

    fn decoded(&self, moment: Moment) -> Vec<f32> {
        let section = if moment == Moment::First { &self.avg } else { &self.sq };
        let mut values = vec![0.0; BLOCK];
        self.moments.decode(moment, bytemuck::cast_slice(section), 0..BLOCK, &mut values);
        values
    }
}

/// The update as the module's page states it.
fn stated(rule: &Rule, grad: f32, main: f32, avg: f32, sq: f32) -> [f32; 3] {
    let Rule { unscale, clip, shrink, l2, slope, beta2, mix2, step, correction, eps } = *rule;
    let g = grad * unscale * clip + l2 * main;
    let m = if slope > 0.0 { avg + slope * (g - avg) } else { g + slope * (g - avg) };
    let v = sq * beta2 + mix2 * g * g;
    [main * shrink + step * m / (v.sqrt() * correction + eps), m, v]
}

fn rules() -> Vec<Rule> {
    let l2 = GroupOptions { weight_decay: 0.1, decoupled: false, ..GroupOptions::default() };
    let ascent = GroupOptions { maximize: true, betas: (0.3, 0.95), ..GroupOptions::default() };
    vec![
        Rule::new(&GroupOptions::default(), 1, 1.0, 1.0),
        Rule::new(&l2, 3, 3.0, 0.7),
        Rule::new(&ascent, 1000, 65_536.0, 1e-4),
    ]
}

const RANGES: [Range<usize>; 6] =
    [0..BLOCK, 0..1, 256..257, 512..1111, 256 + 100..2 * BLOCK / 3, BLOCK - 256..BLOCK - 3];

#[test]
fn every_format_and_instruction_set_follows_the_formula() {
    for (rule, range) in rules().iter().flat_map(|rule| RANGES.map(|range| (rule, range))) {
        let grad = data(range.len(), 1);
        let narrow: Vec<u16> = grad.iter().map(|g| bf16::round(*g)).collect();
        for moments in [Moments::F32, Moments::Bf16, Moments::Int8] {
            let before = State::new(moments, range.clone());
            let (avg, sq) = (before.decoded(Moment::First), before.decoded(Moment::Second));
            for given in [Gradient::F32(&grad), Gradient::Bf16(&narrow)] {
                let mut wanted = before.clone();
                let (mut first, mut second) = (Vec::new(), Vec::new());
                for (i, at) in range.clone().enumerate() {
                    let g = match given {
                        Gradient::F32(grad) => grad[i],
                        Gradient::Bf16(grad) => bf16::widen(grad[i]),
                        Gradient::Device(_) => unreachable!(),
                    };
                    let [w, m, v] = stated(rule, g, before.main[at], avg[at], sq[at]);
                    wanted.main[at] = w;
                    first.push(m);
                    second.push(v);
                }
                for (moment, section, values) in
                    [(Moment::First, &mut wanted.avg, first), (Moment::Second, &mut wanted.sq, second)]
                {
                    moments.encode(moment, &values, bytemuck::cast_slice_mut(section), range.clone());
                }
                for set in InstructionSet::ALL {
                    let mut found = before.clone();
                    let (mut wide, mut rounded) = (vec![0.0; range.len()], vec![0; range.len()]);
                    let weights = match given {
                        Gradient::F32(_) => WeightsOut::F32(&mut wide),
                        _ => WeightsOut::Bf16(&mut rounded),
                    };
                    let (block, range) = (found.block(), range.clone());
                    set.run(Update {
                        rule,
                        block,
                        range: range.clone(),
                        grad: given,
                        weights: Some(weights),
                    });
                    assert_eq!(found, wanted, "{set:?} {moments:?} {range:?}");
                    match given {
                        Gradient::F32(_) => assert_eq!(wide, wanted.main[range]),
                        _ => {
                            let copies: Vec<u16> =
                                wanted.main[range].iter().map(|w| bf16::round(*w)).collect();
                            assert_eq!(rounded, copies);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn every_cut_gives_the_same_bits() {
    let rule = &rules()[1];
    for moments in [Moments::F32, Moments::Bf16, Moments::Int8] {
        let range = 300..9000;
        let grad = data(range.len(), 1);
        let before = State::new(moments, range.clone());
        let mut whole = before.clone();
        update_block(rule, whole.block(), range.clone(), Gradient::F32(&grad), None);
        for cut in [512, 1024, 1027, 8999] {
            // Elements that share a scale stay together.
            let cut = if moments == Moments::Int8 { cut / QUANT_BLOCK * QUANT_BLOCK } else { cut };
            let mut parts = before.clone();
            for part in [range.start..cut, cut..range.end] {
                let grad = &grad[part.start - range.start..part.end - range.start];
                update_block(rule, parts.block(), part, Gradient::F32(grad), None);
            }
            assert_eq!(whole, parts, "{moments:?} cut at {cut}");
        }
    }
}

#[test]
fn a_beta_below_one_half_interpolates_from_the_gradient() {
    // beta1 = 0 forgets the past entirely, whatever its size.
    let options = GroupOptions { betas: (0.0, 0.9), ..GroupOptions::default() };
    let (mut main, mut avg, mut sq) = ([1.0], [1e30], [0.0]);
    Rule::new(&options, 1, 1.0, 1.0).advance(&[0.25], &mut main, &mut avg, &mut sq);
    assert_eq!(avg, [0.25]);
}

/// Steps `count` times with one gradient; returns the main weights and their bfloat16 copies.
fn trained(options: &GroupOptions, count: u64, weight: f32, grad: f32) -> (f32, f32) {
    let mut state = State::new(Moments::F32, 0..0);
    state.main[0] = weight;
    let mut copy = [0];
    for t in 1..=count {
        let rule = Rule::new(options, t, 1.0, 1.0);
        update_block(&rule, state.block(), 0..1, Gradient::F32(&[grad]), Some(WeightsOut::Bf16(&mut copy)));
    }
    (state.main[0], bf16::widen(copy[0]))
}

#[test]
fn o5_updates_below_half_a_bfloat16_step_add_up() {
    // Adam moves by the learning rate where the gradient is always the same; half a step below 1 is 2^-9 = 2e-3.
    let options = GroupOptions { lr: 1e-4, weight_decay: 0.0, ..GroupOptions::default() };
    let (main, copy) = trained(&options, 100, 1.0, 0.5);
    assert!((main - 0.99).abs() < 1e-5, "{main}");
    assert!((copy - main).abs() <= 2f32.powi(-9), "{copy}");
    assert!(copy < 1.0);
    // And so does decay alone, a ten-millionth of the weight a step.
    let options = GroupOptions { lr: 1e-5, weight_decay: 0.01, ..GroupOptions::default() };
    let (main, _) = trained(&options, 10_000, 1.0, 0.0);
    assert!((f64::from(main) - (1.0 - 1e-7f64).powi(10_000)).abs() < 3e-4, "{main}");
    assert!(main < 1.0);
}

#[test]
fn second_moments_shrink_in_all_formats_but_bfloat16() {
    let options = GroupOptions { weight_decay: 0.0, ..GroupOptions::default() };
    let after = |moments: Moments| {
        let mut state = State::new(moments, 0..0);
        for t in 1..=1000 {
            // Two gradients at first, none from then on.
            let grad = if t == 1 { [1.0, 0.5] } else { [0.0; 2] };
            let rule = Rule::new(&options, t, 1.0, 1.0);
            update_block(&rule, state.block(), 0..2, Gradient::F32(&grad), None);
        }
        let values = state.decoded(Moment::Second);
        [values[0], values[1]]
    };
    let exact = after(Moments::F32);
    assert!((exact[0] / (1e-3 * 0.999f32.powi(999)) - 1.0).abs() < 1e-3, "{exact:?}");
    for (found, exact) in after(Moments::Int8).iter().zip(exact) {
        assert!((found / exact - 1.0).abs() < 0.02, "{found} {exact}");
    }
    for (found, first) in after(Moments::Bf16).iter().zip([1e-3, 2.5e-4]) {
        assert!((found / first - 1.0).abs() < 0.005, "{found}");
    }
}
