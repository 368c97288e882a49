//! Steps beside a simulated GPU: whatever is where, and in whatever order its streams run, the bits are those of the processor.

use crate::accelerator::simulated::{UNTIL_FAILURE, device};
use crate::common::{State, cut, init, params, state, value};
use crate::{
    AdamOptions, Bytes, DeviceSlice, Durability, Gradient, GroupOptions, LoadOptions, Moments, NvmeAdam,
    OptimError, ParamSpec, StepInput, StepOutcome, UpdateOn, WeightsOut, bf16,
};

const SIZES: [usize; 6] = [70_001, 511, 40_000, 4097, 0, 300_000];
const STEPS: usize = 3;

pub(crate) fn specs() -> Vec<ParamSpec> {
    let formats = [Moments::F32, Moments::Bf16, Moments::Int8, Moments::F32, Moments::F32, Moments::Int8];
    params(&SIZES).into_iter().zip(formats).map(|(param, moments)| param.with_moments(moments)).collect()
}

/// Where gradients are and weights go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Where {
    Ram,
    /// Every second one.
    Mixed,
    Device,
    /// Gradients in device memory, weights shown.
    Shown,
}

/// Gradients in both formats. Those of odd parameters are bfloat16; now and then one is absent.
pub(crate) struct Grads {
    pub(crate) wide: Vec<Vec<f32>>,
    pub(crate) narrow: Vec<Vec<u16>>,
}

impl Grads {
    pub(crate) fn new(step: usize) -> Grads {
        let wide = |p| (0..SIZES[p]).map(|i| value(step, p, i)).collect::<Vec<f32>>();
        let wide: Vec<_> = (0..SIZES.len()).map(wide).collect();
        let narrow = wide.iter().map(|grads| grads.iter().map(|g| bf16::round(*g)).collect()).collect();
        Grads { wide, narrow }
    }

    pub(crate) fn all(&mut self, step: usize, place: Where) -> Vec<Option<Gradient<'_>>> {
        let mut all = Vec::new();
        for (p, (wide, narrow)) in self.wide.iter_mut().zip(&mut self.narrow).enumerate() {
            let on_device = match place {
                Where::Ram => false,
                Where::Mixed => (p + step).is_multiple_of(2),
                Where::Device | Where::Shown => true,
            };
            let grad = match (p % 2, on_device) {
                (0, false) => Gradient::F32(wide),
                (_, false) => Gradient::Bf16(narrow),
                // SAFETY: RAM is the simulated device's memory, and these are alive and at rest during the step.
                (0, true) => Gradient::Device(unsafe { DeviceSlice::f32(address(wide), wide.len()) }),
                // SAFETY: as above.
                (_, true) => Gradient::Device(unsafe { DeviceSlice::bf16(address(narrow), narrow.len()) }),
            };
            all.push((!(p + step).is_multiple_of(4)).then_some(grad));
        }
        all
    }
}

fn address<T>(values: &mut [T]) -> u64 {
    values.as_mut_ptr().expose_provenance() as u64
}

/// Room for weights of both formats. Even parameters give float32; the last one gives none.
#[derive(Clone, PartialEq)]
pub(crate) struct Rooms {
    pub(crate) wide: Vec<Vec<f32>>,
    pub(crate) narrow: Vec<Vec<u16>>,
}

impl Rooms {
    pub(crate) fn new() -> Rooms {
        let wide = SIZES.iter().map(|n| vec![7.0; *n]).collect();
        Rooms { wide, narrow: SIZES.iter().map(|n| vec![7; *n]).collect() }
    }

    pub(crate) fn all(&mut self, place: Where) -> Vec<Option<WeightsOut<'_>>> {
        let mut all = Vec::new();
        for (p, (wide, narrow)) in self.wide.iter_mut().zip(&mut self.narrow).enumerate() {
            let on_device = place == Where::Device || place == Where::Mixed && p / 2 % 2 == 0;
            let room = match (p % 2, on_device) {
                (0, false) => WeightsOut::F32(wide),
                (_, false) => WeightsOut::Bf16(narrow),
                // SAFETY: as for the gradients.
                (0, true) => WeightsOut::Device(unsafe { DeviceSlice::f32(address(wide), wide.len()) }),
                // SAFETY: as above.
                (_, true) => WeightsOut::Device(unsafe { DeviceSlice::bf16(address(narrow), narrow.len()) }),
            };
            all.push((p + 1 < SIZES.len()).then_some(room));
        }
        all
    }
}

