//! The report: one page with the plan's pictures.

use lazy_model::report::{Fact, Headline, Picture, RunReport, Table, TierOccupancy};
use lazy_model::{Bytes, Keep, Seconds, Tier};

use super::super::next::{self, Change, What};
use super::super::plan::Planned;
use super::{kinds_in_words, links, proof, throughput, verdict};

pub(crate) fn page(planned: &Planned, changes: &[Change]) -> String {
    let solution = &planned.solution;
    // Letters of layers where the problem knows of internals, and none where it does not.
    let kept = planned.problem.step.as_ref().and(planned.schedule.as_ref()).map(|s| s.keep.clone());
    let keep = solution.keep.as_ref().map(|keep| keep.iter().map(|k| *k != Keep::Recompute).collect());
    let report = RunReport {
        title: format!("Plan for {}", planned.problem.name),
        of: Picture::Plan,
        facts: facts(planned),
        headlines: headlines(planned, changes),
        placement: solution.placement.clone().unwrap_or_default(),
        boundary_bytes: planned.problem.chain.boundary_bytes.clone(),
        keep: keep.or(kept).unwrap_or_default(),
        occupancy: occupancy(planned),
        spans: planned.verified.as_ref().map(|v| v.timeline.spans.clone()).unwrap_or_default(),
        tables: vec![tiers(planned), links(planned), rivals(planned)],
        ..RunReport::default()
    };
    report.to_html()
}

fn fact(label: &str, value: impl Into<String>) -> Fact {
    Fact { label: label.into(), value: value.into() }
}

fn facts(planned: &Planned) -> Vec<Fact> {
    let problem = &planned.problem;
    let mut facts = Vec::new();
    if let Some(model) = &problem.model {
        let (spec, work) = (&model.spec, &model.work);
        facts.push(fact("Parameters", format!("{:.3}e9", spec.total_parameters() as f64 / 1e9)));
        facts.push(fact("Layers", kinds_in_words(spec)));
        let (batch, seq, bytes) = (work.batch(), work.sequence(), work.element_bytes());
        facts.push(fact("Workload", format!("{batch} x {seq} tokens, {bytes} bytes an element")));
    }
    if let Some(profile) = &problem.profile {
        facts.push(fact("Machine", profile.name.clone()));
    }
    facts.extend(super::ranks(planned).into_iter().map(|(label, value)| fact(label, value)));
    facts.push(fact("Objective", format!("{}, ties {}", problem.objective.name(), problem.tie_break.name())));
    facts.push(fact("Solved", proof(planned)));
    facts
}

fn headlines(planned: &Planned, changes: &[Change]) -> Vec<Headline> {
    let mut tiles = Vec::new();
    let mut tile = |label: &str, value: String, note: String| {
        tiles.push(Headline { label: label.into(), value, note });
    };
    if let Some(promise) = planned.promise() {
        let waits = promise.exposed_s.total();
        tile(
            "Predicted step",
            planned.step().unwrap_or(promise.step_s).to_string(),
            format!("{waits} of it waiting for links"),
        );
    }
    if let Some(through) = throughput(planned) {
        let [by_6n, exact] = through.tflops;
        let note = if through.experts {
            format!("{exact:.2} TFLOP/s by exact counting")
        } else {
            format!("{by_6n:.2} TFLOP/s by 6N")
        };
        tile("Tokens a second", format!("{:.0}", through.tokens_per_s), note);
    }
    if let Some(evaluation) = &planned.solution.evaluation {
        if planned.promise().is_none() {
            let exposed = Seconds::from_ms(evaluation.exposed_ms.total());
            let added = Seconds::from_ms(evaluation.step_ms());
            tile("Added to a step", added.to_string(), format!("{exposed} of it exposed transfers"));
        }
        let c = evaluation.counts;
        let places = format!("{}/{}/{}/{}", c.hbm, c.host, c.nvme, c.recompute);
        tile("Boundaries", places, "HBM / host / NVMe / recomputed".into());
    }
    if let (Some((_, theirs)), Some(verdict)) = (planned.best_rival(), verdict(planned)) {
        let note = format!("this plan: {}", verdict.replace('`', ""));
        tile("Best plan by hand", Seconds::from_ms(theirs).to_string(), note);
    }
    if let Some(limit) = next::limits(planned, changes).into_iter().next() {
        tile("Limited by", limit.what, limit.detail);
    }
    // A faster device always helps; what is cheaper than that is news.
    let helps = |c: &&Change| c.saves_ms > 0.0 && c.what != What::Device;
    if let Some(change) = changes.iter().find(helps) {
        let sentence = next::sentences(changes).into_iter().next().unwrap_or_default();
        tile("Next change saves", Seconds::from_ms(change.saves_ms).to_string(), sentence);
    }
    tiles
}

fn occupancy(planned: &Planned) -> Vec<TierOccupancy> {
    let Some(verified) = &planned.verified else { return vec![] };
    let fixed = planned.problem.step.as_ref().map(|s| s.fixed).unwrap_or_default();
    let curve = |tier| TierOccupancy {
        tier,
        // The curves are boundaries and their like; what is there anyway would hide them.
        budget: Some(planned.budgets().get(tier).saturating_sub(fixed.get(tier))),
        promised: verified.timeline.occupancy(&verified.plan, tier),
        measured: vec![],
    };
    let budgets = planned.budgets();
    Tier::ALL.into_iter().filter(|tier| budgets.get(*tier) > Bytes::ZERO).map(curve).collect()
}

fn tiers(planned: &Planned) -> Table {
    let (peaks, budgets) = (planned.peaks().unwrap_or_default(), planned.budgets());
    let row = |tier: Tier| {
        let (held, budget) = (peaks.get(tier), budgets.get(tier));
        vec![
            tier.name().into(),
            held.to_string(),
            budget.to_string(),
            held.get().to_string(),
            budget.get().to_string(),
        ]
    };
    Table {
        title: "What fits where".into(),
        intro: "The most that each tier holds, and its limit.".into(),
        head: ["Tier", "Held", "Budget", "Held, bytes", "Budget, bytes"].map(String::from).into(),
        rows: Tier::ALL.into_iter().map(row).collect(),
    }
}

fn links(planned: &Planned) -> Table {
    let links = links::of(planned);
    let intro = match planned.verified {
        Some(_) => "Over the simulated step.",
        None => {
            "Windows are what a link can move while layers compute; what does not fit into them is exposed."
        }
    };
    Table {
        title: "What the links carry".into(),
        intro: intro.into(),
        head: links.head.into_iter().map(String::from).collect(),
        rows: links.rows,
    }
}

fn rivals(planned: &Planned) -> Table {
    let row = |rival: &super::super::plan::Rival| {
        let (time, note) = match &rival.cost {
            Ok(cost) => {
                (cost.time_ms().map_or("-".into(), |ms| Seconds::from_ms(ms).to_string()), String::new())
            }
            Err(why) => ("does not fit".into(), why.clone()),
        };
        vec![rival.name.clone(), time, note]
    };
    let ours = planned.time_ms().map_or("-".into(), |ms| Seconds::from_ms(ms).to_string());
    let mut rows =
        vec![vec!["this plan".to_owned(), ours, verdict(planned).unwrap_or_default().replace('`', "")]];
    rows.extend(planned.rivals.iter().map(row));
    let what = if planned.promise().is_some() { "Time of a step" } else { "Added to a step" };
    Table {
        title: "Beside plans made by hand".into(),
        intro: "What people use without a solver, under the same limits.".into(),
        head: ["Plan", what, ""].map(String::from).into(),
        rows,
    }
}
