//! Draws a report without a device: a Qwen3-4B shaped model, a hand-made placement, and a simulated step in the place of
//! a measured one, on links a fifth slower than planned.
//!
//!     cargo run -p lazy-model --example report -- crates/lazy-model/tests/data/configs/qwen3-4b.json report.html

use std::error::Error;
use std::fs::File;
use std::path::Path;

use lazy_model::report::{Compared, Fact, Headline, RunReport, TierOccupancy};
use lazy_model::timeline::{LinkRates, StepCosts, Timeline, simulate};
use lazy_model::{
    Bytes, BytesPerSecond, HardwareProfile, LayerIndex, ModelSpec, Placement, Schedule, Seconds, Span,
    StepPlan, Tier, Workload,
};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(model), Some(out)) = (arguments.next(), arguments.next()) else {
        return Err("usage: report CONFIG.json OUT.html".into());
    };
    let spec = ModelSpec::from_file(Path::new(&model))?;
    let work = Workload::new(16, 1024, 2)?;
    let sizes = vec![spec.boundary_bytes(&work); spec.layers() + 1];
    let profile = HardwareProfile::preset("reference").ok_or("no such preset")?;
    let plan = StepPlan::new(&schedule(&sizes), &sizes)?;
    let planned = simulate(&plan, &costs(&spec, &work, profile.links.rates(), 1.0));
    let slower = |rate: BytesPerSecond| BytesPerSecond(rate.get() * 0.8);
    let rates = profile.links.rates();
    let links = LinkRates {
        d2h: slower(rates.d2h),
        h2d: slower(rates.h2d),
        nvme_write: slower(rates.nvme_write),
        nvme_read: slower(rates.nvme_read),
        ..rates
    };
    let happened = simulate(&plan, &costs(&spec, &work, links, 1.04));
    report(&spec, &sizes, &plan, &planned, &happened).write_html(File::create(out)?)?;
    Ok(())
}

/// The first boundaries to NVMe, the next to host RAM, every fourth one recomputed, the last in HBM.
fn schedule(sizes: &[Bytes]) -> Schedule {
    let mut schedule = Schedule::named("by hand", sizes, false);
    let (last, layers) = (sizes.len() - 1, sizes.len() - 1);
    for (i, place) in schedule.placement.iter_mut().enumerate() {
        *place = match i {
            i if i == last => Placement::Hbm,
            i if i % 4 == 3 => Placement::Recompute,
            i if i < layers / 5 => Placement::Nvme,
            i if i < layers * 2 / 3 => Placement::Host,
            _ => Placement::Hbm,
        };
    }
    for keep in schedule.keep.iter_mut().rev().take(5) {
        *keep = true;
    }
    schedule
}

/// Times from counted operations at 400 TFLOP/s.
fn costs(spec: &ModelSpec, work: &Workload, links: LinkRates, factor: f64) -> StepCosts {
    let time = |flops: f64| Seconds(factor * flops / 400e12);
    let forward: Vec<Seconds> =
        (0..spec.layers()).map(|l| time(spec.layer_forward_flops(LayerIndex(l), work))).collect();
    StepCosts {
        prologue: Seconds::from_ms(0.4),
        saving_forward: forward.clone(),
        internals_forward: forward.clone(),
        backward: forward.iter().map(|t| Seconds(2.0 * t.get())).collect(),
        forward,
        epilogue: time(3.0 * spec.head_forward_flops(work)),
        prologue_backward: Seconds::from_ms(0.6),
        links,
    }
}

fn report(
    spec: &ModelSpec,
    sizes: &[Bytes],
    plan: &StepPlan,
    planned: &Timeline,
    happened: &Timeline,
) -> RunReport {
    let schedule = schedule(sizes);
    let optimizer = |timeline: &Timeline| Span {
        name: "optimizer".into(),
        lane: lazy_model::Lane::Optimizer,
        start: timeline.total(),
        end: timeline.total() + Seconds::from_ms(180.0),
        bytes: Bytes(12 * spec.total_parameters()),
        blocked_on: None,
    };
    let mut spans = happened.spans.clone();
    spans.push(optimizer(happened));
    let occupancy = Tier::ALL.map(|tier| TierOccupancy {
        tier,
        budget: Some(plan.extents.get(tier)),
        promised: planned.occupancy(plan, tier),
        measured: happened.occupancy(plan, tier),
    });
    let row = |label: &str, unit: &str, promised: f64, measured: f64| Compared {
        label: label.into(),
        unit: unit.into(),
        promised: Some(promised),
        measured: Some(measured),
        recent: None,
    };
    let (exposed, waited) = (planned.exposed(), happened.exposed());
    let tokens = 16.0 * 1024.0;
    let tokens_per_s = tokens / happened.total().get();
    RunReport {
        title: "Qwen3-4B shape, batch 16 x 1024".into(),
        facts: [("Parameters", spec.total_parameters().to_string()), ("Plan", schedule.solve.method.clone())]
            .map(|(label, value)| Fact { label: label.into(), value })
            .into(),
        headlines: [
            ("Step", happened.total().to_string(), format!("promised {}", planned.total())),
            ("Tokens a second", format!("{tokens_per_s:.0}"), String::new()),
            ("Peak HBM", plan.extents.hbm.to_string(), "of activations".into()),
            ("Loss", "2.31".into(), "unigram entropy 3.29".into()),
        ]
        .map(|(label, value, note)| Headline { label: label.into(), value, note })
        .into(),
        loss: (1..=240)
            .map(|s| (s, 2.2 + 3.3 * (-(s as f64) / 45.0).exp() + 0.12 * (s as f64 * 1.7).sin()))
            .collect(),
        unigram_entropy: Some(3.29),
        placement: schedule.placement,
        boundary_bytes: sizes.to_vec(),
        keep: schedule.keep,
        occupancy: occupancy.into(),
        spans,
        comparison: vec![
            row("Step without optimizer", "s", planned.total().get(), happened.total().get()),
            row("Waiting for device to host", "ms", exposed.d2h.as_ms(), waited.d2h.as_ms()),
            row("Waiting for NVMe reads", "ms", exposed.nvme_read.as_ms(), waited.nvme_read.as_ms()),
            row(
                "Peak HBM of activations",
                "bytes",
                plan.extents.hbm.get() as f64,
                plan.extents.hbm.get() as f64,
            ),
            row("Tokens a second", "tok/s", tokens / planned.total().get(), tokens_per_s),
        ],
        ..RunReport::default()
    }
}
