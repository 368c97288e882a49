//! The executor over a real store, with a small nonlinear model whose gradients a plain loop computes too.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::sync::{Arc, Mutex};

use lazy_model::schedule::{Execution, Schedule};
use lazy_model::{Bytes, LayerIndex, Placement, StepPlan, Tier};
use lazy_runtime::{
    Context, Epilogue, Executor, Gradients, Layer, LayerError, Phase, Prologue, RuntimeError, Saved,
};
use lazy_store::{NvmeOptions, QueueOrder, Store, StoreOptions};
use proptest::prelude::*;

const WIDTH: usize = 1500;
const BYTES: Bytes = Bytes(4 * WIDTH as u64);
const LAYERS: usize = 8;

/// A mask of zeros and twos that depends on nothing but the key, as dropout does.
fn mask(cx: &Context, element: usize) -> f32 {
    let mut z = element as u64;
    for word in cx.dropout_key() {
        z = (z ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
    if z & 1 == 0 { 0.0 } else { 2.0 }
}

/// y = x + mask * w * x * x, element by element.
fn forward_value(cx: &Context, w: f32, x: f32, element: usize) -> f32 {
    x + mask(cx, element) * w * x * x
}

fn floats(bytes: &[u8]) -> &[f32] {
    bytemuck::cast_slice(bytes)
}

/// Where a layer goes wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    Error(Phase),
    Panic(Phase),
    SavesNothing,
}

struct Square {
    number: usize,
    weight: f32,
    gradients: Arc<Gradients>,
    fault: Mutex<Fault>,
}

impl Square {
    fn fail(&self, cx: &Context) -> Result<(), LayerError> {
        // Copied out, so that the panic does not poison the lock.
        let fault = *self.fault.lock().unwrap();
        match fault {
            Fault::Error(phase) if phase == cx.phase => Err("the layer ran out of luck".into()),
            #[expect(clippy::panic, reason = "the executor has to survive it")]
            Fault::Panic(phase) if phase == cx.phase => panic!("the layer fell over"),
            _ => Ok(()),
        }
    }
}

impl Layer for Square {
    fn output_bytes(&self) -> Bytes {
        BYTES
    }
    fn saved_bytes(&self) -> Bytes {
        BYTES
    }
    fn forward(
        &self,
        cx: &Context,
        x: &[u8],
        out: Option<&mut [u8]>,
        save: bool,
    ) -> Result<Option<Saved>, LayerError> {
        self.fail(cx)?;
        assert_eq!(cx.layer, Some(LayerIndex(self.number)));
        let x = floats(x);
        if let Some(out) = out {
            let out: &mut [f32] = bytemuck::cast_slice_mut(out);
            for (i, (y, x)) in out.iter_mut().zip(x).enumerate() {
                *y = forward_value(cx, self.weight, *x, i);
            }
        }
        let nothing = *self.fault.lock().unwrap() == Fault::SavesNothing;
        let internals: Vec<f32> = x.iter().enumerate().map(|(i, x)| mask(cx, i) * x).collect();
        Ok((save && !nothing).then(|| Saved::new(internals)))
    }
    fn backward(
        &self,
        cx: &Context,
        x: &[u8],
        saved: Saved,
        dy: &[u8],
        dx: &mut [u8],
    ) -> Result<(), LayerError> {
        self.fail(cx)?;
        let (x, dy) = (floats(x), floats(dy));
        let masked: Vec<f32> = saved.take()?;
        let gradient: f32 = (0..WIDTH).map(|i| dy[i] * masked[i] * x[i]).sum();
        self.gradients.add(self.number, &[gradient])?;
        let dx: &mut [f32] = bytemuck::cast_slice_mut(dx);
        for i in 0..WIDTH {
            dx[i] = dy[i] * (1.0 + 2.0 * self.weight * masked[i]);
        }
        Ok(())
    }
}

struct Ends {
    input_gradient: Mutex<Vec<f32>>,
}

fn input(micro_batch: usize, element: usize) -> f32 {
    ((element * 37 + micro_batch * 101) % 97) as f32 / 97.0 - 0.4
}

impl Prologue for Ends {
    fn output_bytes(&self) -> Bytes {
        BYTES
    }
    fn forward(&self, cx: &Context, out: &mut [u8]) -> Result<(), LayerError> {
        let out: &mut [f32] = bytemuck::cast_slice_mut(out);
        out.iter_mut().enumerate().for_each(|(i, x)| *x = input(cx.micro_batch, i));
        Ok(())
    }
    fn backward(&self, _: &Context, dy: &[u8]) -> Result<(), LayerError> {
        *self.input_gradient.lock().unwrap() = floats(dy).to_vec();
        Ok(())
    }
}

impl Epilogue for Ends {
    fn run(&self, _: &Context, x: &[u8], dx: &mut [u8]) -> Result<(), LayerError> {
        // Loss: half the sum of squares.
        dx.copy_from_slice(x);
        Ok(())
    }
}

struct Model {
    gradients: Arc<Gradients>,
    squares: Vec<Arc<Square>>,
    ends: Arc<Ends>,
}

fn weight(layer: usize) -> f32 {
    0.05 + 0.01 * layer as f32
}

impl Model {
    fn new() -> Model {
        let gradients = Arc::new(Gradients::new(&[1; LAYERS]));
        let square = |number| {
            let gradients = Arc::clone(&gradients);
            Arc::new(Square { number, weight: weight(number), gradients, fault: Mutex::new(Fault::None) })
        };
        let squares = (0..LAYERS).map(square).collect();
        Model { gradients, squares, ends: Arc::new(Ends { input_gradient: Mutex::default() }) }
    }

    fn executor(&self, store: Store) -> Executor {
        let layers = self.squares.iter().map(|s| Arc::clone(s) as Arc<dyn Layer>).collect();
        Executor::new(store, Arc::clone(&self.ends) as _, layers, Arc::clone(&self.ends) as _)
    }

    /// Bits of all gradients.
    fn result(&self) -> Vec<u32> {
        let gradients = self.gradients.read();
        let input = self.ends.input_gradient.lock().unwrap();
        gradients.iter().flat_map(|g| g.iter()).chain(input.iter()).map(|v| v.to_bits()).collect()
    }
}

/// The same gradients from a plain loop over kept activations.
fn by_hand(cx: Context, micro_batches: usize) -> Vec<u32> {
    let mut sums = [0.0f32; LAYERS];
    let mut input_gradient = Vec::new();
    for micro_batch in 0..micro_batches {
        let at = |l| Context { micro_batch, layer: Some(LayerIndex(l)), ..cx };
        let mut boundaries = vec![(0..WIDTH).map(|i| input(micro_batch, i)).collect::<Vec<f32>>()];
        for l in 0..LAYERS {
            let next = boundaries[l].iter().enumerate().map(|(i, x)| forward_value(&at(l), weight(l), *x, i));
            let next = next.collect();
            boundaries.push(next);
        }
        let mut dy = boundaries[LAYERS].clone();
        for l in (0..LAYERS).rev() {
            let x = &boundaries[l];
            let masked: Vec<f32> = x.iter().enumerate().map(|(i, x)| mask(&at(l), i) * x).collect();
            sums[l] += (0..WIDTH).map(|i| dy[i] * masked[i] * x[i]).sum::<f32>();
            dy = (0..WIDTH).map(|i| dy[i] * (1.0 + 2.0 * weight(l) * masked[i])).collect();
        }
        input_gradient = dy;
    }
    sums.iter().chain(&input_gradient).map(|v| v.to_bits()).collect()
}

fn schedule(letters: &str, keep: &str, prefetch: usize) -> Schedule {
    let mut schedule = Schedule::named("test", &[BYTES; LAYERS + 1], false);
    schedule.placement = letters.chars().map(|c| Placement::from_letter(c).unwrap()).collect();
    schedule.keep = keep.chars().map(|c| c == 'K').collect();
    schedule.execution = Execution { prefetch, ..Execution::default() };
    schedule
}

fn plan(letters: &str, prefetch: usize) -> StepPlan {
    StepPlan::new(&schedule(letters, "--------", prefetch), &[BYTES; LAYERS + 1]).unwrap()
}

/// A store with exactly what the plan promises to need, released memory poisoned.
fn store(plan: &StepPlan, order: QueueOrder, dir: &Path) -> Store {
    let nvme = (plan.extents.nvme > Bytes::ZERO).then(|| NvmeOptions::new(dir, plan.extents.nvme));
    let options = StoreOptions {
        hbm: plan.extents.hbm,
        host: plan.extents.host,
        nvme,
        poison: true,
        order,
        ..Default::default()
    };
    Store::open(options).unwrap()
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

const CX: Context = Context { seed: 5, step: 3, micro_batch: 0, layer: None, phase: Phase::Forward };

fn gradients_of(plan: &StepPlan, order: QueueOrder, micro_batches: usize) -> Vec<u32> {
    let dir = folder();
    let model = Model::new();
    let executor = model.executor(store(plan, order, dir.path()));
    for micro_batch in 0..micro_batches {
        executor.run(plan, Context { micro_batch, ..CX }).unwrap();
    }
    for tier in Tier::ALL {
        assert_eq!(executor.store().live(tier), Bytes::ZERO);
    }
    model.result()
}

#[test]
fn every_schedule_and_prefetch_gives_the_bits_of_a_plain_loop() {
    let expected = by_hand(CX, 2);
    for letters in ["GGGGGGGGG", "CCCCCCCCG", "NNNNNNNNG", "G---G---G", "N-C-N--CG", "C-GN-CG-G"] {
        for prefetch in [0, 1, 2, 4] {
            let plan = plan(letters, prefetch);
            assert!(gradients_of(&plan, QueueOrder::Threads, 2) == expected, "{letters} prefetch {prefetch}");
        }
    }
}

#[test]
fn kept_internals_give_the_same_bits() {
    let expected = by_hand(CX, 1);
    for (letters, keep) in [("GGGGGGGGG", "KKKKKKKK"), ("N-C-G--CG", "K--K-KK-")] {
        let plan = StepPlan::new(&schedule(letters, keep, 1), &[BYTES; LAYERS + 1]).unwrap();
        assert!(gradients_of(&plan, QueueOrder::Threads, 1) == expected, "{letters} {keep}");
    }
}

/// R2: read-ahead on a small model under many orders of execution.
#[test]
fn r2_a_thousand_interleavings_give_the_same_bits() {
    // Ten passes each draw on the seed: every one is another order.
    let expected = by_hand(CX, 10);
    for (letters, prefetch) in [("N-C-N--CG", 2), ("CCNNCCNNG", 4)] {
        let plan = plan(letters, prefetch);
        for seed in 0..50 {
            assert!(gradients_of(&plan, QueueOrder::Seeded(seed), 10) == expected, "{letters} seed {seed}");
        }
    }
}

#[test]
fn a_fault_in_any_layer_is_named_and_leaves_the_store_empty_and_usable() {
    let plan = plan("N-C-G--CG", 2);
    let dir = folder();
    let model = Model::new();
    let executor = model.executor(store(&plan, QueueOrder::Threads, dir.path()));
    for layer in [0, 3, 7] {
        for phase in [Phase::Forward, Phase::Recompute, Phase::Backward] {
            for fault in [Fault::Error(phase), Fault::Panic(phase)] {
                *model.squares[layer].fault.lock().unwrap() = fault;
                let error = executor.run(&plan, CX).unwrap_err().to_string();
                assert!(error.contains(&layer.to_string()), "{error}");
                for tier in Tier::ALL {
                    assert_eq!(executor.store().live(tier), Bytes::ZERO);
                }
                *model.squares[layer].fault.lock().unwrap() = Fault::None;
            }
        }
    }
    model.gradients.zero();
    executor.run(&plan, CX).unwrap();
    assert!(model.result() == by_hand(CX, 1));
}

#[test]
fn a_layer_that_saves_nothing_is_named() {
    let plan = plan("GGGGGGGGG", 1);
    let dir = folder();
    let model = Model::new();
    *model.squares[4].fault.lock().unwrap() = Fault::SavesNothing;
    let executor = model.executor(store(&plan, QueueOrder::Threads, dir.path()));
    let error = executor.run(&plan, CX).unwrap_err().to_string();
    assert!(error.contains("layer 4 was asked to save its internals"), "{error}");
}

#[test]
fn a_plan_for_another_number_of_layers_is_refused() {
    let bytes = [BYTES; 5];
    let plan = StepPlan::new(&Schedule::named("checkpoint", &bytes, false), &bytes).unwrap();
    let dir = folder();
    let executor = Model::new().executor(store(&plan, QueueOrder::Threads, dir.path()));
    assert!(matches!(executor.run(&plan, CX), Err(RuntimeError::Layers { plan: 4, executor: 8 })));
}

#[test]
fn a_store_smaller_than_the_plan_is_refused_and_left_empty() {
    let plan = plan("GGGGGGGGG", 1);
    let store =
        Store::open(StoreOptions { hbm: Bytes(plan.extents.hbm.get() / 2), ..Default::default() }).unwrap();
    let executor = Model::new().executor(store);
    assert!(matches!(executor.run(&plan, CX), Err(RuntimeError::Store(_))));
    assert_eq!(executor.store().live(Tier::Hbm), Bytes::ZERO);
}

#[test]
fn the_report_counts_the_bytes_of_each_link() {
    let plan = plan("GCNCGGGGG", 1);
    let dir = folder();
    let executor = Model::new().executor(store(&plan, QueueOrder::Threads, dir.path()));
    executor.store().start_step();
    let report = executor.run(&plan, CX).unwrap();
    use lazy_model::Lane::*;
    let moved = [D2h, H2d, NvmeWrite, NvmeRead].map(|lane| report.bytes(lane).get() / BYTES.get());
    assert_eq!(moved, [3, 3, 1, 1]);
    assert_eq!(report.timeline.spans.len(), plan.tasks().count());
    assert!(report.forward.get() > 0.0 && report.backward.get() > 0.0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    /// The store holds exactly the promised extents, so a step that needed more would fail.
    #[test]
    fn any_schedule_completes_within_its_promise(
        picks in proptest::collection::vec(0usize..4, LAYERS), prefetch in 0usize..5, writes_in_flight in 0usize..4,
        staging_buffers in 1usize..4, keep in proptest::collection::vec(any::<bool>(), LAYERS), seed: u64,
    ) {
        let mut letters: String = picks.iter().map(|&p| ['G', 'C', 'N', '-'][p]).collect();
        if letters.starts_with('-') {
            letters.replace_range(..1, "C");
        }
        letters.push('G');
        let keep: String = keep.iter().map(|&k| if k { 'K' } else { '-' }).collect();
        let mut schedule = schedule(&letters, &keep, prefetch);
        schedule.execution = Execution { prefetch, writes_in_flight, staging_buffers };
        let plan = StepPlan::new(&schedule, &[BYTES; LAYERS + 1]).unwrap();
        prop_assert!(gradients_of(&plan, QueueOrder::Seeded(seed), 1) == by_hand(CX, 1));
    }
}
