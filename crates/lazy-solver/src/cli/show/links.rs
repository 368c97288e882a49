//! What each link carries, as rows of text.

use lazy_model::{Bytes, BytesPerSecond, Lane, LinkLoad, Pool, Seconds, Verified};

use super::super::plan::Planned;

/// Headings and rows.
pub(super) struct Links {
    pub(super) head: Vec<&'static str>,
    pub(super) rows: Vec<Vec<String>>,
}

/// Of a simulated step: what moved, and for how long the link was busy. Otherwise: what its windows could carry, and what they must.
pub(super) fn of(planned: &Planned) -> Links {
    let loads = loads(planned);
    match &planned.verified {
        Some(verified) => Links {
            head: vec!["link", "rate", "both ways", "a boundary", "moved", "busy", "waited for"],
            rows: loads.iter().map(|load| simulated(load, planned, verified)).collect(),
        },
        None => Links {
            head: vec!["link", "rate", "a boundary", "windows", "mandatory", "boundaries", "used", "exposed"],
            rows: loads.iter().map(|load| counted(load, planned)).collect(),
        },
    }
}

/// The links with their rates alone: a step's chain has the lower ones where another's traffic slows a link down throughout.
pub(super) fn loads(planned: &Planned) -> [LinkLoad; 4] {
    let problem = &planned.problem;
    let mut chain = problem.chain.clone();
    if let Some(step) = &problem.step {
        let links = &step.costs.links;
        (chain.d2h_bytes_per_s, chain.h2d_bytes_per_s) = (links.d2h, links.h2d);
        (chain.nvme_write_bytes_per_s, chain.nvme_read_bytes_per_s) = (links.nvme_write, links.nvme_read);
    }
    LinkLoad::of(&chain, planned.solution.placement.as_deref())
}

/// The rate of a link while the other direction is busy, where the machine says so.
pub(super) fn both_ways(planned: &Planned, pool: Pool) -> Option<BytesPerSecond> {
    let contention = planned.problem.step.as_ref()?.costs.links.contention;
    match pool {
        Pool::D2h => contention.d2h_both,
        Pool::H2d => contention.h2d_both,
        Pool::NvmeWrite | Pool::NvmeRead => None,
    }
}

fn boundary(load: &LinkLoad) -> String {
    if load.rate.get() > 0.0 { format!("{:.1} ms", load.largest_boundary.as_ms()) } else { "-".into() }
}

fn counted(load: &LinkLoad, planned: &Planned) -> Vec<String> {
    let used = load.mandatory + load.moved;
    let mut row = vec![load.pool.name().into(), load.rate.to_string(), boundary(load)];
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
    vec![
        load.pool.name().into(),
        load.rate.to_string(),
        both_ways(planned, load.pool).map_or("-".into(), |rate| rate.to_string()),
        boundary(load),
        moved.to_string(),
        percent(busy.get(), verified.timeline.total().get()),
        planned.exposed(load.pool).to_string(),
    ]
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
