//! `summary.json`: what the report is drawn from besides a run's settings, schedule, metrics and profiles.

use std::path::Path;

use lazy_model::report::TierOccupancy;
use lazy_model::timeline::Timeline;
use lazy_model::{Bytes, Lane, ModelSpec, Seconds, Span, StepProblem, Tier, TierBytes, Verified};
use lazy_runtime::StepReport;
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};
use crate::metrics::LaneSeconds;
use crate::noted::Noted;
use crate::planning::Chosen;
use crate::run_folder::write_file;
use crate::train::Summary;

/// Format version of `summary.json`.
pub const RECORD_VERSION: u32 = 1;
/// Name of the file in a run's folder.
pub const RECORD_FILE: &str = "summary.json";
/// Waits that are written down.
const WAITS: usize = 20;

/// What one process of a run promised and, once it has ended, what it measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// [`RECORD_VERSION`].
    pub version: u32,
    /// The model's family.
    pub family: String,
    /// The model, in words.
    pub model: String,
    /// Where arithmetic ran.
    pub device: String,
    /// First step of the process.
    pub first: u64,
    /// Loss of who knows only how often each token occurs.
    pub unigram_entropy: f64,
    /// What the plan says.
    pub promised: Promised,
    /// What happened; none while the process runs, or if it was killed.
    pub measured: Option<Measured>,
}

/// What the plan says beyond the promise in `schedule.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Promised {
    /// Caps of the tiers.
    pub budgets: TierBytes,
    /// What is there throughout, of them.
    pub base: TierBytes,
    /// Sizes of the boundaries.
    pub boundary_bytes: Vec<Bytes>,
    /// Forwards that are run again, in a step.
    pub recompute_s: Seconds,
    /// Time each link moves something, in a step.
    pub busy_s: LaneSeconds,
    /// Transfers that arithmetic waits for, in a step.
    pub waits: Vec<Waited>,
    /// Bytes of a micro-batch in each tier over time, the measured side empty.
    pub occupancy: Vec<TierOccupancy>,
}

/// Time that arithmetic waits for a transfer in a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Waited {
    /// The transfer, as spans name it.
    pub name: String,
    /// Its link.
    pub lane: Lane,
    /// How long.
    pub wait_s: Seconds,
    /// How long the transfer itself took, in the step looked at.
    pub transfer_s: Seconds,
    /// Why it was not done earlier; may be empty.
    pub why: String,
}

/// What the process measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// What `train --json` printed.
    pub summary: Summary,
    /// The last step, span by span, its optimizer included.
    pub spans: Vec<Span>,
    /// As the promised one, of the last step's first micro-batch.
    pub occupancy: Vec<Vec<(Seconds, Bytes)>>,
    /// Means over the process's steps but its first.
    pub waits: Vec<Waited>,
    /// What would make steps shorter, in sentences; best first.
    pub advice: Vec<String>,
}

impl Record {
    /// The record of a process that is about to run its first step.
    pub fn new(
        spec: &ModelSpec,
        device: String,
        first: u64,
        unigram_entropy: f64,
        problem: &StepProblem,
        chosen: &Chosen,
    ) -> Record {
        let parameters = spec.total_parameters() as f64;
        let (layers, hidden) = (spec.layers(), spec.hidden);
        let parameters = match parameters {
            p if p >= 1e9 => format!("{:.2} G", p / 1e9),
            p => format!("{:.2} M", p / 1e6),
        };
        Record {
            version: RECORD_VERSION,
            family: spec.family.model_type().to_owned(),
            model: format!("{layers} layers, hidden {hidden}, {parameters} parameters"),
            device,
            first,
            unigram_entropy,
            promised: Promised::of(problem, chosen),
            measured: None,
        }
    }

    /// Writes it into a run's folder.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn write(&self, run: &Path) -> Result<()> {
        let path = run.join(RECORD_FILE);
        write_file(&path, &serde_json::to_vec(self).map_err(TrainError::json(&path))?)
    }

    /// Reads it from there.
    ///
    /// # Errors
    /// When it is not there, or of another version.
    pub fn read(run: &Path) -> Result<Record> {
        let path = run.join(RECORD_FILE);
        let text = std::fs::read_to_string(&path).map_err(|source| {
            TrainError::Usage(format!(
                "{}: {source}; a report is drawn from the folder of a run that has begun its first step",
                path.display()
            ))
        })?;
        let record: Record = serde_json::from_str(&text).map_err(TrainError::json(&path))?;
        if record.version == RECORD_VERSION {
            return Ok(record);
        }
        Err(TrainError::Usage(format!(
            "{} has version {}, this program reads version {RECORD_VERSION}",
            path.display(),
            record.version
        )))
    }
}

