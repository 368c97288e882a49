//! A plan as JSON, as a table with a map, as a report, or the reason why there is none.

pub(crate) mod html;
pub(crate) mod json;
mod links;
mod map;
pub(crate) mod text;

use std::collections::BTreeMap;

use lazy_model::config::Mlp;
use lazy_model::{Bytes, LayerIndex, ModelSpec, Placement, Seconds};
use lazy_solver::{Raise, Remedy, Status};

use super::next::flag_of;
use super::plan::Planned;
use super::problem::ModelFacts;

/// Why there is no plan and what would help, in sentences for people.
pub(crate) fn refusal(planned: &Planned) -> String {
    let mut said = reason(planned);
    if !planned.remedies.is_empty() {
        said += "\nAny one of these would help:";
    }
    for each in &planned.remedies {
        said += &format!("\n  - {}", remedy(planned, each));
    }
    said
}

/// Why there is no plan.
fn reason(planned: &Planned) -> String {
    let solution = &planned.solution;
    match solution.status {
        Status::NoIncumbent => {
            let rival = planned.best_rival().map_or(String::new(), |(rival, _)| {
                format!(". The plan `{}`, made by hand, fits", rival.name)
            });
            format!(
                "no placement was found within the time limit ({}); there may be one: raise --time-limit-s{rival}",
                solution.solve
            )
        }
        Status::Infeasible if planned.given => {
            format!("the plan breaks a rule: {}", planned.why.as_deref().unwrap_or("no rule was named"))
        }
        Status::Infeasible => match (&planned.why, planned.remedies.is_empty()) {
            (Some(why), true) => {
                format!("{why}\nThe budgets are --hbm-gib, --host-gib and --nvme-gib, or as many -mib.")
            }
            (Some(why), false) if planned.problem.ranks.is_some() => {
                format!("ranks share host RAM and NVMe evenly: {why}")
            }
            (Some(why), false) => why.clone(),
            (None, true) => {
                "no placement keeps all rules, and no single budget, block limit or lock is to blame: raise several budgets".into()
            }
            (None, false) => "no placement keeps all rules".into(),
        },
        _ => format!("the solver failed: {}", solution.message.as_deref().unwrap_or("no reason given")),
    }
}

fn less_might_do(least: bool) -> &'static str {
    if least { "" } else { "; time ended the search, and less might do: raise --time-limit-s to know" }
}

/// What would help, with the flag that does it, to be typed as it stands.
fn remedy(planned: &Planned, remedy: &Remedy) -> String {
    let raise = |what: &str, flag: &str, from: Bytes, to: Bytes| {
        format!("raise {what} from {from}: {flag} {} ({} bytes)", gib_rounded_up(to), to.get())
    };
    let together = |raises: &[Raise]| {
        let list =
            |part: &dyn Fn(&Raise) -> String, by: &str| raises.iter().map(part).collect::<Vec<_>>().join(by);
        let what = list(&|r| format!("the {} budget from {}", r.tier, r.budget), " and ");
        let flags = list(&|r| format!("{} {}", flag_of(planned, r.tier), gib_rounded_up(r.smallest)), " ");
        let bytes = list(&|r| format!("{} bytes", r.smallest.get()), " and ");
        let least = less_might_do(raises.iter().all(|r| r.least));
        format!("raise {what}, none of them alone is enough: {flags} ({bytes}){least}")
    };
    match remedy {
        Remedy::Budget(Raise { tier, budget, smallest, least }) => {
            let said = raise(&format!("the {tier} budget"), flag_of(planned, *tier), *budget, *smallest);
            said + less_might_do(*least)
        }
        Remedy::Budgets(raises) => together(raises),
        Remedy::HbmCap { cap, smallest } => raise("hbm_cap_bytes", "--hbm-gib", *cap, *smallest),
        Remedy::SegmentLayers { smallest, .. } => format!("{remedy}: --max-segment {smallest}"),
        Remedy::Rate { pool } => format!("{remedy}: --{}-gbps", pool.name().replace('_', "-")),
        _ => remedy.to_string(),
    }
}

