//! A small nonlinear model whose weights the runtime keeps and whose internals lie in the arena, and the same steps by a plain loop.
#![allow(dead_code, reason = "each test program uses a part")]

use std::path::Path;
use std::sync::{Arc, Mutex};

use lazy_model::schedule::{Execution, Schedule};
use lazy_model::step::{Transfer, TransferPlanner};
use lazy_model::timeline::{LinkRates, StepCosts};
use lazy_model::{Bytes, BytesPerSecond, LayerIndex, Placement, Seconds, StepPlan, Tier};
use lazy_runtime::{
    Backward, Context, Epilogue, Executor, ExecutorOptions, Forward, Grads, Input, Layer, LayerError,
    LayerSizes, Loss, Model, ModelOptions, Output, Parameter, ParameterId, Phase, Program, Prologue, Saved,
    Step, Weights,
};
use lazy_store::{BackendChoice, DirectChoice, LinkLimits, NvmeOptions, QueueOrder, Store, StoreOptions};

/// Elements of a boundary: each test program says how many.
pub(crate) use crate::WIDTH;
pub(crate) const BYTES: Bytes = Bytes(4 * WIDTH as u64);
pub(crate) const LAYERS: usize = 8;
/// The parameter that prologue and epilogue share.
pub(crate) const TIED: ParameterId = ParameterId(LAYERS);
const RATE: f32 = 1e-3;

