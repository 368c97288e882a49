//! The flags.

use std::path::{Path, PathBuf};

use clap::{Args as ClapArgs, Parser, ValueEnum};
use lazy_model::{FusedKernels, Seconds, Training};
use lazy_solver::budgets::BudgetArgs;
use lazy_solver::{Method, SolveOptions, TieBreak};

use super::max::MaxFlag;
use super::output;
use super::reference::{ReferenceArgs, gib};
use super::sweep::Sweep;

/// Far above any optimizer's state of one parameter.
const MOST_STATE_BYTES: u64 = 1 << 10;
/// Thirty years.
const LONGEST_S: f64 = 1e9;
/// Far above what shares a host's memory.
const MOST_RANKS: usize = 1024;

const EXAMPLES: &str = "\
Examples:
  Sizes of a model:
    lazy-plan --model qwen3-8b --batch 8 --seq 4096
  Its plan on a machine, with a report:
    lazy-plan --model qwen3-8b --machine h100 --hbm-gib 40 --host-gib 64 --batch 8 --seq 4096 --report plan.html
  The largest batch that fits, as JSON:
    lazy-plan --model qwen3-8b --machine h100 --host-gib 64 --seq 4096 --max batch --json
  How the step depends on host RAM:
    lazy-plan --model qwen3-8b --machine h100 --hbm-gib 40 --batch 8 --sweep host-gib=0,4,8,16
  A schedule for a trainer, from a measured profile:
    lazy-plan --model ./config.json --profile profile.json --hbm-mib 600 --out schedule.json

The exit status is 0 for a plan, for sizes and for a sweep, 1 where there is no plan or an input is refused, 2 where flags are wrong.
docs/planning.md explains every line of the output.";

/// Plans where the activation at every layer boundary lives between forward and backward: in HBM, in host RAM, on NVMe, or nowhere
/// (recomputed).
///
/// The problem is a cost chain (--chain), or a model on a machine (--model with --machine), or a model with the parameters of the
/// published reference command (--model with any flag under "Reference command").
#[derive(Clone, Debug, Parser)]
#[command(name = "lazy-plan", version, after_help = EXAMPLES, allow_negative_numbers = true, group(clap::ArgGroup::new("problem").required(true).args(["chain", "model"])))]
pub(crate) struct Args {
    /// Cost chain to solve (JSON). Budgets, rates and weights are the file's own, but for reference flags given beside it
    #[arg(long, value_name = "FILE", help_heading = "Problem")]
    pub(crate) chain: Option<PathBuf>,
    /// Model to plan for: a config.json as Hugging Face has it, the folder that holds one, or a name that ships with this program
    /// (an unknown one lists them)
    #[arg(long, value_name = "NAME|PATH", help_heading = "Problem")]
    pub(crate) model: Option<PathBuf>,
    /// Sequences in a batch [default: 1]
    #[arg(long, value_name = "N", conflicts_with = "chain", help_heading = "Problem")]
    pub(crate) batch: Option<usize>,
    /// Tokens in a sequence [default: 1024]
    #[arg(long, value_name = "N", conflicts_with = "chain", help_heading = "Problem")]
    pub(crate) seq: Option<usize>,
    /// Layers of the model: the first so many, or after its last the first again [default: as many as it has]
    #[arg(long, value_name = "N", conflicts_with = "chain", help_heading = "Problem")]
    pub(crate) layers: Option<usize>,
    /// Bytes of an activation, weight or gradient element
    #[arg(
        long,
        value_name = "N",
        visible_alias = "dtype-bytes",
        default_value_t = 2,
        conflicts_with = "chain",
        help_heading = "Problem"
    )]
    pub(crate) element_bytes: usize,
    /// Most layers between two saved boundaries [default: 4, or the chain's]
    #[arg(long, value_name = "N", visible_alias = "max-segment-layers", help_heading = "Problem")]
    pub(crate) max_segment: Option<usize>,
    #[command(flatten)]
    pub(crate) budgets: BudgetArgs,
    #[command(flatten)]
    pub(crate) training: TrainingArgs,
    #[command(flatten)]
    pub(crate) reference: ReferenceArgs,
    #[command(flatten)]
    pub(crate) search: SearchArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// How the model is trained, as far as the physical objective sees it.
