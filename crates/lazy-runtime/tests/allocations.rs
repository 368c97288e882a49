//! A step that was run before takes no memory for its operations when it is run again: what it takes is the report's, whose lists are as many
//! however long the step is.
//!
//! A binary of its own, with an allocator that counts; nothing else may run beside it.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lazy_model::{Bytes, Placement, Schedule};
use lazy_runtime::{
    Backward, Context, Epilogue, Executor, ExecutorOptions, Forward, Layer, LayerError, LayerSizes, Loss,
    Model, ModelOptions, Output, Parameter, Prologue, Saved, Step, Weights,
};
use lazy_store::{Store, StoreOptions};

/// The system's allocator, counting what it is asked for by any thread.
struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: by the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: by the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: by the caller's promise.
        unsafe { System.realloc(start, layout, len) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: by the caller's promise.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const WIDTH: usize = 64;
const BYTES: Bytes = Bytes(4 * WIDTH as u64);

/// A layer that passes on what it is given.
struct Pass(usize);

impl Layer for Pass {
    fn sizes(&self) -> LayerSizes {
        LayerSizes { output: BYTES, saved: BYTES, forward_workspace: BYTES, backward_workspace: BYTES }
    }
    fn parameters(&self) -> Vec<Parameter> {
        vec![Parameter::f32(self.0, "w", WIDTH)]
    }
    fn forward(&self, cx: &Context<'_>, call: Forward<'_>) -> Result<Saved, LayerError> {
        cx.describe("output", &[WIDTH], "f32")?;
        for out in call.out.into_iter().chain(call.save) {
            out.f32()?.copy_from_slice(call.x.f32()?);
        }
        Ok(Saved::none())
    }
    fn backward(&self, _: &Context<'_>, mut call: Backward<'_>) -> Result<(), LayerError> {
        call.grads.add(0, call.internals.f32()?)?;
        call.dx.f32()?.copy_from_slice(call.dy.f32()?);
        Ok(())
    }
}

struct Ends;

impl Prologue for Ends {
    fn output_bytes(&self) -> Bytes {
        BYTES
    }
    fn forward(&self, _: &Context<'_>, _: Weights<'_>, out: Output<'_>) -> Result<(), LayerError> {
        out.f32()?.fill(1.0);
        Ok(())
    }
}

impl Epilogue for Ends {
    fn run(&self, _: &Context<'_>, call: Loss<'_>) -> Result<(), LayerError> {
        call.loss.f32()?[0] = call.x.f32()?.iter().sum();
        call.dx.map_or(Ok(()), |dx| dx.f32().map(|dx| dx.fill(1.0)))
    }
}

/// How a step is run.
#[derive(Clone, Copy, Debug)]
struct Way {
    letters: &'static str,
    streamed: bool,
    /// A hook that is called for final gradients, and whether it updates weights.
    hook: Option<bool>,
}

/// The fewest allocations of a step once the queues have grown: they grow a few times more where threads are further behind than before.
fn allocations(way: Way, layers: usize, micro_batches: usize) -> usize {
    let options = ModelOptions {
        micro_batches,
        stream_weights: way.streamed,
        stream_gradients: way.streamed,
        on_nvme: false,
    };
    let all = (0..layers).map(|l| Arc::new(Pass(l)) as Arc<dyn Layer>).collect();
    let model = Model::new(Arc::new(Ends), all, Arc::new(Ends), options).unwrap();
    let mut schedule = Schedule::named("test", &vec![BYTES; layers + 1], false);
    let letters = way.letters.chars().cycle();
    for (placement, letter) in schedule.placement.iter_mut().take(layers).zip(letters) {
        *placement = Placement::from_letter(letter).unwrap();
    }
    let plan = model.plan(&schedule).unwrap();
    let needs = model.needs(&plan);
    let store = StoreOptions { hbm: needs.hbm, host: needs.host, ..StoreOptions::default() };
    let mut executor = Executor::new(Store::open(store).unwrap(), model, ExecutorOptions::default()).unwrap();
    match way.hook {
        Some(true) => executor.update_in_backward(|last| {
            let (weights, gradient) = (last.weights.unwrap().f32()?, last.gradient.unwrap().f32()?);
            weights.iter_mut().zip(gradient).for_each(|(w, g)| *w -= g);
            Ok(())
        }),
        Some(false) => executor.on_final_gradient(|_| Ok(())),
        None => {}
    }
    let mut program = executor.prepare(plan).unwrap();
    let step = Step::default();
    let counts = (0..40).map(|_| {
        let before = COUNT.load(Ordering::SeqCst);
        let report = executor.run(&mut program, &step).unwrap();
        let count = COUNT.load(Ordering::SeqCst) - before;
        assert_eq!(report.losses, vec![WIDTH as f32; micro_batches]);
        count
    });
    counts.min().unwrap()
}

#[test]
fn a_step_takes_no_memory_for_its_operations() {
    for way in [
        Way { letters: "GCC-", streamed: false, hook: None },
        Way { letters: "CGC", streamed: false, hook: Some(true) },
        Way { letters: "C-C", streamed: true, hook: None },
        Way { letters: "CC-G", streamed: true, hook: Some(true) },
        Way { letters: "C", streamed: false, hook: Some(false) },
    ] {
        let few = allocations(way, 6, 2);
        eprintln!("{way:?}: {few} allocations a step");
        assert_eq!(allocations(way, 6, 4), few, "of twice as many micro-batches: {way:?}");
        assert_eq!(allocations(way, 12, 2), few, "of twice as many layers: {way:?}");
    }
}
