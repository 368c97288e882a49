//! Memory that steps take besides their buffers, which are mapped and do not count here: nothing that grows with the state.

#![allow(clippy::unwrap_used, reason = "a test that cannot set up should stop")]
#![allow(unsafe_code, reason = "counts what is allocated")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{cut, init, params};
use lazy_optim_nvme::{
    Gradient, Gradients, GroupOptions, LoadOptions, NvmeAdam, StepInput, WeightsOut, export,
};

/// Bytes allocated now, and at the most.
struct Counting {
    live: AtomicUsize,
    peak: AtomicUsize,
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = self.live.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        self.peak.fetch_max(live, Ordering::Relaxed);
        // SAFETY: by the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        self.live.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: by the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATED: Counting = Counting { live: AtomicUsize::new(0), peak: AtomicUsize::new(0) };

/// What `work` has allocated at the most beyond what there was.
fn peak(work: impl FnOnce()) -> usize {
    let before = ALLOCATED.live.load(Ordering::Relaxed);
    ALLOCATED.peak.store(before, Ordering::Relaxed);
    work();
    ALLOCATED.peak.load(Ordering::Relaxed) - before
}

/// Peaks of opening a store of so many buckets with a step, of an awaited step with a weight read, of a load into another cut, and of an
/// export.
fn peaks(buckets: usize) -> [usize; 4] {
    let dir = common::scratch();
    let params = params(&[buckets * 32_768]);
    // Two chunks a bucket; sets of three buffers of 64 KiB.
    let options = cut(32_768, 64, 3);
    let store = dir.path().join("store");
    drop(NvmeAdam::create(&store, &params, &options, init).unwrap());
    let grads = vec![0.25; buckets * 32_768];
    let mut weights = vec![0u16; buckets * 32_768];
    let input = StepInput { groups: &[GroupOptions::default()], ..StepInput::default() };
    let mut adam = None;
    let opened = peak(|| {
        let adam = adam.insert(NvmeAdam::open(&store, &params, &options).unwrap());
        adam.step(&[Some(Gradient::F32(&grads))], &input, &mut |_, _, _| {}).unwrap();
    });
    let mut adam = adam.unwrap();
    let awaited = peak(|| {
        let mut awaited = |_| Ok(Some(Gradient::F32(&grads)));
        let room = vec![Some(WeightsOut::Bf16(&mut weights))];
        adam.step_into(Gradients::Awaited(&mut awaited), &input, room, &mut |_, _| {}).unwrap();
        adam.read_weights_into(vec![Some(WeightsOut::Bf16(&mut weights))]).unwrap();
    });
    adam.save("here").unwrap().wait().unwrap();
    drop(adam);
    let source = [store.join("here")];
    let loaded = peak(|| {
        let to = dir.path().join("loaded");
        drop(NvmeAdam::load(&source, &to, &params, &cut(50_000, 64, 3), LoadOptions::default()).unwrap());
    });
    let exported = peak(|| export(&source, &dir.path().join("exported")).unwrap());
    [opened, awaited, loaded, exported]
}

#[test]
fn memory_does_not_grow_with_the_state() {
    // Threads that stay are made here.
    peaks(1);
    let (few, many) = (peaks(10), peaks(100));
    for (what, (few, many)) in
        ["open and step", "awaited", "load", "export"].into_iter().zip(few.into_iter().zip(many))
    {
        // 90 buckets of 384 KiB more: their names, checksums, heads and spans of time are less than 4 KiB each.
        assert!(many < few + 90 * 4096, "{what}: {few} bytes with 10 buckets, {many} with 100");
    }
    assert!(many.iter().all(|bytes| *bytes < 1 << 20), "{many:?}");
}