#[derive(Clone, Debug, Default, PartialEq, ClapArgs)]
#[command(next_help_heading = "Training (physical objective)")]
pub(crate) struct TrainingArgs {
    /// Batches of --batch sequences in one optimizer step [default: 1]
    #[arg(long, value_name = "N")]
    pub(crate) micro_batches: Option<usize>,
    /// Layer weights live in host RAM and are copied in for every pass over a layer
    #[arg(long)]
    pub(crate) stream_weights: bool,
    /// Layer gradients are copied to host RAM as they arise
    #[arg(long)]
    pub(crate) stream_gradients: bool,
    /// What is streamed lives on NVMe and passes through host RAM on its way
    #[arg(long)]
    pub(crate) stream_from_nvme: bool,
    /// Bytes of optimizer state a parameter that stay in HBM; 0: all of it is streamed [default: 0]
    #[arg(long, value_name = "N")]
    pub(crate) state_bytes: Option<u64>,
    /// Tokens whose logits exist at once [default: 4096]
    #[arg(long, value_name = "N")]
    pub(crate) loss_chunk_tokens: Option<u64>,
    /// Kernels of the layers, which decide what they hold
    #[arg(long, value_enum, default_value = "operations")]
    pub(crate) kernels: KernelsFlag,
    /// Accelerators on one host, all alike and in step. Host RAM, NVMe, the drives and the root complex are then the host's and shared;
    /// HBM and the links of each are its own
    #[arg(long, value_name = "R", conflicts_with = "evaluate")]
    pub(crate) ranks: Option<usize>,
    /// HBM of the device's context and of libraries [default: 0]
    #[arg(long, value_name = "GIB")]
    pub(crate) hbm_reserved_gib: Option<f64>,
    /// Host RAM that is taken throughout, for example by the optimizer's ring [default: 0]
    #[arg(long, value_name = "GIB")]
    pub(crate) host_reserved_gib: Option<f64>,
}

impl TrainingArgs {
    fn fused(&self) -> FusedKernels {
        let own = FusedKernels::default();
        FusedKernels { loss_tokens: self.loss_chunk_tokens.unwrap_or(own.loss_tokens), ..own }
    }

    /// The training these flags describe, with weights and gradients of `element_bytes`.
    pub(crate) fn training(
        &self,
        element_bytes: usize,
        max_segment: Option<usize>,
    ) -> Result<Training, String> {
        let default = Training::default();
        if self.micro_batches == Some(0) || self.loss_chunk_tokens == Some(0) {
            return Err("--micro-batches and --loss-chunk-tokens: give a whole number of 1 or more".into());
        }
        if self.stream_from_nvme && !self.stream_weights && !self.stream_gradients {
            return Err(
                "--stream-from-nvme: say what is streamed, with --stream-weights or --stream-gradients"
                    .into(),
            );
        }
        if self.stream_from_nvme && self.ranks.is_some_and(|ranks| ranks > 1) {
            return Err(
                "--stream-from-nvme: several ranks stream from host RAM only; leave out --ranks or the flag"
                    .into(),
            );
        }
        if let Some(state) = self.state_bytes.filter(|state| *state > MOST_STATE_BYTES) {
            return Err(format!(
                "--state-bytes {state}: give the bytes of one parameter, at most {MOST_STATE_BYTES}"
            ));
        }
        if let Some(ranks) = self.ranks.filter(|ranks| !(1..=MOST_RANKS).contains(ranks)) {
            return Err(format!("--ranks {ranks}: give the accelerators of one host, 1 to {MOST_RANKS}"));
        }
        Ok(Training {
            micro_batches: self.micro_batches.unwrap_or(default.micro_batches),
            weight_bytes: element_bytes as u64,
            gradient_bytes: element_bytes as u64,
            state_bytes: self.state_bytes.unwrap_or(default.state_bytes),
            stream_weights: self.stream_weights,
            stream_gradients: self.stream_gradients,
            stream_from_nvme: self.stream_from_nvme,
            loss_chunk_tokens: self.loss_chunk_tokens.unwrap_or(default.loss_chunk_tokens),
            fused: (self.kernels == KernelsFlag::Fused).then(|| self.fused()),
            max_segment: max_segment.unwrap_or(default.max_segment),
            reserved: gib("hbm-reserved-gib", self.hbm_reserved_gib)?.unwrap_or_default(),
            host_reserved: gib("host-reserved-gib", self.host_reserved_gib)?.unwrap_or_default(),
        })
    }
}

/// What is minimised, and how.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Search")]
pub(crate) struct SearchArgs {
    /// What is minimised: the reference's sum over a chain, or the predicted step time with HBM counted at every moment [default:
    /// reference with --chain or any reference flag but rates beside --machine, otherwise physical]
    #[arg(long, value_enum)]
    pub(crate) objective: Option<ObjectiveFlag>,
    /// Which of equally fast plans: by the chain's weights, or fewest checkpoints and then fewest on NVMe [default: weighted with the
    /// reference objective, otherwise lexicographic]
    #[arg(long, value_enum)]
    pub(crate) tie_break: Option<TieBreakFlag>,
    /// Stop after this many seconds with the best plan found and how far it may be from the best one
    #[arg(long, value_name = "S", default_value_t = 60.0)]
    pub(crate) time_limit_s: f64,
    /// Algorithm
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) method: MethodFlag,
    /// Judge this plan instead of solving: a schedule file, a plan's --json output, or one letter a boundary over G (HBM), C (host),
    /// N (NVMe), - (recomputed)
    #[arg(long, value_name = "SCHEDULE", allow_hyphen_values = true)]
    pub(crate) evaluate: Option<String>,
    /// With --evaluate and letters: one letter a layer over K (internals kept), - (recomputed)
    #[arg(long, value_name = "LETTERS", allow_hyphen_values = true, requires = "evaluate")]
    pub(crate) keep: Option<String>,
    /// Plan once for each value of one flag, for example host-activation-gib=8,10,12 or batch=1..8 (1 to 8, both included). Any budget,
    /// bandwidth, --batch and --seq
    #[arg(long, value_name = "FLAG=V1,V2,V3..V4", conflicts_with_all = ["evaluate", "out", "report", "trace", "chain_out"])]
    pub(crate) sweep: Option<Sweep>,
    /// Find the largest batch, sequence or number of layers that fits the budgets, plan with it, and say what keeps it from being larger
    #[arg(long, value_enum, conflicts_with_all = ["chain", "evaluate", "sweep"])]
    pub(crate) max: Option<MaxFlag>,
}

