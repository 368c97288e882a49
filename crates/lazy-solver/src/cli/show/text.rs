//! Plans for people.

use std::fmt::{Result, Write};

use lazy_model::{Bytes, Evaluation, Seconds, Tier};

use super::super::max::{Max, Next};
use super::super::next::{self, Change};
use super::super::plan::{Planned, Rival};
use super::super::problem::{ModelFacts, Problem};
use super::{gap, internals, kinds_in_words, links, map, number, proof, throughput, verdict};

pub(crate) fn plan(planned: &Planned, changes: &[Change], colours: bool) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_plan(&mut out, planned, changes, colours);
    out
}

fn write_plan(out: &mut String, planned: &Planned, changes: &[Change], colours: bool) -> Result {
    let solution = &planned.solution;
    let (Some(evaluation), Some(placement)) = (&solution.evaluation, &solution.placement) else {
        return Ok(());
    };
    head(out, planned)?;
    ranks(out, planned)?;
    tiers(out, planned, evaluation)?;
    links(out, planned)?;
    times(out, planned, evaluation)?;
    writeln!(out)?;
    map::write(out, placement, solution.keep.as_deref(), colours)?;
    rivals(out, planned)?;
    let limits: Vec<String> = next::limits(planned, changes).iter().map(ToString::to_string).collect();
    if !limits.is_empty() {
        writeln!(out, "\nlimited by:  {}", limits.join(", "))?;
    }
    for (i, sentence) in next::sentences(changes).iter().enumerate() {
        writeln!(out, "{:<12} {sentence}", if i == 0 { "next change:" } else { "" })?;
    }
    Ok(())
}

/// What `--max` found, above the plan.
pub(crate) fn max(max: &Max) -> String {
    let (name, value) = (max.flag.name(), max.value);
    let next = match &max.next {
        Next::Refused(refused) => format!("{name} {} does not fit: {}", value + 1, super::refusal(refused)),
        Next::Unknown => {
            format!("whether {name} {} fits was not found out in time: raise --time-limit-s", value + 1)
        }
        Next::Unsupported(why) => format!("{name} {} is not supported: {why}", value + 1),
    };
    format!("largest {name} that fits: {value}\n{next}\n\n")
}

/// Names come from files: their line breaks and terminal codes stay theirs.
fn plain(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}

fn head(out: &mut String, planned: &Planned) -> Result {
    let (problem, solution) = (&planned.problem, &planned.solution);
    write!(out, "{}: ", plain(&problem.name))?;
    if let Some(model) = &problem.model {
        model_line(out, model)?;
    }
    if let Some(profile) = &problem.profile {
        writeln!(out, "on {}", plain(&profile.name))?;
    }
    for note in &problem.notes {
        writeln!(out, "note: {}", plain(note))?;
    }
    let how = if planned.given {
        String::new()
    } else {
        format!(", {} in {}", solution.method.name(), solution.solve)
    };
    let boundaries = problem.chain.boundaries();
    writeln!(out, "{} layers, {boundaries} boundaries: {}{how}", problem.chain.layers, proof(planned))?;
    writeln!(out, "objective: {}, ties: {}\n", problem.objective.name(), problem.tie_break.name())
}

/// What several ranks share. The tables below are of one of them.
fn ranks(out: &mut String, planned: &Planned) -> Result {
    for line in super::ranks(planned) {
        writeln!(out, "{:<14} {}", line.0, line.1)?;
    }
    if planned.problem.ranks.is_some() { writeln!(out) } else { Ok(()) }
}

fn model_line(out: &mut String, model: &ModelFacts) -> Result {
    let (spec, work) = (&model.spec, &model.work);
    let boundary = spec.boundary_bytes(work);
    writeln!(
        out,
        "{:.3}e9 parameters, {}\n{} x {} tokens of {} bytes an element; a boundary is {} ({} bytes)",
        spec.total_parameters() as f64 / 1e9,
        kinds_in_words(spec),
        work.batch(),
        work.sequence(),
        work.element_bytes(),
        boundary,
        boundary.get()
    )
}

