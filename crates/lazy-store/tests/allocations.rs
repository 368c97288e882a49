//! A step that was submitted before takes no memory when it is submitted again, on whichever thread.
//!
//! A binary of its own, with an allocator that counts; nothing else may run beside it.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use lazy_store::{
    Access, BoxError, Bytes, Lane, Routine, Span, Store, StoreError, StoreOptions, Submission, Tier,
};

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

/// Allocations made while `f` runs, and what it gives.
fn counted<T>(f: impl FnOnce() -> T) -> (usize, T) {
    let before = COUNT.load(Ordering::SeqCst);
    let given = f();
    (COUNT.load(Ordering::SeqCst) - before, given)
}

const LEN: Bytes = Bytes(256);
/// Rounds between two synchronizations: a step.
const ROUNDS: usize = 50;

/// What the compute lane does.
struct Layers {
    /// Holds the lane until a whole step is submitted.
    gate: Barrier,
    wrong: AtomicUsize,
}

/// Items below this fill an extent with their number, those from it on add one to what they read, and the last waits.
const ADD: usize = 1000;
const HOLD: usize = 2000;

impl Routine for Layers {
    fn run(&self, item: usize, access: &mut Access<'_>) -> Result<(), BoxError> {
        match item {
            HOLD => drop(self.gate.wait()),
            ..ADD => access.write(0).fill(item as u8),
            _ => {
                let (reads, writes) = access.split();
                for (from, to) in reads.zip(writes) {
                    if from.iter().any(|&byte| byte != (item - ADD) as u8) {
                        self.wrong.fetch_add(1, Ordering::SeqCst);
                    }
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = from.wrapping_add(1));
                }
            }
        }
        Ok(())
    }
}

struct Step {
    store: Store,
    layers: Arc<Layers>,
    routine: Arc<dyn Routine>,
    names: [Arc<str>; 3],
}

impl Step {
    fn new() -> Self {
        let memory = StoreOptions { hbm: Bytes(4096), host: Bytes(4096), ..StoreOptions::default() };
        let layers = Arc::new(Layers { gate: Barrier::new(2), wrong: AtomicUsize::new(0) });
        Step {
            store: Store::open(memory).unwrap(),
            routine: Arc::clone(&layers) as Arc<dyn Routine>,
            layers,
            names: ["layer", "out", "in"].map(Arc::from),
        }
    }

    fn submit(&self, task: Submission<'_>, item: usize) -> lazy_store::Event {
        self.store.submit_routine(task, &self.routine, item).unwrap()
    }

    /// Compute, out to host, back in, compute; everything is given back before it has run.
    fn round(&self, round: usize) {
        let (store, [layer, out, back]) = (&self.store, &self.names);
        let task = |name| Submission::new(Lane::Compute, Arc::clone(name));
        let item = round % 200;
        let x = store.reserve(Tier::Hbm, LEN).unwrap();
        self.submit(Submission { writes: &[&x], ..task(layer) }, item);
        let saved = store.reserve_at(Tier::Host, 1024 * (round as u64 % 3), LEN).unwrap();
        let event = store.copy(Arc::clone(out), &x, &saved, &[]).unwrap();
        store.release(x);
        let y = store.reserve(Tier::Hbm, LEN).unwrap();
        store.copy(Arc::clone(back), &saved, &y, std::slice::from_ref(&event)).unwrap();
        store.release(saved);
        let z = store.reserve(Tier::Hbm, Bytes(LEN.get() / 2)).unwrap();
        drop(z);
        let z = store.reserve(Tier::Hbm, LEN).unwrap();
        let added = Submission { reads: &[&y], writes: &[&z], ..task(layer) };
        self.submit(added, ADD + item);
    }

    /// A step. With `hold`, nothing of it runs before all of it is submitted: what grows with that has grown then.
    fn run(&self, hold: bool) {
        self.store.start_step();
        if hold {
            self.submit(Submission::new(Lane::Compute, Arc::clone(&self.names[0])), HOLD);
        }
        for round in 0..ROUNDS {
            self.round(round);
        }
        if hold {
            self.layers.gate.wait();
        }
        self.store.synchronize().unwrap();
    }
}

#[test]
fn a_step_submitted_again_takes_no_memory() {
    let step = Step::new();
    step.run(true);
    step.run(true);
    let (allocations, ()) = counted(|| (0..1000 / ROUNDS).for_each(|_| step.run(false)));
    assert_eq!(allocations, 0, "in 1,000 rounds");
    assert_eq!(step.layers.wrong.load(Ordering::SeqCst), 0);

    // The spans are the caller's, in a list; how many there are makes no difference.
    let (some, spans): (usize, Vec<Span>) = counted(|| step.store.take_spans());
    assert_eq!(spans.len(), 4 * ROUNDS);
    step.store.start_step();
    step.round(0);
    step.store.synchronize().unwrap();
    let (few, spans) = counted(|| step.store.take_spans());
    assert_eq!((spans.len(), few), (4, some));
    assert!(some <= 2, "{some} allocations for a list of spans");

    // Told here, where it is seen that the allocator counts.
    let (allocations, refused) = counted(|| step.store.reserve(Tier::Nvme, LEN).map(drop));
    assert!(matches!(refused, Err(StoreError::NoNvme)));
    assert_eq!(allocations, 0);
    let (allocations, ()) = counted(|| {
        let task = Submission::new(Lane::Compute, "a name of its own");
        let own = move |_: &mut Access<'_>| {
            drop(spans);
            Ok(())
        };
        step.store.submit(task, own).unwrap();
    });
    assert!(allocations >= 2, "a name and a closure take memory");
    step.store.synchronize().unwrap();
}
