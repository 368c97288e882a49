//! Flags of the trainer, and the settings a run is remembered by.

use std::path::{Path, PathBuf};

use clap::Args;
use lazy_model::{Bytes, BytesPerSecond};
use lazy_solver::budgets::BudgetArgs;
use lazy_store::LinkLimits;
use serde::{Deserialize, Serialize};

use crate::cuda::Real;
use crate::error::{Result, TrainError};
use crate::habits::HabitArgs;
use crate::homes::WeightsHome;
use crate::io::IoChoice;
use crate::model::Shape;

/// Where the layers' arithmetic runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum DeviceChoice {
    /// A GPU when there is one this build can use, else the host.
    #[default]
    Auto,
    /// The CPU, with part of RAM standing for HBM.
    Host,
    /// An NVIDIA GPU.
    Cuda,
}

/// Where the optimizer's state lives between steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StateHome {
    /// On a drive, streamed through a ring of chunks at every step.
    #[default]
    Nvme,
    /// In RAM; on disk from save to save.
    Host,
    /// In the memory of the GPU; on disk from save to save.
    Hbm,
}

/// Where the optimizer's arithmetic runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum UpdateChoice {
    /// On the processor's cores
    Cpu,
    /// On the GPU, which chunks of the state visit
    Cuda,
    /// Where a chunk takes less time, measured at the start
    #[default]
    Auto,
}

/// The device that a run computes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunDevice {
    /// The CPU.
    #[default]
    Host,
    /// A GPU.
    Cuda,
}

/// The format of the optimizer's moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MomentFormat {
    /// float32
    #[default]
    F32,
    /// bfloat16
    Bf16,
    /// 8 bits with a scale for 256 elements
    Int8,
}

/// What a step leaves of the optimizer's state on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DurabilityChoice {
    /// All of it, in twice its space
    #[default]
    Step,
    /// Nothing: what was saved last (--save-every, the end of the run, an interruption) is what it resumes from
    Checkpoint,
}

