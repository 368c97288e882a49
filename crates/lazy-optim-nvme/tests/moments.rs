//! Moments in fewer bits: what they hold, what they take, and that nothing depends on the cut.

#![allow(clippy::unwrap_used, reason = "a test that cannot set up should stop")]

mod common;

use common::{cut, grad, grads, init, state, take_step};
use lazy_optim_nvme::{
    AdamOptions, Gradient, GroupOptions, Moments, NvmeAdam, ParamSpec, StepInput, WeightsOut, combine_norm,
};

/// All formats at once, in an order that is not that of the buckets, with sizes that fit nothing.
fn mixed() -> Vec<ParamSpec> {
    let sizes = [70_001, 1, 511, 0, 40_000, 4097, 300_000];
    let formats = [
        Moments::Int8,
        Moments::F32,
        Moments::Bf16,
        Moments::Int8,
        Moments::Bf16,
        Moments::Int8,
        Moments::F32,
    ];
    let spec = |(i, (n, moments))| ParamSpec::new(format!("p{i}"), &[n]).with_moments(moments);
    sizes.into_iter().zip(formats).enumerate().map(spec).collect()
}

fn run(params: &[ParamSpec], options: &AdamOptions, steps: usize) -> common::State {
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), params, options, init).unwrap();
    (1..=steps).for_each(|t| take_step(&mut adam, params, t).unwrap());
    state(&mut adam, params)
}

fn floats(bits: &[u32]) -> Vec<f32> {
    bits.iter().map(|bits| f32::from_bits(*bits)).collect()
}

#[test]
fn any_bucket_chunk_and_depth_gives_the_same_bits_in_every_format() {
    let params = mixed();
    let whole = run(&params, &cut(1 << 20, 16 << 10, 3), 3);
    for (bucket, chunk_kib, depth) in [(1 << 20, 64, 1), (40_000, 64, 3), (9_973, 1, 4)] {
        let found = run(&params, &cut(bucket, chunk_kib, depth), 3);
        assert!(found == whole, "bucket {bucket} chunk {chunk_kib} KiB depth {depth}");
    }
}

#[test]
fn stopping_and_opening_again_changes_no_bit_in_any_format() {
    let params = mixed();
    let options = cut(30_000, 64, 3);
    let straight = run(&params, &options, 4);
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &options, init).unwrap();
    (1..=2).for_each(|t| take_step(&mut adam, &params, t).unwrap());
    drop(adam);
    let mut adam = NvmeAdam::open(dir.path(), &params, &options).unwrap();
    (3..=4).for_each(|t| take_step(&mut adam, &params, t).unwrap());
    assert!(state(&mut adam, &params) == straight);
}

#[test]
fn a_parameter_without_gradient_keeps_its_codes_beside_others_of_its_block() {
    let params: Vec<_> =
        (0..3).map(|i| ParamSpec::new(format!("p{i}"), &[300]).with_moments(Moments::Int8)).collect();
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &AdamOptions::default(), init).unwrap();
    take_step(&mut adam, &params, 1).unwrap();
    let before = state(&mut adam, &params);
    let grads = grads(&params, 2);
    let input = StepInput { groups: &[GroupOptions::default()], ..StepInput::default() };
    adam.step(&[grad(&grads[0]), None, grad(&grads[2])], &input, &mut |_, _, _| {}).unwrap();
    let after = state(&mut adam, &params);
    assert_ne!(before[0][1], after[0][1]);
    assert_eq!(before[1], after[1]);
    assert_ne!(before[2][1], after[2][1]);
}

/// The values that `bitsandbytes.functional.create_dynamic_map` gives.
fn map(text: &str) -> Vec<f32> {
    text.split_whitespace().map(|value| value.parse().unwrap()).collect()
}

/// The value of the map nearest to `x`, the lower one of two.
fn nearest(map: &[f32], x: f32) -> f32 {
    let distance = |value: f32| (f64::from(value) - f64::from(x)).abs();
    map.iter()
        .copied()
        .reduce(|best, value| if distance(value) < distance(best) { value } else { best })
        .unwrap()
}