/// What fits where. Capacities are GiB; the plain bytes stand beside them.
fn tiers(out: &mut String, planned: &Planned, evaluation: &Evaluation) -> Result {
    let counts = evaluation.counts;
    let (peaks, budgets) = (planned.peaks().unwrap_or_default(), planned.budgets());
    let exact = planned.promise().is_some() || evaluation.hbm_peak.is_some();
    let held = if exact { "peak" } else { "held" };
    writeln!(
        out,
        "{:<10} {:>10} {held:>14} {:>14} {:>18} {:>18}",
        "", "boundaries", "budget", "bytes", "of"
    )?;
    for (tier, count) in [(Tier::Hbm, counts.hbm), (Tier::Host, counts.host), (Tier::Nvme, counts.nvme)] {
        let (held, budget) = (peaks.get(tier), budgets.get(tier));
        writeln!(
            out,
            "{:<10} {count:>10} {:>14} {:>14} {:>18} {:>18}",
            tier.name(),
            held.to_string(),
            budget.to_string(),
            held.get(),
            budget.get()
        )?;
    }
    writeln!(out, "{:<10} {:>10}", "recompute", counts.recompute)?;
    if planned.solution.keep.is_some() || counts.kept > 0 {
        writeln!(out, "{:<10} {:>10} of {} layers", "kept", counts.kept, planned.problem.chain.layers)?;
    }
    writeln!(out)
}

fn links(out: &mut String, planned: &Planned) -> Result {
    let links = links::of(planned);
    let head = links.head.iter().map(|&heading| heading.to_owned()).collect();
    for row in std::iter::once(&head).chain(&links.rows) {
        let Some((name, cells)) = row.split_first() else { continue };
        write!(out, "{name:<10}")?;
        cells.iter().try_for_each(|cell| write!(out, " {cell:>12}"))?;
        writeln!(out)?;
    }
    writeln!(out)
}

fn times(out: &mut String, planned: &Planned, evaluation: &Evaluation) -> Result {
    let ms = |out: &mut String, label: &str, value: f64, digits: usize| {
        writeln!(out, "{label:<22} {value:>12.digits$} ms")
    };
    if evaluation.hbm_peak.is_some() {
        ms(out, "layers run once more", evaluation.base_recompute_ms, 3)?;
    }
    ms(out, "recompute", evaluation.recompute_ms, 3)?;
    // Of a step the objective foresees what the simulation then sees as waits.
    let exposed = if planned.promise().is_some() { "exposed, foreseen" } else { "exposed" };
    ms(out, exposed, evaluation.exposed_ms.total(), 3)?;
    ms(out, "objective", evaluation.objective_ms, 5)?;
    if let Some(optimizer) = &planned.problem.optimizer {
        let share = 100.0 * optimizer.fraction_8bit;
        let total = optimizer.total().get();
        writeln!(out, "{:<22} {total:>12.3} s   with {share} % of the moments in 8 bits", "optimizer")?;
    }
    if let Some(promise) = planned.promise() {
        // The machine's profile has no rate of it.
        let counted = promise.optimizer_s > Seconds::ZERO;
        let optimizer = if counted { promise.optimizer_s.to_string() } else { "not counted".into() };
        writeln!(
            out,
            "{:<22} {:>12.4} s   forward {}, backward {}, optimizer {optimizer}, waits {}",
            "predicted step",
            promise.step_s.get(),
            promise.forward_s,
            promise.backward_s,
            promise.exposed_s.total()
        )?;
    }
    if let Some(bound) = planned.step_bound {
        writeln!(
            out,
            "{:<22} {:>12.4} s   no plan is faster; there may be none as fast",
            "at least",
            bound.get()
        )?;
    }
    if let Some(through) = throughput(planned) {
        let [by_6n, exact] = through.tflops;
        write!(
            out,
            "{:<22} {:>12.1}     {by_6n:.2} TFLOP/s by 6N, {exact:.2} by exact counting",
            "tokens a second", through.tokens_per_s
        )?;
        match through.mfu {
            Some([_, exact]) if through.experts => {
                writeln!(out, "; MFU {:.1} % by exact counting: 6N counts every expert", 100.0 * exact)?;
            }
            Some([by_6n, exact]) => writeln!(out, "; MFU {:.1} %, {:.1} %", 100.0 * by_6n, 100.0 * exact)?,
            None => writeln!(out)?,
        }
    }
    Ok(())
}

fn rivals(out: &mut String, planned: &Planned) -> Result {
    if planned.rivals.is_empty() {
        return Ok(());
    }
    let what = if planned.promise().is_some() { "a step" } else { "added to a step" };
    writeln!(out, "\nbeside plans made by hand ({what}):")?;
    for Rival { name, cost, .. } in &planned.rivals {
        let shown = match cost {
            Ok(cost) => cost.time_ms().map_or("-".into(), |ms| Seconds::from_ms(ms).to_string()),
            Err(why) => format!("does not fit: {}", why.split(": ").next().unwrap_or(why)),
        };
        writeln!(out, "  {name:<28} {shown}")?;
    }
    match verdict(planned) {
        Some(verdict) => writeln!(out, "  this plan: {verdict}"),
        None => Ok(()),
    }
}

