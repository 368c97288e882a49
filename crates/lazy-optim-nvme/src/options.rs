//! What the caller hands in and gets back: parameters, hyper-parameters, tuning, and the account of a step.

use std::time::Instant;

use lazy_model::{Bytes, Seconds, Span};

use lazy_store::durable::IoOptions;
use lazy_store::{DeviceChoice, Stream};

use crate::moments::Moments;

/// One parameter, or this store's part of one, in the caller's order. The list of them is the layout of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamSpec {
    /// Unique name.
    pub name: String,
    /// Dimensions of what is held here; the element count is their product (1 for an empty list).
    pub shape: Vec<usize>,
    /// Index into [`StepInput::groups`].
    pub group: usize,
    /// How its moments are kept.
    pub moments: Moments,
    /// Which part of a larger parameter is held here; `None`: all of it.
    pub shard: Option<Shard>,
}

impl ParamSpec {
    /// A whole parameter of group 0 with float32 moments.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        let (name, shape) = (name.into(), shape.to_vec());
        ParamSpec { name, shape, group: 0, moments: Moments::F32, shard: None }
    }

    /// The same parameter in another group.
    pub fn in_group(self, group: usize) -> Self {
        ParamSpec { group, ..self }
    }

    /// The same parameter with moments in another format.
    pub fn with_moments(self, moments: Moments) -> Self {
        ParamSpec { moments, ..self }
    }

    /// The `elements` from `first` on of this whole parameter, flattened: the shard of a rank that holds a run of it.
    ///
    /// Shards cut at multiples of 65,536 elements give the same bits for any number of shards.
    pub fn range(self, first: usize, elements: usize) -> Self {
        let shard = Some(Shard { global_shape: self.shape, part: Part::Range { first } });
        ParamSpec { shape: vec![elements], shard, ..self }
    }

    /// The box of `shape` at `offsets` of this whole parameter: the shard of a rank that holds some of its rows or columns.
    pub fn boxed(self, offsets: &[usize], shape: &[usize]) -> Self {
        let shard = Some(Shard { global_shape: self.shape, part: Part::Box { offsets: offsets.to_vec() } });
        ParamSpec { shape: shape.to_vec(), shard, ..self }
    }
}

/// A part of a larger parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Dimensions of the whole parameter.
    pub global_shape: Vec<usize>,
    /// What is held of it.
    pub part: Part,
}

/// Which elements of a parameter a shard holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// A run of the flattened parameter from `first` on. [`ParamSpec::shape`] is its length.
    Range {
        /// Index of its first element.
        first: usize,
    },
    /// A box of [`ParamSpec::shape`].
    Box {
        /// Index of its first element in every dimension.
        offsets: Vec<usize>,
    },
}

/// Hyper-parameters of one group, re-read every step, so that a schedule is the caller's own arithmetic.
///
/// The meaning and the defaults are those of `torch.optim.AdamW` (with `decoupled`) and `torch.optim.Adam` (without).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupOptions {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Decay of the first and second moment, each in `[0, 1)`.
    pub betas: (f64, f64),
    /// Added to the root of the second moment, at least 0.
    pub eps: f64,
    /// Weight decay, at least 0.
    pub weight_decay: f64,
    /// `true`: the decay shrinks the weight (AdamW). `false`: it is added to the gradient (Adam with L2).
    pub decoupled: bool,
    /// Ascend instead of descend.
    pub maximize: bool,
}

impl Default for GroupOptions {
    fn default() -> Self {
        GroupOptions {
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.01,
            decoupled: true,
            maximize: false,
        }
    }
}

/// What a step leaves on disk. Fixed when the store is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// Every step commits: whatever cuts it short, the state before it or after it is there. Takes twice the space of the
    /// state, and a flush of what was written each step.
    #[default]
    Step,
    /// Steps update the state in place and commit nothing; the state of the last save is what survives. Takes the space of
    /// the state once, and one flush after each save. A store that was stopped after that is refused by name when it is
    /// opened; [going back](crate::LoadOptions::replace) to what was saved links its files. While a generation is kept, the
    /// state takes its space once more from the next step on: every step changes all of it.
    Checkpoint,
}

/// Where the update of state at home in RAM and on NVMe is computed. The bits are the same; state at home in HBM is updated there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpdateOn {
    /// On the processor's cores. Gradients and weights in the GPU's memory are copied.
    Cpu,
    /// On the GPU of [`AdamOptions::device`]: chunks of the state go there and back.
    Cuda,
    /// Where it takes less time, measured when the store is opened; without a GPU on the processor. [`NvmeAdam::update_on`] says
    /// what was taken and why.
    ///
    /// [`NvmeAdam::update_on`]: crate::NvmeAdam::update_on
    #[default]
    Auto,
}

/// Where updates of state at home in RAM and on NVMe are computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateChoice {
    /// [`UpdateOn::Cpu`] or [`UpdateOn::Cuda`].
    pub on: UpdateOn,
    /// With [`UpdateOn::Auto`] beside a GPU, the time of a chunk on each, of several in a row: with checksums, gradients that are float32
    /// in device memory and weights that go there as bfloat16, and all copies.
    pub measured: Option<UpdateCosts>,
}

