//! A model that takes a set time and does no arithmetic.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lazy_model::timeline::StepCosts;
use lazy_model::{Bytes, Seconds};
use lazy_runtime::{
    Backward, Context, Epilogue, Forward, Grads, Input, Layer, LayerError, LayerSizes, Loss, Model,
    ModelOptions, Output, Parameter, Prologue, RuntimeError, Saved, Weights,
};

/// Sleeping ends late by less than this, mostly; so much is spun.
const SPIN: Duration = Duration::from_micros(300);

/// What a model is to look like.
pub(crate) struct Shape<'a> {
    pub(crate) boundary: &'a [Bytes],
    pub(crate) saved: &'a [Bytes],
    /// Weights of each layer, and as many bytes of gradients.
    pub(crate) weights: Bytes,
    pub(crate) costs: &'a StepCosts,
}

struct Timed {
    sizes: LayerSizes,
    weights: Bytes,
    parameter: usize,
    forward: Seconds,
    saving: Seconds,
    internals: Seconds,
    backward: Seconds,
}

struct Ends {
    output: Bytes,
    prologue: Seconds,
    loss: Seconds,
    prologue_backward: Seconds,
}

/// The model of a shape.
pub(crate) fn model(shape: &Shape<'_>, options: ModelOptions) -> Result<Model, RuntimeError> {
    let costs = shape.costs;
    let layers = (0..shape.saved.len()).map(|l| {
        let sizes =
            LayerSizes { output: shape.boundary[l + 1], saved: shape.saved[l], ..LayerSizes::default() };
        Timed {
            sizes,
            weights: shape.weights,
            parameter: l,
            forward: costs.forward[l],
            saving: costs.saving_forward[l],
            internals: costs.internals_forward[l],
            backward: costs.backward[l],
        }
    });
    let ends = Arc::new(Ends {
        output: shape.boundary[0],
        prologue: costs.prologue,
        loss: costs.epilogue,
        prologue_backward: costs.prologue_backward,
    });
    Model::new(Arc::clone(&ends), layers.collect(), ends, options)
}

/// Returns `time` after `start`, most of it without taking the CPU.
fn pass_until(start: Instant, time: Seconds) {
    let Ok(time) = Duration::try_from_secs_f64(time.get()) else { return };
    if let Some(most) = time.checked_sub(SPIN + start.elapsed()) {
        std::thread::sleep(most);
    }
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// In the first step, makes the memory of an output its own: what nobody wrote is one page of zeros, which copies faster than data does.
fn touch(cx: &Context<'_>, out: Option<Output<'_>>) -> Result<(), LayerError> {
    match out {
        Some(out) if cx.step == 0 => out.bytes().map(|bytes| bytes.fill(1)),
        _ => Ok(()),
    }
}

impl Layer for Timed {
    fn sizes(&self) -> LayerSizes {
        self.sizes
    }

    fn parameters(&self) -> Vec<Parameter> {
        let elements = self.weights.get() as usize / 4;
        if elements == 0 {
            return Vec::new();
        }
        vec![Parameter::f32(self.parameter, format!("w{}", self.parameter), elements)]
    }

    fn forward(&self, cx: &Context<'_>, call: Forward<'_>) -> Result<Saved, LayerError> {
        let start = Instant::now();
        let time = match (&call.save, &call.out) {
            (Some(_), Some(_)) => self.saving,
            (Some(_), None) => self.internals,
            (None, _) => self.forward,
        };
        touch(cx, call.out)?;
        touch(cx, call.save)?;
        pass_until(start, time);
        Ok(Saved::none())
    }

    fn backward(&self, cx: &Context<'_>, call: Backward<'_>) -> Result<(), LayerError> {
        let start = Instant::now();
        touch(cx, Some(call.dx))?;
        pass_until(start, self.backward);
        Ok(())
    }
}

impl Prologue for Ends {
    fn output_bytes(&self) -> Bytes {
        self.output
    }

    fn forward(&self, cx: &Context<'_>, _: Weights<'_>, out: Output<'_>) -> Result<(), LayerError> {
        let start = Instant::now();
        touch(cx, Some(out))?;
        pass_until(start, self.prologue);
        Ok(())
    }

    fn backward(
        &self,
        _: &Context<'_>,
        _: Weights<'_>,
        _: Input<'_>,
        _: Grads<'_>,
    ) -> Result<(), LayerError> {
        pass_until(Instant::now(), self.prologue_backward);
        Ok(())
    }
}

impl Epilogue for Ends {
    fn run(&self, cx: &Context<'_>, call: Loss<'_>) -> Result<(), LayerError> {
        let start = Instant::now();
        call.loss.f32()?[0] = 0.0;
        touch(cx, call.dx)?;
        pass_until(start, self.loss);
        Ok(())
    }
}