/// What `train` takes.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Training")]
pub struct TrainArgs {
    /// Optimizer steps in all [default: 125; with --resume as many as the run was to have]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub steps: Option<u64>,
    /// Model: a Hugging Face config.json, or a folder with one; where the folder holds weights too (model.safetensors, or several files
    /// and their index), training starts from them. Default: the model that ships with the trainer, at random
    #[arg(long, value_name = "PATH", help_heading = "Model and text")]
    pub model: Option<PathBuf>,
    /// Start from random weights although the folder named by --model holds some
    #[arg(long, conflicts_with = "resume", help_heading = "Model and text")]
    pub random_weights: bool,
    /// Training data: text files, or folders of them; files named .jsonl hold examples, an object with "prompt" and "answer" on each line,
    /// of which the answers are learned. Default: this workspace's documents and sources
    #[arg(long, value_name = "PATH", num_args = 1.., help_heading = "Model and text")]
    pub text: Vec<PathBuf>,
    /// Every file of data holds examples, whatever its name; from folders, those named .jsonl are read
    #[arg(long, help_heading = "Model and text")]
    pub jsonl: bool,
    /// Hugging Face tokenizer.json that makes tokens of text; default: the one in the folder named by --model, or else every byte is a token
    #[arg(long, value_name = "FILE", help_heading = "Model and text")]
    pub tokenizer: Option<PathBuf>,
    /// Evaluation and saves.
    #[command(flatten)]
    pub habits: HabitArgs,
    /// Rows in a micro-batch [default: 8]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub batch: Option<usize>,
    /// Tokens in a row [default: 64]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub seq: Option<usize>,
    /// Seed of weights, data order and dropout [default: 1]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub seed: Option<u64>,
    /// Learning rate at the end of the warm-up; the default is for a small model from random weights, and weights that are trained already
    /// take far less, such as 1e-5 [default: 0.008]
    #[arg(long, value_name = "RATE", help_heading = "Training")]
    pub lr: Option<f64>,
    /// Steps over which the learning rate rises from zero, before it falls with the root of the step; 0: constant [default: 10]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub warmup: Option<u64>,
    /// Decoupled weight decay of matrices [default: 0.1]
    #[arg(long, value_name = "RATE", help_heading = "Training")]
    pub weight_decay: Option<f64>,
    /// Global gradient norm is clipped to this; 0 clips nothing [default: 1]
    #[arg(long, value_name = "NORM", help_heading = "Training")]
    pub clip: Option<f64>,
    /// Dropout probability on residual branches [default: 0]
    #[arg(long, value_name = "P", help_heading = "Training")]
    pub dropout: Option<f32>,
    /// Micro-batches whose gradients are added up in a step [default: 1]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub accum: Option<usize>,
    /// Where the arithmetic runs
    #[arg(long, value_enum, default_value_t, help_heading = "Plan")]
    pub device: DeviceChoice,
    /// `auto` (solved), `resident` (everything stays in HBM), `checkpoint` (boundaries stay, internals are recomputed), or a
    /// schedule file
    #[arg(long, value_name = "PLAN", default_value = "auto", help_heading = "Plan")]
    pub plan: String,
    /// Where weights and gradients of layers are when no layer uses them
    #[arg(long, value_enum, default_value_t, help_heading = "Plan")]
    pub weights: WeightsHome,
    /// Caps and machine.
    #[command(flatten)]
    pub budgets: BudgetArgs,
    /// Folder for spill files; default: `spill` beside the run
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    pub nvme_dir: Option<PathBuf>,
    /// What moves bytes to and from drives; a choice that cannot be had is refused
    #[arg(long, value_enum, default_value_t, help_heading = "Run")]
    pub io: IoChoice,
    /// Folder for the optimizer's state; default: `state` in the run
    #[arg(long, value_name = "DIR", help_heading = "Optimizer state")]
    pub state_dir: Option<PathBuf>,
    /// Type of weights and activations [default: bf16 on a GPU, f32 on the host device, which has no other]
    #[arg(long, value_enum, help_heading = "Training")]
    pub dtype: Option<Real>,
    /// Type of the gradients of weights [default: as --dtype]
    #[arg(long, value_enum, help_heading = "Training")]
    pub grad_dtype: Option<Real>,
    /// Where the optimizer's state lives: what does not fit there goes to the next of hbm, host and nvme [default: nvme]
    #[arg(long, value_enum, help_heading = "Optimizer state")]
    pub state: Option<StateHome>,
    /// Most of the optimizer's state in the GPU's memory, with --state hbm [default: all]
    #[arg(long, value_name = "GIB", value_parser = parse_gib, help_heading = "Optimizer state")]
    pub state_hbm_gib: Option<Bytes>,
    /// Most of the optimizer's state in RAM, with --state host or hbm [default: all]
    #[arg(long, value_name = "GIB", value_parser = parse_gib, help_heading = "Optimizer state")]
    pub state_host_gib: Option<Bytes>,
    /// Where the arithmetic of the optimizer runs for state in RAM and on NVMe
    #[arg(long, value_enum, default_value_t, help_heading = "Optimizer state")]
    pub update: UpdateChoice,
    /// Format of the optimizer's moments; parameters of fewer than 4096 elements keep float32 [default: f32]
    #[arg(long, value_enum, help_heading = "Optimizer state")]
    pub moments: Option<MomentFormat>,
    /// Share of the parameters whose moments take 8 bits, the largest first [default: 0, or 1 with --moments int8]
    #[arg(long, value_name = "F", help_heading = "Optimizer state")]
    pub max_8bit_fraction: Option<f64>,
    /// What a step leaves of the optimizer's state on disk [default: step, or checkpoint with --state host and hbm]
    #[arg(long, value_enum, help_heading = "Optimizer state")]
    pub durability: Option<DurabilityChoice>,
    /// Measure and plan, print the plan, and write nothing: no run folder, no step. With --json the schedule goes to standard output
    #[arg(long, help_heading = "Plan")]
    pub dry_run: bool,
    /// Blocks to read ahead: a number, or `auto`
    #[arg(long, value_name = "N", default_value = "auto", value_parser = parse_prefetch, help_heading = "Plan")]
    pub prefetch: Prefetch,
    /// Folder of the run; must not exist yet; default: `runs/` and the time
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    pub out: Option<PathBuf>,
    /// Continue a run from its last committed step
    #[arg(long, value_name = "RUN", conflicts_with = "out", help_heading = "Run")]
    pub resume: Option<PathBuf>,
    /// Continue with the weights alone: the optimizer's moments are zero again, as at the start of a run
    #[arg(long, requires = "resume", help_heading = "Optimizer state")]
    pub no_load_optim: bool,
    /// One JSON object on standard output at the end, and nothing else there
    #[arg(long, help_heading = "Run")]
    pub json: bool,
    /// Steps recorded in trace.json, counted from the start of this process
    #[arg(long, value_name = "N", default_value_t = 200, help_heading = "Run")]
    pub trace_steps: u64,
    /// Look for what changes a value, slowly: write what each boundary holds before it goes to NVMe and after it comes back (finite values,
    /// largest and mean magnitude, checksum) to boundaries.jsonl, stop where a layer is recomputed to other values, and fill memory
    /// with NaN whenever its owner changes
    #[arg(long, help_heading = "Run")]
    pub debug_boundaries: bool,
    /// Slow the host device's links down to these rates in GB/s, of h2d, d2h, nvme_read and nvme_write those that are named, as in
    /// h2d=2,nvme_read=0.5: shows how a plan would do on a machine with such links
    #[arg(long, value_name = "LINK=RATE,..", value_parser = parse_throttle, help_heading = "Plan")]
    pub throttle: Option<LinkLimits>,
}

