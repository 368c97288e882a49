//! Models of functions and of modules that differentiate by themselves, plans by letters, and stores of their size.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use lazy_model::Bytes;
use lazy_runtime::*;
use lazy_store::{Store, StoreOptions};

const WIDTH: usize = 64;
const BOUNDARY: Bytes = Bytes(4 * WIDTH as u64);
const LAYERS: usize = 3;

/// y = w x in a framework of its own; `given` is how many values it hands over.
struct Scale {
    w: f32,
    gradient: f32,
    given: usize,
}

impl Autograd for Scale {
    type Graph = Vec<f32>;

    fn forward(&mut self, _: &Context<'_>, x: &[f32]) -> Result<(Vec<f32>, Vec<f32>), LayerError> {
        Ok((x.iter().take(self.given).map(|x| self.w * x).collect(), x.to_vec()))
    }

    fn backward(&mut self, _: &Context<'_>, x: Vec<f32>, dy: &[f32]) -> Result<Vec<f32>, LayerError> {
        self.gradient += x.iter().zip(dy).map(|(x, dy)| x * dy).sum::<f32>();
        Ok(dy.iter().map(|dy| self.w * dy).collect())
    }
}

type Scales = Vec<Arc<AutogradLayer<Scale>>>;

fn scales(given: usize) -> Scales {
    let layer = |l: usize| {
        let module = Scale { w: 2.0 + l as f32, gradient: 0.0, given };
        Arc::new(AutogradLayer::new(
            Parameter::own(l, format!("w{l}")),
            LayerSizes::graph(BOUNDARY, BOUNDARY),
            module,
        ))
    };
    (0..LAYERS).map(layer).collect()
}

fn sum(_: &Context<'_>, call: Loss<'_>) -> Result<(), LayerError> {
    call.loss.f32()?[0] = call.x.f32()?.iter().sum();
    call.dx.map_or(Ok(()), |dx| dx.f32().map(|dx| dx.fill(1.0)))
}

/// Each micro-batch's input is its side input, everywhere.
fn model(layers: Scales, micro_batches: usize) -> Model {
    let source = Source::new(BOUNDARY, |cx: &Context<'_>, out: Output<'_>| {
        out.f32()?.fill(*cx.inputs::<f32>()?);
        Ok(())
    });
    Model::new(source, layers, sum, ModelOptions { micro_batches, ..ModelOptions::default() }).unwrap()
}

fn open(model: Model, letters: &str, dir: &std::path::Path) -> (Executor, Program) {
    let plan = model.plan(&model.schedule(letters).unwrap()).unwrap();
    let options = StoreOptions { poison: true, ..model.store_options(&plan, dir) };
    Executor::open(model, plan, options).unwrap()
}

#[test]
fn modules_train_by_a_closed_form_under_every_plan() {
    // Loss = sum over both micro-batches of WIDTH * x * w0 w1 w2, with w = (2, 3, 4) and x = (1, 2).
    let rate = 1.0 / (3.0 * WIDTH as f32 * 12.0);
    for letters in ["GGGG", "CN-G", "N--G", "GCCG"] {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let layers = scales(WIDTH);
        let (mut executor, mut program) = open(model(layers.clone(), 2), letters, dir.path());
        let own = layers.clone();
        executor.on_final_gradient(move |last| {
            let mut module = own[last.parameter.id.0].module();
            module.w -= rate * module.gradient;
            module.gradient = 0.0;
            Ok(())
        });
        let steps = (0..2).map(|step| Step::with_inputs(step, [1.0f32, 2.0]));
        let losses = executor.run_all(&mut program, steps).unwrap();
        // By the first step's gradients, 3 WIDTH times the product of the two others, w0 falls by 1, w1 by 8/12, w2 by 6/12.
        let (first, product) = (WIDTH as f32 * 24.0, WIDTH as f32 * (1.0 * (7.0 / 3.0) * 3.5));
        for (loss, wanted) in losses.iter().zip([first, 2.0 * first, product, 2.0 * product]) {
            assert!((loss - wanted).abs() <= 1e-5 * wanted, "{letters}: {loss}, not {wanted}");
        }
        assert_eq!(losses.len(), 4);
    }
}

#[test]
fn a_module_that_gives_too_few_values_ends_the_step_and_says_so() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (mut executor, mut program) = open(model(scales(WIDTH - 1), 1), "GGGG", dir.path());
    let error = executor.run(&mut program, &Step::with_inputs(0, [1.0f32])).unwrap_err();
    let told = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    assert!(format!("{error} {told}").contains("output has 63 values, its boundary 64"), "{error} {told}");
}

#[test]
fn letters_that_place_no_boundaries_are_refused_and_named() {
    let model = model(scales(WIDTH), 1);
    for letters in ["GGG", "GGGGG", "GXGG", "", "gggg"] {
        let told = model.schedule(letters).unwrap_err().to_string();
        assert!(told.contains(&format!("{letters:?} places no 4 boundaries")), "{told}");
    }
    // Right letters, but the loss reads the last boundary in HBM.
    assert!(model.plan(&model.schedule("GGG-").unwrap()).is_err());
}

