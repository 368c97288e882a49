//! A layer on the GPU.

use std::sync::Arc;

use lazy_runtime::{
    Backward, Context, Forward, Grads, Layer, LayerError, LayerSizes, Parameter, Saved, Weights,
};
use lazy_store::{DeviceRange, Stream};

use super::blas::Matrix;
use super::kernels::{DeviceMask, Heads, Norm};
use super::places::{BackwardPlaces, ForwardPlaces, Internals};
use super::{Result, Shared, attention};
use crate::decoder::LAYER_PARAMETERS;
use crate::dropout::{DropoutKey, Mask};

/// One layer.
pub(super) struct CudaLayer {
    shared: Arc<Shared>,
    layer: usize,
}

/// Weights, or their gradients, in the order of `ModelSpec::layer_parameters`.
struct Tensors {
    norm_1: DeviceRange,
    q: DeviceRange,
    k: DeviceRange,
    v: DeviceRange,
    o: DeviceRange,
    q_norm: DeviceRange,
    k_norm: DeviceRange,
    norm_2: DeviceRange,
    gate: DeviceRange,
    up: DeviceRange,
    down: DeviceRange,
}

impl Tensors {
    fn of(
        get: impl FnMut(usize) -> std::result::Result<DeviceRange, LayerError>,
    ) -> std::result::Result<Tensors, LayerError> {
        let all: Vec<DeviceRange> = (0..LAYER_PARAMETERS).map(get).collect::<std::result::Result<_, _>>()?;
        let [norm_1, q, k, v, o, q_norm, k_norm, norm_2, gate, up, down] = all[..] else {
            return Err("a layer has another number of parameters than it declares".into());
        };
        Ok(Tensors { norm_1, q, k, v, o, q_norm, k_norm, norm_2, gate, up, down })
    }

    fn weights(weights: Weights<'_>) -> std::result::Result<Tensors, LayerError> {
        Tensors::of(|i| weights.get(i).range())
    }

    fn gradients(mut gradients: Grads<'_>) -> std::result::Result<Tensors, LayerError> {
        Tensors::of(|i| gradients.get(i).range())
    }
}

/// A call's stream and where products work.
#[derive(Clone, Copy)]
struct On {
    stream: Stream,
    blas: DeviceRange,
}

impl CudaLayer {
    pub(super) fn new(shared: &Arc<Shared>, layer: usize) -> CudaLayer {
        CudaLayer { shared: Arc::clone(shared), layer }
    }

    /// The mask of a residual branch, where there is dropout.
    fn mask(&self, cx: &Context<'_>, site: u64) -> Option<DeviceMask> {
        let key = DropoutKey { seed: cx.seed, step: cx.step, micro_batch: cx.micro_batch as u64 };
        let dropout =
            if cx.phase == lazy_runtime::Phase::Evaluation { 0.0 } else { self.shared.options.dropout };
        Mask::new(dropout, key, self.layer, site).map(|mask| {
            let (state, threshold, scale) = mask.parts();
            DeviceMask { state, threshold, scale }
        })
    }

    fn norm(&self) -> Norm {
        let shared = &self.shared;
        Norm { rows: shared.tokens(), width: shared.geometry.hidden, eps: shared.spec.rms_norm_eps as f32 }
    }

    fn heads(&self, heads: usize) -> Heads {
        let shared = &self.shared;
        let (tokens, seq) = (shared.tokens(), shared.options.shape.seq);
        Heads { tokens, heads, seq, eps: shared.spec.rms_norm_eps as f32 }
    }

    fn shape(&self) -> attention::Heads {
        let (shape, g) = (self.shared.options.shape, &self.shared.geometry);
        attention::Heads { batch: shape.batch, seq: shape.seq, heads: g.heads, kv_heads: g.kv_heads }
    }

    /// A tensor of a row a token.
    fn wide(&self, at: DeviceRange, width: usize) -> Matrix {
        Matrix::new(at, self.shared.tokens(), width)
    }

    /// `y = x wᵀ`, and `add` where given.
    fn linear(
        &self,
        on: On,
        (x, inputs): (DeviceRange, usize),
        w: DeviceRange,
        (y, outputs): (DeviceRange, usize),
        add: Option<DeviceRange>,
    ) -> Result<()> {
        let matrices = [self.wide(x, inputs), Matrix::new(w, outputs, inputs), self.wide(y, outputs)];
        self.shared.blas.linear(on.stream, on.blas, matrices, add)
    }

    /// The weights' gradient of a linear map from `x`.
    fn d_weights(
        &self,
        on: On,
        (dy, outputs): (DeviceRange, usize),
        (x, inputs): (DeviceRange, usize),
        dw: DeviceRange,
    ) -> Result<()> {
        let matrices = [self.wide(dy, outputs), self.wide(x, inputs), Matrix::new(dw, outputs, inputs)];
        self.shared.blas.weight_gradient(on.stream, on.blas, matrices, self.shared.options.gradients)
    }