impl Promised {
    fn of(problem: &StepProblem, chosen: &Chosen) -> Promised {
        let Verified { plan, timeline, promise, .. } = &chosen.verified;
        let later = problem.micro_batches.saturating_sub(1) as f64;
        let first = chosen.verified.first();
        let [one, each] = [first, timeline].map(|t| LaneSeconds::of(&t.spans));
        let sum = |one: Seconds, each: Seconds| Seconds(one.get() + later * each.get());
        let [again, again_each] = [first, timeline].map(|t| {
            let tasks = plan.tasks().zip(&t.spans);
            let again =
                tasks.filter(|(task, _)| matches!(task.work, lazy_model::step::Work::Recompute { .. }));
            again.map(|(_, span)| span.duration()).sum::<Seconds>()
        });
        let mut base = TierBytes::default();
        for tier in Tier::ALL {
            let peak = promise.peak_bytes.get(tier);
            *base.get_mut(tier) = peak.saturating_sub(plan.extents.get(tier));
        }
        let occupancy = Tier::ALL.map(|tier| TierOccupancy {
            tier,
            budget: Some(chosen.budgets.get(tier).saturating_sub(base.get(tier))),
            promised: timeline.occupancy(plan, tier),
            measured: Vec::new(),
        });
        Promised {
            budgets: chosen.budgets,
            base,
            boundary_bytes: problem.boundary_bytes.clone(),
            recompute_s: sum(again, again_each),
            busy_s: LaneSeconds {
                d2h: sum(one.d2h, each.d2h),
                h2d: sum(one.h2d, each.h2d),
                nvme_write: sum(one.nvme_write, each.nvme_write),
                nvme_read: sum(one.nvme_read, each.nvme_read),
            },
            waits: waits(first, 1.0).into_iter().chain(waits(timeline, later)).fold(vec![], added),
            occupancy: occupancy.into(),
        }
    }
}

impl Measured {
    /// What was noted of the run's steps, and its last step. `plan` is that step's.
    pub(crate) fn of(
        summary: Summary,
        noted: &Noted,
        last: Option<(&StepReport, &[Span])>,
        chosen: &Chosen,
        advice: Vec<String>,
    ) -> Measured {
        let plan = &chosen.verified.plan;
        let spans = last.map(|(passes, optimizer)| {
            passes.timeline.spans.iter().chain(optimizer).cloned().collect::<Vec<Span>>()
        });
        let pass = last.map(|(passes, _)| passes.pass(0));
        let timeline = last.map(|(passes, _)| &passes.timeline);
        let waits = noted.waits().into_iter().take(WAITS).map(|wait| {
            let at = timeline.and_then(|t| t.spans.iter().position(|span| span.name == wait.name));
            let (transfer_s, why) = match (timeline, at) {
                (Some(t), Some(at)) => (t.spans[at].duration(), why(t, at)),
                _ => (Seconds::ZERO, String::new()),
            };
            Waited { name: wait.name.to_string(), lane: wait.lane, wait_s: wait.time, transfer_s, why }
        });
        Measured {
            summary,
            waits: waits.collect(),
            occupancy: Tier::ALL
                .map(|tier| pass.as_ref().map(|pass| pass.occupancy(plan, tier)).unwrap_or_default())
                .into(),
            spans: spans.unwrap_or_default(),
            advice,
        }
    }
}

/// Transfers that arithmetic waits for in a simulated pass, each `times` over.
fn waits(timeline: &Timeline, times: f64) -> Vec<Waited> {
    let waits = timeline.exposed_waits(Seconds::ZERO);
    let waited = |wait: &lazy_model::timeline::ExposedWait| Waited {
        name: timeline.spans[wait.span].name.to_string(),
        lane: wait.lane,
        wait_s: Seconds(wait.time.get() * times),
        transfer_s: timeline.spans[wait.span].duration(),
        why: String::new(),
    };
    waits.iter().map(waited).filter(|wait| wait.wait_s > Seconds::ZERO).collect()
}

fn added(mut all: Vec<Waited>, wait: Waited) -> Vec<Waited> {
    match all.iter_mut().find(|known| known.name == wait.name) {
        Some(known) => known.wait_s += wait.wait_s,
        None => all.push(wait),
    }
    all
}

/// Spans that begin within this of the end of another followed it at once.
const AT_ONCE: f64 = 1e-4;

/// Why a transfer ran when it did: what it followed.
fn why(timeline: &Timeline, at: usize) -> String {
    let span = &timeline.spans[at];
    if let Some(other) = span.blocked_on.and_then(|other| timeline.spans.get(other)) {
        return match other.lane {
            Lane::Compute => format!("could begin when {} was done", other.name),
            _ => format!("followed {}", other.name),
        };
    }
    let before = timeline.spans[..at].iter().rev().find(|other| other.lane == span.lane);
    match before {
        Some(other) if (span.start - other.end).get() < AT_ONCE => format!("queued behind {}", other.name),
        _ => "began when it was submitted, and took that long".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(name: &str, lane: Lane, start: f64, end: f64, blocked_on: Option<usize>) -> Span {
        let (start, end) = (Seconds(start), Seconds(end));
        Span { name: name.into(), lane, start, end, bytes: Bytes::ZERO, blocked_on }
    }

    #[test]
    fn a_wait_is_explained_by_what_its_transfer_followed() {
        let spans = vec![
            span("forward 0", Lane::Compute, 0.0, 1.0, None),
            span("boundary 1 nvme_read", Lane::NvmeRead, 1.0, 2.0, Some(0)),
            span("boundary 1 h2d", Lane::H2d, 2.0, 3.0, Some(1)),
            span("boundary 0 h2d", Lane::H2d, 3.0, 4.0, None),
            span("boundary 2 h2d", Lane::H2d, 6.0, 7.0, None),
        ];
        let timeline = Timeline { spans };
        let whys: Vec<String> = (1..5).map(|at| why(&timeline, at)).collect();
        assert_eq!(
            whys,
            [
                "could begin when forward 0 was done",
                "followed boundary 1 nvme_read",
                "queued behind boundary 1 h2d",
                "began when it was submitted, and took that long"
            ]
        );
    }
}