/// How far to read ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefetch {
    /// As far as the time line says is worth its memory.
    #[default]
    Auto,
    /// This many blocks.
    Blocks(usize),
}

impl Prefetch {
    /// `None` for [`Prefetch::Auto`].
    pub const fn blocks(self) -> Option<usize> {
        match self {
            Prefetch::Auto => None,
            Prefetch::Blocks(n) => Some(n),
        }
    }
}

fn parse_prefetch(text: &str) -> std::result::Result<Prefetch, String> {
    match text {
        "auto" => Ok(Prefetch::Auto),
        n => match n.parse() {
            Ok(n) if n <= 1024 => Ok(Prefetch::Blocks(n)),
            _ => Err("give a number of blocks from 0 to 1024, or `auto`".into()),
        },
    }
}

pub(crate) fn parse_throttle(text: &str) -> std::result::Result<LinkLimits, String> {
    let mut limits = LinkLimits::default();
    for part in text.split(',') {
        let (link, rate) = part.split_once('=').ok_or("give LINK=RATE, for example h2d=2,nvme_read=0.5")?;
        let entry = match link.trim() {
            "h2d" => &mut limits.h2d,
            "d2h" => &mut limits.d2h,
            "nvme_read" => &mut limits.nvme_read,
            "nvme_write" => &mut limits.nvme_write,
            other => {
                return Err(format!("{other:?} is none of the links h2d, d2h, nvme_read and nvme_write"));
            }
        };
        // Slower, and a copy would take so long that nothing seems to go on.
        let gbps = rate.trim().parse().ok().filter(|rate: &f64| rate.is_finite() && *rate >= 0.001);
        let gbps = gbps.ok_or_else(|| format!("{link}={rate}: give a rate in GB/s, 0.001 or more"))?;
        if entry.replace(BytesPerSecond::from_gb(gbps)).is_some() {
            return Err(format!("{link} is given twice"));
        }
    }
    Ok(limits)
}

fn parse_gib(text: &str) -> std::result::Result<Bytes, String> {
    match text.parse::<f64>() {
        Ok(gib) if (0.0..=1e9).contains(&gib) => Ok(Bytes((gib * (1u64 << 30) as f64) as u64)),
        _ => Err("give a number of GiB, 0 or more".into()),
    }
}