#[test]
fn after_one_step_moments_are_the_float32_ones_rounded() {
    let of = |moments| vec![ParamSpec::new("w", &[1_000]).with_moments(moments)];
    let options = AdamOptions::default();
    let exact = run(&of(Moments::F32), &options, 1).remove(0);
    let maps = [
        map(include_str!("data/dynamic_map_signed.txt")),
        map(include_str!("data/dynamic_map_unsigned.txt")),
    ];
    let halves = run(&of(Moments::Bf16), &options, 1).remove(0);
    let bytes = run(&of(Moments::Int8), &options, 1).remove(0);
    // The weights have not met the rounded moments yet.
    assert!(halves[0] == exact[0] && bytes[0] == exact[0]);
    for (moment, map) in [1, 2].into_iter().zip(maps) {
        for (exact, half) in exact[moment].iter().zip(&halves[moment]) {
            // Of the two neighbours in bfloat16, the nearer one, or the even one.
            let (below, rest) = (exact >> 16, exact & 0xffff);
            let up = rest > 0x8000 || (rest == 0x8000 && below & 1 == 1);
            assert_eq!(*half, (below + u32::from(up)) << 16);
        }
        for (exact, found) in floats(&exact[moment]).chunks(256).zip(floats(&bytes[moment]).chunks(256)) {
            let scale = exact.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            for (exact, found) in exact.iter().zip(found) {
                assert_eq!(*found, nearest(&map, exact / scale) * scale);
            }
        }
    }
}

#[test]
fn training_with_fewer_bits_stays_near_float32() {
    // A quadratic bowl: weights go to their targets under any of the formats.
    for moments in Moments::ALL {
        let params = [ParamSpec::new("w", &[2_000]).with_moments(moments)];
        let dir = tempfile::tempdir().unwrap();
        let mut adam = NvmeAdam::create(dir.path(), &params, &AdamOptions::default(), init).unwrap();
        let target: Vec<f32> = (0..2_000).map(|i| common::value(77, 0, i)).collect();
        let mut weights = vec![0.0; 2_000];
        init(0, 0, &mut weights);
        let groups = [GroupOptions { lr: 0.02, weight_decay: 0.0, ..GroupOptions::default() }];
        let input = StepInput { groups: &groups, ..StepInput::default() };
        for _ in 0..300 {
            let grad: Vec<f32> = weights.iter().zip(&target).map(|(w, t)| w - t).collect();
            adam.step(&[common::grad(&grad)], &input, &mut |_, first, values| {
                weights[first..first + values.len()].copy_from_slice(values);
            })
            .unwrap();
        }
        let worst = weights.iter().zip(&target).map(|(w, t)| (w - t).abs()).fold(0.0, f32::max);
        assert!(worst < 0.05, "{moments:?}: {worst}");
    }
}

