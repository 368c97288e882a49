//! Random chains under random budgets, of a size that a host device runs in well under a second.

use lazy_model::timeline::{LinkRates, StepCosts};
use lazy_model::{Bytes, BytesPerSecond, Seconds, StepProblem, Streamed, TierBytes, Workspaces};
use lazy_runtime::{Model, ModelOptions, RuntimeError};

use crate::layers::{Shape, model};

/// A small generator, so that a number names a problem.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        low * (high / low).powf(self.next())
    }
}

/// A chain, its machine, and how its model is run.
#[derive(Clone)]
pub(crate) struct Drawn {
    pub(crate) problem: StepProblem,
    weights: Bytes,
    options: ModelOptions,
}

impl Drawn {
    /// The model that the problem is about.
    pub(crate) fn model(&self) -> Result<Model, RuntimeError> {
        let problem = &self.problem;
        let shape = Shape {
            boundary: &problem.boundary_bytes,
            saved: &problem.saved_bytes,
            weights: self.weights,
            costs: &problem.costs,
        };
        model(&shape, self.options)
    }
}

/// The problem of a number. Layers take 6 to 14 ms forward; a boundary takes 0.4 to 5 times that on a link. Of eight problems one streams
/// weights from host RAM and one from NVMe, and every third adds up two micro-batches.
pub(crate) fn problem(seed: u64) -> Result<Drawn, RuntimeError> {
    let mut random = Random(seed);
    let layers = 5 + (random.next() * 6.0) as usize;
    let uniform = random.next() < 0.5;
    let boundary = random.between(1e6, 4e6);
    let forward_ms = random.between(6.0, 14.0);
    let ratio = random.between(2.0, 6.0);
    let mut vary = || if uniform { 1.0 } else { random.between(0.7, 1.4) };
    let factors: Vec<f64> = (0..layers).map(|_| vary()).collect();
    let size = |factor: f64| Bytes((boundary * factor) as u64 / 4096 * 4096);
    let times = |factor: f64| factors.iter().map(|f| Seconds::from_ms(forward_ms * f * factor)).collect();
    let mut rate = || BytesPerSecond(boundary / (forward_ms / 1e3 * random.between(0.4, 5.0)));
    let links =
        LinkRates { d2h: rate(), h2d: rate(), nvme_write: rate(), nvme_read: rate(), ..LinkRates::default() };
    let (stream, on_nvme) = (seed % 4 == 1, seed % 8 == 5);
    let options = ModelOptions {
        micro_batches: if seed % 3 == 2 { 2 } else { 1 },
        stream_weights: stream,
        stream_gradients: stream,
        on_nvme,
    };
    let weights = if stream { size(0.25) } else { Bytes::ZERO };
    let saved: Vec<Bytes> = factors.iter().map(|f| size(f * ratio)).collect();
    let all = saved.iter().map(|s| s.get() as f64).sum::<f64>() + boundary * layers as f64;
    let mut drawn = Drawn {
        problem: StepProblem {
            boundary_bytes: vec![size(1.0); layers + 1],
            saved_bytes: saved,
            workspaces: Workspaces::default(),
            streamed: Streamed::default(),
            costs: StepCosts {
                prologue: Seconds::from_ms(1.0),
                forward: times(1.0),
                saving_forward: times(1.05),
                internals_forward: times(0.8),
                backward: times(2.0),
                epilogue: Seconds::from_ms(random.between(2.0, 30.0)),
                prologue_backward: Seconds::from_ms(1.0),
                links,
            },
            micro_batches: options.micro_batches,
            optimizer: Seconds::ZERO,
            fixed: TierBytes::default(),
            budgets: TierBytes::default(),
            beside_backward: None,
            max_segment: 4,
        },
        weights,
        options,
    };
    let model = drawn.model()?;
    let sizes = model.sizes();
    let problem = &mut drawn.problem;
    (problem.workspaces, problem.streamed) = (sizes.workspaces.clone(), sizes.streamed.clone());
    problem.fixed.hbm = model.resident();
    let least = problem.sizes().least_hbm().get() as f64 + boundary;
    let room = |share: f64| Bytes((share * boundary * layers as f64) as u64);
    let homes = problem.always();
    problem.budgets = TierBytes {
        hbm: problem.fixed.hbm + Bytes((least + random.between(0.005, 0.4) * all) as u64),
        host: homes.host + room(random.between(0.1, 1.5)),
        nvme: homes.nvme + room(if random.next() < 0.4 { 0.0 } else { random.between(0.2, 1.0) }),
    };
    Ok(drawn)
}
