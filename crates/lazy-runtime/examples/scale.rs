//! Four layers y = w * x: boundary 1 goes to host RAM, boundary 2 is recomputed, and weights come from host RAM layer by layer.
use lazy_model::Bytes;
use lazy_runtime::*;

const SIZE: usize = 1024;
const BOUNDARY: Bytes = Bytes(4 * SIZE as u64);

struct Scale(usize);

impl Layer for Scale {
    fn sizes(&self) -> LayerSizes {
        LayerSizes { output: BOUNDARY, ..LayerSizes::default() }
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

fn main() -> Result<(), LayerError> {
    let ones = Source::new(BOUNDARY, |_: &Context<'_>, out: Output<'_>| {
        out.f32()?.fill(1.0);
        Ok(())
    });
    let sum = |_: &Context<'_>, call: Loss<'_>| {
        call.loss.f32()?[0] = call.x.f32()?.iter().sum();
        call.dx.map_or(Ok(()), |dx| dx.f32().map(|dx| dx.fill(1.0)))
    };
    let streaming = ModelOptions { stream_weights: true, stream_gradients: true, ..ModelOptions::default() };
    let model = Model::new(ones, (0..4).map(Scale).collect(), sum, streaming)?;

    // One letter a boundary: `G` stays in HBM, `C` goes to host RAM, `N` to NVMe, `-` is recomputed.
    let plan = model.plan(&model.schedule("GC-GG")?)?;
    let options = model.store_options(&plan, std::env::temp_dir());
    let (mut executor, mut program) = Executor::open(model, plan, options)?;
    executor.initialize(|_, weights| weights.fill(2.0))?;
    let report = executor.run(&mut program, &Step::default())?;

    assert_eq!(report.losses, [1024.0 * 16.0]);
    // The derivative by one weight: the product of the three others, once for each element.
    assert_eq!(executor.gradient(ParameterId(3))?, (1024.0f32 * 8.0).to_le_bytes());
    Ok(())
}
