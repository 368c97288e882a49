//! What a person wants to know first: what the plan did, where the time went, what was waited for, whether promises held, what would help.

use lazy_model::report::Fact;
use lazy_model::schedule::ExposedSeconds;
use lazy_model::{Seconds, Tier};

use super::{Files, fact, mean};
use crate::metrics::StepMetrics;

/// A promise is kept that is off by no more than this share.
const KEPT: f64 = 0.05;
/// Waits below this share of a step are not worth a sentence.
const WAIT: f64 = 0.002;

impl Files {
    pub(super) fn answers(&self) -> Vec<Fact> {
        let mut answers = vec![fact("Plan", self.plan())];
        if let Some((time, waits)) = self.time().zip(self.waited()) {
            answers.push(fact("Time", time));
            answers.push(fact("Waiting", waits));
        }
        answers.extend(self.promises().map(|said| fact("Promises", said)));
        let advice = self.record.measured.as_ref().map(|m| &m.advice[..]).unwrap_or_default();
        if let Some(first) = advice.first() {
            let more = advice.get(1).map(|second| format!(" {second}")).unwrap_or_default();
            answers.push(fact("Next", format!("{first}{more}")));
        }
        answers
    }

    fn plan(&self) -> String {
        let counts = self.schedule.counts();
        let all = self.schedule.placement.len();
        let places: Vec<String> = [
            (counts.hbm, "in HBM"),
            (counts.host, "in host RAM"),
            (counts.nvme, "on NVMe"),
            (counts.recompute, "recomputed"),
        ]
        .into_iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, where_to)| format!("{count} {where_to}"))
        .collect();
        let kept = self.schedule.keep.iter().filter(|&&kept| kept).count();
        let internals = match kept {
            0 => "every layer runs forward again before its backward".into(),
            k if k == self.schedule.layers => "every layer keeps its internals".into(),
            k => format!("{k} of {} layers keep their internals", self.schedule.layers),
        };
        format!("{all} boundaries: {}; {internals}.", places.join(", "))
    }

    fn time(&self) -> Option<String> {
        let settled = self.settled();
        let step = mean(&settled, |m| m.seconds.step.get())?;
        let share = |of: fn(&StepMetrics) -> f64| 100.0 * mean(&settled, of).unwrap_or(0.0) / step;
        let again = share(|m| m.seconds.recompute.get());
        let waits = share(|m| m.exposed_s.total().get());
        let optimizer = share(|m| m.seconds.all_of_optimizer().get());
        let passes = share(|m| (m.seconds.forward + m.seconds.backward).get());
        let said = [
            (passes - again - waits, "forward and backward"),
            (again, "forwards run again"),
            (waits, "standing still"),
            (optimizer, "the optimizer"),
            (100.0 - passes - optimizer, "the rest"),
        ];
        let said: Vec<String> = said
            .into_iter()
            .filter(|(share, what)| *share >= 0.5 || *what == "standing still")
            .map(|(share, what)| format!("{share:.0} % {what}"))
            .collect();
        Some(format!("A step takes {}: {}.", Seconds(step), said.join(", ")))
    }

    fn waited(&self) -> Option<String> {
        let settled = self.settled();
        let total = mean(&settled, |m| m.exposed_s.total().get())?;
        let step = mean(&settled, |m| m.seconds.step.get())?;
        let promised = self.promise().map_or(Seconds::ZERO, |p| p.exposed_s.total());
        if total <= WAIT * step {
            return Some(format!("Next to none: {} a step, {promised} promised.", Seconds(total)));
        }
        let link = |of: fn(&ExposedSeconds) -> Seconds| {
            settled.iter().map(|m| of(&m.exposed_s).get()).sum::<f64>() / settled.len() as f64
        };
        let links = [
            (link(|e| e.d2h), "copies to host RAM"),
            (link(|e| e.h2d), "copies from host RAM"),
            (link(|e| e.nvme_write), "NVMe writes"),
            (link(|e| e.nvme_read), "NVMe reads"),
        ];
        let most = links.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).map_or("", |link| link.1);
        let longest = self.record.measured.as_ref().and_then(|m| m.waits.first());
        let longest = longest.map_or(String::new(), |wait| {
            let why = if wait.why.is_empty() { String::new() } else { format!(": it {}", wait.why) };
            format!(" The longest wait is for {}, {}{why}.", wait.name, wait.wait_s)
        });
        Some(format!("{} a step, {promised} promised, most of it for {most}.{longest}", Seconds(total)))
    }

    fn promises(&self) -> Option<String> {
        let (promise, settled) = (self.promise()?, self.settled());
        let step = mean(&settled, |m| m.seconds.step.get())?;
        let over: Vec<String> = Tier::ALL
            .into_iter()
            .filter(|&tier| settled.iter().any(|m| m.peak_bytes.get(tier) > promise.peak_bytes.get(tier)))
            .map(|tier| tier.to_string())
            .collect();
        let memory = if over.is_empty() {
            "no tier ever held more than promised".into()
        } else {
            format!("{} held more than promised", over.join(" and "))
        };
        let off = step / promise.step_s.get() - 1.0;
        let shown = format!("a step takes {:.1} % {} than promised", 100.0 * off.abs(), more(off));
        if off.abs() <= KEPT && over.is_empty() {
            return Some(format!("Kept: {shown}, {memory}."));
        }
        // The part that is furthest off says where to look.
        let parts = [
            ("forward", promise.forward_s, mean(&settled, |m| m.seconds.forward.get())),
            ("backward", promise.backward_s, mean(&settled, |m| m.seconds.backward.get())),
            ("the optimizer", promise.optimizer_s, mean(&settled, |m| m.seconds.all_of_optimizer().get())),
        ];
        let furthest = parts
            .into_iter()
            .filter_map(|(what, promised, measured)| Some((what, measured? - promised.get())))
            .max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()))
            .filter(|_| off.abs() > KEPT);
        let furthest = furthest.map_or(String::new(), |(what, by)| {
            format!(", most of it {what} ({}{})", if by < 0.0 { "-" } else { "+" }, Seconds(by.abs()))
        });
        let verdict = if over.is_empty() { "Time is off" } else { "Not kept" };
        Some(format!("{verdict}: {shown}{furthest}; {memory}."))
    }
}

fn more(off: f64) -> &'static str {
    if off < 0.0 { "less" } else { "more" }
}