/// Time of a chunk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateCosts {
    /// On the processor.
    pub cpu: Seconds,
    /// On the GPU.
    pub cuda: Seconds,
}

/// How the state is cut, kept and streamed.
#[derive(Clone, Debug)]
pub struct AdamOptions {
    /// Elements in a bucket, the unit of the two slots; fixed when the store is made. A bucket holds moments of one format; with
    /// 8-bit ones it is rounded up to a multiple of 256. Default 200 million.
    pub bucket_elements: usize,
    /// Bytes of the main weights of a chunk, the unit of the pipeline, rounded up to whole checksum blocks of 64 KiB, with
    /// 8-bit moments to whole MiB. May differ from one opening to the next. Default 16 MiB.
    pub chunk_bytes: Bytes,
    /// Chunks in the ring. 1 does one thing at a time; from 3 on reads, arithmetic and writes all overlap.
    /// Default 3.
    pub depth: usize,
    /// What a step leaves on disk. Default: everything.
    pub durability: Durability,
    /// The GPU in whose memory gradients, weights and state may be. Default: none.
    pub device: DeviceChoice,
    /// Where updates are computed. Default: where that takes less time.
    pub update: UpdateOn,
    /// State that is at home in the GPU's memory: whole buckets, from the first on, as many as fit. It is on disk only in what was
    /// saved, so this needs [`Durability::Checkpoint`]. Default none.
    pub hbm: Bytes,
    /// State that is at home in RAM: whole buckets, from the first on of the others, as many as fit; as for `hbm`. Default none.
    pub host: Bytes,
    /// How the files are read and written.
    pub io: IoOptions,
}

impl Default for AdamOptions {
    fn default() -> Self {
        AdamOptions {
            bucket_elements: 200_000_000,
            chunk_bytes: Bytes::from_mib(16),
            depth: 3,
            durability: Durability::Step,
            device: DeviceChoice::Host,
            update: UpdateOn::Auto,
            hbm: Bytes::ZERO,
            host: Bytes::ZERO,
            io: IoOptions::default(),
        }
    }
}

/// What one step needs besides the gradients.
#[derive(Clone, Copy, Debug)]
pub struct StepInput<'a> {
    /// Hyper-parameters by group index.
    pub groups: &'a [GroupOptions],
    /// The gradients' norm over all ranks, from [`combine_norm`](crate::combine_norm); `None`: that of the gradients given.
    pub grad_norm: Option<f64>,
    /// Clip the global norm to this; `None` leaves the gradients alone. Must be finite and above 0.
    pub max_norm: Option<f64>,
    /// Gradients are divided by it first (loss scale, accumulation count). Must be finite and above 0.
    pub scale: f64,
    /// The caller's own state (data cursor, seed, schedule hash), committed with the step; at most
    /// [`MAX_BLOB_BYTES`](crate::MAX_BLOB_BYTES) bytes.
    pub blob: &'a [u8],
    /// The stream of the caller's on which gradients in device memory are computed, and weights there were last used: the call begins
    /// with waiting for what is on it. `None`: all that is done. When the call returns, what it did in device memory is done.
    pub stream: Option<Stream>,
    /// Zero of the times in [`StepOutcome::spans`]; the start of the call where absent.
    pub origin: Option<Instant>,
}

impl Default for StepInput<'_> {
    fn default() -> Self {
        StepInput {
            groups: &[],
            grad_norm: None,
            max_norm: None,
            scale: 1.0,
            blob: &[],
            stream: None,
            origin: None,
        }
    }
}

/// Where a step's time went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepSeconds {
    /// Global norm and clip coefficient.
    pub norm: Seconds,
    /// Reading, updating and writing the buckets.
    pub update: Seconds,
    /// Flushing the slot files, writing and flushing the record.
    pub commit: Seconds,
}

/// The account of one step.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct StepOutcome {
    /// Euclidean norm of all gradients after division by the scale, before clipping.
    pub grad_norm: f64,
    /// What the gradients were multiplied by: `min(1, max_norm / (grad_norm + 1e-6))`, 1 without clipping.
    pub clip_coefficient: f64,
    /// The norm was not finite: nothing was read, written or committed, no counter moved.
    pub skipped: bool,
    /// Where the time went.
    pub seconds: StepSeconds,
    /// Bytes read from the state's files.
    pub bytes_read: Bytes,
    /// Bytes written to the state's files.
    pub bytes_written: Bytes,
    /// What ran when: transfers and the commit on the lanes of the drive, copies on those of the link, arithmetic on the optimizer
    /// lane.
    pub spans: Vec<Span>,
    /// Something the caller should show: for example a norm so large that clipping pushes gradients under `eps`.
    pub warning: Option<String>,
}

/// A run of elements of one parameter's state.
#[derive(Clone, Copy, Debug)]
pub struct StatePart<'a> {
    /// Index of the parameter.
    pub param: usize,
    /// First element, counted in the parameter.
    pub first: usize,
    /// Main weights.
    pub main: &'a [f32],
    /// First moments, as many.
    pub exp_avg: &'a [f32],
    /// Second moments, as many.
    pub exp_avg_sq: &'a [f32],
}