/// Where the answer goes.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArgs {
    /// Print one JSON object (with --sweep, an array) and nothing else
    #[arg(long)]
    pub(crate) json: bool,
    /// Also say in the JSON what more of each budget, faster links and a faster device would save; the table says so anyway
    #[arg(long, requires = "json", conflicts_with = "sweep")]
    pub(crate) next_change: bool,
    /// Write the schedule here (JSON)
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Write a report with pictures here (HTML)
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Write the simulated step here, for ui.perfetto.dev; needs the physical objective
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Write the cost chain that was solved here (JSON)
    #[arg(long, value_name = "FILE")]
    pub(crate) chain_out: Option<PathBuf>,
}

impl OutputArgs {
    /// Each file that is to be written, with its flag.
    pub(crate) fn files(&self) -> Vec<(&'static str, &Path)> {
        let all = [
            ("--out", &self.out),
            ("--report", &self.report),
            ("--trace", &self.trace),
            ("--chain-out", &self.chain_out),
        ];
        all.into_iter().filter_map(|(flag, path)| Some((flag, path.as_deref()?))).collect()
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum KernelsFlag {
    /// One for each operation, as frameworks have it
    #[default]
    Operations,
    /// Those of train-lm on a GPU, without dropout: layers such as Qwen3's save matrix products and attention alone
    Fused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ObjectiveFlag {
    Reference,
    Physical,
}

impl ObjectiveFlag {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            ObjectiveFlag::Reference => "reference",
            ObjectiveFlag::Physical => "physical",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TieBreakFlag {
    Weighted,
    Lexicographic,
}

impl TieBreakFlag {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            TieBreakFlag::Weighted => "weighted",
            TieBreakFlag::Lexicographic => "lexicographic",
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum MethodFlag {
    Auto,
    Mip,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnOff {
    On,
    Off,
}

impl Args {
    /// Refuses flags that would be passed over, and places to write to that cannot be: before the work, not after it.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.reference.check()?;
        let limit = self.search.time_limit_s;
        if !(0.0..=LONGEST_S).contains(&limit) {
            return Err(format!("--time-limit-s {limit:?}: give seconds between 0 and {LONGEST_S:e}"));
        }
        let problem =
            [("--chain", &self.chain), ("--model", &self.model), ("--profile", &self.budgets.profile)];
        let given = [
            ("--evaluate", &self.search.evaluate),
            ("--reference-schedule", &self.reference.reference_schedule),
        ];
        let problem = problem.iter().filter_map(|(flag, path)| Some((*flag, path.as_deref()?)));
        let given = given.iter().filter_map(|(flag, text)| Some((*flag, Path::new(text.as_deref()?))));
        output::check(&self.output.files(), &problem.chain(given).collect::<Vec<_>>())
    }

    /// What is minimised: said, or by where the problem comes from.
    pub(crate) fn objective(&self) -> ObjectiveFlag {
        // Rates alone describe the machine that was named.
        let of_machine = self.budgets.profile.is_some() && self.reference.only_rates();
        let reference = self.chain.is_some() || !(self.reference.is_empty() || of_machine);
        self.search.objective.unwrap_or(if reference {
            ObjectiveFlag::Reference
        } else {
            ObjectiveFlag::Physical
        })
    }

    /// How ties are broken: said, or by the objective.
    pub(crate) fn tie_break(&self) -> TieBreakFlag {
        self.search.tie_break.unwrap_or(match self.objective() {
            ObjectiveFlag::Reference => TieBreakFlag::Weighted,
            ObjectiveFlag::Physical => TieBreakFlag::Lexicographic,
        })
    }

    pub(crate) fn options(&self) -> SolveOptions {
        let method = match self.search.method {
            MethodFlag::Auto => Method::Auto,
            MethodFlag::Mip => Method::Mip,
        };
        let tie_break = match self.tie_break() {
            TieBreakFlag::Weighted => TieBreak::Weighted,
            TieBreakFlag::Lexicographic => TieBreak::Lexicographic,
        };
        SolveOptions { time_limit: Some(Seconds(self.search.time_limit_s)), method, tie_break }
    }
}