/// A mask of zeros and twos that depends on nothing but the key, as dropout does.
pub(crate) fn mask(cx: &Context<'_>, element: usize) -> f32 {
    let mut z = element as u64;
    for word in cx.dropout_key() {
        z = (z ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
    if z & 1 == 0 { 0.0 } else { 2.0 }
}

/// Where a layer goes wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    None,
    Error(Phase),
    Panic(Phase),
    /// Says another shape when it is recomputed.
    Shape,
    /// Computes other values when it is recomputed.
    Values,
}

/// y = x + mask * w * x * x, element by element.
pub(crate) struct Square {
    pub(crate) number: usize,
    pub(crate) fault: Mutex<Fault>,
}

impl Square {
    fn fault(&self) -> Fault {
        // Copied out, so that a panic does not poison the lock.
        *self.fault.lock().unwrap()
    }

    fn fail(&self, cx: &Context<'_>) -> Result<(), LayerError> {
        assert_eq!(cx.layer, Some(LayerIndex(self.number)));
        match self.fault() {
            Fault::Error(phase) if phase == cx.phase => Err("the layer ran out of luck".into()),
            #[expect(clippy::panic, reason = "the executor has to survive it")]
            Fault::Panic(phase) if phase == cx.phase => panic!("the layer fell over"),
            _ => Ok(()),
        }
    }
}

impl Layer for Square {
    fn sizes(&self) -> LayerSizes {
        LayerSizes {
            output: BYTES,
            saved: BYTES,
            forward_workspace: Bytes(512),
            backward_workspace: Bytes(1024),
        }
    }

    fn parameters(&self) -> Vec<Parameter> {
        vec![Parameter::f32(self.number, format!("w{}", self.number), WIDTH)]
    }

    fn forward(&self, cx: &Context<'_>, call: Forward<'_>) -> Result<Saved, LayerError> {
        self.fail(cx)?;
        let again = cx.phase == Phase::Recompute;
        let width = if again && self.fault() == Fault::Shape { WIDTH / 2 } else { WIDTH };
        cx.describe("output", &[width, 1], "f32")?;
        let off = if again && self.fault() == Fault::Values { 1.0 } else { 0.0 };
        let (w, x) = (call.weights.get(0).f32()?, call.x.f32()?);
        // What a workspace held before means nothing.
        call.workspace.bytes()?.fill(0xab);
        if let Some(out) = call.out {
            let values = out.f32()?.iter_mut().zip(x.iter().zip(w)).enumerate();
            values.for_each(|(i, (y, (x, w)))| *y = x + mask(cx, i) * w * x * x + off);
        }
        if let Some(save) = call.save {
            save.f32()?.iter_mut().zip(x).enumerate().for_each(|(i, (s, x))| *s = mask(cx, i) * x);
        }
        Ok(Saved::none())
    }

    fn backward(&self, cx: &Context<'_>, mut call: Backward<'_>) -> Result<(), LayerError> {
        self.fail(cx)?;
        let (w, x, dy) = (call.weights.get(0).f32()?, call.x.f32()?, call.dy.f32()?);
        let masked = call.internals.f32()?;
        call.workspace.bytes()?.fill(0xcd);
        let contribution: Vec<f32> = (0..WIDTH).map(|i| dy[i] * masked[i] * x[i]).collect();
        call.grads.add(0, &contribution)?;
        let dx = call.dx.f32()?;
        (0..WIDTH).for_each(|i| dx[i] = dy[i] * (1.0 + 2.0 * w[i] * masked[i]));
        Ok(())
    }
}

/// Boundary 0 is the input scaled by e; the loss is half the sum of squares of the output scaled by e.
pub(crate) struct Ends;

impl Prologue for Ends {
    fn output_bytes(&self) -> Bytes {
        BYTES
    }
    fn parameters(&self) -> Vec<Parameter> {
        vec![Parameter::f32(TIED.0, "e", WIDTH)]
    }
    fn forward(&self, cx: &Context<'_>, weights: Weights<'_>, out: Output<'_>) -> Result<(), LayerError> {
        let (e, input) = (weights.get(0).f32()?, cx.inputs::<Vec<f32>>()?);
        out.f32()?.iter_mut().zip(e.iter().zip(input)).for_each(|(y, (e, x))| *y = e * x);
        Ok(())
    }
    fn backward(
        &self,
        cx: &Context<'_>,
        _: Weights<'_>,
        dy: Input<'_>,
        mut grads: Grads<'_>,
    ) -> Result<(), LayerError> {
        let (dy, input) = (dy.f32()?, cx.inputs::<Vec<f32>>()?);
        grads.add(0, &dy.iter().zip(input).map(|(dy, x)| dy * x).collect::<Vec<f32>>())
    }
}

impl Epilogue for Ends {
    fn workspace(&self) -> Bytes {
        Bytes(2048)
    }
    fn parameters(&self) -> Vec<Parameter> {
        vec![Parameter::f32(TIED.0, "e", WIDTH)]
    }
    fn run(&self, _: &Context<'_>, mut call: Loss<'_>) -> Result<(), LayerError> {
        let (e, x) = (call.weights.get(0).f32()?, call.x.f32()?);
        call.workspace.bytes()?.fill(0xef);
        call.loss.f32()?[0] = e.iter().zip(x).map(|(e, x)| 0.5 * (e * x) * (e * x)).sum();
        let Some(dx) = call.dx else { return Ok(()) };
        dx.f32()?.iter_mut().zip(e.iter().zip(x)).for_each(|(dx, (e, x))| *dx = e * e * x);
        call.grads.add(0, &e.iter().zip(x).map(|(e, x)| e * x * x).collect::<Vec<f32>>())
    }
}

pub(crate) fn input(step: u64, micro_batch: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 37 + micro_batch * 101 + step as usize * 13) % 97) as f32 / 97.0 - 0.4;
    (0..WIDTH).map(value).collect()
}

pub(crate) fn first_weights(parameter: usize) -> Vec<f32> {
    let scale = if parameter == TIED.0 { 1.0 } else { 0.05 };
    (0..WIDTH).map(|i| scale + 0.01 * parameter as f32 + 1e-5 * i as f32).collect()
}

pub(crate) fn step(number: u64, micro_batches: usize) -> Step {
    let inputs = (0..micro_batches).map(|m| Arc::new(input(number, m)) as _).collect();
    Step { seed: 5, step: number, inputs }
}

/// The layers, for tests that make them fail.
pub(crate) fn squares() -> Vec<Arc<Square>> {
    (0..LAYERS).map(|number| Arc::new(Square { number, fault: Mutex::new(Fault::None) })).collect()
}

