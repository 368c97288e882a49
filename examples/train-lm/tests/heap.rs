//! No tensor is kept alive beside the store. Alone in its program, because it counts every allocation there.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "common/counting.rs"]
mod counting;
#[path = "common/plan.rs"]
mod plan;

use std::sync::Mutex;

use counting::{forget_peak, live, peak};
use lazy_model::{Bytes, LayerIndex, ModelSpec};
use lazy_optim_nvme::{AdamOptions, Gradient, GroupOptions, NvmeAdam, ParamSpec, StepInput};
use plan::{on, planned};
use train_lm::decoder::{Decoder, DecoderError};
use train_lm::model::{HostModel, Shape};
use train_lm::random::initial_values;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// One test counts at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Steps of the shipped model under a plan: the most that was allocated, arenas (which are mappings) not counted, beside what was
/// there before the model.
fn most_allocated(letters: &str, shape: Shape) -> (usize, Bytes) {
    let before = live();
    let spec = ModelSpec::from_json(include_str!("../config.json")).unwrap();
    let decoder = Decoder::new(spec, &mut |name, shape| initial_values(0, name, shape)).unwrap();
    let model = HostModel::new(decoder, shape, 1, 0.1);
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (mut program, mut executor) = planned(&model, letters, dir.path(), false);
    let adam =
        AdamOptions { bucket_elements: 1 << 19, chunk_bytes: Bytes::from_mib(1), ..AdamOptions::default() };
    let named = model.decoder.parameters();
    let specs: Vec<ParamSpec> = named.iter().map(|(n, v)| ParamSpec::new(n.as_str(), v.dims())).collect();
    let state = dir.path().join("state");
    let mut optimizer = NvmeAdam::create(&state, &specs, &adam, |_, _, values| values.fill(0.0)).unwrap();

    for step in 0..3 {
        // The first step makes the threads and their scratch memory.
        if step == 1 {
            forget_peak();
        }
        let ids = (0..shape.tokens() as u32).map(|t| t * 31 % 256).collect();
        executor.run(&mut program, &on(ids, shape.seq, step)).unwrap();
        let gradients = model.gradients.read();
        let views: Vec<_> = gradients.iter().map(|g| Some(Gradient::F32(g))).collect();
        let input =
            StepInput { groups: &[GroupOptions::default()], max_norm: Some(1.0), ..StepInput::default() };
        let write = &mut |parameter, first, values: &[f32]| {
            model.decoder.write_parameter(parameter, first, values).unwrap();
        };
        optimizer.step(&views, &input, write).unwrap();
        drop(views);
        drop(gradients);
        model.gradients.zero();
    }
    let declared = model.decoder.declared(shape.batch, shape.seq);
    let boundary = model.boundary_bytes();
    let layer = declared.layer_internals_total() + declared.layer_gradients + declared.layer_workspace;
    // A layer's graph also holds its input and its output, and its backward starts from a copy of dy.
    let bound = declared.weights
        + declared.gradients
        + layer
        + boundary * 3
        + declared.loss_workspace
        + NvmeAdam::memory_bytes(&specs, &adam).unwrap();
    (peak() - before, bound)
}

type Make = fn(ModelSpec, &mut dyn FnMut(&str, &[usize]) -> Vec<f32>) -> Result<Decoder, DecoderError>;

/// Passes of the shipped model, its decoder made by `make`: as above, without an optimizer.
fn most_allocated_by_passes(letters: &str, shape: Shape, make: Make) -> usize {
    let before = live();
    let spec = ModelSpec::from_json(include_str!("../config.json")).unwrap();
    let decoder = make(spec, &mut |name, shape| initial_values(0, name, shape)).unwrap();
    let model = HostModel::new(decoder, shape, 1, 0.1);
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (mut program, mut executor) = planned(&model, letters, dir.path(), false);
    for step in 0..3 {
        if step == 1 {
            forget_peak();
        }
        let ids = (0..shape.tokens() as u32).map(|t| t * 31 % 256).collect();
        executor.run(&mut program, &on(ids, shape.seq, step)).unwrap();
        model.gradients.zero();
    }
    peak() - before
}

#[test]
fn of_layers_at_home_in_ram_the_heap_holds_one_copy_of_one_layers_weights() {
    let _alone = ALONE.lock().unwrap();
    let shape = Shape { batch: 4, seq: 128 };
    let spec = ModelSpec::from_json(include_str!("../config.json")).unwrap();
    let layer = 4 * spec.layer_parameter_count(LayerIndex(0)) as usize;
    for letters in ["GGGGGGGGGGGGG", "NCC-NGG-G-C-G"] {
        let resident = most_allocated_by_passes(letters, shape, Decoder::new);
        let streamed = most_allocated_by_passes(letters, shape, Decoder::without_layers);
        let bound = resident - 2 * spec.layers() * layer + layer;
        assert!(streamed as f64 <= 1.02 * bound as f64, "{letters}: {streamed} for {resident}");
    }
}

#[test]
fn the_heap_holds_weights_gradients_one_layer_and_the_optimizers_ring() {
    let _alone = ALONE.lock().unwrap();
    let shape = Shape { batch: 4, seq: 128 };
    for letters in ["GGGGGGGGGGGGG", "NCC-NGG-G-C-G"] {
        let (most, bound) = most_allocated(letters, shape);
        assert!(
            most as f64 <= 1.1 * bound.get() as f64,
            "{letters}: {} allocated, {bound} declared",
            Bytes(most as u64)
        );
    }
}
