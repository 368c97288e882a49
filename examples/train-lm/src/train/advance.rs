//! A step: the passes, and the optimizer after them or beside backward.

use std::cell::OnceCell;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use lazy_model::Seconds;
use lazy_optim_nvme::{Gradient, Gradients, GroupOptions, NvmeAdam, OptimError, StepInput, StepOutcome};
use lazy_runtime::{Executor, RuntimeError, Step, StepReport};

use super::state::Cursor;
use super::{GROUPS, Run, lock};
use crate::backend::Trained;
use crate::batch::Batch;
use crate::cuda::memory::Mark;
use crate::decoder::{Decoder, DecoderError};
use crate::error::{Result, TrainError};
use crate::homes;
use crate::phase::{self, Phase};
use crate::settings::Settings;

/// What a step did.
pub(super) struct Advanced {
    pub(super) passes: StepReport,
    pub(super) outcome: StepOutcome,
    /// What the optimizer took after the passes, the gradients' norm not counted.
    pub(super) after: Seconds,
}

type StepResult = std::result::Result<StepOutcome, OptimError>;

/// Says which gradients are final while the passes run.
pub(super) struct Finals {
    send: Sender<Final>,
    receive: Receiver<Final>,
}

enum Final {
    /// That of a parameter; on a GPU, when its stream has come there.
    One(usize, Option<Mark>),
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
    /// Has the executor say so, where the optimizer may begin before all gradients are known, and none is handed over only once the passes
    /// have ended.
    pub(super) fn of(settings: &Settings, executor: &mut Executor) -> Option<Finals> {
        let in_ram = homes::are_in_ram(executor.model().options());
        if !settings.is_beside_backward() || in_ram {
            return None;
        }
        let (send, receive) = channel();
        let (hook, gpu) = (send.clone(), executor.store().gpu().cloned());
        executor.on_final_gradient(move |last| {
            let at = gpu.as_ref().zip(last.stream);
            let mark = at.map(|(gpu, stream)| Mark::on(gpu, stream)).transpose()?;
            Ok(hook.send(Final::One(last.parameter.id.0, mark))?)
        });
        Some(Finals { send, receive })
    }
}

