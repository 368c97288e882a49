//! Parameters, sizes and work of a [`ModelSpec`](crate::ModelSpec), layer by layer.
//!
//! Symbols used below: `T = batch * sequence` tokens, `S` tokens a sequence, `h` hidden, `V` vocabulary, `e` bytes of an
//! activation element, `N` layers. Of softmax attention: `q = heads * head_dim`, `k = kv_heads * head_dim`. Of a dense MLP: `m`
//! intermediate.

mod fused;
mod parameters;
mod sizer;
mod sizes;
mod state;
mod work;
mod workspace;

pub use self::fused::{FusedBytes, FusedKernels};
pub(crate) use self::parameters::EXPERT;
pub use self::parameters::Parameter;
pub use self::sizes::{LossBytes, SavedTensor};
pub use self::state::{MomentFormat, Sharding, StateBytes, StateFormat};
pub use self::workspace::LayerWorkspace;
use crate::error::Error;

/// How softmax attention is computed. Linear attention has one form, its fused chunked kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AttentionKernel {
    /// Flash attention: scores exist a tile at a time, their log-sum-exp is kept.
    #[default]
    Fused,
    /// Products and softmax one after the other; the scores of every head exist whole, masked ones included.
    Eager,
}

/// What a layer's forward leaves for its backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Saving {
    /// Whatever the backward of each operation takes, one kernel an operation.
    #[default]
    Operands,
    /// The least that spares backward a matrix product and attention: what is made element by element, norms and rotation
    /// included, is made again.
    Products,
}

/// What one step trains on, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    batch: usize,
    sequence: usize,
    element_bytes: usize,
    attention: AttentionKernel,
    saving: Saving,
}

impl Workload {
    /// `batch` sequences of `sequence` tokens with activations of `element_bytes` bytes an element, fused attention.
    ///
    /// # Errors
    /// Where a value is zero, an element is wider than 8 bytes, or there are more than 2^30 tokens.
    pub fn new(batch: usize, sequence: usize, element_bytes: usize) -> Result<Self, Error> {
        let fail = |problem: String| Err(Error::Workload { problem });
        match batch.checked_mul(sequence) {
            Some(0) => fail(format!("batch {batch} and sequence {sequence} must both be at least 1")),
            Some(tokens) if tokens <= 1 << 30 => match element_bytes {
                1 | 2 | 4 | 8 => {
                    let (attention, saving) = (AttentionKernel::Fused, Saving::Operands);
                    Ok(Self { batch, sequence, element_bytes, attention, saving })
                }
                other => fail(format!("{other} bytes an element; it must be 1, 2, 4 or 8")),
            },
            _ => fail(format!("batch {batch} x sequence {sequence} is more than 2^30 tokens; lower one")),
        }
    }

    /// The same with softmax attention computed that way.
    pub fn with_attention(self, attention: AttentionKernel) -> Self {
        Self { attention, ..self }
    }

    /// The same with layers that save that much.
    pub fn with_saving(self, saving: Saving) -> Self {
        Self { saving, ..self }
    }

    /// Sequences a step.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Tokens a sequence.
    pub fn sequence(&self) -> usize {
        self.sequence
    }

    /// Bytes of one activation element.
    pub fn element_bytes(&self) -> usize {
        self.element_bytes
    }

    /// How softmax attention is computed.
    pub fn attention(&self) -> AttentionKernel {
        self.attention
    }

    /// What layers save.
    pub fn saving(&self) -> Saving {
        self.saving
    }

    /// `T = batch * sequence`.
    pub fn tokens(&self) -> u64 {
        self.batch as u64 * self.sequence as u64
    }
}
