//! What a decoder of fused kernels takes, every buffer counted: `train-lm`'s for GPUs declares these bytes.

use super::Workload;
use super::sizer::{FP32, Sizer};
use crate::config::{Mixer, Mlp, ModelSpec};
use crate::units::{Bytes, LayerIndex};

/// Rows of logits start at multiples of so many bytes, which is what vector loads need.
const LOGITS_ALIGNMENT: u64 = 16;

/// How the kernels of such a decoder work, as far as sizes depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedKernels {
    /// Buffers start at multiples of so many bytes.
    pub alignment: u64,
    /// Workspace of a matrix product.
    pub product: Bytes,
    /// Sums that the gradient of a norm's weights is made of: each a row of fp32 as wide as the model or a head, whichever is wider.
    pub partial_sums: u64,
    /// Tokens whose logits exist at a time.
    pub loss_tokens: u64,
    /// Whether residual branches pass through dropout.
    pub dropout: bool,
}

/// Those of `train-lm` on GPUs, without dropout.
impl Default for FusedKernels {
    fn default() -> Self {
        FusedKernels {
            alignment: 256,
            product: Bytes::from_mib(32),
            partial_sums: 512,
            loss_tokens: 4096,
            dropout: false,
        }
    }
}

/// Bytes that such a decoder declares for one layer, and for the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedBytes {
    /// What the backward needs of the forward besides the layer's input ([`Saving::Products`](super::Saving::Products)).
    pub internals: Bytes,
    /// Workspace of a forward, whether it saves or not.
    pub forward: Bytes,
    /// Workspace of a backward, and of a forward for internals just before it.
    pub backward: Bytes,
    /// Workspace of final norm, head and loss.
    pub loss: Bytes,
}

/// Aligned sizes of one workload.
struct Buffers<'a> {
    sizer: Sizer,
    kernels: &'a FusedKernels,
}

impl Buffers<'_> {
    fn aligned(&self, bytes: Bytes) -> Bytes {
        bytes.align_up(self.kernels.alignment.max(1))
    }

    /// A tensor of `width` elements a token.
    fn wide(&self, width: usize) -> Bytes {
        self.aligned(self.sizer.wide(width))
    }

    /// Tensors of these widths that exist at once.
    fn all<const N: usize>(&self, widths: [usize; N]) -> Bytes {
        widths.into_iter().map(|width| self.wide(width)).sum()
    }

    /// `width` numbers a token in fp32.
    fn fp32(&self, width: usize) -> Bytes {
        self.aligned(self.sizer.fp32(width))
    }
}

impl ModelSpec {
    /// What a layer and the loss of a decoder with these kernels take, to the byte; see `docs/model.md`. `None` of a layer that is none of
    /// its kind: softmax attention with norms on queries and keys, without a gate, and a dense MLP, normed before alone.
    ///
    /// # Panics
    /// Where the model has no such layer.
    pub fn fused_bytes(
        &self,
        layer: LayerIndex,
        work: &Workload,
        kernels: &FusedKernels,
    ) -> Option<FusedBytes> {
        let shape = self.layer(layer);
        let (Mixer::Attention(a), Mlp::Dense(mlp)) = (&shape.mixer, &shape.mlp) else { return None };
        if !a.qk_norm || a.output_gate || shape.norms.after() {
            return None;
        }
        let (h, m, q, k) = (self.hidden, mlp.intermediate, a.query_width(), a.kv_width());
        let buffers = Buffers { sizer: Sizer::new(work), kernels };
        // A cosine and a sine for every position and pair of a head's elements.
        let table = buffers.aligned(Bytes((work.sequence() * (a.head_dim / 2)) as u64 * 2 * FP32));
        let product = buffers.aligned(kernels.product);
        let sums = buffers.aligned(Bytes(kernels.partial_sums * h.max(a.head_dim) as u64 * FP32));
        let branch = if kernels.dropout { buffers.wide(h) } else { Bytes::ZERO };
        let lse = buffers.fp32(a.heads);
        let around = product + table + buffers.wide(h) + branch;
        let saving = around + buffers.all([q, k]).max(buffers.wide(m));
        let bare = around + buffers.wide(h) + (buffers.all([q, k, k, q]) + lse).max(buffers.all([m, m]));
        let attention = lse + buffers.all([q, k, q, q, k, k]);
        let backward =
            product + table + sums + buffers.all([h, h]) + branch + attention.max(buffers.all([m, m, m]));
        Some(FusedBytes {
            // Nothing comes after the last of them.
            internals: buffers.all([h, m, m, q, k, k, q]) + buffers.sizer.fp32(a.heads),
            forward: saving.max(bare),
            backward: backward.max(saving),
            loss: product + sums + self.fused_loss(&buffers, work),
        })
    }

    /// Losses of all tokens, and of those that are worked on normed inputs with their gradients and logits.
    fn fused_loss(&self, buffers: &Buffers<'_>, work: &Workload) -> Bytes {
        let rows = buffers.kernels.loss_tokens.min(work.tokens());
        let element = work.element_bytes() as u64;
        let logits = Bytes(self.vocab as u64 * element).align_up(LOGITS_ALIGNMENT) * rows;
        let normed = buffers.aligned(Bytes(rows * self.hidden as u64 * element));
        buffers.fp32(1) + normed * 2 + buffers.aligned(logits)
    }
}