impl Run<'_> {
    /// Runs the passes and the optimizer; the weights are those that the passes use, overwritten chunk by chunk.
    pub(super) fn advance(&mut self, step: u64, batches: Vec<Batch>, origin: Instant) -> Result<Advanced> {
        let call = Step { seed: self.settings.seed, step, inputs: self.trained.inputs(batches)? };
        let (groups, blob) = (self.groups(step), self.cursor(step + 1)?);
        let input = StepInput {
            groups: &groups,
            max_norm: (self.settings.clip > 0.0).then_some(self.settings.clip),
            blob: &blob,
            origin: Some(origin),
            ..StepInput::default()
        };
        phase::enter(Phase::Passes);
        let advanced = match self.finals.is_some() {
            true => self.beside_backward(&call, &input),
            false => self.after_backward(&call, &input),
        };
        phase::enter(Phase::Between);
        advanced
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
        let mut failed = None;
        let mut optimizer = lock(&self.optimizer);
        let outcome = match &self.trained {
            _ if homes::are_in_ram(self.executor.model().options()) => {
                drop(optimizer);
                self.over_homes(input)?
            }
            Trained::Host(model) => {
                let gradients = model.gradients.read();
                let views: Vec<_> = gradients.iter().map(|g| Some(Gradient::F32(g))).collect();
                optimizer.step(&views, input, &mut write_to(&model.decoder, &mut failed))?
            }
            Trained::Cuda { parameters, .. } => {
                optimizer.step_into(&parameters.gradients(), input, parameters.weights(), &mut |_, _| {})?
            }
        };
        let after = outcome.seconds.update + outcome.seconds.commit;
        failed.map_or(Ok(Advanced { passes, outcome, after }), |error| Err(error.into()))
    }

    /// The optimizer's step where layers have their parameters at home in RAM: a task of the executor's store that holds them.
    fn over_homes(&self, input: &StepInput<'_>) -> Result<StepOutcome> {
        let (groups, blob) = (input.groups.to_vec(), input.blob.to_vec());
        let StepInput { max_norm, origin, .. } = *input;
        let optimizer = Arc::clone(&self.optimizer);
        let input = move |step: &mut dyn FnMut(&mut NvmeAdam, &StepInput<'_>) -> StepResult| {
            let (groups, blob) = (&groups, &blob);
            let input = StepInput { groups, blob, max_norm, origin, ..StepInput::default() };
            step(&mut lock(&optimizer), &input)
        };
        match &self.trained {
            Trained::Host(model) => {
                let model = model.clone();
                self.executor.update_in_ram(move |all| {
                    let own = model.gradients.read();
                    let mut gradients: Vec<_> = own.iter().map(|g| Some(Gradient::F32(g))).collect();
                    let mut rooms: Vec<Option<&mut [f32]>> = own.iter().map(|_| None).collect();
                    for home in all {
                        let number = home.parameter.id.0;
                        let (room, gradient) = home.in_memory()?;
                        gradients[number] = Some(Gradient::F32(gradient.f32()?));
                        rooms[number] = Some(room.f32()?);
                    }
                    let mut failed = None;
                    let outcome = input(&mut |optimizer, input| {
                        let mut elsewhere = write_to(&model.decoder, &mut failed);
                        let mut write = |number: usize, first: usize, values: &[f32]| match &mut rooms[number]
                        {
                            Some(room) => room[first..first + values.len()].copy_from_slice(values),
                            None => elsewhere(number, first, values),
                        };
                        optimizer.step(&gradients, input, &mut write)
                    });
                    Ok(failed.map_or(outcome.map_err(TrainError::from), |error| Err(error.into())))
                })?
            }
            Trained::Cuda { decoder, parameters } => {
                let (parameters, options) = (Arc::clone(parameters), *decoder.options());
                self.executor.update_in_ram(move |all| {
                    let (mut gradients, mut rooms) = (parameters.gradients(), parameters.weights());
                    for home in all {
                        let number = home.parameter.id.0;
                        let (gradient, room) = homes::to_update(home, [options.real, options.gradients])?;
                        (gradients[number], rooms[number]) = (Some(gradient), Some(room));
                    }
                    let outcome = input(&mut |optimizer, input| {
                        optimizer.step_into(&gradients, input, std::mem::take(&mut rooms), &mut |_, _| {})
                    });
                    Ok(outcome.map_err(TrainError::from))
                })?
            }
        }
    }

    fn beside_backward(&mut self, call: &Step, input: &StepInput<'_>) -> Result<Advanced> {
        let Run { executor, program, optimizer, trained, finals, .. } = self;
        let Some(Finals { send, receive }) = finals else {
            return self.after_backward(call, input);
        };
        let count = trained.spec().parameters().len();
        // The views of the gradients that are final: the step reads them to its end.
        let views: Vec<OnceCell<Option<MutexGuard<'_, Vec<f32>>>>> =
            (0..count).map(|_| OnceCell::new()).collect();
        let (mut done, mut ended): (Vec<Option<Option<Mark>>>, _) =
            ((0..count).map(|_| None).collect(), false);
        let mut wait = |parameter: usize| {
            while !ended && done[parameter].is_none() {
                match receive.recv()? {
                    Final::One(last, mark) => done[last] = Some(mark),
                    Final::Ended(true) => ended = true,
                    Final::Ended(false) => return Err("the passes have failed".into()),
                }
            }
            if let Some(Some(mark)) = &done[parameter] {
                mark.wait()?;
            }
            Ok(match &*trained {
                Trained::Host(model) => {
                    let view = views[parameter].get_or_init(|| model.gradients.view(parameter));
                    view.as_ref().map(|view| Gradient::F32(view))
                }
                Trained::Cuda { parameters, .. } => parameters.gradient(parameter),
            })
        };
        let mut failed = None;
        let mut optimizer = lock(optimizer);
        let mut ending = Ending { send: send.clone(), whole: false };
        let (ran, outcome) = std::thread::scope(|scope| {
            let ran = scope.spawn(move || {
                let ran = executor.run(program, call);
                ending.whole = ran.is_ok();
                drop(ending);
                (ran, Instant::now())
            });
            let awaited = Gradients::Awaited(&mut wait);
            let outcome = match &*trained {
                Trained::Host(model) => {
                    optimizer.step(awaited, input, &mut write_to(&model.decoder, &mut failed))
                }
                Trained::Cuda { parameters, .. } => {
                    optimizer.step_into(awaited, input, parameters.weights(), &mut |_, _| {})
                }
            };
            (ran.join(), outcome)
        });
        let updated = Instant::now();
        // What is left of a step that failed is not the next one's.
        while receive.try_recv().is_ok() {}
        drop((views, optimizer));
        let (ran, ended) = ran.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let passes = self.passed(call.step, ran)?;
        let after = Seconds(updated.saturating_duration_since(ended).as_secs_f64());
        let advanced = Advanced { passes, outcome: outcome?, after };
        failed.map_or(Ok(advanced), |error| Err(error.into()))
    }
}

/// Overwrites the weights of a decoder on the host device; the first failure is kept.
fn write_to<'a>(
    decoder: &'a Decoder,
    failed: &'a mut Option<DecoderError>,
) -> impl FnMut(usize, usize, &[f32]) + 'a {
    move |parameter, first, values| {
        phase::enter(Phase::WriteBack);
        if let Err(error) = decoder.write_parameter(parameter, first, values) {
            failed.get_or_insert(error);
        }
    }
}
