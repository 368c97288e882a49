//! What one change to the machine would save: more of a tier, a faster link, device or optimizer.

use std::fmt;
use std::time::Instant;

use lazy_model::timeline::{LinkRates, StepCosts};
use lazy_model::{Bytes, BytesPerSecond, CostChain, Pool, Seconds, StepProblem, Tier};
use lazy_solver::step::{StepOptions, solve_step};
use lazy_solver::{SolveOptions, Status, solve};

use super::plan::{Clock, Planned};
use super::problem::Ranks;
use super::show::gib_rounded_up;

/// Boundaries that the step of a budget holds at least.
const BOUNDARIES: u64 = 4;
/// A saving below this is none (ms).
const NOTHING_MS: f64 = 1e-3;
/// An optimizer that takes less of the step is not what limits it.
const OPTIMIZER_SHARE: f64 = 0.1;
/// How much faster a link or the device is made.
const FASTER: f64 = 2.0;

/// What is changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum What {
    /// More of a tier.
    Memory {
        tier: Tier,
        more: Bytes,
        /// Whether every one of several ranks gets as much.
        each: bool,
        /// The flag that gives the tier its size, and the size it then has (of all ranks where they share it).
        flag: &'static str,
        size: Bytes,
    },
    /// A link of twice the rate, both alone and beside the other direction.
    Link(Pool),
    /// Arithmetic of twice the speed.
    Device,
    /// An optimizer of twice the rate.
    Optimizer,
}

/// One change, and what it saves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    pub(crate) what: What,
    /// Of the step; zero where it saves nothing.
    pub(crate) saves_ms: f64,
    /// Whether no plan saves more with it, or more may have been found with more time.
    pub(crate) proven: bool,
}

impl What {
    /// The category: of each the best change is shown.
    pub(crate) const fn kind(self) -> &'static str {
        match self {
            What::Memory { .. } => "memory",
            What::Link(_) => "link",
            What::Device => "device",
            What::Optimizer => "optimizer",
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            What::Memory { tier, more, each, flag, size } => {
                let whose = if *each { " a rank" } else { "" };
                write!(f, "{more} more {}{whose} ({flag} {})", of_tier(*tier), gib_rounded_up(*size))
            }
            What::Link(pool) => write!(f, "twice the {} rate", of_link(*pool)),
            What::Device => f.write_str("a device that computes twice as fast"),
            What::Optimizer => f.write_str("twice the optimizer's rate"),
        }
    }
}

const fn of_tier(tier: Tier) -> &'static str {
    match tier {
        Tier::Hbm => "HBM",
        Tier::Host => "host RAM",
        Tier::Nvme => "NVMe",
    }
}

const fn of_link(pool: Pool) -> &'static str {
    match pool {
        Pool::D2h => "D2H",
        Pool::H2d => "H2D",
        Pool::NvmeWrite => "NVMe write",
        Pool::NvmeRead => "NVMe read",
    }
}

impl Change {
    pub(crate) fn sentence(&self) -> String {
        let saves = Seconds::from_ms(self.saves_ms);
        if self.what == What::Optimizer {
            return format!(
                "{} saves {saves}; more --micro-batches spread the optimizer over more tokens",
                self.what
            );
        }
        match (self.saves_ms > 0.0, self.proven) {
            (true, true) => format!("{} saves {saves}", self.what),
            (true, false) => format!("{} saves at least {saves}", self.what),
            (false, true) => format!("{} saves nothing", self.what),
            (false, false) => format!("{} saves nothing that was found in time", self.what),
        }
    }
}

/// One sentence a category, what saves most first; where nothing in a category helps, one for all of it.
pub(crate) fn sentences(changes: &[Change]) -> Vec<String> {
    let mut said = Vec::new();
    for change in changes {
        let kind = change.what.kind();
        if said.iter().any(|(other, _)| *other == kind) {
            continue;
        }
        let of_kind = changes.iter().filter(|c| c.what.kind() == kind);
        let in_vain = match (change.what, of_kind.clone().all(|c| c.proven)) {
            (What::Link(_), true) => Some("twice the rate of any one link saves nothing".into()),
            (What::Link(_), false) => {
                Some("twice the rate of any one link saves nothing that was found in time".into())
            }
            (What::Memory { more, each, .. }, proven) => {
                let tiers = of_kind.clone().filter_map(|c| match c.what {
                    What::Memory { tier, .. } => Some(of_tier(tier)),
                    _ => None,
                });
                let whose = if each { " a rank" } else { "" };
                let found = if proven { "" } else { " that was found in time" };
                Some(format!(
                    "{more} more {}{whose} saves nothing{found}",
                    tiers.collect::<Vec<_>>().join(" or ")
                ))
            }
            (What::Device | What::Optimizer, _) => None,
        };
        let helps = || match change.what {
            What::Memory { more, each, .. } => tied(more, each, &of_kind.collect::<Vec<_>>()),
            _ => change.sentence(),
        };
        let sentence = if change.saves_ms == 0.0 { in_vain } else { None };
        said.push((kind, sentence.unwrap_or_else(helps)));
    }
    said.into_iter().map(|(_, sentence)| sentence).collect()
}

