//! The run's report: what was promised and what happened, for a person. It is drawn from the run's folder alone, so that it can be
//! drawn again, of a run under way or of one that was killed too.

mod answers;
mod compare;
mod record;

use std::path::{Path, PathBuf};

use lazy_model::report::{Compared, Curve, Fact, Headline, Part, RunReport, StepParts, Table, TierOccupancy};
use lazy_model::schedule::Promise;
use lazy_model::{HardwareProfile, Schedule, Seconds, Tier};

use crate::error::{Result, TrainError};
use crate::evaluation::{Evaluation, comparable};
use crate::homes::WeightsHome;
use crate::metrics::StepMetrics;
use crate::noted::LATE;
use crate::run_folder::{self, write_file};
use crate::settings::Settings;

pub use compare::compare;
pub use record::{Measured, Promised, RECORD_FILE, RECORD_VERSION, Record, Waited};

/// Name of the report in a run's folder.
pub const REPORT_FILE: &str = "report.html";
/// Steps over which the loss at the end is a mean.
const LAST: usize = 20;

/// Draws `report.html` of a run's folder; returns its path.
///
/// # Errors
/// When the folder is none of a run that began its first step, or cannot be written.
pub fn draw(run: &Path) -> Result<PathBuf> {
    let path = run.join(REPORT_FILE);
    write_page(&path, &Files::read(run)?.report())?;
    Ok(path)
}

fn write_page(path: &Path, report: &RunReport) -> Result<()> {
    let mut page = Vec::new();
    report.write_html(&mut page).map_err(TrainError::io(path))?;
    write_file(path, &page)
}

/// What a run's folder holds.
struct Files {
    settings: Settings,
    schedule: Schedule,
    record: Record,
    /// All steps of the run.
    metrics: Vec<StepMetrics>,
    /// All evaluations of the run on the data that it was last evaluated on.
    evaluations: Vec<Evaluation>,
    /// What the plan was made on, and that corrected by the run.
    profiles: Option<(HardwareProfile, HardwareProfile)>,
}

fn fact(label: &str, value: impl Into<String>) -> Fact {
    Fact { label: label.into(), value: value.into() }
}

/// A quantity with its own value of every step.
struct Quantity {
    label: &'static str,
    unit: &'static str,
    promised: f64,
    of: fn(&StepMetrics) -> f64,
    /// The largest of the steps says more than their mean.
    peak: bool,
}

impl Files {
    fn read(run: &Path) -> Result<Files> {
        let run_folder::Remembered { settings, .. } = run_folder::read_run(run)?;
        let text = |name: &str| {
            let path = run.join(name);
            std::fs::read_to_string(&path).map_err(TrainError::io(&path))
        };
        let profile = |name: &str| {
            let text = std::fs::read_to_string(run.join(name)).ok()?;
            HardwareProfile::from_json(&text).ok()
        };
        Ok(Files {
            settings,
            schedule: Schedule::from_json(&text("schedule.json")?)?,
            record: Record::read(run)?,
            metrics: run_folder::read_metrics(run, u64::MAX)?,
            evaluations: text(run_folder::EVALUATIONS_FILE)
                .map(|text| comparable(&text, None))
                .unwrap_or_default(),
            profiles: profile(run_folder::PROFILE_FILE).zip(profile(run_folder::CORRECTED_FILE)),
        })
    }

    fn report(&self) -> RunReport {
        let measured = self.record.measured.as_ref();
        RunReport {
            title: self.title(),
            answers: self.answers(),
            facts: self.facts(),
            headlines: self.headlines(),
            loss: self.losses(),
            curves: self.curves(),
            unigram_entropy: Some(self.record.unigram_entropy),
            placement: self.schedule.placement.clone(),
            boundary_bytes: self.record.promised.boundary_bytes.clone(),
            keep: self.schedule.keep.clone(),
            occupancy: self.occupancy(),
            spans: measured.map(|m| m.spans.clone()).unwrap_or_default(),
            parts: self.parts(),
            comparison: self.comparison(),
            compared_over: self.compared_over(),
            waits: self.waits(),
            tables: self.corrections().into_iter().collect(),
            ..RunReport::default()
        }
    }

    fn title(&self) -> String {
        let steps = self.metrics.len();
        let plural = if steps == 1 { "" } else { "s" };
        format!("{steps} step{plural} of a {} decoder", self.record.family)
    }

    fn promise(&self) -> Option<&Promise> {
        self.schedule.promise.as_ref()
    }