impl Rooms {
    /// Whether the weights are those of others that some steps wrote, of which a parameter may have had no gradient in any.
    fn has(&self, others: &Rooms) -> bool {
        let untouched = Rooms::new();
        (0..SIZES.len()).all(|p| {
            let wide = others.wide[p] == untouched.wide[p] || others.wide[p] == self.wide[p];
            wide && (others.narrow[p] == untouched.narrow[p] || others.narrow[p] == self.narrow[p])
        })
    }
}

/// A step with clipping on.
fn take_step(
    adam: &mut NvmeAdam,
    step: usize,
    place: Where,
    rooms: &mut Rooms,
) -> Result<StepOutcome, OptimError> {
    let groups = [GroupOptions { lr: 0.01 / step as f64, ..GroupOptions::default() }];
    let input = StepInput { groups: &groups, max_norm: Some(1.0), scale: 2.0, ..StepInput::default() };
    let mut grads = Grads::new(step);
    let grads = grads.all(step, place);
    if place != Where::Shown {
        return adam.step_into(&grads, &input, rooms.all(place), &mut |_, _| {});
    }
    adam.step(&grads, &input, &mut |param, first, values| match param {
        5 => {}
        _ if param % 2 == 0 => rooms.wide[param][first..first + values.len()].copy_from_slice(values),
        _ => bf16::round_all(values, &mut rooms.narrow[param][first..first + values.len()]),
    })
}

/// State, weights, and norms after some steps.
type Trace = (State, Rooms, Vec<u64>);

fn steps(adam: &mut NvmeAdam, which: std::ops::RangeInclusive<usize>, place: Where) -> Trace {
    let mut rooms = Rooms::new();
    let norms = which.map(|t| {
        let outcome = take_step(adam, t, place, &mut rooms).unwrap();
        assert!(outcome.clip_coefficient < 1.0);
        outcome.grad_norm.to_bits()
    });
    let norms = norms.collect();
    let state = state(adam, &specs());
    if place != Where::Shown {
        // A parameter without a gradient in the last step has what the one before it wrote.
        let mut read = Rooms::new();
        adam.read_weights_into(read.all(place)).unwrap();
        assert!(read.has(&rooms), "{place:?}: weights read are not those written");
    }
    (state, rooms, norms)
}

fn run(options: &AdamOptions, place: Where) -> Trace {
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &specs(), options, init).unwrap();
    steps(&mut adam, 1..=STEPS, place)
}

/// On the processor, all in RAM.
fn wanted() -> Trace {
    run(&cut(40_000, 64, 3), Where::Ram)
}

pub(crate) fn beside_gpu(seed: u64, update: UpdateOn, [hbm, host]: [u64; 2]) -> AdamOptions {
    let durability = if hbm + host > 0 { Durability::Checkpoint } else { Durability::Step };
    let (hbm, host) = (Bytes(hbm), Bytes(host));
    AdamOptions { device: device(seed), update, hbm, host, durability, ..cut(40_000, 64, 3) }
}

/// None, some buckets, all: of HBM, then of RAM.
const BUDGETS: [[u64; 2]; 6] =
    [[0, 0], [0, 1_000_000], [0, 1 << 40], [1_000_000, 0], [1 << 40, 0], [1_000_000, 1_000_000]];
const PLACES: [Where; 4] = [Where::Ram, Where::Mixed, Where::Device, Where::Shown];

#[test]
fn every_home_place_and_way_gives_the_bits_of_the_processor() {
    let wanted = wanted();
    let mut seed = 0;
    for update in [UpdateOn::Cpu, UpdateOn::Cuda] {
        for budgets in BUDGETS {
            for place in PLACES {
                seed += 1;
                let found = run(&beside_gpu(seed, update, budgets), place);
                assert!(found == wanted, "{update:?}, budgets {budgets:?}, {place:?}");
            }
        }
    }
}

#[test]
fn neither_chunks_depth_nor_the_order_of_the_streams_changes_a_bit() {
    let wanted = wanted();
    for seed in 100..112 {
        let depth = [1, 2, 3, 7][seed as usize % 4];
        let chunk_bytes = Bytes([1, 100_000, 16 << 20][seed as usize % 3]);
        let budgets = [[0, 0], [0, 1 << 40], [1_000_000, 0]][seed as usize % 3];
        let options = AdamOptions { depth, chunk_bytes, ..beside_gpu(seed, UpdateOn::Cuda, budgets) };
        assert!(run(&options, Where::Mixed) == wanted, "seed {seed}");
    }
}