    /// The input's gradient of a linear map.
    fn d_input(
        &self,
        on: On,
        (dy, outputs): (DeviceRange, usize),
        w: DeviceRange,
        (dx, inputs): (DeviceRange, usize),
        adds: bool,
    ) -> Result<()> {
        let matrices = [self.wide(dy, outputs), Matrix::new(w, outputs, inputs), self.wide(dx, inputs)];
        self.shared.blas.input_gradient(on.stream, on.blas, matrices, adds)
    }

    /// Adds a branch to the residual: at once by the product that makes it, or after its dropout.
    fn close(
        &self,
        on: On,
        p: &ForwardPlaces,
        mask: Option<DeviceMask>,
        from: (DeviceRange, usize),
        w: DeviceRange,
        [residual, sum]: [DeviceRange; 2],
    ) -> Result<()> {
        let hidden = self.shared.geometry.hidden;
        match mask {
            None => self.linear(on, from, w, (sum, hidden), Some(residual)),
            Some(mask) => {
                self.linear(on, from, w, (p.branch, hidden), None)?;
                let elements = self.shared.tokens() * hidden;
                self.shared.kernels.dropout(on.stream, elements, mask, [p.branch, sum], Some(residual))
            }
        }
    }

    /// The gradient of a branch from that of the sum.
    fn open(
        &self,
        on: On,
        p: &BackwardPlaces,
        mask: Option<DeviceMask>,
        d_sum: DeviceRange,
    ) -> Result<DeviceRange> {
        let Some(mask) = mask else { return Ok(d_sum) };
        let elements = self.shared.tokens() * self.shared.geometry.hidden;
        self.shared.kernels.dropout(on.stream, elements, mask, [d_sum, p.branch], None)?;
        Ok(p.branch)
    }

    fn rotate(&self, on: On, w: &Tensors, p: [DeviceRange; 5]) -> Result<()> {
        let (kernels, g, spec) = (&self.shared.kernels, &self.shared.geometry, &self.shared.spec);
        let [table, q, rotated_q, k, rotated_k] = p;
        kernels.rotary_table(on.stream, table, self.shared.options.shape.seq, spec.rope_theta)?;
        kernels.qk_forward(on.stream, self.heads(g.heads), [q, w.q_norm, table, rotated_q])?;
        kernels.qk_forward(on.stream, self.heads(g.kv_heads), [k, w.k_norm, table, rotated_k])
    }

    fn run_forward(
        &self,
        cx: &Context<'_>,
        on: On,
        w: &Tensors,
        x: DeviceRange,
        p: &ForwardPlaces,
        out: Option<DeviceRange>,
    ) -> Result<()> {
        let (kernels, g) = (&self.shared.kernels, &self.shared.geometry);
        let (h, q, kv, i) = (g.hidden, g.query_width(), g.kv_width(), g.intermediate);
        let saved = &p.internals;
        kernels.bind()?;
        kernels.rms_forward(on.stream, self.norm(), [x, w.norm_1, p.normed])?;
        self.linear(on, (p.normed, h), w.q, (saved.q, q), None)?;
        self.linear(on, (p.normed, h), w.k, (saved.k, kv), None)?;
        self.linear(on, (p.normed, h), w.v, (saved.v, kv), None)?;
        self.rotate(on, w, [p.table, saved.q, p.rotated_q, saved.k, p.rotated_k])?;
        let attended = [p.rotated_q, p.rotated_k, saved.v, saved.attended, saved.lse];
        kernels.attention.forward(on.stream, self.shape(), attended)?;
        self.close(on, p, self.mask(cx, 0), (saved.attended, q), w.o, [x, saved.mid])?;
        kernels.rms_forward(on.stream, self.norm(), [saved.mid, w.norm_2, p.normed])?;
        self.linear(on, (p.normed, h), w.gate, (saved.gate, i), None)?;
        self.linear(on, (p.normed, h), w.up, (saved.up, i), None)?;
        let Some(out) = out else { return Ok(()) };
        let elements = self.shared.tokens() * i;
        kernels.swiglu_forward(on.stream, elements, [saved.gate, saved.up, p.gated])?;
        self.close(on, p, self.mask(cx, 1), (p.gated, i), w.down, [saved.mid, out])
    }