/// What decides every bit of a run: remembered in `run.json`, and not to be changed on resuming.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Rows in a micro-batch.
    pub batch: usize,
    /// Tokens in a row.
    pub seq: usize,
    /// Seed.
    pub seed: u64,
    /// Learning rate after warm-up.
    pub lr: f64,
    /// Steps of warm-up.
    pub warmup: u64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// Largest gradient norm; 0 for none.
    pub clip: f64,
    /// Dropout probability.
    pub dropout: f32,
    /// Micro-batches in a step.
    pub accum: usize,
    /// Training text.
    pub text: Vec<PathBuf>,
    /// Folder of the optimizer's state; none: `state` in the run's folder, wherever that is moved.
    pub state_dir: Option<PathBuf>,
    /// The device it computes on.
    #[serde(default)]
    pub device: RunDevice,
    /// Type of weights and activations.
    #[serde(default)]
    pub dtype: Real,
    /// Type of the gradients of weights.
    #[serde(default)]
    pub grad_dtype: Real,
    /// Where the optimizer's state lives.
    pub state: StateHome,
    /// Most of it in the GPU's memory; none: all.
    #[serde(default)]
    pub state_hbm: Option<Bytes>,
    /// Most of it in RAM; none: all.
    #[serde(default)]
    pub state_host: Option<Bytes>,
    /// Format of its moments.
    pub moments: MomentFormat,
    /// Share of the parameters whose moments take 8 bits.
    pub max_8bit_fraction: f64,
    /// What a step leaves on disk.
    pub durability: DurabilityChoice,
    /// SHA-256 of the text.
    pub text_hash: String,
    /// Folder of the first weights; none: drawn from the seed.
    #[serde(default)]
    pub weights: Option<PathBuf>,
    /// All files of data hold examples.
    #[serde(default)]
    pub jsonl: bool,
    /// SHA-256 of the tokenizer; none: bytes are tokens.
    #[serde(default)]
    pub tokenizer: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            batch: 8,
            seq: 64,
            seed: 1,
            lr: 8e-3,
            warmup: 10,
            weight_decay: 0.1,
            clip: 1.0,
            dropout: 0.0,
            accum: 1,
            text: Vec::new(),
            state_dir: None,
            device: RunDevice::Host,
            dtype: Real::F32,
            grad_dtype: Real::F32,
            state: StateHome::Nvme,
            state_hbm: None,
            state_host: None,
            moments: MomentFormat::F32,
            max_8bit_fraction: 0.0,
            durability: DurabilityChoice::Step,
            text_hash: String::new(),
            weights: None,
            jsonl: false,
            tokenizer: None,
        }
    }
}

impl Settings {
    /// The settings of a new run on a device.
    ///
    /// # Errors
    /// When a value makes no sense.
    pub fn of(args: &TrainArgs, device: RunDevice) -> Result<Settings> {
        let d = Settings::default();
        let (state, moments) = (args.state.unwrap_or(d.state), args.moments.unwrap_or(d.moments));
        let fraction = if moments == MomentFormat::Int8 { 1.0 } else { d.max_8bit_fraction };
        let durability = if state == StateHome::Nvme { d.durability } else { DurabilityChoice::Checkpoint };
        let own = if device == RunDevice::Cuda { Real::Bf16 } else { Real::F32 };
        let dtype = args.dtype.unwrap_or(own);
        let settings = Settings {
            batch: args.batch.unwrap_or(d.batch),
            seq: args.seq.unwrap_or(d.seq),
            seed: args.seed.unwrap_or(d.seed),
            lr: args.lr.unwrap_or(d.lr),
            warmup: args.warmup.unwrap_or(d.warmup),
            weight_decay: args.weight_decay.unwrap_or(d.weight_decay),
            clip: args.clip.unwrap_or(d.clip),
            dropout: args.dropout.unwrap_or(d.dropout),
            accum: args.accum.unwrap_or(d.accum),
            text: absolute(&args.text),
            jsonl: args.jsonl,
            state_dir: args.state_dir.as_deref().map(absolute_path),
            device,
            dtype,
            grad_dtype: args.grad_dtype.unwrap_or(dtype),
            state,
            state_hbm: args.state_hbm_gib,
            state_host: args.state_host_gib,
            moments,
            max_8bit_fraction: args.max_8bit_fraction.unwrap_or(fraction),
            durability: args.durability.unwrap_or(durability),
            ..d
        };
        settings.check()?;
        Ok(settings)
    }