/// More memory of the tier that saves most, and of those that save as much, the cheaper ones first.
fn tied(more: Bytes, each: bool, memory: &[&Change]) -> String {
    let best = memory.iter().map(|c| c.saves_ms).fold(0.0, f64::max);
    let same = memory.iter().filter(|c| same_saving(c.saves_ms, best));
    let whose = if each { " a rank" } else { "" };
    let tiers: Vec<String> = same
        .clone()
        .filter_map(|c| match c.what {
            What::Memory { tier, flag, size, .. } => {
                Some(format!("{}{whose} ({flag} {})", of_tier(tier), gib_rounded_up(size)))
            }
            _ => None,
        })
        .collect();
    let saves = Seconds::from_ms(same.clone().map(|c| c.saves_ms).fold(best, f64::min));
    let least = if same.clone().all(|c| c.proven) { "" } else { "at least " };
    format!("{more} more {} saves {least}{saves}", tiers.join(" or "))
}

/// Whether two savings (ms) are one for whoever pays for them: searches end a little apart.
fn same_saving(a: f64, b: f64) -> bool {
    (a - b).abs() <= NOTHING_MS.max(1e-3 * a.max(b))
}

/// What keeps the step from being shorter.
pub(crate) struct Limit {
    /// For example `the hbm budget`.
    pub(crate) what: String,
    /// For example `12.30 ms exposed`; may be empty.
    pub(crate) detail: String,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, " ({})", self.detail) }
    }
}

/// The budgets of which more would help, and the links that are waited for or of which a faster one would help. Nothing where no change
/// was tried.
pub(crate) fn limits(planned: &Planned, changes: &[Change]) -> Vec<Limit> {
    let helps = changes.iter().filter(|c| c.saves_ms > 0.0);
    let mut found: Vec<Limit> = helps
        .clone()
        .filter_map(|c| match c.what {
            What::Memory { tier, .. } => {
                Some(Limit { what: format!("the {tier} budget"), detail: String::new() })
            }
            _ => None,
        })
        .collect();
    let waited = if planned.promise().is_some() { "waited for" } else { "exposed" };
    for pool in Pool::ALL {
        let exposed = planned.exposed(pool);
        if exposed.as_ms() > NOTHING_MS {
            found.push(Limit { what: pool.name().into(), detail: format!("{exposed} {waited}") });
        } else if let Some(change) = helps.clone().find(|c| c.what == What::Link(pool)) {
            let saves = Seconds::from_ms(change.saves_ms);
            found.push(Limit { what: pool.name().into(), detail: format!("twice its rate saves {saves}") });
        }
    }
    if let Some(promise) = planned.promise() {
        let (optimizer, step) = (promise.optimizer_s, promise.step_s);
        let limit = || Limit { what: "the optimizer".into(), detail: format!("{optimizer} of {step}") };
        if optimizer.get() > 0.5 * step.get() {
            found.insert(0, limit());
        } else if optimizer.get() > OPTIMIZER_SHARE * step.get() {
            found.push(limit());
        }
    }
    let memory = |c: &Change| matches!(c.what, What::Memory { .. });
    if found.is_empty() && changes.iter().any(memory) {
        found.push(Limit { what: "arithmetic alone".into(), detail: String::new() });
    }
    found
}

/// The time all changes together may take.
struct Patience {
    until: Seconds,
    started: Instant,
}

impl Patience {
    /// The user waits for these: together they may take a few times as long as the plan itself did, within the limit.
    fn new(planned: &Planned, left: Option<Seconds>) -> Patience {
        let enough = 4.0 * planned.solution.solve.get() + 4.0;
        let until = Seconds(left.map_or(enough, |left| left.get().min(enough)));
        Patience { until, started: Instant::now() }
    }

    /// An even part of what is left for each of `waiting` changes.
    fn share(&self, waiting: usize) -> Seconds {
        let left = (self.until.get() - self.started.elapsed().as_secs_f64()).max(0.0);
        Seconds(left / waiting.max(1) as f64)
    }
}