pub(crate) fn model(squares: &[Arc<Square>], options: ModelOptions) -> Model {
    let layers = squares.iter().map(|s| Arc::clone(s) as Arc<dyn Layer>).collect();
    Model::new(Arc::new(Ends), layers, Arc::new(Ends), options).unwrap()
}

pub(crate) fn schedule(letters: &str, keep: &str, prefetch: usize) -> Schedule {
    let mut schedule = Schedule::named("test", &[BYTES; LAYERS + 1], false);
    schedule.placement = letters.chars().map(|c| Placement::from_letter(c).unwrap()).collect();
    schedule.keep = keep.chars().map(|c| c == 'K').collect();
    schedule.execution = Execution { prefetch, ..Execution::default() };
    schedule
}

pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// How a store runs.
pub(crate) struct Running<'a> {
    pub(crate) order: QueueOrder,
    pub(crate) dir: &'a Path,
    pub(crate) limits: LinkLimits,
}

/// A store with exactly what the plan promises to need, released memory poisoned.
pub(crate) fn store(model: &Model, plan: &StepPlan, running: &Running<'_>) -> Store {
    let needs = model.needs(plan);
    let nvme = NvmeOptions::new(running.dir, needs.nvme);
    let nvme = match running.order {
        QueueOrder::Threads => nvme,
        // Thousands of orders: through the page cache.
        QueueOrder::Seeded(_) => {
            NvmeOptions { backend: BackendChoice::Posix, direct: DirectChoice::Off, ..nvme }
        }
    };
    let nvme = (needs.nvme > Bytes::ZERO).then_some(nvme);
    let options = StoreOptions {
        hbm: needs.hbm,
        host: needs.host,
        nvme,
        poison: true,
        order: running.order,
        limits: running.limits,
        ..Default::default()
    };
    Store::open(options).unwrap()
}

/// An executor with the first weights set.
pub(crate) fn executor(store: Store, model: Model, options: ExecutorOptions) -> Executor {
    let executor = Executor::new(store, model, options).unwrap();
    set_all(&executor, &(0..=LAYERS).map(first_weights).collect::<Vec<_>>());
    executor
}

pub(crate) fn floats(bytes: Vec<u8>) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Gradients of all parameters.
pub(crate) fn gradients(executor: &Executor) -> Vec<Vec<f32>> {
    (0..=LAYERS).map(|p| floats(executor.gradient(ParameterId(p)).unwrap())).collect()
}

pub(crate) fn weights(executor: &Executor) -> Vec<Vec<f32>> {
    (0..=LAYERS).map(|p| floats(executor.weights(ParameterId(p)).unwrap())).collect()
}

/// What an optimizer does to the weights of a parameter.
pub(crate) fn descend(weights: &mut [f32], gradient: &[f32]) {
    weights.iter_mut().zip(gradient).for_each(|(w, g)| *w -= RATE * g);
}

/// Losses and gradients of a step from a plain loop over kept activations.
pub(crate) fn by_hand(w: &[Vec<f32>], number: u64, micro_batches: usize) -> (Vec<f32>, Vec<Vec<f32>>) {
    let mut sums = vec![vec![0.0f32; WIDTH]; LAYERS + 1];
    let mut losses = Vec::new();
    let e = &w[TIED.0];
    let add = |sum: &mut [f32], value: &dyn Fn(usize) -> f32| {
        sum.iter_mut().enumerate().for_each(|(i, sum)| *sum += value(i));
    };
    for micro_batch in 0..micro_batches {
        let at = |l| {
            let mut cx = Context::new(Some(LayerIndex(l)), Phase::Forward);
            (cx.seed, cx.step, cx.micro_batch) = (5, number, micro_batch);
            cx
        };
        let input = input(number, micro_batch);
        let mut boundaries = vec![e.iter().zip(&input).map(|(e, x)| e * x).collect::<Vec<f32>>()];
        for l in 0..LAYERS {
            let (cx, x) = (at(l), &boundaries[l]);
            let next = (0..WIDTH).map(|i| x[i] + mask(&cx, i) * w[l][i] * x[i] * x[i]).collect();
            boundaries.push(next);
        }
        let x = &boundaries[LAYERS];
        losses.push(e.iter().zip(x).map(|(e, x)| 0.5 * (e * x) * (e * x)).sum());
        let mut dy: Vec<f32> = e.iter().zip(x).map(|(e, x)| e * e * x).collect();
        add(&mut sums[TIED.0], &|i| e[i] * x[i] * x[i]);
        for l in (0..LAYERS).rev() {
            let (cx, x) = (at(l), &boundaries[l]);
            let masked: Vec<f32> = x.iter().enumerate().map(|(i, x)| mask(&cx, i) * x).collect();
            add(&mut sums[l], &|i| dy[i] * masked[i] * x[i]);
            dy = (0..WIDTH).map(|i| dy[i] * (1.0 + 2.0 * w[l][i] * masked[i])).collect();
        }
        add(&mut sums[TIED.0], &|i| dy[i] * input[i]);
    }
    (losses, sums)
}

