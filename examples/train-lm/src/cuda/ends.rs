//! Embedding, and final norm, head and loss, on the GPU.

use std::sync::Arc;

use lazy_model::Bytes;
use lazy_runtime::{Context, Epilogue, Grads, Input, LayerError, Loss, Output, Parameter, Prologue, Weights};

use super::blas::Matrix;
use super::kernels::Norm;
use super::places::rows_of;
use super::{Shared, batch};
use crate::decoder::LAYER_PARAMETERS;

/// Embedding and loss, which share the embedding's weights where those are tied.
pub(super) struct Ends(pub(super) Arc<Shared>);

type Result<T> = std::result::Result<T, LayerError>;

impl Ends {
    /// Tokens, rows and columns of the embedding.
    fn sizes(&self) -> [usize; 3] {
        [self.0.tokens(), self.0.spec.vocab, self.0.geometry.hidden]
    }
}

impl Prologue for Ends {
    fn output_bytes(&self) -> Bytes {
        self.0.places.boundary()
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.0.parameters([0])
    }

    fn forward(&self, cx: &Context<'_>, weights: Weights<'_>, out: Output<'_>) -> Result<()> {
        self.0.kernels.bind()?;
        let buffers = [batch(cx)?.ids, weights.get(0).range()?, out.range()?];
        Ok(self.0.kernels.embed_forward(cx.stream()?, buffers, self.sizes())?)
    }

    fn backward(&self, cx: &Context<'_>, _: Weights<'_>, dy: Input<'_>, mut grads: Grads<'_>) -> Result<()> {
        self.0.kernels.bind()?;
        let buffers = [batch(cx)?.ids, dy.range()?, grads.get(0).range()?];
        Ok(self.0.kernels.embed_backward(cx.stream()?, buffers, self.sizes())?)
    }
}

impl Epilogue for Ends {
    fn workspace(&self) -> Bytes {
        self.0.places.loss_bytes()
    }

    fn parameters(&self) -> Vec<Parameter> {
        let norm = 1 + self.0.spec.layers() * LAYER_PARAMETERS;
        self.0.parameters([norm, if self.0.spec.tied { 0 } else { norm + 1 }])
    }

    /// A few tokens at a time, so that never all logits exist.
    fn run(&self, cx: &Context<'_>, mut call: Loss<'_>) -> Result<()> {
        let Shared { kernels, blas, places, spec, options, .. } = &*self.0;
        let (batch, stream) = (batch(cx)?, cx.stream()?);
        let [tokens, vocab, hidden] = self.sizes();
        let p = places.loss(call.workspace.range()?);
        let (norm, head) = (call.weights.get(0).range()?, call.weights.get(1).range()?);
        let (x, dx) = (call.x.range()?, call.dx.map(|dx| dx.range()).transpose()?);
        let row = hidden * options.real.bytes();
        let scale = 1.0 / batch.count.max(1) as f32;
        kernels.bind()?;
        for first in (0..tokens).step_by(p.rows) {
            let rows = p.rows.min(tokens - first);
            let shape = Norm { rows, width: hidden, eps: spec.rms_norm_eps as f32 };
            let x = rows_of(x, first, rows, row);
            let normed = Matrix::new(p.normed, rows, hidden);
            let table = Matrix::new(head, vocab, hidden);
            let logits = Matrix { pitch: p.pitch, ..Matrix::new(p.logits, rows, vocab) };
            kernels.rms_forward(stream, shape, [x, norm, p.normed])?;
            blas.linear(stream, p.blas, [normed, table, logits], None)?;
            let (targets, losses) =
                (rows_of(batch.targets, first, rows, 4), rows_of(p.losses, first, rows, 4));
            let scale = if dx.is_some() { scale } else { 0.0 };
            kernels.cross_entropy(stream, [p.logits, targets, losses], [rows, vocab, p.pitch], scale)?;
            let Some(dx) = dx else { continue };
            let d_head = Matrix::new(call.grads.get(1).range()?, vocab, hidden);
            blas.weight_gradient(stream, p.blas, [logits, normed, d_head], options.gradients)?;
            let d_normed = Matrix::new(p.d_normed, rows, hidden);
            blas.input_gradient(stream, p.blas, [logits, table, d_normed], false)?;
            let tensors = [x, norm, p.d_normed, rows_of(dx, first, rows, row)];
            let sums = [p.parts, call.grads.get(0).range()?];
            kernels.rms_backward(stream, shape, tensors, None, sums)?;
        }
        Ok(kernels.sum_losses(stream, [p.losses, call.loss.range()?], tokens, scale)?)
    }
}