    /// From the gradient of the output to that of the residual after attention, which goes to `dx`.
    #[expect(clippy::too_many_arguments, reason = "what one call is made of")]
    fn mlp_backward(
        &self,
        cx: &Context<'_>,
        on: On,
        w: &Tensors,
        d: &Tensors,
        saved: &Internals,
        p: &BackwardPlaces,
        [dy, dx]: [DeviceRange; 2],
    ) -> Result<()> {
        let (kernels, g) = (&self.shared.kernels, &self.shared.geometry);
        let (h, i) = (g.hidden, g.intermediate);
        let branch = self.open(on, p, self.mask(cx, 1), dy)?;
        self.d_input(on, (branch, h), w.down, (p.d_up, i), false)?;
        let elements = self.shared.tokens() * i;
        kernels.swiglu_backward(on.stream, elements, [saved.gate, saved.up, p.d_up, p.d_gate, p.gated])?;
        self.d_weights(on, (branch, h), (p.gated, i), d.down)?;
        kernels.rms_forward(on.stream, self.norm(), [saved.mid, w.norm_2, p.normed])?;
        self.d_weights(on, (p.d_gate, i), (p.normed, h), d.gate)?;
        self.d_weights(on, (p.d_up, i), (p.normed, h), d.up)?;
        self.d_input(on, (p.d_gate, i), w.gate, (p.d_normed, h), false)?;
        self.d_input(on, (p.d_up, i), w.up, (p.d_normed, h), true)?;
        let tensors = [saved.mid, w.norm_2, p.d_normed, dx];
        kernels.rms_backward(on.stream, self.norm(), tensors, Some(dy), [p.parts, d.norm_2])
    }

    /// From the gradient of the residual after attention to that of the input, both in `dx`.
    #[expect(clippy::too_many_arguments, reason = "what one call is made of")]
    fn attention_backward(
        &self,
        cx: &Context<'_>,
        on: On,
        w: &Tensors,
        d: &Tensors,
        saved: &Internals,
        p: &BackwardPlaces,
        [x, dx]: [DeviceRange; 2],
    ) -> Result<()> {
        let (kernels, g) = (&self.shared.kernels, &self.shared.geometry);
        let (h, q, kv) = (g.hidden, g.query_width(), g.kv_width());
        let branch = self.open(on, p, self.mask(cx, 0), dx)?;
        self.d_input(on, (branch, h), w.o, (p.d_attended, q), false)?;
        self.d_weights(on, (branch, h), (saved.attended, q), d.o)?;
        self.rotate(on, w, [p.table, saved.q, p.rotated_q, saved.k, p.rotated_k])?;
        let made = [p.rotated_q, p.rotated_k, saved.v, saved.attended, saved.lse];
        let gradients = [p.d_q, p.d_k, p.d_v];
        kernels.attention.backward(on.stream, self.shape(), made, [p.d_attended, p.delta], gradients)?;
        let of_q = [saved.q, w.q_norm, p.table, p.d_q];
        kernels.qk_backward(on.stream, self.heads(g.heads), of_q, [p.parts, d.q_norm])?;
        let of_k = [saved.k, w.k_norm, p.table, p.d_k];
        kernels.qk_backward(on.stream, self.heads(g.kv_heads), of_k, [p.parts, d.k_norm])?;
        kernels.rms_forward(on.stream, self.norm(), [x, w.norm_1, p.normed])?;
        for (dy, width, w, dw, adds) in
            [(p.d_q, q, w.q, d.q, false), (p.d_k, kv, w.k, d.k, true), (p.d_v, kv, w.v, d.v, true)]
        {
            self.d_weights(on, (dy, width), (p.normed, h), dw)?;
            self.d_input(on, (dy, width), w, (p.d_normed, h), adds)?;
        }
        let tensors = [x, w.norm_1, p.d_normed, dx];
        kernels.rms_backward(on.stream, self.norm(), tensors, Some(dx), [p.parts, d.norm_1])
    }
}

impl Layer for CudaLayer {
    fn sizes(&self) -> LayerSizes {
        let places = &self.shared.places;
        LayerSizes {
            output: places.boundary(),
            saved: places.internals_bytes(),
            forward_workspace: places.forward_bytes(),
            backward_workspace: places.backward_bytes(),
        }
    }

    fn parameters(&self) -> Vec<Parameter> {
        let first = 1 + self.layer * LAYER_PARAMETERS;
        self.shared.parameters(first..first + LAYER_PARAMETERS)
    }

    fn forward(&self, cx: &Context<'_>, call: Forward<'_>) -> std::result::Result<Saved, LayerError> {
        let saved = call.save.map(|save| save.range()).transpose()?;
        let out = call.out.map(|out| out.range()).transpose()?;
        let places = self.shared.places.forward(call.workspace.range()?, saved);
        let on = On { stream: cx.stream()?, blas: places.blas };
        let weights = Tensors::weights(call.weights)?;
        self.run_forward(cx, on, &weights, call.x.range()?, &places, out)?;
        Ok(Saved::none())
    }

    fn backward(&self, cx: &Context<'_>, call: Backward<'_>) -> std::result::Result<(), LayerError> {
        let places = self.shared.places.backward(call.workspace.range()?);
        let saved = self.shared.places.internals(call.internals.range()?);
        let on = On { stream: cx.stream()?, blas: places.blas };
        let (weights, gradients) = (Tensors::weights(call.weights)?, Tensors::gradients(call.grads)?);
        let (x, dy, dx) = (call.x.range()?, call.dy.range()?, call.dx.range()?);
        self.shared.kernels.bind()?;
        self.mlp_backward(cx, on, &weights, &gradients, &saved, &places, [dy, dx])?;
        self.attention_backward(cx, on, &weights, &gradients, &saved, &places, [x, dx])?;
        Ok(())
    }
}
