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

/// A layer's weights, in the order of `ModelSpec::layer_parameters`.
struct Weights([Tensor; PARAMETERS]);

impl Decoder {
    fn weights(&self, layer: usize, tracked: bool) -> Result<Weights> {
        if layer >= self.spec.layers() {
            return input_error(format!("there is no layer {layer}: the model has {}", self.spec.layers()));
        }
        let first = self.layer_parameters(layer).start;
        Ok(Weights(std::array::from_fn(|i| {
            let var = &self.parameters[first + i].1;
            // A detached tensor shares the storage and starts no graph.
            if tracked { var.as_tensor().clone() } else { var.as_detached_tensor() }
        })))
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
        let (spec, c) = (&self.spec, &self.geometry);
        let Weights([norm_1, q, k, v, o, q_norm, k_norm, norm_2, gate, up, down]) =
            self.weights(layer, x.is_variable())?;
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

        let input = norm(x, &norm_1)?;
        let query = rotated(&input.apply_op2(&q, Linear)?, &q_norm, c.heads)?;
        let key = rotated(&input.apply_op2(&k, Linear)?, &k_norm, c.kv_heads)?;
        let value = input.apply_op2(&v, Linear)?;
        let (heads, kv_heads, head_dim) = (c.heads, c.kv_heads, c.head_dim);
        let attention = Attention { batch, seq, heads, kv_heads, head_dim };
        let attended = query.apply_op3(&key, &value, attention)?;
        let x = residual(x, &attended.apply_op2(&o, Linear)?, 0)?;

        let input = norm(&x, &norm_2)?;
        let gated = input.apply_op2(&gate, Linear)?.apply_op2(&input.apply_op2(&up, Linear)?, SwiGlu)?;
        Ok(residual(&x, &gated.apply_op2(&down, Linear)?, 1)?)
    }
}