/// Weights after a number of steps by the plain loop.
pub(crate) fn trained_by_hand(steps: u64, micro_batches: usize) -> Vec<Vec<f32>> {
    let mut weights: Vec<Vec<f32>> = (0..=LAYERS).map(first_weights).collect();
    for number in 0..steps {
        let (_, gradients) = by_hand(&weights, number, micro_batches);
        weights.iter_mut().zip(&gradients).for_each(|(w, g)| descend(w, g));
    }
    weights
}

pub(crate) fn bits(values: &[Vec<f32>]) -> Vec<u32> {
    values.iter().flatten().map(|v| v.to_bits()).collect()
}

pub(crate) const NO_KEEP: &str = "--------";

pub(crate) fn running(order: QueueOrder, dir: &Path) -> Running<'_> {
    Running { order, dir, limits: LinkLimits::default() }
}

pub(crate) fn set_up(
    letters: &str,
    keep: &str,
    prefetch: usize,
    options: ModelOptions,
    running: &Running<'_>,
) -> (Executor, Program) {
    set_up_ahead(letters, keep, Ahead::Prefetch(prefetch), options, running)
}

pub(crate) fn set_up_ahead(
    letters: &str,
    keep: &str,
    ahead: Ahead,
    options: ModelOptions,
    running: &Running<'_>,
) -> (Executor, Program) {
    let model = model(&squares(), options);
    let plan = model.plan(&scheduled(&model, letters, keep, ahead)).unwrap();
    prepared(model, plan, running)
}

pub(crate) fn prepared(model: Model, plan: StepPlan, running: &Running<'_>) -> (Executor, Program) {
    let store = store(&model, &plan, running);
    let executor = executor(store, model, ExecutorOptions::default());
    let program = executor.prepare(plan).unwrap();
    (executor, program)
}

pub(crate) fn baseline(executor: &Executor) -> [Bytes; 3] {
    Tier::ALL.map(|tier| executor.store().live(tier))
}

pub(crate) fn streamed(on_nvme: bool, micro_batches: usize) -> ModelOptions {
    ModelOptions { micro_batches, stream_weights: true, stream_gradients: true, on_nvme }
}

pub(crate) fn resident(micro_batches: usize) -> ModelOptions {
    ModelOptions { micro_batches, ..ModelOptions::default() }
}

/// What a step by hand gives: losses, and the bits of all gradients.
pub(crate) fn expected(number: u64, micro_batches: usize) -> (Vec<f32>, Vec<u32>) {
    let weights: Vec<Vec<f32>> = (0..=LAYERS).map(first_weights).collect();
    let (losses, gradients) = by_hand(&weights, number, micro_batches);
    (losses, bits(&gradients))
}

/// How a schedule says when transfers happen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Ahead {
    Prefetch(usize),
    /// At the positions that a planner chooses for links of these rates: 0 for slow ones, 9 for fast ones.
    Planned(u32),
    /// Back so soon that the room of a boundary is free again for those that leave later in the forward pass.
    /// What lies on a drive is that many layers in host RAM on its way back.
    Early(usize),
}

