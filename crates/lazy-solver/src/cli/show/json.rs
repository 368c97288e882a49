//! Plans for programs.

use lazy_model::keep::Keep;
use lazy_model::{BytesPerSecond, LinkLoad, Placement, Seconds, StepProblem};
use lazy_solver::{Raise, Remedy, Status};
use serde_json::{Map, Value, json};

use super::super::max::{Max, Next};
use super::super::next::{self, Change, What};
use super::super::plan::{Planned, Rival};
use super::super::problem::{ModelFacts, Ranks};
use super::{boundaries, internals, kinds, links, reason, throughput, verdict};

/// The one object of `--json`.
pub(crate) fn plan(planned: &Planned, changes: Option<&[Change]>) -> Value {
    let mut object = Map::new();
    put(&mut object, result(planned));
    put(&mut object, context(planned));
    if let Some(model) = &planned.problem.model {
        put(&mut object, of_model(model));
    }
    if let Some(changes) = changes {
        object.insert("next_change".into(), changes.iter().map(change).collect());
        object.insert(
            "limited_by".into(),
            next::limits(planned, changes).iter().map(|l| json!(l.to_string())).collect(),
        );
    }
    Value::Object(object)
}

/// The `max` of `--max`.
pub(crate) fn max(max: &Max) -> Value {
    let mut value = json!({"flag": max.flag.name(), "value": (max.value > 0).then_some(max.value)});
    match &max.next {
        Next::Refused(refused) => {
            value["next_fits"] = json!(false);
            value["message"] = json!(reason(refused));
            value["remedies"] = refused.remedies.iter().map(|r| of_remedy(refused, r)).collect();
        }
        Next::Unknown => value["next_fits"] = Value::Null,
        Next::Unsupported(why) => {
            value["next_fits"] = json!(false);
            value["message"] = json!(why);
        }
    }
    value
}

fn change(change: &Change) -> Value {
    let mut value = json!({
        "kind": change.what.kind(),
        "saves_ms": change.saves_ms,
        "proven": change.proven,
        "text": change.sentence(),
    });
    match change.what {
        What::Memory { tier, more, .. } => {
            value["tier"] = json!(tier);
            value["more_bytes"] = json!(more);
        }
        What::Link(pool) => value["link"] = json!(pool.name()),
        What::Device | What::Optimizer => {}
    }
    value
}

fn put(object: &mut Map<String, Value>, more: Value) {
    if let Value::Object(more) = more {
        object.extend(more);
    }
}

/// What was found.
fn result(planned: &Planned) -> Value {
    let solution = &planned.solution;
    let evaluation = solution.evaluation.as_ref();
    let with = |wanted| solution.placement.as_ref().map(|p| boundaries(p, wanted));
    let mut value = json!({
        "status": solution.status.name(),
        "objective_ms": solution.objective_ms,
        "bound_ms": solution.bound_ms,
        "gap": solution.gap,
        "solve_s": solution.solve.get(),
        "method": if planned.given { "given" } else { solution.method.name() },
        "counts": evaluation.map(|e| e.counts),
        "hbm": with(Placement::Hbm),
        "host": with(Placement::Host),
        "nvme": with(Placement::Nvme),
        "recompute": with(Placement::Recompute),
        "exposed_ms": evaluation.map(|e| e.exposed_ms),
        "recompute_ms": evaluation.map(|e| e.recompute_ms),
        "step_ms": evaluation.map(|e| e.step_ms()),
        "predicted_step_s": planned.step().map(Seconds::get),
        "step_bound_s": planned.step_bound.map(Seconds::get),
        "peaks": planned.peaks(),
        "placement": solution.placement_string(),
    });
    if let Some(keep) = solution.keep_string() {
        value["keep"] = json!(keep);
        value["base_recompute_ms"] = json!(evaluation.map(|e| e.base_recompute_ms));
    }
    match solution.status {
        Status::Infeasible => {
            value["message"] = json!(reason(planned));
            value["remedies"] = planned.remedies.iter().map(|r| of_remedy(planned, r)).collect();
        }
        _ if solution.message.is_some() => value["message"] = json!(solution.message),
        _ => {}
    }
    if let Some(throughput) = throughput(planned) {
        value["tokens_per_s"] = json!(throughput.tokens_per_s);
        value["tflops_6n"] = json!(throughput.tflops[0]);
        value["tflops_exact"] = json!(throughput.tflops[1]);
        value["mfu"] = json!(throughput.mfu.filter(|_| !throughput.experts).map(|m| m[0]));
        value["mfu_exact"] = json!(throughput.mfu.map(|m| m[1]));
    }
    value
}

fn of_remedy(planned: &Planned, remedy: &Remedy) -> Value {
    let mut value = match remedy {
        Remedy::Budget(raise) => of_raise(raise),
        _ => json!({}),
    };
    value["text"] = json!(super::remedy(planned, remedy));
    match remedy {
        Remedy::Budgets(raises) => value["budgets"] = raises.iter().map(of_raise).collect(),
        Remedy::HbmCap { cap, smallest } => {
            value["tier"] = json!("hbm");
            value["budget_bytes"] = json!(cap);
            value["smallest_bytes"] = json!(smallest);
        }
        Remedy::SegmentLayers { smallest, .. } => value["max_segment_layers"] = json!(smallest),
        Remedy::Rate { pool } => value["link"] = json!(pool.name()),
        _ => {}
    }
    value
}

fn of_raise(raise: &Raise) -> Value {
    json!({
        "tier": raise.tier,
        "budget_bytes": raise.budget,
        "smallest_bytes": raise.smallest,
        "proven": raise.least,
    })
}

