//! One decoder layer, an autograd graph of its own.

use candle_core::Tensor;

use super::attention::Attention;
use super::linear::Linear;
use super::mlp::{Residual, SwiGlu};
use super::norm::{RmsNorm, Rotation};
use super::{Decoder, Result, StepContext, input_error};
use crate::dropout::Mask;

/// Parameters of a layer.
pub(crate) const PARAMETERS: usize = 11;

impl Decoder {
    fn check_layer(&self, layer: usize) -> Result<()> {
        match self.spec.layers() {
            layers if layer >= layers => {
                input_error(format!("there is no layer {layer}: the model has {layers}"))
            }
            _ => Ok(()),
        }
    }

    /// Leads from boundary `layer` to boundary `layer + 1`, both `[batch, seq, hidden]`.
    ///
    /// Where `x` is a variable, the result holds the layer's autograd graph, and with it every intermediate tensor,
    /// for the backward. Where it is a plain tensor, the intermediate tensors are dropped on the way.
    /// The values are the same.
    ///
    /// # Errors
    ///
    /// When there is no such layer, `x` has another width, or the dropout probability is not in `0.0..1.0`.
    pub fn layer_forward(&self, layer: usize, x: &Tensor, cx: &StepContext) -> Result<Tensor> {
        self.check_layer(layer)?;
        let weights = self.parameters[self.layer_parameters(layer)].iter().map(|(_, var)| {
            // A detached tensor shares the storage and starts no graph.
            if x.is_variable() { var.as_tensor().clone() } else { var.as_detached_tensor() }
        });
        self.layer_forward_with(layer, &weights.collect::<Vec<_>>(), x, cx)
    }

    /// The same with weights that are given, in the order of [`Decoder::layer_parameters`].
    ///
    /// # Errors
    ///
    /// As for [`Decoder::layer_forward`], and for another number of weights.
    pub fn layer_forward_with(
        &self,
        layer: usize,
        weights: &[Tensor],
        x: &Tensor,
        cx: &StepContext,
    ) -> Result<Tensor> {
        self.check_layer(layer)?;
        let (spec, c) = (&self.spec, &self.geometry);
        let [norm_1, q, k, v, o, q_norm, k_norm, norm_2, gate, up, down] = weights else {
            return input_error(format!("a layer has {PARAMETERS} weights, {} were given", weights.len()));
        };
        let (batch, seq, hidden) = x.dims3()?;
        if hidden != c.hidden || batch * seq == 0 {
            return input_error(format!(
                "boundary {layer} is [batch, seq, {}], got {:?}",
                c.hidden,
                x.shape()
            ));
        }
        if !(0.0..1.0).contains(&cx.dropout) {
            return input_error(format!("dropout is a probability below 1, got {}", cx.dropout));
        }
        let norm = |x: &Tensor, w: &Tensor| {
            x.apply_op2(w, RmsNorm { eps: spec.rms_norm_eps as f32, rotation: None })
        };
        let residual = |x: &Tensor, branch: &Tensor, site| {
            let mask = Mask::new(cx.dropout, cx.key, layer, site);
            x.apply_op2(branch, Residual { mask })
        };
        let rotated = |x: &Tensor, w: &Tensor, heads| {
            let rotation = Some(Rotation { table: self.rotary(seq), heads, seq });
            x.apply_op2(w, RmsNorm { eps: spec.rms_norm_eps as f32, rotation })
        };

        let input = norm(x, norm_1)?;
        let query = rotated(&input.apply_op2(q, Linear)?, q_norm, c.heads)?;
        let key = rotated(&input.apply_op2(k, Linear)?, k_norm, c.kv_heads)?;
        let value = input.apply_op2(v, Linear)?;
        let (heads, kv_heads, head_dim) = (c.heads, c.kv_heads, c.head_dim);
        let attention = Attention { batch, seq, heads, kv_heads, head_dim };
        let attended = query.apply_op3(&key, &value, attention)?;
        let x = residual(x, &attended.apply_op2(o, Linear)?, 0)?;

        let input = norm(&x, norm_2)?;
        let gated = input.apply_op2(gate, Linear)?.apply_op2(&input.apply_op2(up, Linear)?, SwiGlu)?;
        Ok(residual(&x, &gated.apply_op2(down, Linear)?, 1)?)
    }
}