    /// Steps of the last process but its first, which touches everything for the first time.
    fn settled(&self) -> Vec<&StepMetrics> {
        self.metrics.iter().filter(|m| m.step > self.record.first).collect()
    }

    /// The last of them.
    fn late(&self) -> Vec<&StepMetrics> {
        let settled = self.settled();
        settled[settled.len().saturating_sub(LATE)..].to_vec()
    }

    fn losses(&self) -> Vec<(u64, f64)> {
        self.metrics.iter().map(|m| (m.step, f64::from(m.loss))).collect()
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

    fn compared_over(&self) -> String {
        let settled = self.settled();
        match (settled.first(), settled.last()) {
            (Some(first), Some(last)) => format!(
                "Measured are means over steps {} to {} (step {} touched everything for the first time and does not count){}; of \
                 peaks the largest.",
                first.step,
                last.step,
                self.record.first,
                if settled.len() > LATE {
                    format!(", of late those over the last {LATE}")
                } else {
                    String::new()
                }
            ),
            _ => "Nothing is measured: that takes a second step.".into(),
        }
    }

    fn quantities(&self) -> Vec<Quantity> {
        let Some(promise) = self.promise() else { return Vec::new() };
        let (exposed, busy) = (&promise.exposed_s, &self.record.promised.busy_s);
        let peaks = &promise.peak_bytes;
        let quantity =
            |label, unit, promised, of| Quantity { label, unit, promised, of, peak: unit == "bytes" };
        vec![
            quantity("Step", "s", promise.step_s.get(), |m| m.seconds.step.get()),
            quantity("Forward", "s", promise.forward_s.get(), |m| m.seconds.forward.get()),
            quantity("Backward", "s", promise.backward_s.get(), |m| m.seconds.backward.get()),
            quantity("of it, forwards run again", "s", self.record.promised.recompute_s.get(), |m| {
                m.seconds.recompute.get()
            }),
            quantity("Optimizer", "s", promise.optimizer_s.get(), |m| m.seconds.all_of_optimizer().get()),
            quantity("Copies to host RAM", "ms", busy.d2h.as_ms(), |m| m.busy_s.d2h.as_ms()),
            quantity("waited for", "ms", exposed.d2h.as_ms(), |m| m.exposed_s.d2h.as_ms()),
            quantity("Copies from host RAM", "ms", busy.h2d.as_ms(), |m| m.busy_s.h2d.as_ms()),
            quantity("waited for", "ms", exposed.h2d.as_ms(), |m| m.exposed_s.h2d.as_ms()),
            quantity("NVMe writes", "ms", busy.nvme_write.as_ms(), |m| m.busy_s.nvme_write.as_ms()),
            quantity("waited for", "ms", exposed.nvme_write.as_ms(), |m| m.exposed_s.nvme_write.as_ms()),
            quantity("NVMe reads", "ms", busy.nvme_read.as_ms(), |m| m.busy_s.nvme_read.as_ms()),
            quantity("waited for", "ms", exposed.nvme_read.as_ms(), |m| m.exposed_s.nvme_read.as_ms()),
            quantity("HBM at most", "bytes", peaks.hbm.get() as f64, |m| m.peak_bytes.hbm.get() as f64),
            quantity("Host RAM at most", "bytes", peaks.host.get() as f64, |m| {
                m.peak_bytes.host.get() as f64
            }),
            quantity("NVMe at most", "bytes", peaks.nvme.get() as f64, |m| m.peak_bytes.nvme.get() as f64),
        ]
    }

    fn comparison(&self) -> Vec<Compared> {
        let (settled, late) = (self.settled(), self.late());
        // In a short run the last steps are all of them.
        let told_apart = late.len() < settled.len();
        let compared = |q: Quantity| Compared {
            label: q.label.into(),
            unit: q.unit.into(),
            promised: Some(q.promised),
            measured: q.over(&settled),
            recent: q.over(&late).filter(|_| told_apart),
        };
        self.quantities().into_iter().map(compared).collect()
    }

    /// The promised step, and the mean one.
    fn parts(&self) -> Vec<StepParts> {
        let (Some(promise), settled) = (self.promise(), self.settled()) else { return Vec::new() };
        let split = |passes: f64, again: f64, waits: f64, optimizer: f64, step: f64| {
            let once = (passes - again - waits).max(0.0);
            let rest = (step - passes - optimizer).max(0.0);
            let parts = [
                (Part::Arithmetic, once),
                (Part::Recompute, again),
                (Part::Wait, waits),
                (Part::Optimizer, optimizer),
                (Part::Other, rest),
            ];
            parts.map(|(part, seconds)| (part, Seconds(seconds))).into()
        };
        let promised = split(
            (promise.forward_s + promise.backward_s).get(),
            self.record.promised.recompute_s.get(),
            promise.exposed_s.total().get(),
            promise.optimizer_s.get(),
            promise.step_s.get(),
        );
        let mut bars = vec![StepParts { label: "Promised".into(), parts: promised }];
        if !settled.is_empty() {
            let mean = |of: fn(&StepMetrics) -> f64| mean(&settled, of).unwrap_or(0.0);
            let measured = split(
                mean(|m| (m.seconds.forward + m.seconds.backward).get()),
                mean(|m| m.seconds.recompute.get()),
                mean(|m| m.exposed_s.total().get()),
                mean(|m| m.seconds.all_of_optimizer().get()),
                mean(|m| m.seconds.step.get()),
            );
            bars.push(StepParts { label: "Measured".into(), parts: measured });
        }
        bars
    }

    fn occupancy(&self) -> Vec<TierOccupancy> {
        let mut tiers = self.record.promised.occupancy.clone();
        for (at, tier) in tiers.iter_mut().enumerate() {
            let measured = self.record.measured.as_ref().and_then(|m| m.occupancy.get(at));
            tier.measured = measured.cloned().unwrap_or_default();
        }
        tiers
    }

    fn waits(&self) -> Option<Table> {
        let measured = self.record.measured.as_ref()?;
        let promised = &self.record.promised.waits;
        let row = |wait: &Waited| {
            let promised = promised.iter().find(|p| p.name == wait.name);
            vec![
                wait.name.clone(),
                wait.wait_s.to_string(),
                promised.map_or(Seconds::ZERO, |p| p.wait_s).to_string(),
                wait.transfer_s.to_string(),
                wait.why.clone(),
            ]
        };
        let shown = measured.waits.iter().filter(|wait| wait.wait_s.as_ms() >= 0.01).take(8);
        let rows: Vec<Vec<String>> = shown.map(row).collect();
        (!rows.is_empty()).then(|| Table {
            title: "What arithmetic waited for".into(),
            intro: "Transfers that kept the compute lane standing still, mean time a step, the longest first; beside it what the plan \
                    said, how long the transfer itself took in the last step, and what it followed there."
                .into(),
            head: ["Transfer", "Waited", "Promised", "Took", "Why not earlier"].map(String::from).into(),
            rows,
        })
    }

    /// What the corrected profile changes.
    fn corrections(&self) -> Option<Table> {
        let (before, after) = self.profiles.as_ref()?;
        let mut rows = Vec::new();
        let mut row = |what: &str, unit: &str, before: Option<f64>, after: Option<f64>| {
            let show = |v: Option<f64>| v.map_or("–".to_owned(), |v| format!("{} {unit}", significant(v)));
            let change = before.zip(after).map(|(b, a)| 100.0 * (a / b - 1.0)).filter(|c| c.is_finite());
            let change = change.map_or("–".to_owned(), |c| format!("{c:+.1}%"));
            rows.push(vec![what.to_owned(), show(before), show(after), change]);
        };
        let sum = |list: &[f64]| list.iter().sum::<f64>();
        let times = before.times.as_ref().zip(after.times.as_ref());
        if let Some((b, a)) = times {
            let lists = [
                ("Layers forward", &b.forward_ms, &a.forward_ms),
                ("Layers forward, keeping internals", &b.saving_forward_ms, &a.saving_forward_ms),
                ("Layers forward, for internals alone", &b.internals_forward_ms, &a.internals_forward_ms),
                ("Layers backward", &b.backward_ms, &a.backward_ms),
            ];
            for (what, b, a) in lists {
                row(what, "ms", Some(sum(&b.value)), Some(sum(&a.value)));
            }
            row("Head and loss", "ms", Some(b.epilogue_ms.value), Some(a.epilogue_ms.value));
        }
        let (b, a) = (&before.links, &after.links);
        for (what, b, a) in [
            ("Copies to host RAM", &b.d2h, &a.d2h),
            ("Copies from host RAM", &b.h2d, &a.h2d),
            ("NVMe writes", &b.nvme_write, &a.nvme_write),
            ("NVMe reads", &b.nvme_read, &a.nvme_read),
        ] {
            row(what, "GB/s", Some(b.value.as_gb()), Some(a.value.as_gb()));
        }
        let optimizer = |p: &HardwareProfile| Some(p.optimizer_elements_per_s.as_ref()?.value / 1e6);
        row("Optimizer, parameters", "M/s", optimizer(before), optimizer(after));
        Some(Table {
            title: "The machine, as this run saw it".into(),
            intro: format!(
                "Times and rates of these steps are in {}, in the run's folder: plan with them by --profile, for the next run or with \
                 lazy-plan.",
                run_folder::CORRECTED_FILE
            ),
            head: ["", "Planned with", "Seen", "Change"].map(String::from).into(),
            rows,
        })
    }

    fn facts(&self) -> Vec<Fact> {
        let (settings, solve) = (&self.settings, &self.schedule.solve);
        let base = &self.record.promised.base;
        let mut facts = vec![
            fact("Model", self.record.model.clone()),
            fact("Device", self.record.device.clone()),
            fact(
                "Step",
                format!(
                    "{} x {} tokens, {} micro-batch(es), seed {}",
                    settings.batch, settings.seq, settings.accum, settings.seed
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
            fact(
                "Always there",
                format!(
                    "{} of HBM (weights, gradients), {} of host RAM (the optimizer's ring)",
                    base.get(Tier::Hbm),
                    base.get(Tier::Host)
                ),
            ),
        ];
        facts.extend(self.evaluated());
        if let Some(measured) = &self.record.measured {
            let summary = &measured.summary;
            facts.push(fact("Spill files", format!("{} (--io {})", summary.nvme_mode, summary.io)));
            facts.push(fact(
                "Weights and gradients of layers",
                match summary.weights_home {
                    WeightsHome::Hbm => "stay in HBM",
                    WeightsHome::Host => "are at home in host RAM and streamed layer by layer",
                },
            ));
            facts.push(fact("Files of the optimizer", summary.state_mode.clone()));
            facts.push(fact("Weights", format!("sha256 {}", summary.weights_digest)));
        }
        facts
    }

    fn headlines(&self) -> Vec<Headline> {
        let value = |v: Option<f64>, digits: usize, unit: &str| {
            v.map_or_else(|| "-".into(), |v| format!("{v:.digits$}{unit}"))
        };
        let late = self.late();
        let last: Vec<&StepMetrics> = self.metrics.iter().rev().take(LAST).collect();
        let over = format!("mean of the last {} steps", late.len());
        let peak = self.settled().iter().map(|m| m.peak_bytes.hbm).max();
        let promised = self.promise().map_or(Seconds::ZERO, |p| p.step_s);
        let tile = |label: String, value: String, note: String| Headline { label, value, note };
        vec![
            tile(
                format!("Loss, last {} steps", last.len()),
                value(mean(&last, |m| f64::from(m.loss)), 3, ""),
                format!("{:.3} without context", self.record.unigram_entropy),
            ),
            tile("Tokens a second".into(), value(self.tokens_per_s(&late), 0, ""), over),
            tile(
                "Step".into(),
                mean(&late, |m| m.seconds.step.get()).map_or("-".into(), |s| Seconds(s).to_string()),
                format!("promised {promised}"),
            ),
            tile(
                "HBM at most".into(),
                peak.map_or("-".into(), |peak| peak.to_string()),
                format!("cap {}", self.record.promised.budgets.hbm),
            ),
        ]
    }

    /// Tokens over time: not the mean of rates, in which quick steps would count for more.
    fn tokens_per_s(&self, steps: &[&StepMetrics]) -> Option<f64> {
        Some(self.settings.tokens() as f64 / mean(steps, |m| m.seconds.step.get())?)
    }
}

impl Quantity {
    fn over(&self, steps: &[&StepMetrics]) -> Option<f64> {
        if self.peak { steps.iter().map(|m| (self.of)(m)).reduce(f64::max) } else { mean(steps, self.of) }
    }
}

/// Four significant digits, or all of a whole number.
fn significant(value: f64) -> String {
    let digits = if value == 0.0 { 0.0 } else { value.abs().log10().floor() };
    format!("{value:.*}", (3.0 - digits).clamp(0.0, 9.0) as usize)
}

fn mean(steps: &[&StepMetrics], of: fn(&StepMetrics) -> f64) -> Option<f64> {
    (!steps.is_empty()).then(|| steps.iter().map(|m| of(m)).sum::<f64>() / steps.len() as f64)
}