    /// Refuses flags that would make a resumed run another run.
    ///
    /// # Errors
    /// Names the first such flag.
    pub fn check_unchanged(&self, args: &TrainArgs) -> Result<()> {
        let changed = [
            ("--batch", args.batch.is_some_and(|v| v != self.batch)),
            ("--seq", args.seq.is_some_and(|v| v != self.seq)),
            ("--seed", args.seed.is_some_and(|v| v != self.seed)),
            ("--lr", args.lr.is_some_and(|v| v != self.lr)),
            ("--warmup", args.warmup.is_some_and(|v| v != self.warmup)),
            ("--weight-decay", args.weight_decay.is_some_and(|v| v != self.weight_decay)),
            ("--clip", args.clip.is_some_and(|v| v != self.clip)),
            ("--dropout", args.dropout.is_some_and(|v| v != self.dropout)),
            ("--accum", args.accum.is_some_and(|v| v != self.accum)),
            ("--text", !args.text.is_empty() && absolute(&args.text) != self.text),
            ("--jsonl", args.jsonl && !self.jsonl),
            ("--tokenizer", args.tokenizer.is_some()),
            ("--model", args.model.is_some()),
            ("--dtype", args.dtype.is_some_and(|v| v != self.dtype)),
            ("--grad-dtype", args.grad_dtype.is_some_and(|v| v != self.grad_dtype)),
            ("--state", args.state.is_some_and(|v| v != self.state)),
            ("--moments", args.moments.is_some_and(|v| v != self.moments)),
            ("--max-8bit-fraction", args.max_8bit_fraction.is_some_and(|v| v != self.max_8bit_fraction)),
            ("--durability", args.durability.is_some_and(|v| v != self.durability)),
            (
                "--state-dir",
                args.state_dir.is_some() && args.state_dir.as_deref().map(absolute_path) != self.state_dir,
            ),
        ];
        match changed.iter().find(|(_, changed)| *changed) {
            Some((flag, _)) => Err(TrainError::Usage(format!(
                "{flag} cannot be changed when a run is resumed: leave it out, or start a new run"
            ))),
            None => Ok(()),
        }
    }

    /// Refuses values that make no sense, naming the flag.
    ///
    /// # Errors
    /// For the first such value.
    pub fn check(&self) -> Result<()> {
        let wrong = |flag: &str, want: &str| Err(TrainError::Usage(format!("{flag}: give {want}")));
        match self {
            s if s.batch == 0 || s.batch > 1 << 20 => wrong("--batch", "a number of rows from 1 to 1048576"),
            s if s.seq < 2 || s.seq > 1 << 20 => wrong("--seq", "a number of tokens from 2 to 1048576"),
            s if s.batch * s.seq > 1 << 30 => {
                wrong("--batch", "fewer rows, or --seq fewer tokens: a micro-batch has at most 2^30 tokens")
            }
            s if s.accum == 0 || s.accum > 1 << 16 => {
                wrong("--accum", "a number of micro-batches from 1 to 65536")
            }
            s if !(s.lr.is_finite() && s.lr >= 0.0) => wrong("--lr", "a number, 0 or more"),
            s if !(s.weight_decay.is_finite() && s.weight_decay >= 0.0) => {
                wrong("--weight-decay", "a number, 0 or more")
            }
            s if !(s.clip.is_finite() && s.clip >= 0.0) => {
                wrong("--clip", "a norm above 0, or 0 for no clipping")
            }
            s if !(0.0..=1.0).contains(&s.max_8bit_fraction) => {
                wrong("--max-8bit-fraction", "a share of the parameters from 0 to 1")
            }
            s if s.state != StateHome::Nvme && s.durability == DurabilityChoice::Step => {
                wrong("--durability", "checkpoint: state in RAM or HBM is on disk only when it is saved")
            }
            s if s.state_host.is_some() && s.state == StateHome::Nvme => {
                wrong("--state-host-gib", "--state host or --state hbm with it")
            }
            s if s.state_hbm.is_some() && s.state != StateHome::Hbm => {
                wrong("--state-hbm-gib", "--state hbm with it")
            }
            s if s.device == RunDevice::Host && s.state == StateHome::Hbm => {
                wrong("--state", "host or nvme on the host device: hbm needs --device cuda")
            }
            s if s.device == RunDevice::Host && s.dtype != Real::F32 => wrong(
                "--dtype",
                "f32 on the host device, which computes in nothing else: bf16 needs --device cuda",
            ),
            s if s.device == RunDevice::Host && s.grad_dtype != Real::F32 => {
                wrong("--grad-dtype", "f32 on the host device: bf16 needs --device cuda")
            }
            s if !(0.0..1.0).contains(&s.dropout) => wrong("--dropout", "a probability from 0 to below 1"),
            _ => Ok(()),
        }
    }

    /// Batch and sequence.
    pub const fn shape(&self) -> Shape {
        Shape { batch: self.batch, seq: self.seq }
    }

    /// Whether the optimizer may begin before all gradients are known: none is clipped by the norm of all, and a step can be taken back.
    pub fn is_beside_backward(&self) -> bool {
        self.clip == 0.0 && self.durability == DurabilityChoice::Step
    }

    /// Tokens in an optimizer step.
    pub const fn tokens(&self) -> usize {
        self.batch * self.seq * self.accum
    }

