//! Random programs over three tiers, with slow streams and poison, against a model.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lazy_store::gpu_test::Random;
use lazy_store::{
    BoxError, Bytes, DeviceChoice, Event, Extent, Lane, NvmeOptions, Store, StoreOptions, Submission, Tier,
};

use crate::{Context, check, fill, spin, word};

/// An extent, and what it holds.
struct Held {
    extent: Extent,
    tag: u32,
}

/// Counts of a run.
#[derive(Default)]
pub(crate) struct Counts {
    /// Words that were not what the model says.
    pub(crate) errors: u64,
    pub(crate) copies: u64,
    pub(crate) checks: u64,
}

pub(crate) fn open(context: &Context, hbm: u64, host: u64) -> Result<Store, BoxError> {
    let nvme = NvmeOptions { staging: Bytes(16 << 20), ..NvmeOptions::new(&context.dir, Bytes(64 << 20)) };
    Ok(Store::open(StoreOptions {
        device: DeviceChoice::Cuda { ordinal: 0 },
        hbm: Bytes(hbm),
        host: Bytes(host + (16 << 20)),
        nvme: Some(nvme),
        poison: true,
        ..StoreOptions::default()
    })?)
}

/// One random program. Nothing waits before its end, so that releases, reuse and transfers overlap as much as they can.
pub(crate) fn run(context: &Context, store: &Store, seed: u64, steps: usize) -> Result<Counts, BoxError> {
    let mut random = Random(seed);
    let mut counts = Counts::default();
    let errors = store.reserve(Tier::Hbm, Bytes(4))?;
    let zero = Submission { writes: &[&errors], ..Submission::new(Lane::Compute, "zero the count") };
    let fill_kernel = context.fill.clone();
    // Tag 0 makes a first word of zero.
    store.launch(zero, move |cx| fill(&fill_kernel, cx.stream(), cx.write(0), 0))?;
    let on_host = Arc::new(AtomicU64::new(0));
    let mut held: Vec<Held> = Vec::new();
    let mut tag = seed as u32 | 1;
    for _ in 0..steps {
        slow_down(context, store, &mut random)?;
        match random.below(10) {
            0..3 => {
                tag = tag.wrapping_add(2);
                put(context, store, &mut random, &mut held, tag)?;
            }
            3..7 if !held.is_empty() => {
                let which = random.below(held.len() as u64) as usize;
                let from = &held[which];
                let to = Tier::ALL[random.below(3) as usize];
                if to == from.extent.tier() {
                    continue;
                }
                let Ok(extent) = store.reserve(to, from.extent.bytes()) else {
                    held.swap_remove(which);
                    continue;
                };
                store.copy(format!("copy {:?} to {to}", from.extent), &from.extent, &extent, &[])?;
                counts.copies += 1;
                let copied = Held { extent, tag: from.tag };
                if random.below(2) == 0 {
                    held[which] = copied;
                } else {
                    held.push(copied);
                }
            }
            7..9 if !held.is_empty() => {
                let which = random.below(held.len() as u64) as usize;
                verify(context, store, &held[which], &errors, &on_host)?;
                counts.checks += 1;
            }
            _ if !held.is_empty() => {
                held.swap_remove(random.below(held.len() as u64) as usize);
            }
            _ => {}
        }
    }
    for last in &held {
        verify(context, store, last, &errors, &on_host)?;
        counts.checks += 1;
    }
    let count = store.reserve(Tier::Host, Bytes(4))?;
    store.copy("errors out", &errors, &count, &[])?;
    let seen = Arc::clone(&on_host);
    let read = Submission { reads: &[&count], ..Submission::new(Lane::Optimizer, "count") };
    store.submit(read, move |access| {
        let bytes: [u8; 4] = access.read(0).try_into()?;
        seen.fetch_add(u64::from(u32::from_le_bytes(bytes)), Ordering::Relaxed);
        Ok(())
    })?;
    drop((held, count, errors));
    store.synchronize()?;
    counts.errors = on_host.load(Ordering::Relaxed);
    Ok(counts)
}

/// Sometimes makes a stream slow.
fn slow_down(context: &Context, store: &Store, random: &mut Random) -> Result<(), BoxError> {
    if random.below(3) > 0 {
        return Ok(());
    }
    let lane = [Lane::Compute, Lane::D2h, Lane::H2d][random.below(3) as usize];
    let (kernel, microseconds) = (context.spin.clone(), 20 + random.below(300));
    store.launch(Submission::new(lane, "spin"), move |cx| spin(&kernel, cx.stream(), microseconds))?;
    Ok(())
}

/// Makes a new extent with contents of its own, in HBM or in host RAM.
fn put(
    context: &Context,
    store: &Store,
    random: &mut Random,
    held: &mut Vec<Held>,
    tag: u32,
) -> Result<Event, BoxError> {
    let bytes = Bytes(4 * (1 + random.below(1 << 17)));
    let tier = if random.below(3) > 0 { Tier::Hbm } else { Tier::Host };
    let extent = loop {
        match store.reserve(tier, bytes) {
            Ok(extent) => break extent,
            // Room is made by forgetting, never by waiting.
            Err(_) if !held.is_empty() => drop(held.remove(0)),
            Err(error) => return Err(error.into()),
        }
    };
    let task = Submission { writes: &[&extent], ..Submission::new(Lane::Compute, "put") };
    let event = if tier == Tier::Hbm {
        let kernel = context.fill.clone();
        store.launch(task, move |cx| fill(&kernel, cx.stream(), cx.write(0), tag))?
    } else {
        store.submit(task, move |access| {
            for (i, out) in access.write(0).chunks_exact_mut(4).enumerate() {
                out.copy_from_slice(&word(tag, i as u32).to_le_bytes());
            }
            Ok(())
        })?
    };
    held.push(Held { extent, tag });
    Ok(event)
}

/// Compares an extent with the model: on the GPU in HBM, on the CPU in host RAM, from NVMe by way of host RAM.
fn verify(
    context: &Context,
    store: &Store,
    held: &Held,
    errors: &Extent,
    on_host: &Arc<AtomicU64>,
) -> Result<(), BoxError> {
    let (tag, extent) = (held.tag, &held.extent);
    if extent.tier() == Tier::Hbm {
        let kernel = context.check.clone();
        let task = Submission {
            reads: &[extent],
            writes: &[errors],
            ..Submission::new(Lane::Compute, "check in HBM")
        };
        store.launch(task, move |cx| check(&kernel, cx.stream(), cx.read(0), tag, cx.write(0)))?;
        return Ok(());
    }
    let staged;
    let on_cpu = if extent.tier() == Tier::Nvme {
        let Ok(room) = store.reserve(Tier::Host, extent.bytes()) else { return Ok(()) };
        store.copy("read back", extent, &room, &[])?;
        staged = room;
        &staged
    } else {
        extent
    };
    let wrong = Arc::clone(on_host);
    let task = Submission { reads: &[on_cpu], ..Submission::new(Lane::Optimizer, "check on the host") };
    store.submit(task, move |access| {
        let words = access.read(0).chunks_exact(4).enumerate();
        let differ = words.filter(|(i, bytes)| **bytes != word(tag, *i as u32).to_le_bytes()).count();
        wrong.fetch_add(differ as u64, Ordering::Relaxed);
        Ok(())
    })?;
    Ok(())
}