/// A size in GiB for a flag: the least that holds it with few digits.
pub(crate) fn gib_rounded_up(size: Bytes) -> String {
    const GIB: u128 = 1 << 30;
    let bytes = u128::from(size.get());
    let mut text = String::new();
    for digits in 2..=9 {
        let unit = 10u128.pow(digits);
        let units = (bytes * unit).div_ceil(GIB);
        let (whole, part, width) = (units / unit, units % unit, digits as usize);
        text = format!("{whole}.{part:0width$}");
        // A thousandth more than is needed hurts nobody.
        if units * GIB <= bytes * unit + bytes * unit / 1000 {
            break;
        }
    }
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// What several ranks share and how good their plan is known to be, as labels and values. Nothing for one alone.
fn ranks(planned: &Planned) -> Vec<(&'static str, String)> {
    let Some(ranks) = &planned.problem.ranks else { return vec![] };
    let (host, count) = (&ranks.host, ranks.count);
    let links = &host.costs.links;
    let part = |bytes: Bytes| Bytes(bytes.get() / count.max(1) as u64);
    let mut lines = vec![
        ("Ranks", format!("{count}, all with the plan below; each has an even part of the host")),
        ("Host RAM", format!("{} shared, {} a rank", host.budgets.host, part(host.budgets.host))),
    ];
    if host.budgets.nvme > Bytes::ZERO {
        let part = part(host.budgets.nvme);
        let (write, read) = (links.nvme_write, links.nvme_read);
        lines.push((
            "Drives",
            format!("{} shared, {part} a rank; write {write}, read {read} shared", host.budgets.nvme),
        ));
    }
    lines.push((
        "Root complex",
        links.contention.shared.map_or("no limit known".into(), |shared| format!("{shared} shared")),
    ));
    lines.push((
        "Peer links",
        ranks.peer.map_or("none".into(), |peer| {
            format!("{peer} each way a rank; exchanges stick out by {}", ranks.peer_exposed())
        }),
    ));
    if let Some(found) = &planned.ranks {
        lines.push((
            "All ranks",
            format!(
                "{} a step by the objective; no way to share is faster than {}: gap {:.3} %",
                found.step,
                found.bound,
                100.0 * found.gap
            ),
        ));
    }
    lines
}

/// How good the plan is known to be.
fn proof(planned: &Planned) -> String {
    let solution = &planned.solution;
    match (planned.given, solution.status, gap(planned)) {
        (true, ..) => "as given".into(),
        // The simulated step may lie above the least that is known of it.
        (_, Status::Optimal, _) if planned.problem.step.is_some() => "optimal by the objective".into(),
        (_, Status::Optimal, _) => "proven optimal".into(),
        (_, _, Some(gap)) => format!("not proven, at most {:.3} % from the optimum", gap * 100.0),
        _ => "not proven".into(),
    }
}

/// How far from the best plan this one is at most, as a share, where that is known.
fn gap(planned: &Planned) -> Option<f64> {
    if planned.solution.status == Status::Optimal {
        return Some(0.0);
    }
    let of_step = || {
        let (step, bound) = (planned.step()?, planned.step_bound?);
        (step > Seconds::ZERO).then(|| (step.get() - bound.get()).max(0.0) / step.get())
    };
    planned.solution.gap.or_else(of_step)
}

/// What a whole step comes to for a model.
struct Throughput {
    /// Of all ranks together.
    tokens_per_s: f64,
    /// 10^12 operations a second of one rank, by the 6N convention and by exact counting.
    tflops: [f64; 2],
    /// Shares of the machine's best, in the same order, where that is known. The first says nothing of a model with experts, whose
    /// parameters a token mostly does not meet.
    mfu: Option<[f64; 2]>,
    /// Whether any layer routes tokens to experts.
    experts: bool,
}

fn throughput(planned: &Planned) -> Option<Throughput> {
    let (step, model) = (planned.step()?, planned.problem.model.as_ref()?);
    let ranks = planned.problem.ranks.as_ref().map_or(1, |ranks| ranks.count) as f64;
    let micro_batches = planned.problem.step.as_ref().map_or(1, |s| s.micro_batches) as f64;
    let (spec, work) = (&model.spec, &model.work);
    let each = Seconds(step.get() / micro_batches);
    let tokens_per_s = ranks * work.tokens() as f64 / each.get();
    let compute = planned.problem.profile.as_ref().and_then(|p| p.compute.as_ref());
    let best = compute.map(|c| c.matmul_flops_per_s.value / 1e12).filter(|best| *best > 0.0);
    tokens_per_s.is_finite().then(|| Throughput {
        tokens_per_s,
        tflops: [spec.tflops_6n(work, each), spec.tflops_exact(work, each)],
        experts: (0..spec.layers()).any(|l| matches!(spec.layer(LayerIndex(l)).mlp, Mlp::Moe(_))),
        mfu: best.map(|best| [spec.mfu_6n(work, each, best), spec.mfu_exact(work, each, best)]),
    })
}

/// Internals of a layer of each kind; where layers of a kind differ, the largest.
fn internals(model: &ModelFacts) -> BTreeMap<String, Bytes> {
    let mut kinds = BTreeMap::new();
    for layer in (0..model.spec.layers()).map(LayerIndex) {
        let entry = kinds.entry(kind_of(&model.spec, layer)).or_insert(Bytes::ZERO);
        *entry = (*entry).max(model.spec.internals_bytes(layer, &model.work));
    }
    kinds
}

/// The name of `layer_types`; where some layers have experts and some do not, those that have say so.
fn kind_of(spec: &ModelSpec, layer: LayerIndex) -> String {
    let experts = |layer| matches!(spec.layer(layer).mlp, Mlp::Moe(_));
    let mixed = (0..spec.layers()).any(|l| experts(LayerIndex(l)) != experts(LayerIndex(0)));
    let name = spec.layer_kind(layer).name();
    if mixed && experts(layer) { format!("{name}_moe") } else { name.to_owned() }
}

/// Layers of each kind.
fn kinds(spec: &ModelSpec) -> BTreeMap<String, usize> {
    let mut kinds = BTreeMap::new();
    for layer in (0..spec.layers()).map(LayerIndex) {
        *kinds.entry(kind_of(spec, layer)).or_insert(0) += 1;
    }
    kinds
}

/// `48 linear_attention, 16 full_attention`.
fn kinds_in_words(spec: &ModelSpec) -> String {
    let list: Vec<String> = kinds(spec).into_iter().map(|(name, count)| format!("{count} {name}")).collect();
    list.join(", ")
}

/// How the plan compares with the best one made by hand.
fn verdict(planned: &Planned) -> Option<String> {
    let (rival, theirs) = planned.best_rival()?;
    let ours = planned.time_ms()?;
    let difference = Seconds::from_ms((theirs - ours).abs());
    Some(if ours < theirs - 1e-6 {
        format!("{difference} faster than `{}`, the best plan made by hand", rival.name)
    } else if ours > theirs + 1e-6 {
        format!("{difference} slower than `{}`: use that plan instead", rival.name)
    } else {
        format!("no faster than `{}`", rival.name)
    })
}

/// A value of a sweep, in as many digits as it needs.
pub(crate) fn number(value: f64) -> String {
    if value == 0.0 || (1e-6..1e15).contains(&value.abs()) { value.to_string() } else { format!("{value:e}") }
}

fn boundaries(placement: &[Placement], wanted: Placement) -> Vec<usize> {
    (0..placement.len()).filter(|&i| placement[i] == wanted).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_to_be_typed_hold_what_they_are_for() {
        let gib = |bytes: u64| gib_rounded_up(Bytes(bytes));
        assert_eq!(
            (gib(16 * 754_974_720), gib(2 << 30), gib(10 << 20)),
            ("11.25".into(), "2".into(), "0.00977".into())
        );
        for bytes in (1..64).flat_map(|shift| [(1u64 << shift) - 1, 1 << shift, (1 << shift) + 1]) {
            let typed: f64 = gib(bytes).parse().unwrap();
            // Two doublings above the digits of a float nothing is typed.
            assert!(bytes > 1 << 50 || Bytes::from_gib(typed).get() >= bytes, "{bytes}: {typed}");
        }
    }
}
