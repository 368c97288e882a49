//! The run's report: what was promised and what happened, for a person.

use lazy_model::report::{Compared, Curve, Fact, Headline, RunReport, TierOccupancy};
use lazy_model::{Bytes, ModelSpec, Schedule, Span, StepProblem, Tier, TierBytes, Verified};
use lazy_runtime::StepReport;

use crate::error::{Result, TrainError};
use crate::evaluation::Evaluation;
use crate::metrics::StepMetrics;
use crate::probe::median;
use crate::run_folder::{RunFolder, write_file};
use crate::settings::Settings;
use crate::train::Summary;

/// The last step, span by span.
pub struct LastStep {
    /// Its micro-batches.
    pub passes: StepReport,
    /// Its optimizer.
    pub optimizer: Vec<Span>,
}

/// All that the report is made of.
pub struct Inputs<'a> {
    /// The run's results.
    pub summary: &'a Summary,
    /// Its settings.
    pub settings: &'a Settings,
    /// The model.
    pub spec: &'a ModelSpec,
    /// The plan.
    pub schedule: &'a Schedule,
    /// Its promises.
    pub verified: &'a Verified,
    /// Sizes and costs.
    pub problem: &'a StepProblem,
    /// The caps.
    pub budgets: TierBytes,
    /// All steps of the run.
    pub metrics: &'a [StepMetrics],
    /// All evaluations of the run.
    pub evaluations: &'a [Evaluation],
    /// First step of this process.
    pub first: u64,
    /// The last step in detail.
    pub last: Option<&'a LastStep>,
}

/// Writes `report.html`.
///
/// # Errors
/// When the folder cannot be written.
pub fn write(folder: &RunFolder, inputs: &Inputs<'_>) -> Result<()> {
    let mut page = Vec::new();
    inputs.report().write_html(&mut page).map_err(TrainError::io(&folder.report()))?;
    write_file(&folder.report(), &page)
}

fn fact(label: &str, value: impl Into<String>) -> Fact {
    Fact { label: label.into(), value: value.into() }
}

