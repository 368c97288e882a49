//! From files and flags to a problem.

use std::path::Path;

use lazy_model::reference::{HbmRoom, Mandatory, OptimizerTime};
use lazy_model::step::TierBytes;
use lazy_model::{
    Bytes, BytesPerSecond, CostChain, HardwareProfile, ModelSpec, ReferenceSettings, Saving, Seconds,
    StepProblem, Tier, Workload, read_text,
};
use lazy_solver::ranks::{exchange, share};

use super::args::{Args, KernelsFlag, ObjectiveFlag, TieBreakFlag, TrainingArgs};
use super::given::Reference;
use super::models;
use super::reference::ReferenceArgs;

/// A model and what one step trains it on.
pub(crate) struct ModelFacts {
    pub(crate) name: String,
    pub(crate) spec: ModelSpec,
    pub(crate) work: Workload,
}

impl ModelFacts {
    /// What was assumed of the model, and whether it was made for sequences as long as these.
    pub(crate) fn notes(&self) -> Vec<String> {
        let mut notes = self.spec.notes.clone();
        let seq = self.work.sequence();
        if let Some(longest) = self.spec.max_positions.filter(|longest| seq > *longest) {
            notes.push(format!(
                "--seq {seq} is longer than the config's max_position_embeddings of {longest}: the sizes hold, but the model was not made \
                 for it"
            ));
        }
        notes
    }
}

/// What is to be planned.
pub(crate) struct Problem {
    /// The model, or the chain's file.
    pub(crate) name: String,
    pub(crate) model: Option<ModelFacts>,
    pub(crate) profile: Option<HardwareProfile>,
    /// The placement problem; of a step, the one with all the room its caps leave.
    pub(crate) chain: CostChain,
    /// Present with the physical objective. Of several ranks, the step of each on its part of the host.
    pub(crate) step: Option<StepProblem>,
    /// Present with `--ranks`.
    pub(crate) ranks: Option<Ranks>,
    /// What was assumed on the way, in sentences.
    pub(crate) notes: Vec<String>,
    pub(crate) optimizer: Option<OptimizerTime>,
    pub(crate) reference: Option<Reference>,
    pub(crate) objective: ObjectiveFlag,
    pub(crate) tie_break: TieBreakFlag,
}

/// Several ranks on one host.
pub(crate) struct Ranks {
    pub(crate) count: usize,
    /// The step of one rank, with the whole host's budgets and rates of what is shared.
    pub(crate) host: StepProblem,
    /// Rate of the link between accelerators, each way.
    pub(crate) peer: Option<BytesPerSecond>,
}

impl Ranks {
    /// Time of a step that exchanges between accelerators stick out of arithmetic.
    pub(crate) fn peer_exposed(&self) -> Seconds {
        self.peer.map_or(Seconds::ZERO, |rate| exchange(&self.host, self.count, rate))
    }
}

/// What the flags ask for.
pub(crate) enum Input {
    /// No machine and no budgets: the model's sizes alone.
    Sizes(Box<ModelFacts>),
    Problem(Box<Problem>),
}

pub(crate) fn read(args: &Args) -> Result<Input, String> {
    match (&args.chain, &args.model) {
        (Some(path), _) => of_chain(args, path).map(|p| Input::Problem(Box::new(p))),
        (None, Some(path)) => of_model(args, path),
        (None, None) => Err("give --chain FILE or --model NAME".into()),
    }
}

