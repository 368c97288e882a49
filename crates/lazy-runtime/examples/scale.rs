//! Four layers y = w * x: boundary 1 goes to host RAM, boundary 2 is recomputed, and weights come from host RAM layer by layer.
use std::sync::Arc;

use lazy_model::{Bytes, Placement, Schedule};
use lazy_runtime::*;
use lazy_store::{Store, StoreOptions};

const SIZE: usize = 1024;

struct Scale(usize);

impl Layer for Scale {
    fn sizes(&self) -> LayerSizes {
        LayerSizes { output: Bytes(4 * SIZE as u64), ..LayerSizes::default() }
    }
    fn parameters(&self) -> Vec<Parameter> {
        vec![Parameter::f32(self.0, format!("w{}", self.0), 1)]
    }
    fn forward(&self, _: &Context<'_>, call: Forward<'_>) -> Result<Saved, LayerError> {
        let (w, x) = (call.weights.get(0).f32()?[0], call.x.f32()?);
        if let Some(out) = call.out {
            out.f32()?.iter_mut().zip(x).for_each(|(y, x)| *y = w * x);
        }
        Ok(Saved::none())
    }
    fn backward(&self, _: &Context<'_>, mut call: Backward<'_>) -> Result<(), LayerError> {
        let (w, x, dy) = (call.weights.get(0).f32()?[0], call.x.f32()?, call.dy.f32()?);
        call.grads.add(0, &[x.iter().zip(dy).map(|(x, dy)| x * dy).sum()])?;
        call.dx.f32()?.iter_mut().zip(dy).for_each(|(dx, dy)| *dx = w * dy);
        Ok(())
    }
}

/// Starts with ones, and ends with the sum as the loss.
struct Ends;

impl Prologue for Ends {
    fn output_bytes(&self) -> Bytes {
        Bytes(4 * SIZE as u64)
    }
    fn forward(&self, _: &Context<'_>, _: Weights<'_>, out: Output<'_>) -> Result<(), LayerError> {
        out.f32()?.fill(1.0);
        Ok(())
    }
    fn backward(
        &self,
        _: &Context<'_>,
        _: Weights<'_>,
        _: Input<'_>,
        _: Grads<'_>,
    ) -> Result<(), LayerError> {
        Ok(())
    }
}

impl Epilogue for Ends {
    fn run(&self, _: &Context<'_>, call: Loss<'_>) -> Result<(), LayerError> {
        call.loss.f32()?[0] = call.x.f32()?.iter().sum();
        call.dx.map_or(Ok(()), |dx| dx.f32().map(|dx| dx.fill(1.0)))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let layers = (0..4).map(|l| Arc::new(Scale(l)) as Arc<dyn Layer>).collect();
    let streaming = ModelOptions { stream_weights: true, stream_gradients: true, ..ModelOptions::default() };
    let model = Model::new(Arc::new(Ends), layers, Arc::new(Ends), streaming)?;

    let mut schedule = Schedule::named("by hand", &model.sizes().boundary, false);
    schedule.placement[1] = Placement::Host;
    schedule.placement[2] = Placement::Recompute;
    let plan = model.plan(&schedule)?;
    let needs = model.needs(&plan);
    let store = Store::open(StoreOptions { hbm: needs.hbm, host: needs.host, ..StoreOptions::default() })?;

    let mut executor = Executor::new(store, model, ExecutorOptions::default())?;
    let two = 2.0f32.to_le_bytes();
    executor.set_weights(&[0, 1, 2, 3].map(|l| (ParameterId(l), &two[..])))?;
    let mut program = executor.prepare(plan)?;
    let report = executor.run(&mut program, &Step::default())?;

    assert_eq!(report.losses, [1024.0 * 16.0]);
    // The derivative by one weight: the product of the three others, once for each element.
    assert_eq!(executor.gradient(ParameterId(3))?, (1024.0f32 * 8.0).to_le_bytes());
    Ok(())
}
