//! Trains a model written in burn with boundaries in HBM, in host RAM, on NVMe and recomputed.

mod layer;
mod model;

use std::sync::Arc;

use burn::optim::{AdamConfig, GradientsAccumulator};
use layer::Trained;
use lazy_runtime::*;
use model::{BOUNDARY, GRAPH, batch, blocks, loss, rows};

#[expect(clippy::print_stdout, reason = "shows that the loss falls")]
fn main() -> Result<(), LayerError> {
    let layers = blocks().into_iter().enumerate().map(|(l, block)| {
        let (optimizer, gradients) = (AdamConfig::new().init(), GradientsAccumulator::new());
        let parameter = Parameter::own(l, format!("block {l}"));
        let trained = Trained { block, optimizer, gradients };
        Arc::new(AutogradLayer::new(parameter, LayerSizes::graph(BOUNDARY, GRAPH), trained))
    });
    let layers: Vec<_> = layers.collect();
    let model = Model::new(Source::new(BOUNDARY, rows), layers.clone(), loss, ModelOptions::default())?;
    let plan = model.plan(&model.schedule("CN-G--G")?)?;
    let options = model.store_options(&plan, std::env::temp_dir());
    let (mut executor, mut program) = Executor::open(model, plan, options)?;
    executor.on_final_gradient(move |last| layers[last.parameter.id.0].module().update());
    let steps = (0..60).map(|step| Step::with_inputs(step, [batch(step)]));
    let losses = executor.run_all(&mut program, steps)?;
    println!("loss {:.4} -> {:.4}", losses[0], losses[59]);
    if losses[59] < 0.5 * losses[0] { Ok(()) } else { Err("the loss did not fall by half".into()) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_trains() -> Result<(), super::LayerError> {
        super::main()
    }
}