#[test]
fn what_is_chosen_is_told_and_changes_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let options = beside_gpu(1, UpdateOn::Auto, [0, 0]);
    let mut adam = NvmeAdam::create(dir.path(), &specs(), &options, init).unwrap();
    let choice = adam.update_on();
    let measured = choice.measured.unwrap();
    assert!(measured.cpu.0 > 0.0 && measured.cuda.0 > 0.0);
    assert_eq!(choice.on == UpdateOn::Cuda, measured.cuda < measured.cpu);
    assert!(steps(&mut adam, 1..=STEPS, Where::Device) == wanted());
    let without = cut(40_000, 64, 3);
    let dir = tempfile::tempdir().unwrap();
    let adam = NvmeAdam::create(dir.path(), &specs(), &without, init).unwrap();
    assert_eq!((adam.update_on().on, adam.update_on().measured), (UpdateOn::Cpu, None));
}

#[test]
fn memory_is_what_is_said_whatever_the_model() {
    let bytes = |buckets: usize, update, budgets| {
        let params = params(&[buckets * 40_000]);
        let options = AdamOptions { chunk_bytes: Bytes(65_536), ..beside_gpu(3, update, budgets) };
        let dir = tempfile::tempdir().unwrap();
        let adam = NvmeAdam::create(dir.path(), &params, &options, init).unwrap();
        let taken = adam.ring.accelerator().unwrap().live();
        assert_eq!(taken, NvmeAdam::device_bytes(&params, &options).unwrap());
        assert_eq!(adam.ring_bytes(), NvmeAdam::memory_bytes(&params, &options).unwrap());
        (adam.ring_bytes(), taken)
    };
    // Sets of four buffers of 64 KiB: three of the ring and two more; and one for whoever copies and waits.
    let ram = Bytes(65_536 * (5 * 4 + 1));
    let sums = Bytes(4096);
    for buckets in [1, 5, 20] {
        assert_eq!(bytes(buckets, UpdateOn::Cuda, [0, 0]), (ram, Bytes(3 * 4 * 65_536) + sums));
        assert_eq!(bytes(buckets, UpdateOn::Cpu, [0, 0]), (ram, Bytes(3 * 65_536) + sums));
    }
    let bucket = 3 * (40_000u64 * 4).next_multiple_of(4096);
    let (_, taken) = bytes(5, UpdateOn::Cuda, [2 * bucket, 0]);
    assert_eq!(taken, Bytes(3 * 4 * 65_536 + 2 * bucket) + sums);
}

#[test]
fn state_in_hbm_is_saved_loaded_lent_and_changed() {
    let options = beside_gpu(5, UpdateOn::Cuda, [1_000_000, 1_000_000]);
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(&dir.path().join("a"), &specs(), &options, init).unwrap();
    let one = steps(&mut adam, 1..=1, Where::Device).0;
    adam.save("one").unwrap().wait().unwrap();
    // Lent: nothing is left of it on the device, and steps are refused until it is taken back.
    adam.suspend().unwrap();
    assert!(adam.ring.accelerator().is_none() && adam.ring_bytes() == Bytes::ZERO);
    let refused = take_step(&mut adam, 2, Where::Device, &mut Rooms::new()).unwrap_err();
    assert!(matches!(refused, OptimError::Suspended), "{refused}");
    adam.resume().unwrap();
    assert!(state(&mut adam, &specs()) == one);
    let mut shift = |_: usize, _: usize, values: &mut [f32]| values.iter_mut().for_each(|v| *v += 0.25);
    adam.reload_weights(&mut shift).unwrap();
    let changed = steps(&mut adam, 2..=STEPS, Where::Device);
    drop(adam);

    // The same without a GPU, from what was saved there.
    let source = dir.path().join("a/one");
    let without = cut(33_000, 64, 3);
    let load = LoadOptions::default();
    let mut adam = NvmeAdam::load(&[&source], &dir.path().join("b"), &specs(), &without, load).unwrap();
    assert!(state(&mut adam, &specs()) == one);
    adam.reload_weights(&mut shift).unwrap();
    assert!(steps(&mut adam, 2..=STEPS, Where::Ram) == changed);
    adam.save("end").unwrap().wait().unwrap();
    drop(adam);
    let exported = |generation: &std::path::Path| {
        let file = dir.path().join("exported");
        crate::export(&[generation], &file).unwrap();
        std::fs::read(file).unwrap()
    };
    let end = exported(&dir.path().join("b/end"));

    // And back: linked, and gathered from another cut.
    for (name, source) in [("c", dir.path().join("a/one")), ("d", dir.path().join("b/end"))] {
        let mut adam = NvmeAdam::load(&[&source], &dir.path().join(name), &specs(), &options, load).unwrap();
        assert!(state(&mut adam, &specs()) == if name == "c" { one.clone() } else { changed.0.clone() });
        adam.save("again").unwrap().wait().unwrap();
    }
    assert!(exported(&dir.path().join("d/again")) == end);
}

