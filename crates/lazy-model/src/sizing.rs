//! The step of a model on a machine: sizes and times from a config, a workload and a profile.

use crate::config::ModelSpec;
use crate::error::Error;
use crate::hardware::{Compute, HardwareProfile, Source};
use crate::layers::{FusedKernels, Workload};
use crate::problem::StepProblem;
use crate::step::{Streamed, TierBytes, Workspaces};
use crate::timeline::StepCosts;
use crate::units::{Bytes, LayerIndex, Seconds};

/// How a model is trained, as far as sizes and times depend on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Training {
    /// Micro-batches of the workload in one optimizer step.
    pub micro_batches: usize,
    /// Bytes of a weight in HBM.
    pub weight_bytes: u64,
    /// Bytes of a weight's gradient.
    pub gradient_bytes: u64,
    /// Bytes of optimizer state a parameter that stay in HBM; 0 where they are streamed.
    pub state_bytes: u64,
    /// Weights of the layers live in host RAM and are copied in for every pass over a layer.
    pub stream_weights: bool,
    /// Gradients of the layers are copied to host RAM as they arise.
    pub stream_gradients: bool,
    /// What is streamed lives on NVMe and passes through host RAM.
    pub stream_from_nvme: bool,
    /// Tokens whose logits exist at once.
    pub loss_chunk_tokens: u64,
    /// A decoder of fused kernels, whose sizes are those of [`ModelSpec::fused_bytes`] and `loss_tokens` those of its own. `None`: one
    /// kernel an operation.
    pub fused: Option<FusedKernels>,
    /// Most layers between two saved boundaries.
    pub max_segment: usize,
    /// HBM of the device's context and of libraries.
    pub reserved: Bytes,
    /// Host RAM that is taken throughout, for example by the optimizer's ring.
    pub host_reserved: Bytes,
}

impl Default for Training {
    /// bf16 weights and gradients in HBM, states streamed, logits of 4096 tokens at once, blocks of up to four layers.
    fn default() -> Self {
        Training {
            micro_batches: 1,
            weight_bytes: 2,
            gradient_bytes: 2,
            state_bytes: 0,
            stream_weights: false,
            stream_gradients: false,
            stream_from_nvme: false,
            loss_chunk_tokens: 4096,
            fused: None,
            max_segment: 4,
            reserved: Bytes::ZERO,
            host_reserved: Bytes::ZERO,
        }
    }
}

impl StepProblem {
    /// The step of `model` under `work` on the machine of `profile`.
    ///
    /// Times are the profile's where it has times of as many layers; otherwise they are derived, see [`StepCosts::for_model`].
    /// Sizes: boundaries, internals, workspaces and loss as [`ModelSpec`] counts them.
    ///
    /// # Errors
    /// Where neither measured times nor a compute rate are there, and where a decoder of fused kernels has no layer such as the model's.
    pub fn for_model(
        model: &ModelSpec,
        work: &Workload,
        profile: &HardwareProfile,
        budgets: TierBytes,
        training: &Training,
    ) -> Result<StepProblem, Error> {
        let (costs, _) = StepCosts::for_model(model, work, profile)?;
        let layers = model.layers();
        let of =
            |size: &dyn Fn(LayerIndex) -> Bytes| (0..layers).map(|l| size(LayerIndex(l))).collect::<Vec<_>>();
        let boundary = model.boundary_bytes(work);
        let (saved_bytes, workspaces) = match &training.fused {
            Some(kernels) => fused(model, work, kernels)?,
            None => {
                let workspaces = Workspaces {
                    forward: of(&|l| model.layer_workspace(l, work).forward),
                    backward: of(&|l| model.layer_workspace(l, work).backward),
                    loss: model.loss_bytes(work, training.loss_chunk_tokens).workspace,
                };
                (of(&|l| model.internals_bytes(l, work)), workspaces)
            }
        };
        let in_layers: u64 = (0..layers).map(|l| model.layer_parameter_count(LayerIndex(l))).sum();
        let outside = model.total_parameters() - in_layers;
        let resident = |streamed: bool| outside + if streamed { 0 } else { in_layers };
        let stream = |wanted: bool, bytes: u64| {
            if wanted { of(&|l| Bytes(model.layer_parameter_count(l)) * bytes) } else { Vec::new() }
        };
        let hbm = Bytes(resident(training.stream_weights)) * training.weight_bytes
            + Bytes(resident(training.stream_gradients)) * training.gradient_bytes
            + Bytes(model.total_parameters()) * training.state_bytes
            + training.reserved;
        let rate = profile.optimizer_elements_per_s.as_ref().map_or(0.0, |rate| rate.value);
        let optimizer = if rate > 0.0 { model.total_parameters() as f64 / rate } else { 0.0 };
        Ok(StepProblem {
            boundary_bytes: vec![boundary; layers + 1],
            saved_bytes,
            workspaces,
            streamed: Streamed {
                weights: stream(training.stream_weights, training.weight_bytes),
                gradients: stream(training.stream_gradients, training.gradient_bytes),
                on_nvme: training.stream_from_nvme,
            },
            costs,
            micro_batches: training.micro_batches,
            optimizer: Seconds(optimizer),
            beside_backward: None,
            fixed: TierBytes { hbm, host: training.host_reserved, nvme: Bytes::ZERO },
            budgets,
            max_segment: training.max_segment,
        })
    }
}

