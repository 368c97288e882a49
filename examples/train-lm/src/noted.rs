//! What a run shows of itself while it goes on: how long its layers and copies take, and what arithmetic waits for.

use std::collections::HashMap;
use std::sync::Arc;

use lazy_model::{HardwareProfile, Lane, Marked, Observations, Seconds, StepPlan};
use lazy_runtime::StepReport;

use crate::metrics::StepMetrics;
use crate::probe::{median, timestamp};

/// Steps that the means of late are over, and passes that correct a profile.
pub(crate) const LATE: usize = 100;

/// Steps of one process, but for its first, which touches memory and files for the first time.
pub(crate) struct Noted {
    seen: Observations,
    waits: HashMap<Arc<str>, (Lane, Seconds)>,
    /// Steps so far, the first one included.
    steps: u64,
}

/// Mean time a step that arithmetic waited for one transfer.
pub(crate) struct MeanWait {
    pub(crate) name: Arc<str>,
    pub(crate) lane: Lane,
    pub(crate) time: Seconds,
}

impl Noted {
    pub(crate) fn new(plan: &StepPlan) -> Noted {
        Noted { seen: Observations::new(plan, LATE), waits: HashMap::new(), steps: 0 }
    }

    /// Notes a step.
    pub(crate) fn note(&mut self, passes: &StepReport) {
        self.steps += 1;
        if self.steps == 1 {
            return;
        }
        for wait in &passes.waits {
            self.waits.entry(Arc::clone(&wait.name)).or_insert((wait.lane, Seconds::ZERO)).1 += wait.time;
        }
        // The last micro-batch: the first may have no sums of gradients to bring in.
        self.seen.note(&passes.pass(passes.losses.len().saturating_sub(1)));
    }

    /// The waits, the longest first.
    pub(crate) fn waits(&self) -> Vec<MeanWait> {
        let steps = self.steps.saturating_sub(1).max(1) as f64;
        let mean = |(name, (lane, time)): (&Arc<str>, &(Lane, Seconds))| MeanWait {
            name: Arc::clone(name),
            lane: *lane,
            time: Seconds(time.get() / steps),
        };
        let mut waits: Vec<MeanWait> = self.waits.iter().map(mean).collect();
        waits.sort_by(|a, b| b.time.get().total_cmp(&a.time.get()).then_with(|| a.name.cmp(&b.name)));
        waits
    }

    /// `profile` corrected by the last steps, of which `metrics` has the lines; nothing before there is a second step. The optimizer's rate
    /// stays where its steps do not show what so many `parameters` take, since it ran beside backward.
    pub(crate) fn correct(
        &self,
        profile: &HardwareProfile,
        metrics: &[&StepMetrics],
        parameters: Option<u64>,
    ) -> Option<HardwareProfile> {
        let late = &metrics[metrics.len().saturating_sub(LATE)..];
        if self.steps < 2 || late.is_empty() {
            return None;
        }
        let (by, when) = ("steps of a run", timestamp());
        let mut corrected = self.seen.correct(profile, by, &when);
        let optimizer = median(late.iter().map(|m| m.seconds.all_of_optimizer().get()).collect());
        if let Some(parameters) = parameters.filter(|_| optimizer > 0.0) {
            let rate = parameters as f64 / optimizer;
            corrected.optimizer_elements_per_s = Some(Marked::measured(rate, by, &when));
        }
        Some(corrected)
    }
}