/// Solves again with a step more of each budget, each link twice as fast and the device twice as fast; the change that saves most comes
/// first, but for the device. Of a plan that is not proven more memory could only show what the search missed: there links and device
/// are tried, and with the plan as it is.
pub(crate) fn changes(planned: &Planned, options: &SolveOptions, clock: &Clock) -> Vec<Change> {
    let Some(now) = planned.time_ms() else { return vec![] };
    let proven = planned.solution.status == Status::Optimal;
    let (more, each) = (step_of(planned), planned.problem.ranks.is_some());
    let mut whats: Vec<What> = Vec::new();
    if proven {
        // The cheaper tiers first.
        whats.extend(Tier::ALL.into_iter().rev().map(|tier| {
            let flag = flag_of(planned, tier);
            What::Memory { tier, more, each, flag, size: size_of_all(planned, tier, more) }
        }));
    }
    if planned.problem.step.is_some() {
        // Of a chain the arithmetic itself is not known, only what a plan adds to it.
        whats.push(What::Device);
    }
    if proven || planned.problem.step.is_some() {
        whats.extend(Pool::ALL.map(What::Link));
    }
    let patience = Patience::new(planned, clock.left(options).time_limit);
    let mut list: Vec<Change> = Vec::new();
    for (done, &what) in whats.iter().enumerate() {
        if cannot_help(planned, what, now) {
            list.push(Change { what, saves_ms: 0.0, proven: true });
            continue;
        }
        let options = SolveOptions { time_limit: Some(patience.share(whats.len() - done)), ..*options };
        if let Some((then, proven)) = time_with(planned, what, proven.then_some(&options)) {
            let saves = now - then;
            list.push(Change { what, saves_ms: if saves > NOTHING_MS { saves } else { 0.0 }, proven });
        }
    }
    let optimizer = planned.promise().map_or(0.0, |promise| promise.optimizer_s.as_ms());
    if optimizer > 0.0 {
        // It follows the step, whatever is placed where.
        let saves_ms = optimizer - optimizer / FASTER;
        list.push(Change { what: What::Optimizer, saves_ms, proven: true });
    }
    // A faster device always helps, and seldom is to be had.
    let device = |change: &Change| change.what == What::Device;
    list.sort_by(|a, b| device(a).cmp(&device(b)).then(b.saves_ms.total_cmp(&a.saves_ms)));
    cheapest_first(&mut list);
    list
}

/// The flag that gives a tier its size.
pub(crate) fn flag_of(planned: &Planned, tier: Tier) -> &'static str {
    let whole = planned.problem.step.is_some()
        || (tier == Tier::Hbm && planned.problem.chain.hbm_cap_bytes.is_some());
    match (tier, whole) {
        (Tier::Hbm, true) => "--hbm-gib",
        (Tier::Host, true) => "--host-gib",
        (Tier::Nvme, true) => "--nvme-gib",
        (Tier::Hbm, false) => "--hbm-activation-gib",
        (Tier::Host, false) => "--host-activation-gib",
        (Tier::Nvme, false) => "--nvme-activation-gib",
    }
}

/// What the tier has with `more` for each rank; of all ranks together where they share it.
fn size_of_all(planned: &Planned, tier: Tier, more: Bytes) -> Bytes {
    match planned.problem.ranks.as_ref().filter(|_| tier != Tier::Hbm) {
        Some(ranks) => ranks.host.budgets.get(tier) + more * ranks.count as u64,
        None => planned.budgets().get(tier) + more,
    }
}

/// Of the sizes of memory that save as much as the best of them, the cheapest tier goes first.
fn cheapest_first(list: &mut [Change]) {
    let tier = |change: &Change| match change.what {
        What::Memory { tier, .. } => Some(tier),
        _ => None,
    };
    let Some(best) = list.iter().position(|c| tier(c).is_some()) else { return };
    let saves = list[best].saves_ms;
    let tied = |c: &Change| tier(c).filter(|_| same_saving(c.saves_ms, saves));
    let at = |tier| list.iter().position(|c| tied(c) == Some(tier));
    if let Some(cheapest) = Tier::ALL.into_iter().rev().find_map(at) {
        list[best..=cheapest].rotate_right(1);
    }
}

/// Where that is known without solving.
fn cannot_help(planned: &Planned, what: What, now: f64) -> bool {
    let What::Link(pool) = what else { return false };
    // The bound holds however fast links are, but for what it says must be waited for from host RAM.
    let waits = pool == Pool::H2d && planned.exposed(pool).as_ms() > NOTHING_MS;
    let at_best = !waits && planned.step_bound.is_some_and(|bound| now - bound.as_ms() <= NOTHING_MS);
    let nvme = matches!(pool, Pool::NvmeWrite | Pool::NvmeRead);
    at_best || (nvme && planned.budgets().nvme == Bytes::ZERO)
}

