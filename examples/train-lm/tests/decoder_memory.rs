//! The sizes the decoder declares, against what it allocates. Alone in its program, because it counts every
//! allocation there.
#![allow(clippy::unwrap_used, clippy::panic)] // Helpers of tests may unwrap, as tests do.

mod common;
#[path = "common/counting.rs"]
mod counting;

use candle_core::{Device, Tensor, Var};
use common::layer_backward;
use counting::{forget_peak, live, peak};
use lazy_model::{Bytes, ModelSpec};
use train_lm::decoder::{Decoder, StepContext, shifted_targets};
use train_lm::dropout::DropoutKey;
use train_lm::random::initial_values;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// What `f` leaves allocated and the most that it had, beyond what was there before.
fn allocated<R>(f: impl FnOnce() -> R) -> (R, usize, usize) {
    let before = live();
    forget_peak();
    let result = f();
    (result, live() - before, peak() - before)
}

/// Declared sizes bound what is allocated, and by no more than `slack`.
fn check(what: &str, allocated: usize, declared: Bytes, slack: f64) {
    let declared = declared.get() as f64;
    // Graph nodes, shapes and the scratch memory of matrix products are small and not declared.
    assert!(allocated as f64 <= declared * 1.02, "{what}: {allocated} allocated, {declared} declared");
    assert!(allocated as f64 * slack >= declared, "{what}: {allocated} allocated, {declared} declared");
}

#[test]
fn declared_sizes_bound_what_is_allocated() {
    const SHIPPED: &str = include_str!("../config.json");
    let wide = SHIPPED.replace("\"vocab_size\": 256", "\"vocab_size\": 20000");
    for (config, batch, seq) in [(SHIPPED, 4, 128), (SHIPPED, 1, 100), (SHIPPED, 3, 300), (&wide, 2, 256)] {
        let spec = ModelSpec::from_json(config).unwrap();
        let (hidden, shape) = (spec.hidden, (batch, seq, spec.hidden));
        let make = || Decoder::new(spec, &mut |name, shape| initial_values(0, name, shape)).unwrap();
        let (decoder, weights, _) = allocated(make);
        let sizes = decoder.declared(batch, seq);
        check("weights", weights, sizes.weights, 1.01);

        let noise = |name| initial_values(1, name, &[batch * seq, hidden]);
        let x = Var::from_vec(noise("x"), shape, &Device::Cpu).unwrap();
        let dy = Tensor::from_vec(noise("dy"), shape, &Device::Cpu).unwrap();
        let cx = StepContext { dropout: 0.1, key: DropoutKey::default() };
        // The first call makes the threads and their scratch memory.
        let once = || decoder.layer_forward(0, x.as_tensor(), &cx).unwrap();
        let warm = once();
        layer_backward(&decoder, 0, &x, warm, &dy);

        let (y, kept, peak) = allocated(once);
        let internals = sizes.layer_internals_total();
        check("internals", kept, internals + sizes.boundary, 1.02);
        check("forward", peak, internals + sizes.boundary + sizes.layer_workspace, 1.35);

        let (back, _, peak) = allocated(|| layer_backward(&decoder, 0, &x, y.clone(), &dy));
        check("backward", peak, sizes.layer_gradients, 1.35);
        drop((back.dx, back.gradients, y));

        let ids: Vec<u32> = (0..batch * seq).map(|i| (i * 31 % 256) as u32).collect();
        let targets = shifted_targets(&ids, seq);
        // The first call makes the threads' scratch memory larger, by as much as suits the processor's caches.
        decoder.loss(&dy, &targets, 1).unwrap();
        let (_, _, peak) = allocated(|| decoder.loss(&dy, &targets, 1).unwrap());
        check("loss", peak, sizes.loss_workspace, 1.5);
    }
}
