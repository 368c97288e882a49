//! A plan as JSON, as a table with a map, or as the reason why there is none.

use std::fmt::Write;

use lazy_model::step::TierBytes;
use lazy_model::{Placement, Tier};
use lazy_solver::{Remedy, Status};
use serde_json::{Value, json};

use super::input::Planned;

const BOUNDARIES_A_LINE: usize = 64;

fn with_placement(planned: &Planned, wanted: Placement) -> Option<Vec<usize>> {
    let placement = planned.solution.placement.as_ref()?;
    Some((0..placement.len()).filter(|&i| placement[i] == wanted).collect())
}

/// Bytes each tier holds at its worst moment; for a bare chain, the sum of its boundaries.
fn peaks(planned: &Planned) -> Option<TierBytes> {
    if let Some(promise) = &planned.promise {
        return Some(promise.peak_bytes);
    }
    let bytes = planned.solution.evaluation.as_ref()?.bytes;
    Some(TierBytes { hbm: bytes.hbm, host: bytes.host, nvme: bytes.nvme })
}

pub(crate) fn json(planned: &Planned, remedies: &[Remedy]) -> Value {
    let solution = &planned.solution;
    let evaluation = solution.evaluation.as_ref();
    let mut value = json!({
        "status": solution.status.name(),
        "objective_ms": solution.objective_ms,
        "bound_ms": solution.bound_ms,
        "gap": solution.gap,
        "solve_s": solution.solve.get(),
        "method": solution.method.name(),
        "counts": evaluation.map(|e| json!({
            "hbm": e.counts.hbm, "host": e.counts.host, "nvme": e.counts.nvme,
            "recompute": e.counts.recompute, "kept": e.counts.kept,
        })),
        "hbm": with_placement(planned, Placement::Hbm),
        "host": with_placement(planned, Placement::Host),
        "nvme": with_placement(planned, Placement::Nvme),
        "recompute": with_placement(planned, Placement::Recompute),
        "exposed_ms": evaluation.map(|e| e.exposed_ms),
        "step_ms": evaluation.map(|e| e.step_ms()),
        "predicted_step_s": planned.promise.as_ref().map(|p| p.step_s.get()),
        "peaks": peaks(planned),
        "placement": solution.placement_string(),
    });
    if let Some(keep) = solution.keep_string() {
        value["keep"] = json!(keep);
        value["base_recompute_ms"] = json!(evaluation.map(|e| e.base_recompute_ms));
    }
    match solution.status {
        Status::Infeasible => value["message"] = json!(refusal(planned, remedies)),
        Status::Failed => value["message"] = json!(solution.message),
        _ => {}
    }
    value
}

pub(crate) fn refusal(planned: &Planned, remedies: &[Remedy]) -> String {
    let solution = &planned.solution;
    match solution.status {
        Status::NoIncumbent => format!(
            "no placement was found within the time limit ({}); there may be one: raise --time-limit-s",
            solution.solve
        ),
        Status::Infeasible if planned.why.is_some() => planned.why.clone().unwrap_or_default(),
        Status::Infeasible if remedies.is_empty() => {
            "no placement keeps all rules, and no single budget, block limit or lock is to blame: raise several budgets".into()
        }
        Status::Infeasible => {
            let list: Vec<String> = remedies.iter().map(Remedy::to_string).collect();
            format!("no placement keeps all rules. Any one of these would help:\n  - {}", list.join("\n  - "))
        }
        _ => format!("the solver failed: {}", solution.message.as_deref().unwrap_or("no reason given")),
    }
}

pub(crate) fn text(planned: &Planned, colours: bool) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_text(&mut out, planned, colours);
    out
}

fn write_text(out: &mut String, planned: &Planned, colours: bool) -> std::fmt::Result {
    let solution = &planned.solution;
    let (Some(evaluation), Some(placement)) = (&solution.evaluation, &solution.placement) else {
        return Ok(());
    };
    let proof = match (solution.status, solution.gap) {
        (Status::Optimal, _) => "proven optimal".to_owned(),
        (_, Some(gap)) => format!("not proven, at most {:.3} % from the optimum", gap * 100.0),
        _ => "not proven".to_owned(),
    };
    writeln!(
        out,
        "{} layers, {} boundaries: {proof}, {} in {}\n",
        planned.chain.layers,
        placement.len(),
        solution.method.name(),
        solution.solve
    )?;
    let counts = evaluation.counts;
    let peaks = peaks(planned).unwrap_or_default();
    writeln!(out, "{:<12} {:>10} {:>14} {:>14}", "", "boundaries", planned.peak_title(), "budget")?;
    for (tier, count) in [(Tier::Hbm, counts.hbm), (Tier::Host, counts.host), (Tier::Nvme, counts.nvme)] {
        let (held, budget) = (peaks.get(tier).to_string(), planned.budgets.get(tier).to_string());
        writeln!(out, "{:<12} {count:>10} {held:>14} {budget:>14}", tier.name())?;
    }
    writeln!(out, "{:<12} {:>10}\n", "recompute", counts.recompute)?;
    let exposed = evaluation.exposed_ms;
    writeln!(out, "recompute   {:>12.3} ms", evaluation.recompute_ms)?;
    writeln!(
        out,
        "exposed     {:>12.3} ms   d2h {:.3}, h2d {:.3}, nvme_write {:.3}, nvme_read {:.3}",
        exposed.total(),
        exposed.d2h,
        exposed.h2d,
        exposed.nvme_write,
        exposed.nvme_read
    )?;
    writeln!(out, "objective   {:>12.5} ms", evaluation.objective_ms)?;
    if let Some(promise) = &planned.promise {
        writeln!(out, "whole step  {:>12.4} s", promise.step_s.get())?;
    }
    writeln!(out)?;
    write_map(out, placement, colours)
}

/// One letter a boundary, in index order.
fn write_map(out: &mut String, placement: &[Placement], colours: bool) -> std::fmt::Result {
    for (line, boundaries) in placement.chunks(BOUNDARIES_A_LINE).enumerate() {
        write!(out, "{:>6}  ", line * BOUNDARIES_A_LINE)?;
        for p in boundaries {
            write_letter(out, *p, colours)?;
        }
        writeln!(out)?;
    }
    write!(out, "        ")?;
    for p in [Placement::Hbm, Placement::Host, Placement::Nvme, Placement::Recompute] {
        write_letter(out, p, colours)?;
        write!(out, " {p}   ")?;
    }
    writeln!(out)
}

fn write_letter(out: &mut String, p: Placement, colours: bool) -> std::fmt::Result {
    if !colours {
        return write!(out, "{}", p.letter());
    }
    // Backgrounds: green, blue, magenta, grey.
    let colour = match p {
        Placement::Hbm => "30;42",
        Placement::Host => "97;44",
        Placement::Nvme => "97;45",
        Placement::Recompute => "90;47",
    };
    write!(out, "\x1b[{colour}m{}\x1b[0m", p.letter())
}