fn of_chain(args: &Args, path: &Path) -> Result<Problem, String> {
    if args.training != TrainingArgs::default() {
        return Err(
            "a chain already holds what follows from training: leave out --ranks and the other flags under Training"
                .into()
        );
    }
    if args.search.objective == Some(ObjectiveFlag::Physical) {
        return Err("--objective physical predicts whole steps, which a chain does not describe: give --model and --machine".into());
    }
    let text = read_text(path).map_err(|e| e.to_string())?;
    let mut chain = CostChain::from_json(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    hbm_cap(args, &mut chain)?;
    args.reference.change(&mut chain)?;
    chain.max_segment_layers = args.max_segment.unwrap_or(chain.max_segment_layers);
    let name = chain.name.clone().unwrap_or_else(|| path.display().to_string());
    let problem = Problem {
        name,
        model: None,
        profile: None,
        chain,
        step: None,
        ranks: None,
        notes: vec![],
        optimizer: args.reference.optimizer()?,
        reference: None,
        objective: ObjectiveFlag::Reference,
        tie_break: args.tie_break(),
    };
    with_reference(args, problem)
}

/// Of the caps on everything, a chain knows that of HBM at most.
fn hbm_cap(args: &Args, chain: &mut CostChain) -> Result<(), String> {
    if args.budgets.is_empty() {
        return Ok(());
    }
    match (&mut chain.hbm_cap_bytes, args.budgets.cap(Tier::Hbm)?) {
        (Some(cap), Some(given)) if args.budgets.only_hbm() => {
            // A budget for boundaries that the cap switched off stays switched off.
            if chain.gpu_budget_bytes >= *cap {
                chain.gpu_budget_bytes = given;
            }
            *cap = given;
            Ok(())
        }
        _ => Err("a chain brings its own budgets and rates: leave out --profile and the size flags (--hbm-gib goes with a chain that \
                  sets hbm_cap_bytes), give --hbm-activation-gib and its like, or change the file"
            .into()),
    }
}

fn of_model(args: &Args, path: &Path) -> Result<Input, String> {
    let (name, mut spec) = models::find(path)?;
    if let Some(layers) = args.layers.filter(|layers| *layers != spec.layers()) {
        let own = spec.layers();
        spec = spec.with_layers(layers).map_err(|e| format!("--layers: {e}"))?;
        spec.notes.push(format!("planned with {layers} layers; the model has {own}"));
    }
    let work = Workload::new(args.batch.unwrap_or(1), args.seq.unwrap_or(1024), args.element_bytes)
        .map_err(|e| e.to_string())?;
    let work = match args.training.kernels {
        KernelsFlag::Operations => work,
        KernelsFlag::Fused => work.with_saving(Saving::Products),
    };
    let facts = ModelFacts { name, spec, work };
    let profile = args.budgets.hardware()?;
    match args.objective() {
        ObjectiveFlag::Reference => reference_problem(args, facts, profile),
        ObjectiveFlag::Physical => physical_problem(args, facts, profile),
    }
    .and_then(|input| match input {
        Input::Problem(problem) => with_reference(args, *problem).map(|p| Input::Problem(Box::new(p))),
        sizes @ Input::Sizes(_) => Ok(sizes),
    })
}

fn reference_problem(
    args: &Args,
    facts: ModelFacts,
    profile: Option<HardwareProfile>,
) -> Result<Input, String> {
    let chosen = args.search.objective.is_some();
    if args.budgets.has_sizes() {
        return Err("--hbm-gib, --host-gib, --nvme-gib and their like cap everything a tier holds and go with the physical \
                    objective; the reference objective budgets boundaries alone: give --hbm-activation-gib (or --peak-cap-gib), \
                    --host-activation-gib, --nvme-activation-gib"
            .into());
    }
    if args.training != TrainingArgs::default() {
        return Err("--ranks, --micro-batches, --stream-weights and the other flags under Training belong to the physical objective: leave them or \
                    the reference flags out"
            .into());
    }
    let links = profile.as_ref().map(|p| p.links.rates());
    let settings = args.reference.settings(links, args.max_segment)?;
    let chain = settings.chain(&facts.spec, &facts.work).map_err(|e| e.to_string())?;
    let mut notes = facts.notes();
    if let (false, Some(profile)) = (chosen, &profile) {
        notes.push(format!(
            "flags of the reference command select its objective, which takes of {} the rates alone; --objective physical plans the \
             whole step on it, and takes caps and rates but none of the other flags",
            profile.name
        ));
    }
    notes.extend(assumptions(&settings, &chain));
    Ok(Input::Problem(Box::new(Problem {
        name: facts.name.clone(),
        model: Some(facts),
        profile,
        chain,
        step: None,
        ranks: None,
        notes,
        optimizer: args.reference.optimizer()?,
        reference: None,
        objective: ObjectiveFlag::Reference,
        tie_break: args.tie_break(),
    })))
}

/// Where the budgets and the mandatory traffic of the chain come from.
fn assumptions(settings: &ReferenceSettings, chain: &CostChain) -> Vec<String> {
    let mut notes = Vec::new();
    if let HbmRoom::Peak { cap_gib, baseline_gib, interval } = settings.hbm {
        let saved = chain.layers.div_ceil(interval.max(1)) + 1;
        notes.push(format!(
            "HBM for boundaries is {cap_gib} - {baseline_gib} GiB and the {saved} boundaries of the measured run: {:.3} GiB",
            chain.gpu_budget_bytes.as_gib()
        ));
    }
    let staging = settings.host.saturating_sub(chain.cpu_budget_bytes);
    if staging > Bytes::ZERO {
        notes.push(format!("staging for NVMe takes {staging} of the host budget of {}", settings.host));
    }
    let total = chain.param_h2d_bytes.iter().copied().sum::<Bytes>();
    match settings.mandatory {
        Mandatory::Off => {}
        Mandatory::ReferenceCount => notes.push(format!(
            "weights and gradients take {total} of the windows each way, by the reference's approximate count of a layer"
        )),
        Mandatory::ExactCount => notes.push(format!(
            "weights and gradients take {total} of the windows each way, by the exact count of each layer"
        )),
    }
    notes
}

fn physical_problem(
    args: &Args,
    facts: ModelFacts,
    profile: Option<HardwareProfile>,
) -> Result<Input, String> {
    if !args.reference.only_rates() {
        return Err("--objective physical takes --hbm-gib, --host-gib, --nvme-gib, --machine and rates; of the reference command's \
                    other flags none applies to it: leave them or --objective physical out"
            .into());
    }
    let Some(mut profile) = profile else {
        if args.budgets.is_empty() && args.reference.is_empty() {
            return Ok(Input::Sizes(Box::new(facts)));
        }
        return Err("a plan needs a machine: give --machine with a preset's name or a profile that `cargo xtask probe` wrote".into());
    };
    replace_rates(&mut profile, &args.reference)?;
    let host = step_problem(args, &facts, &profile)?;
    let mut notes = facts.notes();
    notes.extend(machine_notes(args, &profile)?);
    notes.extend(times_note(&facts, &profile));
    let ranks = args.training.ranks.map(|count| {
        let peer = profile.links.peer.as_ref().map(|rate| rate.value);
        if peer.is_none() && count > 1 {
            notes.push(
                "the machine names no link between accelerators: exchanging gradients and weights takes no time here".into(),
            );
        }
        Ranks { count, host: host.clone(), peer }
    });
    let step = ranks.as_ref().map_or(host, |ranks| share(&ranks.host, ranks.count));
    notes.extend(unused_nvme(&step));
    notes.extend(optimizer_note(args, &facts));
    Ok(Input::Problem(Box::new(Problem {
        name: facts.name.clone(),
        model: Some(facts),
        profile: Some(profile),
        chain: step.chain(room(&step)),
        step: Some(step),
        ranks,
        notes,
        optimizer: None,
        reference: None,
        objective: ObjectiveFlag::Physical,
        tie_break: args.tie_break(),
    })))
}

/// Puts rates that were given in the place of the machine's. Of a link known beside the other direction too, that rate changes by the
/// same factor.
fn replace_rates(profile: &mut HardwareProfile, flags: &ReferenceArgs) -> Result<(), String> {
    let rates = flags.rates(profile.links.rates())?;
    let links = &mut profile.links;
    for (alone, both, given) in
        [(&mut links.d2h, &mut links.d2h_both, rates.d2h), (&mut links.h2d, &mut links.h2d_both, rates.h2d)]
    {
        let factor = given.get() / alone.value.get();
        if let Some(both) = both.as_mut().filter(|_| factor.is_finite()) {
            both.value = BytesPerSecond(both.value.get() * factor);
        }
        alone.value = given;
    }
    (links.nvme_write.value, links.nvme_read.value) = (rates.nvme_write, rates.nvme_read);
    Ok(())
}

/// Tiers that hold nothing because nobody gave them a size. HBM must have one.
fn empty_tiers(args: &Args, profile: &HardwareProfile) -> Vec<String> {
    let sized = |tier| profile.tiers.get(tier).is_some() || matches!(args.budgets.cap(tier), Ok(Some(_)));
    let note = |tier: Tier| {
        format!(
            "{} gives {tier} no size, so nothing is placed there: give --{tier}-gib for more room",
            profile.name
        )
    };
    [Tier::Host, Tier::Nvme].into_iter().filter(|tier| !sized(*tier)).map(note).collect()
}

/// What the flags change of the machine, and what of it nobody said.
fn machine_notes(args: &Args, profile: &HardwareProfile) -> Result<Vec<String>, String> {
    let mut notes = empty_tiers(args, profile);
    let rates = args.reference.rates_given();
    if !rates.is_empty() {
        notes.push(format!(
            "{} in the place of the rates of {}; the objective stays physical",
            rates.join(", "),
            profile.name
        ));
    }
    for tier in Tier::ALL {
        if let (Some(cap), Some(has)) = (args.budgets.cap(tier)?, profile.tiers.get(tier))
            && cap > has
        {
            notes.push(format!(
                "{} has {has} of {tier}, and the budget is {cap}: a plan may not fit there",
                profile.name
            ));
        }
    }
    Ok(notes)
}

/// What times of layers in the profile were taken for: they do not scale.
fn times_note(facts: &ModelFacts, profile: &HardwareProfile) -> Option<String> {
    let times = profile.times.as_ref()?;
    let (measured, layers) = (times.forward_ms.value.len(), facts.spec.layers());
    Some(if measured == layers {
        format!(
            "times of layers are the profile's, of the workload `{}`, whatever the batch and sequence: leave `times` out of it to \
             derive them",
            times.workload
        )
    } else {
        format!(
            "the profile's times are not used: they are of {measured} layers, the model has {layers}. Times follow from its `compute`"
        )
    })
}

/// Whether NVMe has room that nothing reaches: boundaries pass through host RAM on their way.
fn unused_nvme(step: &StepProblem) -> Option<String> {
    let room = room(step);
    let largest = step.boundary_bytes.iter().copied().max().unwrap_or_default();
    (room.nvme > Bytes::ZERO && room.host < largest).then(|| {
        format!(
            "nothing goes to NVMe: a boundary of {largest} passes through host RAM on its way, which has room for {}; give more with --host-gib",
            room.host
        )
    })
}

/// What no budget of a step's plan counts.
fn optimizer_note(args: &Args, facts: &ModelFacts) -> Option<String> {
    // As `--model` alone lists it: float32, with two moments.
    let state = Bytes(facts.spec.total_parameters()) * 12;
    let streamed = args.training.state_bytes.unwrap_or(0) == 0;
    streamed.then(|| {
        format!("the optimizer's state ({state} as float32 weights and moments) is streamed, and counts in no budget")
    })
}

/// What the caps leave for boundaries.
pub(crate) fn room(step: &StepProblem) -> TierBytes {
    let (always, mut room) = (step.always(), TierBytes::default());
    for tier in Tier::ALL {
        *room.get_mut(tier) = step.budgets.get(tier).saturating_sub(always.get(tier));
    }
    room
}

/// Reads the reference schedule and puts its locks into the chain.
fn with_reference(args: &Args, mut problem: Problem) -> Result<Problem, String> {
    if let Some(given) = &args.reference.reference_schedule {
        let reference = Reference::read(given)?;
        reference.lock(&mut problem.chain, args.reference.lock_edges, args.reference.lock_hbm)?;
        problem.reference = Some(reference);
    }
    Ok(problem)
}

fn step_problem(args: &Args, facts: &ModelFacts, profile: &HardwareProfile) -> Result<StepProblem, String> {
    if profile.tiers.hbm.is_none() && args.budgets.cap(Tier::Hbm)?.is_none() {
        return Err(format!(
            "the machine {} does not say how much HBM it has: give --hbm-gib, or add tiers.hbm_bytes to its profile",
            profile.name
        ));
    }
    // Another tier that nobody gives a size holds nothing.
    let budget =
        |tier| Ok::<_, String>(args.budgets.cap(tier)?.or(profile.tiers.get(tier)).unwrap_or(Bytes::ZERO));
    let budgets = TierBytes { hbm: budget(Tier::Hbm)?, host: budget(Tier::Host)?, nvme: budget(Tier::Nvme)? };
    let training = args.training.training(args.element_bytes, args.max_segment)?;
    if training.max_segment == 0 {
        return Err("--max-segment 0: a block has at least 1 layer".into());
    }
    StepProblem::for_model(&facts.spec, &facts.work, profile, budgets, &training).map_err(|e| e.to_string())
}
