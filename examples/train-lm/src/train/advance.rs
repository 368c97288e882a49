//! A step: the passes, and the optimizer after them or beside backward.

use std::cell::OnceCell;
use std::sync::MutexGuard;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use lazy_model::Seconds;
use lazy_optim_nvme::{Gradient, Gradients, GroupOptions, StepInput, StepOutcome};
use lazy_runtime::{Executor, RuntimeError, Step, StepReport};

use super::{Cursor, GROUPS, Run};
use crate::batch::Batch;
use crate::error::{Result, TrainError};
use crate::settings::{DurabilityChoice, Settings};

/// What a step did.
pub(super) struct Advanced {
    pub(super) passes: StepReport,
    pub(super) outcome: StepOutcome,
    /// What the optimizer took after the passes, the gradients' norm not counted.
    pub(super) after: Seconds,
}

/// Says which gradients are final while the passes run.
pub(super) struct Finals {
    send: Sender<Final>,
    receive: Receiver<Final>,
}

enum Final {
    /// That of a parameter.
    One(usize),
    /// The passes have ended, and whether they did all.
    Ended(bool),
}

/// Sends that the passes have ended, however they do.
struct Ending {
    send: Sender<Final>,
    whole: bool,
}

impl Drop for Ending {
    fn drop(&mut self) {
        // Nobody listens where the optimizer has failed.
        let _ = self.send.send(Final::Ended(self.whole));
    }
}

impl Finals {
    /// Has the executor say so, where the optimizer may begin before all gradients are known: none is clipped by the norm of all,
    /// and a step can be taken back.
    pub(super) fn of(settings: &Settings, executor: &mut Executor) -> Option<Finals> {
        if settings.clip > 0.0 || settings.durability != DurabilityChoice::Step {
            return None;
        }
        let (send, receive) = channel();
        let hook = send.clone();
        executor.on_final_gradient(move |last| Ok(hook.send(Final::One(last.parameter.id.0))?));
        Some(Finals { send, receive })
    }
}

impl Run<'_> {
    /// Runs the passes and the optimizer; the weights are the decoder's own, overwritten chunk by chunk.
    pub(super) fn advance(&mut self, step: u64, inputs: Vec<Batch>, origin: Instant) -> Result<Advanced> {
        let call = Step { seed: self.settings.seed, ..Step::with_inputs(step, inputs) };
        let (groups, blob) = (self.groups(step), self.cursor(step + 1)?);
        let input = StepInput {
            groups: &groups,
            max_norm: (self.settings.clip > 0.0).then_some(self.settings.clip),
            blob: &blob,
            origin: Some(origin),
            ..StepInput::default()
        };
        match self.finals.is_some() {
            true => self.beside_backward(&call, &input),
            false => self.after_backward(&call, &input),
        }
    }

    fn groups(&self, step: u64) -> [GroupOptions; GROUPS] {
        let matrices = GroupOptions {
            lr: self.settings.lr_at(step),
            betas: (0.9, 0.95),
            weight_decay: self.settings.weight_decay,
            ..GroupOptions::default()
        };
        [matrices, GroupOptions { weight_decay: 0.0, ..matrices }]
    }

    fn cursor(&self, next_step: u64) -> Result<Vec<u8>> {
        let shape_hash = self.chosen.schedule.shape_hash.clone();
        let cursor = Cursor { next_step, seed: self.settings.seed, shape_hash };
        serde_json::to_vec(&cursor).map_err(TrainError::json(self.folder.path()))
    }

    /// Notes what the boundaries held, also of passes that failed.
    fn passed(
        &mut self,
        step: u64,
        ran: std::result::Result<StepReport, RuntimeError>,
    ) -> Result<StepReport> {
        let logged = self.boundaries.as_mut().map_or(Ok(()), |log| log.write(step, self.executor.store()));
        let passes = ran?;
        logged?;
        Ok(passes)
    }

    fn after_backward(&mut self, call: &Step, input: &StepInput<'_>) -> Result<Advanced> {
        let ran = self.executor.run(&mut self.program, call);
        let passes = self.passed(call.step, ran)?;
        let gradients = self.model.gradients.read();
        let views: Vec<_> = gradients.iter().map(|g| Some(Gradient::F32(g))).collect();
        let mut failed = None;
        let decoder = &self.model.decoder;
        let outcome = self.optimizer.step(&views, input, &mut |parameter, first, values| {
            if let Err(error) = decoder.write_parameter(parameter, first, values) {
                failed.get_or_insert(error);
            }
        })?;
        let after = outcome.seconds.update + outcome.seconds.commit;
        failed.map_or(Ok(Advanced { passes, outcome, after }), |error| Err(error.into()))
    }

    fn beside_backward(&mut self, call: &Step, input: &StepInput<'_>) -> Result<Advanced> {
        let Run { executor, program, optimizer, model, finals, .. } = self;
        let Some(Finals { send, receive }) = finals else {
            return self.after_backward(call, input);
        };
        let (gradients, decoder) = (&model.gradients, &model.decoder);
        let count = decoder.parameters().len();
        // The views of the gradients that are final: the step reads them to its end.
        let views: Vec<OnceCell<Option<MutexGuard<'_, Vec<f32>>>>> =
            (0..count).map(|_| OnceCell::new()).collect();
        let (mut done, mut ended) = (vec![false; count], false);
        let mut wait = |parameter: usize| {
            while !(ended || done[parameter]) {
                match receive.recv()? {
                    Final::One(last) => done[last] = true,
                    Final::Ended(true) => ended = true,
                    Final::Ended(false) => return Err("the passes have failed".into()),
                }
            }
            let view = views[parameter].get_or_init(|| gradients.view(parameter));
            Ok(view.as_ref().map(|view| Gradient::F32(view)))
        };
        let mut failed = None;
        let mut write = |parameter: usize, first: usize, values: &[f32]| {
            if let Err(error) = decoder.write_parameter(parameter, first, values) {
                failed.get_or_insert(error);
            }
        };
        let mut ending = Ending { send: send.clone(), whole: false };
        let (ran, outcome) = std::thread::scope(|scope| {
            let ran = scope.spawn(move || {
                let ran = executor.run(program, call);
                ending.whole = ran.is_ok();
                drop(ending);
                (ran, Instant::now())
            });
            let outcome = optimizer.step(Gradients::Awaited(&mut wait), input, &mut write);
            (ran.join(), outcome)
        });
        let updated = Instant::now();
        // What is left of a step that failed is not the next one's.
        while receive.try_recv().is_ok() {}
        drop(views);
        let (ran, ended) = ran.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let passes = self.passed(call.step, ran)?;
        let after = Seconds(updated.saturating_duration_since(ended).as_secs_f64());
        let advanced = Advanced { passes, outcome: outcome?, after };
        failed.map_or(Ok(advanced), |error| Err(error.into()))
    }
}