#[test]
fn steps_beside_a_save_of_what_is_in_hbm_change_nothing_of_it() {
    for seed in 30..34 {
        let options = beside_gpu(seed, UpdateOn::Cuda, [1 << 40, 0]);
        let dir = tempfile::tempdir().unwrap();
        let mut adam = NvmeAdam::create(&dir.path().join("a"), &specs(), &options, init).unwrap();
        let (mut saves, mut states) = (Vec::new(), Vec::new());
        for t in 1..=STEPS {
            states.push(steps(&mut adam, t..=t, Where::Mixed).0);
            saves.push(adam.save(&format!("{t}")).unwrap());
        }
        take_step(&mut adam, STEPS + 1, Where::Device, &mut Rooms::new()).unwrap();
        saves.into_iter().for_each(|save| save.wait().unwrap());
        for (i, wanted) in states.iter().enumerate() {
            let (source, to) = (dir.path().join(format!("a/{}", i + 1)), dir.path().join(format!("b{i}")));
            let load = LoadOptions::default();
            let mut adam = NvmeAdam::load(&[source], &to, &specs(), &cut(40_000, 64, 3), load).unwrap();
            assert!(state(&mut adam, &specs()) == *wanted, "save {i}");
        }
    }
}

#[test]
fn an_update_that_fails_on_the_gpu_commits_nothing_and_leaves_nothing_under_way() {
    for (seed, place) in [(20, Where::Device), (21, Where::Ram)] {
        let dir = tempfile::tempdir().unwrap();
        let options = beside_gpu(seed, UpdateOn::Cuda, [0, 0]);
        let mut adam = NvmeAdam::create(dir.path(), &specs(), &options, init).unwrap();
        let one = steps(&mut adam, 1..=1, place).0;
        for fails in [0, 1, 3, 8] {
            UNTIL_FAILURE.set(Some(fails));
            let error = take_step(&mut adam, 2, place, &mut Rooms::new()).unwrap_err();
            assert!(error.to_string().contains("was to fail"), "{error}");
            let refused = take_step(&mut adam, 2, place, &mut Rooms::new()).unwrap_err();
            assert!(matches!(refused, OptimError::Latched { .. }), "{refused}");
            assert!(state(&mut adam, &specs()) == one, "{place:?}, update {fails}");
        }
        UNTIL_FAILURE.set(None);
        steps(&mut adam, 2..=STEPS, place);
    }
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let refused = |options: &AdamOptions| {
        let dir = tempfile::tempdir().unwrap();
        NvmeAdam::create(dir.path(), &specs(), options, init).unwrap_err().to_string()
    };
    let hbm = Bytes(1 << 20);
    let durability = Durability::Checkpoint;
    assert!(refused(&AdamOptions { hbm, durability, ..cut(40_000, 64, 3) }).contains("needs a GPU"));
    let update = UpdateOn::Cuda;
    assert!(refused(&AdamOptions { update, ..cut(40_000, 64, 3) }).contains("set device"));
    assert!(
        refused(&AdamOptions { hbm, ..beside_gpu(1, update, [0, 0]) })
            .contains("set durability to checkpoint")
    );

    let params = params(&[10]);
    let mut grads = [0.5f32; 12];
    fn step(adam: &mut NvmeAdam, grad: Gradient<'_>, room: WeightsOut<'_>) -> String {
        let input = StepInput { groups: &[GroupOptions::default()], ..StepInput::default() };
        adam.step_into(&[Some(grad)], &input, vec![Some(room)], &mut |_, _| {}).unwrap_err().to_string()
    }
    let address = address(&mut grads);
    // SAFETY: the memory is alive, and nothing comes to use it.
    let [good, odd] = unsafe { [DeviceSlice::f32(address, 10), DeviceSlice::f32(address + 2, 10)] };
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &cut(40_000, 64, 3), init).unwrap();
    let mut room = [0.0; 10];
    let error = step(&mut adam, Gradient::Device(good), WeightsOut::F32(&mut room));
    assert!(error.contains("the gradient of p0 is in device memory"), "{error}");
    let error = step(&mut adam, Gradient::F32(&[0.0; 10]), WeightsOut::Device(good));
    assert!(error.contains("the room for the weights of p0 is in device memory"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &beside_gpu(1, update, [0, 0]), init).unwrap();
    let error = step(&mut adam, Gradient::Device(odd), WeightsOut::Device(good));
    assert!(error.contains("give a multiple of 4 bytes"), "{error}");
    assert_eq!(adam.step_counts(), [0]);
}