/// What layers of such a decoder save, and its workspaces.
fn fused(
    model: &ModelSpec,
    work: &Workload,
    kernels: &FusedKernels,
) -> Result<(Vec<Bytes>, Workspaces), Error> {
    let (mut saved, mut workspaces) = (Vec::new(), Workspaces::default());
    for layer in 0..model.layers() {
        let bytes = model.fused_bytes(LayerIndex(layer), work, kernels).ok_or_else(|| Error::Workload {
            problem: format!(
                "layer {layer} is none that the decoder of fused kernels has, which are those of Qwen3's dense models: plan with one \
                 kernel an operation"
            ),
        })?;
        saved.push(bytes.internals);
        workspaces.forward.push(bytes.forward);
        workspaces.backward.push(bytes.backward);
        workspaces.loss = bytes.loss;
    }
    Ok((saved, workspaces))
}

impl StepCosts {
    /// Times of `model` under `work`, and whether they were measured: the profile's own where it has times of as many layers. Otherwise
    /// products take their operations at the profile's rate and efficiency, element-wise work the time to write and read what a layer
    /// saves:
    ///
    /// - forward: `F / (rate efficiency) + 2 internals / hbm`
    /// - forward for internals alone, just before a backward: the same with [`ModelSpec::layer_recompute_flops`]
    /// - backward: `2 F / (rate efficiency) + 2 internals / hbm`
    ///
    /// with `F` the layer's forward operations. The loss counts three times the head's forward, the embedding the traffic of a boundary.
    ///
    /// # Errors
    /// Where neither measured times nor a compute rate are there.
    pub fn for_model(
        model: &ModelSpec,
        work: &Workload,
        profile: &HardwareProfile,
    ) -> Result<(StepCosts, Source), Error> {
        let layers = model.layers();
        if let Some(costs) = profile.costs().filter(|c| c.forward.len() == layers) {
            return Ok((costs, Source::Measured));
        }
        let compute = profile.compute.as_ref().ok_or_else(|| Error::Workload {
            problem: match &profile.times {
                Some(times) => format!(
                    "the profile {:?} has times of {} layers, the model has {layers}: measure this model with `probe`, or give the \
                     profile a `compute` section",
                    profile.name,
                    times.forward_ms.value.len()
                ),
                None => format!(
                    "the profile {:?} has neither `times` nor `compute`, so layers have no times: measure the model with `probe`, or \
                     give the profile a `compute` section",
                    profile.name
                ),
            },
        })?;
        let moved = |bytes: Bytes| compute.hbm.value.time(bytes * 2);
        let of = |flops: &dyn Fn(LayerIndex) -> f64| -> Vec<Seconds> {
            let layer = |l| compute.products(flops(l)) + moved(model.internals_bytes(l, work));
            (0..layers).map(|l| layer(LayerIndex(l))).collect()
        };
        let forward = of(&|l| model.layer_forward_flops(l, work));
        let boundary = model.boundary_bytes(work);
        let costs = StepCosts {
            prologue: moved(boundary),
            saving_forward: forward.clone(),
            internals_forward: of(&|l| model.layer_recompute_flops(l, work)),
            forward,
            backward: of(&|l| model.layer_backward_flops(l, work)),
            epilogue: compute.products(3.0 * model.head_forward_flops(work)) + moved(boundary * 2),
            prologue_backward: moved(boundary),
            links: profile.links.rates(),
        };
        Ok((costs, Source::Assumed))
    }
}

impl Compute {
    /// Time of matrix products with this many operations in all.
    fn products(&self, flops: f64) -> Seconds {
        Seconds(flops / (self.matmul_flops_per_s.value * self.matmul_efficiency.value))
    }
}