pub(crate) fn scheduled(model: &Model, letters: &str, keep: &str, ahead: Ahead) -> Schedule {
    let mut schedule = schedule(letters, keep, 1);
    let fast = match ahead {
        Ahead::Planned(fast) => fast,
        Ahead::Prefetch(blocks) => {
            schedule.execution.prefetch = blocks;
            return schedule;
        }
        Ahead::Early(staged) => {
            let early = |(i, placement): (usize, &Placement)| {
                let back = match placement {
                    Placement::Host => i + 1,
                    Placement::Nvme => (i + 1 + staged).min(LAYERS),
                    _ => return None,
                };
                Some(Transfer { out: i, gone: i, stored: i, read: i + 1, back })
            };
            schedule.transfers =
                Some(schedule.placement.iter().take(LAYERS).enumerate().map(early).collect());
            return schedule;
        }
    };
    let each = |times: [f64; 3]| (0..LAYERS).map(|l| Seconds(times[l % 3])).collect();
    let rate = |times: f64| BytesPerSecond(BYTES.get() as f64 * times * f64::from(fast + 1));
    let costs = StepCosts {
        prologue: Seconds(1.0),
        forward: each([1.0, 3.0, 2.0]),
        saving_forward: each([2.0, 3.0, 2.0]),
        internals_forward: each([1.5, 2.0, 1.0]),
        backward: each([4.0, 2.0, 3.0]),
        epilogue: Seconds(2.0),
        prologue_backward: Seconds(1.0),
        links: LinkRates {
            d2h: rate(0.2),
            h2d: rate(0.3),
            nvme_write: rate(0.1),
            nvme_read: rate(0.15),
            ..LinkRates::default()
        },
    };
    let sizes = model.sizes().step();
    let mut planner = TransferPlanner::new(&schedule, &sizes, &costs);
    (planner.writes_run_on, planner.reads_beside_loss) = (fast.is_multiple_of(2), fast.is_multiple_of(3));
    schedule.transfers = Some(planner.plan(&schedule));
    schedule
}

/// Updates weights beside the backward pass. What lies on NVMe is not handed over: see [`update_after`].
pub(crate) fn update_in_backward(executor: &mut Executor) {
    executor.update_in_backward(|last| {
        let (weights, gradient) = last.in_memory()?;
        descend(weights.f32()?, gradient.f32()?);
        Ok(())
    });
}

/// Updates weights after a step.
pub(crate) fn update_after(executor: &Executor) {
    let mut weights = weights(executor);
    weights.iter_mut().zip(&gradients(executor)).for_each(|(w, g)| descend(w, g));
    set_all(executor, &weights);
}

pub(crate) fn set_all(executor: &Executor, weights: &[Vec<f32>]) {
    let named: Vec<(ParameterId, &[u8])> =
        weights.iter().enumerate().map(|(p, w)| (ParameterId(p), bytemuck::cast_slice(w))).collect();
    executor.set_weights(&named).unwrap();
}

/// How many times as much the deep run does.
pub(crate) fn deep(times: u64) -> u64 {
    if std::env::var_os("PROPTEST_CASES").is_some() { times } else { 1 }
}

/// Numbers from a seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end as u64) as usize
    }

    pub(crate) fn letters(&mut self) -> String {
        let first = ['G', 'C', 'N'][self.below(3)];
        let middle: String = (1..LAYERS).map(|_| ['G', 'C', 'N', '-'][self.below(4)]).collect();
        format!("{first}{middle}G")
    }

    pub(crate) fn keep(&mut self) -> String {
        (0..LAYERS).map(|_| if self.below(3) == 0 { 'K' } else { '-' }).collect()
    }

    pub(crate) fn ahead(&mut self) -> Ahead {
        if self.below(3) == 0 {
            Ahead::Planned(self.below(10) as u32)
        } else {
            Ahead::Prefetch(self.below(5))
        }
    }

    pub(crate) fn options(&mut self) -> ModelOptions {
        let [stream_weights, stream_gradients, on_nvme] = [0; 3].map(|_| self.below(2) == 0);
        ModelOptions { micro_batches: 1 + self.below(3), stream_weights, stream_gradients, on_nvme }
    }
}