#[test]
fn a_store_of_a_plan_holds_it_and_not_a_byte_less() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let options = |letters: &str| {
        let model = model(scales(WIDTH), 1);
        let plan = model.plan(&model.schedule(letters).unwrap()).unwrap();
        let options = model.store_options(&plan, dir.path());
        (model, plan, options)
    };
    let (_, _, resident) = options("GGGG");
    assert!(resident.host == Bytes::ZERO && resident.nvme.is_none());
    let (model, plan, spilling) = options("CNGG");
    assert_eq!(spilling.host, plan.extents.host);
    assert_eq!(spilling.nvme.as_ref().unwrap().bytes, plan.extents.nvme);
    let less = StoreOptions { hbm: spilling.hbm - Bytes(1), ..spilling };
    let executor = Executor::new(Store::open(less).unwrap(), model, ExecutorOptions::default());
    let mut executor = executor.unwrap();
    let mut program = executor.prepare(plan).unwrap();
    assert!(executor.run(&mut program, &Step::with_inputs(0, [1.0f32])).is_err());
}

/// A layer whose weights the runtime keeps, `bytes` of them; it does nothing.
struct Kept(usize, Bytes);

impl Layer for Kept {
    fn sizes(&self) -> LayerSizes {
        LayerSizes { output: BOUNDARY, ..LayerSizes::default() }
    }
    fn parameters(&self) -> Vec<Parameter> {
        let of = |half: usize| Parameter {
            weights: self.1,
            ..Parameter::own(2 * self.0 + half, format!("w{}.{half}", self.0))
        };
        vec![of(0), of(1)]
    }
    fn forward(&self, _: &Context<'_>, _: Forward<'_>) -> Result<Saved, LayerError> {
        Ok(Saved::none())
    }
    fn backward(&self, _: &Context<'_>, _: Backward<'_>) -> Result<(), LayerError> {
        Ok(())
    }
}

/// An executor of a model of `prologue` and two such layers.
fn kept(bytes: Bytes, options: ModelOptions) -> Executor {
    let source = Source::new(BOUNDARY, |_: &Context<'_>, _: Output<'_>| Ok(()));
    let model = Model::new(source, vec![Kept(0, bytes), Kept(1, bytes)], sum, options).unwrap();
    let plan = model.plan(&model.schedule("GGG").unwrap()).unwrap();
    let options = model.store_options(&plan, env!("CARGO_TARGET_TMPDIR"));
    Executor::open(model, plan, options).unwrap().0
}

#[test]
fn weights_are_initialized_wherever_they_lie() {
    for [stream_weights, on_nvme] in [[false, false], [true, false], [true, true]] {
        let executor = kept(Bytes(24), ModelOptions { stream_weights, on_nvme, ..ModelOptions::default() });
        let mut order = Vec::new();
        let fill = |parameter: &Parameter, weights: &mut [f32]| {
            assert_eq!(weights, [0.0; 6]);
            weights.fill(parameter.id.0 as f32 + 0.5);
            order.push(parameter.name.clone());
        };
        executor.initialize(fill).unwrap();
        assert_eq!(order, ["w0.0", "w0.1", "w1.0", "w1.1"]);
        for id in 0..4 {
            let wanted = (id as f32 + 0.5).to_le_bytes().repeat(6);
            assert_eq!(executor.weights(ParameterId(id)).unwrap(), wanted);
        }
    }
    let told = kept(Bytes(6), ModelOptions::default()).initialize(|_, _| {}).unwrap_err().to_string();
    assert!(told.contains("w0.0") && told.contains("set_weights"), "{told}");
}

/// Declares a parameter and has no backward.
struct Forgetful;

impl Prologue for Forgetful {
    fn output_bytes(&self) -> Bytes {
        BOUNDARY
    }
    fn parameters(&self) -> Vec<Parameter> {
        vec![Parameter::f32(9, "embedding", WIDTH)]
    }
    fn forward(&self, _: &Context<'_>, _: Weights<'_>, out: Output<'_>) -> Result<(), LayerError> {
        out.f32()?.fill(1.0);
        Ok(())
    }
}

#[test]
fn a_prologue_with_parameters_and_no_backward_is_told_so() {
    let model = Model::new(Forgetful, scales(WIDTH), sum, ModelOptions::default()).unwrap();
    let (mut executor, mut program) = open(model, "GGGG", env!("CARGO_TARGET_TMPDIR").as_ref());
    let error = executor.run(&mut program, &Step::default()).unwrap_err();
    let told = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    assert!(format!("{error} {told}").contains("embedding"), "{error} {told}");
}

#[test]
fn a_hook_is_told_when_weights_are_not_handed_over() {
    let layers = scales(WIDTH);
    let (mut executor, mut program) = open(model(layers, 1), "GGGG", env!("CARGO_TARGET_TMPDIR").as_ref());
    executor.update_in_backward(|last| last.in_memory().map(|_| ()));
    let error = executor.run(&mut program, &Step::with_inputs(0, [1.0f32])).unwrap_err();
    let told = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    assert!(format!("{error} {told}").contains("w2 are not handed over"), "{error} {told}");
}
