//! Steps that begin while backward still runs, beside those that wait for its end.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use lazy_optim_nvme::{Gradient, Gradients, GroupOptions, NvmeAdam, ParamSpec, StepInput, WeightsOut};
use lazy_store::BoxError;
use serde_json::Value;

use crate::rows::{Figures, compared};
use crate::stats::Goal;
use crate::stream::{BUCKETS, ELEMENTS, Folder, options, settle};

/// A store of a parameter a bucket, and what a trainer has beside it.
struct Trainer {
    adam: NvmeAdam,
    grads: Vec<Vec<f32>>,
    weights: Vec<Vec<u16>>,
}

impl Trainer {
    fn new(folder: &Folder) -> Result<Trainer, BoxError> {
        let n = ELEMENTS / BUCKETS;
        let params: Vec<_> = (0..BUCKETS).map(|i| ParamSpec::new(format!("w{i}"), &[n])).collect();
        let dir = folder.0.join("overlapped");
        let adam = NvmeAdam::create(&dir, &params, &options(3, Default::default()), |_, _, v| v.fill(0.1))?;
        Ok(Trainer { adam, grads: vec![vec![1e-3; n]; BUCKETS], weights: vec![vec![0; n]; BUCKETS] })
    }

    /// Seconds of a backward that takes `backward`, the last parameter's gradient first and at an even pace, and of the step. As on
    /// a GPU it takes nothing of the processor.
    fn run(&mut self, backward: Duration, overlap: bool) -> Result<Times, BoxError> {
        let Trainer { adam, grads, weights } = self;
        let input = StepInput { groups: &[GroupOptions::default()], ..StepInput::default() };
        let rooms = weights.iter_mut().map(|room| Some(WeightsOut::Bf16(room))).collect();
        let start = Instant::now();
        let outcome = std::thread::scope(|scope| {
            let (send, finals) = mpsc::channel();
            scope.spawn(move || {
                for (i, param) in (0..BUCKETS).rev().enumerate() {
                    let due = start + backward * (i as u32 + 1) / BUCKETS as u32;
                    std::thread::sleep(due.saturating_duration_since(Instant::now()));
                    // Nobody listens any more where the step failed.
                    let _ = send.send(param);
                }
            });
            let mut arrived = [false; BUCKETS];
            let mut wait = |param: usize| {
                while !arrived[param] {
                    arrived[finals.recv()?] = true;
                }
                Ok(Some(Gradient::F32(&grads[param])))
            };
            if overlap {
                return adam.step_into(Gradients::Awaited(&mut wait), &input, rooms, &mut |_, _| {});
            }
            let all: Vec<_> = (0..BUCKETS).rev().filter_map(|param| wait(param).transpose()).collect();
            let mut all = all.into_iter().map(Result::ok).collect::<Vec<_>>();
            all.reverse();
            adam.step_into(&all, &input, rooms, &mut |_, _| {})
        })?;
        let (update, commit) = (outcome.seconds.update.0, outcome.seconds.commit.0);
        Ok(Times { total: start.elapsed().as_secs_f64(), update, commit })
    }
}

struct Times {
    total: f64,
    update: f64,
    commit: f64,
}

pub(crate) fn rows(pairs: usize, folder: &Folder) -> Result<Vec<Value>, BoxError> {
    let mut trainer = Trainer::new(folder)?;
    trainer.run(Duration::ZERO, false)?;
    let (mut overlapped, mut serial, mut predicted) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..pairs {
        // Backward takes as long as a step.
        settle(folder)?;
        let alone = trainer.run(Duration::ZERO, false)?;
        let backward = Duration::from_secs_f64(alone.total);
        overlapped.push(trainer.run(backward, true)?.total);
        serial.push(trainer.run(backward, false)?.total);
        // What is left when the last gradient is final: its bucket, and the commit.
        predicted.push(alone.total + alone.update / BUCKETS as f64 + alone.commit);
    }
    let name = "backward as long as a step, gradients awaited";
    let against =
        |label, values: &[f64], goal| compared(name, "s", &overlapped, &Figures { label, values }, goal);
    let rows = [
        against("backward, then the step", &serial, Some(Goal::AtMost(0.85))),
        against("backward, its last bucket's update and the commit", &predicted, None),
    ];
    Ok(rows.into_iter().flatten().collect())
}
