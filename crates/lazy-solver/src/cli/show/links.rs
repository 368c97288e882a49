//! What each link carries, as rows of text.

use lazy_model::{Bytes, Lane, LinkLoad, Pool, Seconds, Verified};

use super::super::plan::Planned;

/// Headings and rows.
pub(super) struct Links {
    pub(super) head: Vec<&'static str>,
    pub(super) rows: Vec<Vec<String>>,
}

/// Of a simulated step: what moved, and for how long the link was busy. Otherwise: what its windows could carry, and what they must.
pub(super) fn of(planned: &Planned) -> Links {
    let loads = LinkLoad::of(&planned.problem.chain, planned.solution.placement.as_deref());
    match &planned.verified {
        Some(verified) => Links {
            head: vec!["link", "rate", "a boundary", "moved", "busy", "waited for"],
            rows: loads.iter().map(|load| simulated(load, planned, verified)).collect(),
        },
        None => Links {
            head: vec!["link", "rate", "a boundary", "windows", "mandatory", "boundaries", "used", "exposed"],
            rows: loads.iter().map(|load| counted(load, planned)).collect(),
        },
    }
}

fn common(load: &LinkLoad) -> Vec<String> {
    let boundary =
        if load.rate.get() > 0.0 { format!("{:.1} ms", load.largest_boundary.as_ms()) } else { "-".into() };
    vec![load.pool.name().into(), load.rate.to_string(), boundary]
}

fn counted(load: &LinkLoad, planned: &Planned) -> Vec<String> {
    let used = load.mandatory + load.moved;
    let mut row = common(load);
    row.extend([
        load.windows.to_string(),
        load.mandatory.to_string(),
        load.moved.to_string(),
        percent(used.get() as f64, load.windows.get() as f64),
        format!("{:.3} ms", planned.exposed(load.pool).as_ms()),
    ]);
    row
}

fn simulated(load: &LinkLoad, planned: &Planned, verified: &Verified) -> Vec<String> {
    let (moved, busy) = carried(verified, load.pool);
    let mut row = common(load);
    row.extend([
        moved.to_string(),
        percent(busy.get(), verified.timeline.total().get()),
        planned.exposed(load.pool).to_string(),
    ]);
    row
}

/// Bytes a link moves over the simulated step, and how long it is busy.
pub(super) fn carried(verified: &Verified, pool: Pool) -> (Bytes, Seconds) {
    let lane = match pool {
        Pool::D2h => Lane::D2h,
        Pool::H2d => Lane::H2d,
        Pool::NvmeWrite => Lane::NvmeWrite,
        Pool::NvmeRead => Lane::NvmeRead,
    };
    let spans = verified.timeline.spans.iter().filter(|span| span.lane == lane);
    let moved = spans.clone().map(|span| span.bytes).sum();
    (moved, spans.fold(Seconds::ZERO, |sum, span| sum + span.duration()))
}

fn percent(part: f64, whole: f64) -> String {
    if whole > 0.0 { format!("{:.0} %", 100.0 * part / whole) } else { "-".into() }
}