/// A model's sizes, with no plan.
pub(crate) fn sizes(model: &ModelFacts) -> String {
    let mut out = String::new();
    let _ = write_sizes(&mut out, model);
    out
}

fn write_sizes(out: &mut String, model: &ModelFacts) -> Result {
    let (spec, work) = (&model.spec, &model.work);
    write!(out, "{}: ", plain(&model.name))?;
    model_line(out, model)?;
    writeln!(out, "\n{:<44} {:>14} {:>18}", "", "", "bytes")?;
    let mut row = |label: &str, bytes: Bytes| {
        writeln!(out, "{label:<44} {:>14} {:>18}", bytes.to_string(), bytes.get())
    };
    let element = work.element_bytes() as u64;
    row("weights", spec.weight_bytes(element))?;
    row("gradients", Bytes(spec.total_parameters()) * element)?;
    row("Adam, float32 weights and moments", Bytes(spec.total_parameters()) * 12)?;
    row("a boundary", spec.boundary_bytes(work))?;
    row("all boundaries", spec.boundary_bytes(work) * (spec.layers() as u64 + 1))?;
    for (kind, bytes) in internals(model) {
        row(&format!("internals of a {kind} layer"), bytes)?;
    }
    writeln!(
        out,
        "\nwork of a token: {:.3e} operations by 6N, {:.3e} by exact counting",
        spec.flops_per_token_6n(),
        spec.flops_per_token_exact(work)
    )?;
    for note in model.notes() {
        writeln!(out, "note: {}", plain(&note))?;
    }
    writeln!(
        out,
        "\nFor a plan, give --machine and budgets, or the parameters of the reference command: see --help."
    )
}

/// Columns of a sweep's table behind the value and the status, with their widths.
const SWEEP: [(&str, usize); 12] = [
    ("hbm", 5),
    ("host", 5),
    ("nvme", 5),
    ("recompute", 10),
    ("kept", 5),
    ("objective ms", 16),
    ("added ms", 12),
    ("step s", 10),
    ("tokens/s", 10),
    ("gap", 9),
    ("hbm peak", 12),
    ("host peak", 12),
];

/// What holds for the rows of a sweep, and the headings.
pub(crate) fn sweep_head(flag: &str, problems: &[(f64, Problem)]) -> String {
    let mut out = String::new();
    let common = |note: &String| problems.iter().all(|(_, problem)| problem.notes.contains(note));
    for (i, (value, problem)) in problems.iter().enumerate() {
        for note in &problem.notes {
            let (said, note) = (common(note), plain(note));
            if said && i == 0 {
                out += &format!("note: {note}\n");
            } else if !said {
                out += &format!("note, {flag}={}: {note}\n", number(*value));
            }
        }
    }
    let heading = |(name, width): (&str, usize)| format!(" {name:>width$}");
    let headings: String = SWEEP.into_iter().map(heading).collect();
    out + &format!("{flag:>20} {:>12}{headings}\n", "status")
}

/// The row of one value.
pub(crate) fn sweep_row(value: f64, planned: &Planned) -> String {
    let dash = || "-".to_owned();
    let cells = planned.solution.evaluation.as_ref().map_or(vec![dash(); SWEEP.len()], |e| {
        let (c, peaks) = (e.counts, planned.peaks().unwrap_or_default());
        let counts = [c.hbm, c.host, c.nvme, c.recompute, c.kept].map(|count| count.to_string());
        let step = planned.step().map(|step| format!("{:.4}", step.get()));
        let tokens = throughput(planned).map(|through| format!("{:.1}", through.tokens_per_s));
        let gap = gap(planned).map(|gap| format!("{:.3} %", 100.0 * gap));
        let times = [format!("{:.5}", e.objective_ms), format!("{:.3}", e.step_ms())];
        let known = [step, tokens, gap].map(|cell| cell.unwrap_or_else(dash));
        let peaks = [peaks.hbm.to_string(), peaks.host.to_string()];
        counts.into_iter().chain(times).chain(known).chain(peaks).collect()
    });
    let cell = |(cell, (_, width)): (&String, &(&str, usize))| format!(" {cell:>width$}");
    let cells: String = cells.iter().zip(&SWEEP).map(cell).collect();
    format!("{:>20} {:>12}{cells}\n", number(value), planned.solution.status.name())
}