/// A round size that holds a few boundaries, and where internals may be kept, those of any layer.
fn step_of(planned: &Planned) -> Bytes {
    let problem = &planned.problem;
    let largest = |sizes: &[Bytes]| sizes.iter().copied().max().unwrap_or_default();
    let saved = problem.step.as_ref().map(|s| &s.saved_bytes).or(problem.chain.layer_internal_bytes.as_ref());
    let internals = saved.map_or(Bytes::ZERO, |sizes| largest(sizes));
    let least = (largest(&problem.chain.boundary_bytes) * BOUNDARIES).max(internals);
    Bytes(least.get().checked_next_power_of_two().unwrap_or(u64::MAX))
}

/// The best time that was found with a change (ms), and whether it is proven the best. Without options the plan stays as it is.
fn time_with(planned: &Planned, what: What, options: Option<&SolveOptions>) -> Option<(f64, bool)> {
    let Some(step) = &planned.problem.step else {
        let mut chain = planned.problem.chain.clone();
        change_chain(&mut chain, what);
        let solution = solve(&chain, options?).ok()?;
        return Some((solution.evaluation?.step_ms(), solution.status == Status::Optimal));
    };
    let mut step = step.clone();
    change_step(&mut step, what);
    let solved = options.and_then(|options| {
        solve_step(&step, &StepOptions { solve: *options, ..StepOptions::default() }).ok()
    });
    let proven = solved.as_ref().is_some_and(|found| found.solution.status == Status::Optimal);
    let solved = solved.map(|found| found.verified.promise.step_s);
    // The plan as it is holds too, and may be better than what was found in a hurry.
    let same = planned.schedule.as_ref().and_then(|s| step.verify(s).ok()).map(|v| v.promise.step_s);
    let best = solved.into_iter().chain(same).map(Seconds::as_ms).reduce(f64::min)?;
    Some((best + peers(planned, what), proven))
}

/// What several ranks wait for one another (ms).
fn peers(planned: &Planned, what: What) -> f64 {
    planned.problem.ranks.as_ref().map_or(0.0, |ranks| {
        let mut host = ranks.host.clone();
        change_step(&mut host, what);
        Ranks { host, ..*ranks }.peer_exposed().as_ms()
    })
}

fn change_step(step: &mut StepProblem, what: What) {
    match what {
        What::Memory { tier, more, .. } => *step.budgets.get_mut(tier) += more,
        What::Link(pool) => speed_up(&mut step.costs.links, pool),
        // Not part of what is solved or simulated.
        What::Optimizer => {}
        What::Device => {
            let faster = |time: &mut Seconds| *time = Seconds(time.get() / FASTER);
            let StepCosts {
                prologue,
                forward,
                saving_forward,
                internals_forward,
                backward,
                epilogue,
                prologue_backward,
                links: _,
            } = &mut step.costs;
            [prologue, epilogue, prologue_backward].into_iter().for_each(faster);
            [forward, saving_forward, internals_forward, backward].into_iter().flatten().for_each(faster);
        }
    }
}

fn speed_up(links: &mut LinkRates, pool: Pool) {
    let twice = |rate: BytesPerSecond| BytesPerSecond(rate.get() * FASTER);
    let both = &mut links.contention;
    match pool {
        Pool::D2h => (links.d2h, both.d2h_both) = (twice(links.d2h), both.d2h_both.map(twice)),
        Pool::H2d => (links.h2d, both.h2d_both) = (twice(links.h2d), both.h2d_both.map(twice)),
        Pool::NvmeWrite => links.nvme_write = twice(links.nvme_write),
        Pool::NvmeRead => links.nvme_read = twice(links.nvme_read),
    }
}

fn change_chain(chain: &mut CostChain, what: What) {
    match what {
        What::Memory { tier: Tier::Hbm, more, .. } => {
            chain.gpu_budget_bytes += more;
            if let Some(cap) = &mut chain.hbm_cap_bytes {
                *cap += more;
            }
        }
        What::Memory { tier: Tier::Host, more, .. } => chain.cpu_budget_bytes += more,
        What::Memory { tier: Tier::Nvme, more, .. } => chain.nvme_budget_bytes += more,
        What::Link(pool) => {
            let rate = match pool {
                Pool::D2h => &mut chain.d2h_bytes_per_s,
                Pool::H2d => &mut chain.h2d_bytes_per_s,
                Pool::NvmeWrite => &mut chain.nvme_write_bytes_per_s,
                Pool::NvmeRead => &mut chain.nvme_read_bytes_per_s,
            };
            *rate = BytesPerSecond(rate.get() * FASTER);
        }
        What::Device | What::Optimizer => {}
    }
}
