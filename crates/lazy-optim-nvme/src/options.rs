//! What the caller hands in and gets back: parameters, hyper-parameters, tuning, and the account of a step.

use std::time::Instant;

use lazy_model::{Bytes, Seconds, Span};

use lazy_store::durable::IoOptions;

/// One parameter, in the caller's order. The order, names, shapes and groups are the layout of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamSpec {
    /// Unique name.
    pub name: String,
    /// Dimensions; the element count is their product (1 for an empty list).
    pub shape: Vec<usize>,
    /// Index into [`StepInput::groups`].
    pub group: usize,
}

impl ParamSpec {
    /// A parameter of group 0.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        ParamSpec { name: name.into(), shape: shape.to_vec(), group: 0 }
    }

    /// The same parameter in another group.
    pub fn in_group(self, group: usize) -> Self {
        ParamSpec { group, ..self }
    }
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

/// How the state is cut and streamed.
#[derive(Clone, Debug)]
pub struct AdamOptions {
    /// Elements in a bucket, the unit of the two slots; fixed when the store is made. Default 200 million.
    pub bucket_elements: usize,
    /// Bytes of one section (main, first or second moment) of a chunk, the unit of the pipeline, rounded up to
    /// whole checksum blocks of 64 KiB. May differ from one opening to the next. Default 16 MiB.
    pub chunk_bytes: Bytes,
    /// Chunks in the ring. 1 does one thing at a time; from 3 on reads, arithmetic and writes all overlap.
    /// Default 3.
    pub depth: usize,
    /// How the files are read and written.
    pub io: IoOptions,
}

impl Default for AdamOptions {
    fn default() -> Self {
        AdamOptions {
            bucket_elements: 200_000_000,
            chunk_bytes: Bytes::from_mib(16),
            depth: 3,
            io: IoOptions::default(),
        }
    }
}

/// What one step needs besides the gradients.
#[derive(Clone, Copy, Debug)]
pub struct StepInput<'a> {
    /// Hyper-parameters by group index.
    pub groups: &'a [GroupOptions],
    /// Clip the global norm to this; `None` leaves the gradients alone. Must be finite and above 0.
    pub max_norm: Option<f64>,
    /// Gradients are divided by it first (loss scale, accumulation count). Must be finite and above 0.
    pub scale: f64,
    /// The caller's own state (data cursor, seed, schedule hash), committed with the step; at most
    /// [`MAX_BLOB_BYTES`](crate::MAX_BLOB_BYTES) bytes.
    pub blob: &'a [u8],
    /// Zero of the times in [`StepOutcome::spans`]; the start of the call where absent.
    pub origin: Option<Instant>,
}

impl Default for StepInput<'_> {
    fn default() -> Self {
        StepInput { groups: &[], max_norm: None, scale: 1.0, blob: &[], origin: None }
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
    /// What ran when: transfers and the commit on the lanes of the drive, arithmetic on the optimizer lane.
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