/// What it was found for, and what it is held against.
fn context(planned: &Planned) -> Value {
    let problem = &planned.problem;
    let mut value = json!({
        "name": problem.name,
        "objective": problem.objective.name(),
        "tie_break": problem.tie_break.name(),
        "layers": problem.chain.layers,
        "max_segment_layers": problem.chain.max_segment_layers,
        "budgets": planned.budgets(),
        "notes": problem.notes,
        "links": link_loads(planned),
        "baselines": planned.rivals.iter().map(rival).collect::<Value>(),
        "verdict": verdict(planned),
        "beats_baselines": planned.time_ms().map(|ours| {
            planned.best_rival().is_none_or(|(_, theirs)| ours < theirs - 1e-6)
        }),
    });
    if let Some(ranks) = &problem.ranks {
        value["ranks"] = of_ranks(planned, ranks);
    }
    if let Some(optimizer) = &problem.optimizer {
        value["optimizer_s"] = json!(optimizer.total().get());
        value["optimizer_8bit_fraction"] = json!(optimizer.fraction_8bit);
    }
    value
}

/// What the ranks share, what each has of it, and how good the even split is known to be.
fn of_ranks(planned: &Planned, ranks: &Ranks) -> Value {
    let part = |step: &StepProblem| {
        let links = &step.costs.links;
        json!({
            "host_bytes": step.budgets.host,
            "nvme_bytes": step.budgets.nvme,
            "nvme_write_bytes_per_s": links.nvme_write.get(),
            "nvme_read_bytes_per_s": links.nvme_read.get(),
            "root_complex_bytes_per_s": links.contention.shared.map(BytesPerSecond::get),
        })
    };
    let found = planned.ranks.as_ref();
    json!({
        "count": ranks.count,
        "shared": part(&ranks.host),
        "each": planned.problem.step.as_ref().map(part),
        "peer_bytes_per_s": ranks.peer.map(BytesPerSecond::get),
        "peer_exposed_s": ranks.peer_exposed().get(),
        "objective_step_s": found.map(|f| f.step.get()),
        "bound_s": found.map(|f| f.bound.get()),
        "gap": found.map(|f| f.gap),
    })
}

/// Of a simulated step: what moved and how long the link was busy; otherwise what its windows could carry, and what they must.
fn link_loads(planned: &Planned) -> Value {
    let known = planned.verified.is_some() || planned.solution.evaluation.is_some();
    let entry = |load: LinkLoad| {
        let boundary_ms = Some(load.largest_boundary.as_ms()).filter(|ms| ms.is_finite());
        let mut value = json!({
            "bytes_per_s": load.rate.get(),
            "boundary_ms": boundary_ms,
            "exposed_ms": known.then(|| planned.exposed(load.pool).as_ms()),
        });
        if let Some(both) = links::both_ways(planned, load.pool) {
            value["both_bytes_per_s"] = json!(both.get());
        }
        if let Some(verified) = &planned.verified {
            let (moved, busy) = links::carried(verified, load.pool);
            value["moved_bytes"] = json!(moved);
            value["busy_s"] = json!(busy);
        } else {
            value["window_bytes"] = json!(load.windows);
            value["mandatory_bytes"] = json!(load.mandatory);
            value["moved_bytes"] = json!(load.moved);
        }
        (load.pool.name().to_owned(), value)
    };
    Value::Object(links::loads(planned).into_iter().map(entry).collect())
}

fn rival(rival: &Rival) -> Value {
    let placement: String = rival.placement.iter().map(|p| p.letter()).collect();
    let cost = rival.cost.as_ref().ok();
    let mut value = json!({
        "name": rival.name,
        "placement": placement,
        "fits": cost.is_some(),
        "objective_ms": cost.and_then(|c| c.objective_ms),
        "step_ms": cost.and_then(|c| c.step_ms),
        "predicted_step_s": cost.and_then(|c| c.predicted).map(Seconds::get),
        "why_not": rival.cost.as_ref().err(),
    });
    if rival.keep.iter().any(|k| *k != Keep::Recompute) {
        value["keep"] = json!(rival.keep.iter().map(|k| k.letter()).collect::<String>());
    }
    value
}

/// A model's sizes, with no plan.
pub(crate) fn sizes(model: &ModelFacts) -> Value {
    let mut object = Map::new();
    put(
        &mut object,
        json!({
            "status": "sized", "name": model.name, "layers": model.spec.layers(), "notes": model.notes(),
        }),
    );
    put(&mut object, of_model(model));
    Value::Object(object)
}

fn of_model(model: &ModelFacts) -> Value {
    let (spec, work) = (&model.spec, &model.work);
    json!({
        "model": model.name,
        "parameters": spec.total_parameters(),
        "weight_bytes": spec.weight_bytes(work.element_bytes() as u64),
        "layer_kinds": kinds(spec),
        "batch": work.batch(),
        "seq": work.sequence(),
        "element_bytes": work.element_bytes(),
        "boundary_bytes": spec.boundary_bytes(work),
        "internals_bytes": internals(model),
        "flops_per_token": spec.flops_per_token_6n(),
        "flops_per_token_exact": spec.flops_per_token_exact(work),
    })
}

/// One entry of the array of `--sweep`.
pub(crate) fn of_sweep(flag: &str, value: f64, planned: &Planned) -> Value {
    let mut object = plan(planned, None);
    object["sweep"] = json!({"flag": flag, "value": value});
    object
}