#[test]
fn weights_go_where_they_are_wanted_in_the_same_bits() {
    let params = mixed();
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &cut(40_000, 64, 3), init).unwrap();
    let grads = grads(&params, 1);
    let groups = [GroupOptions::default()];
    let input = StepInput { groups: &groups, ..StepInput::default() };
    // bfloat16 gradients that are the float32 ones exactly.
    let short: Vec<Vec<u16>> =
        grads.iter().map(|g| g.iter().map(|g| (g.to_bits() >> 16) as u16).collect()).collect();
    let given: Vec<_> = short.iter().map(|g| Some(Gradient::Bf16(g))).collect();
    let mut wide: Vec<Vec<f32>> = grads.iter().map(|g| vec![7.0; g.len()]).collect();
    let mut halves: Vec<Vec<u16>> = grads.iter().map(|g| vec![7; g.len()]).collect();
    let mut room: Vec<_> = wide.iter_mut().map(|w| Some(WeightsOut::F32(w))).collect();
    for param in [0, 4] {
        room[param] = None;
    }
    room[6] = Some(WeightsOut::Bf16(&mut halves[6]));
    adam.step_into(&given, &input, room, &mut |_, _| {}).unwrap();
    let state = state(&mut adam, &params);
    for (param, [main, ..]) in state.iter().enumerate() {
        match param {
            0 | 4 => assert!(wide[param].iter().all(|w| *w == 7.0)),
            6 => {
                let upper = |bits: &u32| f32::from_bits(*bits);
                let half = |bits: &u16| f32::from_bits(u32::from(*bits) << 16);
                // Rounded to within half a unit of the last of eight bits.
                assert!(
                    main.iter()
                        .zip(&halves[6])
                        .all(|(w, h)| (upper(w) - half(h)).abs() <= upper(w).abs() / 256.0)
                );
            }
            _ => assert_eq!(&wide[param].iter().map(|w| w.to_bits()).collect::<Vec<_>>(), main),
        }
    }
    // The same step from float32 gradients of those values gives the same state.
    let widened: Vec<Vec<f32>> =
        short.iter().map(|g| g.iter().map(|g| f32::from_bits(u32::from(*g) << 16)).collect()).collect();
    let dir = tempfile::tempdir().unwrap();
    let mut other = NvmeAdam::create(dir.path(), &params, &cut(1 << 20, 256, 2), init).unwrap();
    other.step(&common::all(&widened), &input, &mut |_, _, _| {}).unwrap();
    assert!(common::state(&mut other, &params) == state);
    let room = vec![Some(WeightsOut::F32(&mut []))];
    assert!(
        other
            .step_into(&given, &input, room, &mut |_, _| {})
            .unwrap_err()
            .to_string()
            .contains("of 1 parameters")
    );
}

#[test]
fn shards_hold_the_bits_of_the_whole() {
    for moments in Moments::ALL {
        let whole = [ParamSpec::new("w", &[500, 600]).with_moments(moments)];
        let expected = run(&whole, &cut(1 << 20, 64, 3), 3);
        for ranks in [2, 4] {
            let marks: Vec<usize> = (0..=ranks).map(|r| (r * 5 / ranks * 65_536).min(300_000)).collect();
            let params: Vec<_> =
                marks.windows(2).map(|m| [whole[0].clone().range(m[0], m[1] - m[0])]).collect();
            let dirs: Vec<_> = params.iter().map(|_| tempfile::tempdir().unwrap()).collect();
            let mut stores: Vec<_> = (dirs.iter().zip(&params).zip(&marks))
                .map(|((dir, params), mark)| {
                    let fill = |param, first, values: &mut [f32]| init(param, mark + first, values);
                    NvmeAdam::create(dir.path(), params, &cut(40_000, 64, 3), fill).unwrap()
                })
                .collect();
            for step in 1..=3 {
                let grads = grads(&whole, step);
                let mine = |rank: usize| [grad(&grads[0][marks[rank]..marks[rank + 1]])];
                let parts = stores.iter().enumerate().flat_map(|(r, s)| s.norm_parts(&mine(r), 2.0).unwrap());
                let grad_norm = Some(combine_norm(parts));
                for (rank, store) in stores.iter_mut().enumerate() {
                    let group = GroupOptions { lr: 0.01 / step as f64, ..GroupOptions::default() };
                    let input = StepInput {
                        groups: &[group],
                        grad_norm,
                        max_norm: Some(1.0),
                        scale: 2.0,
                        ..StepInput::default()
                    };
                    store.step(&mine(rank), &input, &mut |_, _, _| {}).unwrap();
                }
            }
            let mut found: [Vec<u32>; 3] = Default::default();
            for (store, params) in stores.iter_mut().zip(&params) {
                for (all, part) in found.iter_mut().zip(&state(store, params)[0]) {
                    all.extend(part);
                }
            }
            assert!(found == expected[0], "{moments:?}, {ranks} ranks");
        }
    }
}