impl Inputs<'_> {
    fn report(&self) -> RunReport {
        let spans =
            self.last.map(|last| last.passes.timeline.spans.iter().chain(&last.optimizer).cloned().collect());
        RunReport {
            title: format!("{} steps of a {} decoder", self.summary.steps, self.spec.family.model_type()),
            facts: self.facts(),
            headlines: self.headlines(),
            loss: self.metrics.iter().map(|m| (m.step, f64::from(m.loss))).collect(),
            unigram_entropy: Some(self.summary.unigram_entropy),
            placement: self.schedule.placement.clone(),
            boundary_bytes: self.problem.boundary_bytes.clone(),
            keep: self.schedule.keep.clone(),
            occupancy: Tier::ALL.map(|tier| self.occupancy(tier)).to_vec(),
            spans: spans.unwrap_or_default(),
            comparison: self.comparison(),
            curves: self.curves(),
            ..RunReport::default()
        }
    }

    /// Losses of evaluations.
    fn curves(&self) -> Vec<Curve> {
        let points: Vec<(u64, f64)> = self.evaluations.iter().map(|e| (e.step, e.loss)).collect();
        let curve = |points| Curve { label: "evaluation".into(), points };
        if points.is_empty() { Vec::new() } else { vec![curve(points)] }
    }

    /// First and last evaluation.
    fn evaluated(&self) -> Option<Fact> {
        let (first, last) = (self.evaluations.first()?, self.evaluations.last()?);
        let one = |e: &Evaluation| {
            format!("loss {:.4} (perplexity {:.2}) after {} steps", e.loss, e.perplexity, e.step)
        };
        let mut text = one(first);
        if last.step != first.step {
            text += &format!(", {}", one(last));
        }
        Some(fact("Evaluation", format!("{text}; {} tokens", last.tokens)))
    }

    fn facts(&self) -> Vec<Fact> {
        let spec = self.spec;
        let solve = &self.schedule.solve;
        let mut facts = vec![
            fact(
                "Model",
                format!(
                    "{} layers, hidden {}, {:.2} M parameters",
                    spec.layers(),
                    spec.hidden,
                    spec.total_parameters() as f64 / 1e6
                ),
            ),
            fact(
                "Step",
                format!(
                    "{} x {} tokens, {} micro-batch(es), seed {}",
                    self.settings.batch, self.settings.seq, self.settings.accum, self.settings.seed
                ),
            ),
            fact(
                "Plan",
                format!("{} ({}, {} in {})", solve.method, solve.status, solve.solver, solve.solve_s),
            ),
            fact(
                "Read-ahead",
                match &self.schedule.transfers {
                    Some(_) => "each boundary at its planned position".into(),
                    None => {
                        format!("{} block(s) before the one that needs it", self.schedule.execution.prefetch)
                    }
                },
            ),
            fact("Spill files", self.summary.nvme_mode.clone()),
            fact(
                "Always there",
                format!(
                    "{} of HBM (weights, gradients), {} of host RAM (the optimizer's ring)",
                    self.base(Tier::Hbm),
                    self.base(Tier::Host)
                ),
            ),
            fact("Weights", format!("sha256 {}", self.summary.weights_digest)),
        ];
        facts.extend(self.evaluated());
        facts
    }

    fn headlines(&self) -> Vec<Headline> {
        let s = self.summary;
        let value = |v: Option<f64>, digits: usize, unit: &str| {
            v.map_or_else(|| "-".into(), |v| format!("{v:.digits$}{unit}"))
        };
        vec![
            Headline {
                label: format!("Loss, last {} steps", s.steps.min(20)),
                value: value(s.loss_last_20, 3, ""),
                note: format!("{:.3} without context", s.unigram_entropy),
            },
            Headline {
                label: "Tokens a second".into(),
                value: value(s.tokens_per_s, 0, ""),
                note: "median from the third step on".into(),
            },
            Headline {
                label: "Step".into(),
                value: value(s.measured_step_s, 3, " s"),
                note: format!("promised {:.3} s", s.predicted_step_s),
            },
            Headline {
                label: "HBM at most".into(),
                value: s.hbm_peak_bytes.to_string(),
                note: format!("cap {}", s.hbm_budget_bytes),
            },
        ]
    }

    /// What is in a tier whatever is placed where.
    fn base(&self, tier: Tier) -> Bytes {
        self.verified.promise.peak_bytes.get(tier).saturating_sub(self.verified.plan.extents.get(tier))
    }

    /// The plan's buffers over one micro-batch. What is there anyway would hide them; it is among the facts.
    fn occupancy(&self, tier: Tier) -> TierOccupancy {
        let plan = &self.verified.plan;
        let measured = self.last.map(|last| last.passes.pass(0));
        TierOccupancy {
            tier,
            budget: Some(self.budgets.get(tier).saturating_sub(self.base(tier))),
            promised: self.verified.timeline.occupancy(plan, tier),
            measured: measured.map(|pass| pass.occupancy(plan, tier)).unwrap_or_default(),
        }
    }

    fn comparison(&self) -> Vec<Compared> {
        let promise = &self.verified.promise;
        let settled: Vec<&StepMetrics> = self.metrics.iter().filter(|m| m.step >= self.first + 2).collect();
        let middle = |value: fn(&StepMetrics) -> f64| {
            (!settled.is_empty()).then(|| median(settled.iter().map(|m| value(m)).collect()))
        };
        let row = |label: &str, unit: &str, promised: f64, measured: Option<f64>| Compared {
            label: label.into(),
            unit: unit.into(),
            promised: Some(promised),
            measured,
            recent: None,
        };
        let exposed = &promise.exposed_s;
        let bytes = |b: Bytes| b.get() as f64;
        vec![
            row("Step", "s", promise.step_s.get(), middle(|m| m.seconds.step.get())),
            row("Forward", "s", promise.forward_s.get(), middle(|m| m.seconds.forward.get())),
            row("Backward", "s", promise.backward_s.get(), middle(|m| m.seconds.backward.get())),
            row(
                "Optimizer",
                "s",
                promise.optimizer_s.get(),
                middle(|m| m.seconds.clip.get() + m.seconds.optimizer.get() + m.seconds.zero_grad.get()),
            ),
            row("Waiting for copies to host", "ms", exposed.d2h.as_ms(), middle(|m| m.exposed_s.d2h.as_ms())),
            row(
                "Waiting for copies from host",
                "ms",
                exposed.h2d.as_ms(),
                middle(|m| m.exposed_s.h2d.as_ms()),
            ),
            row(
                "Waiting for NVMe writes",
                "ms",
                exposed.nvme_write.as_ms(),
                middle(|m| m.exposed_s.nvme_write.as_ms()),
            ),
            row(
                "Waiting for NVMe reads",
                "ms",
                exposed.nvme_read.as_ms(),
                middle(|m| m.exposed_s.nvme_read.as_ms()),
            ),
            row("HBM", "bytes", bytes(promise.peak_bytes.hbm), middle(|m| m.peak_bytes.hbm.get() as f64)),
            row(
                "Host RAM",
                "bytes",
                bytes(promise.peak_bytes.host),
                middle(|m| m.peak_bytes.host.get() as f64),
            ),
            row("NVMe", "bytes", bytes(promise.peak_bytes.nvme), middle(|m| m.peak_bytes.nvme.get() as f64)),
        ]
    }
}
