//! The sizes the decoder declares, against what it allocates. Alone in its program, because it counts every
//! allocation there.
#![allow(clippy::unwrap_used, clippy::panic)] // Helpers of tests may unwrap, as tests do.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use candle_core::{Device, Tensor, Var};
use lazy_model::{Bytes, ModelSpec};
use train_lm::decoder::{Decoder, StepContext, shifted_targets};
use train_lm::dropout::DropoutKey;
use train_lm::random::initial_values;

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn count(size: usize) {
    PEAK.fetch_max(LIVE.fetch_add(size, Relaxed) + size, Relaxed);
}

// SAFETY: every call is passed on to the system's allocator unchanged; counting touches no memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`, which is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the pointer came from `alloc` above, so from the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What `f` leaves allocated and the most that it had, beyond what was there before.
fn allocated<R>(f: impl FnOnce() -> R) -> (R, usize, usize) {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = f();
    (result, LIVE.load(Relaxed) - before, PEAK.load(Relaxed) - before)
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
        decoder.layer_backward(0, &x, &warm, &dy).unwrap();
        drop(warm);

        let (y, kept, peak) = allocated(once);
        let internals = sizes.layer_internals_total();
        check("internals", kept, internals + sizes.boundary, 1.02);
        check("forward", peak, internals + sizes.boundary + sizes.layer_workspace, 1.35);

        let (back, _, peak) = allocated(|| decoder.layer_backward(0, &x, &y, &dy).unwrap());
        check("backward", peak, sizes.layer_gradients, 1.35);
        drop((back, y));

        let ids: Vec<u32> = (0..batch * seq).map(|i| (i * 31 % 256) as u32).collect();
        let targets = shifted_targets(&ids, seq);
        let (_, _, peak) = allocated(|| decoder.loss(&dy, &targets, 1).unwrap());
        check("loss", peak, sizes.loss_workspace, 1.5);
    }
}