    /// Learning rate of a step, counted from 0: a linear rise over the warm-up, then a fall with the root of the step (Vaswani et
    /// al., "Attention Is All You Need", 2017). It does not depend on the number of steps, so a run that is made longer is the
    /// same run. Without a warm-up it is constant.
    pub fn lr_at(&self, step: u64) -> f64 {
        let (done, warmup) = ((step + 1) as f64, self.warmup as f64);
        match self.warmup {
            0 => self.lr,
            w if step < w => self.lr * done / warmup,
            _ => self.lr * (warmup / done).sqrt(),
        }
    }
}

/// As seen from anywhere, so that a run can be resumed from another folder.
pub(crate) fn absolute(paths: &[PathBuf]) -> Vec<PathBuf> {
    paths.iter().map(|path| absolute_path(path)).collect()
}

fn absolute_path(path: &Path) -> PathBuf {
    // Fails for an empty path alone, which is refused where it is used.
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_learning_rate_rises_linearly_and_falls_with_the_root() {
        let settings = Settings { lr: 0.1, warmup: 4, ..Settings::default() };
        let rates: Vec<f64> = (0..4).map(|s| settings.lr_at(s)).collect();
        assert_eq!(rates, [0.025, 0.05, 0.1 * 3.0 / 4.0, 0.1]);
        // Four times the warm-up, half the rate.
        assert_eq!(settings.lr_at(15), 0.05);
        assert_eq!(Settings { warmup: 0, ..settings }.lr_at(0), 0.1);
    }

    #[test]
    fn senseless_values_are_refused_by_flag() {
        for (args, flag) in [
            (TrainArgs { batch: Some(0), ..TrainArgs::default() }, "--batch"),
            (TrainArgs { seq: Some(1), ..TrainArgs::default() }, "--seq"),
            (TrainArgs { lr: Some(f64::NAN), ..TrainArgs::default() }, "--lr"),
            (TrainArgs { clip: Some(-1.0), ..TrainArgs::default() }, "--clip"),
            (TrainArgs { dropout: Some(1.0), ..TrainArgs::default() }, "--dropout"),
            (TrainArgs { accum: Some(0), ..TrainArgs::default() }, "--accum"),
            (TrainArgs { max_8bit_fraction: Some(1.5), ..TrainArgs::default() }, "--max-8bit-fraction"),
            (
                TrainArgs {
                    state: Some(StateHome::Host),
                    durability: Some(DurabilityChoice::Step),
                    ..TrainArgs::default()
                },
                "--durability",
            ),
            (TrainArgs { state: Some(StateHome::Hbm), ..TrainArgs::default() }, "--state:"),
            (TrainArgs { state_host_gib: Some(Bytes(1)), ..TrainArgs::default() }, "--state-host-gib"),
            (TrainArgs { dtype: Some(Real::Bf16), ..TrainArgs::default() }, "--dtype"),
            (TrainArgs { grad_dtype: Some(Real::Bf16), ..TrainArgs::default() }, "--grad-dtype"),
        ] {
            assert!(Settings::of(&args, RunDevice::Host).unwrap_err().to_string().starts_with(flag));
        }
    }

    #[test]
    fn links_are_slowed_down_by_name_and_in_decimal_units() {
        let limits = parse_throttle("h2d=2, nvme_read=0.5").unwrap();
        let expected = LinkLimits {
            h2d: Some(BytesPerSecond(2e9)),
            nvme_read: Some(BytesPerSecond(5e8)),
            ..LinkLimits::default()
        };
        assert_eq!(limits, expected);
        for (text, part) in [
            ("", "h2d=2,nvme_read"),
            ("pcie=2", "pcie"),
            ("h2d=0", "0.001 or more"),
            ("h2d=1e-7", "0.001 or more"),
            ("h2d=inf", "0.001 or more"),
            ("h2d=1,h2d=2", "twice"),
        ] {
            let error = parse_throttle(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn a_resumed_run_keeps_its_settings() {
        let settings = Settings::of(&TrainArgs::default(), RunDevice::Host).unwrap();
        settings.check_unchanged(&TrainArgs { batch: Some(8), ..TrainArgs::default() }).unwrap();
        let error = settings.check_unchanged(&TrainArgs { lr: Some(0.5), ..TrainArgs::default() });
        assert!(error.unwrap_err().to_string().starts_with("--lr"));
    }
}
