//! Waits: what runs at once, what has to wait, and what the spans say of it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use lazy_store::{
    BackendChoice, Bytes, BytesPerSecond, Event, Extent, Lane, LinkLimits, NvmeOptions, QueueOrder, Store,
    StoreOptions, Submission, Tier,
};
use proptest::prelude::*;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn store(order: QueueOrder, hbm: u64, host: u64, nvme: Option<(&Path, BackendChoice)>) -> Store {
    let nvme = nvme.map(|(dir, backend)| NvmeOptions { backend, ..NvmeOptions::new(dir, Bytes(1 << 20)) });
    let (hbm, host) = (Bytes(hbm), Bytes(host));
    Store::open(StoreOptions { hbm, host, nvme, poison: true, order, ..StoreOptions::default() }).unwrap()
}

fn task<'a>(
    lane: Lane,
    name: impl Into<Arc<str>>,
    reads: &'a [&'a Extent],
    writes: &'a [&'a Extent],
) -> Submission<'a> {
    Submission { reads, writes, ..Submission::new(lane, name) }
}

/// Fills an extent after a pause.
fn fill(store: &Store, extent: &Extent, byte: u8, pause: Duration) -> Event {
    store
        .submit(task(Lane::Compute, format!("fill {byte}"), &[], &[extent]), move |access| {
            std::thread::sleep(pause);
            access.write(0).fill(byte);
            Ok(())
        })
        .unwrap()
}

fn contents(store: &Store, extent: &Extent) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    store
        .submit(task(Lane::Optimizer, "read", &[extent], &[]), move |access| {
            Ok(sender.send(access.read(0).to_vec())?)
        })
        .unwrap();
    receiver
}

#[derive(Clone, Debug)]
enum Step {
    Put { tier: bool, bytes: usize, byte: u8, pause: bool },
    Copy { which: usize, up: bool, keep: bool },
    Check { which: usize },
    Release { which: usize },
    Synchronize,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (any::<bool>(), 1..9000usize, 0..255u8, any::<bool>())
            .prop_map(|(tier, bytes, byte, pause)| Step::Put { tier, bytes, byte, pause }),
        6 => (any::<usize>(), any::<bool>(), any::<bool>())
            .prop_map(|(which, up, keep)| Step::Copy { which, up, keep }),
        2 => any::<usize>().prop_map(|which| Step::Check { which }),
        2 => any::<usize>().prop_map(|which| Step::Release { which }),
        1 => Just(Step::Synchronize),
    ]
}

/// Runs the steps on a store and on a list of (extent, bytes it holds); every read has to agree with the list.
fn agrees_with_model(store: &Store, steps: &[Step]) {
    let mut live: Vec<(Extent, Vec<u8>)> = Vec::new();
    let mut reads: Vec<(mpsc::Receiver<Vec<u8>>, Vec<u8>)> = Vec::new();
    for step in steps {
        match *step {
            Step::Put { tier, bytes, byte, pause } => {
                let tier = if tier { Tier::Hbm } else { Tier::Host };
                let Ok(extent) = store.reserve(tier, Bytes(bytes as u64)) else { continue };
                fill(store, &extent, byte, Duration::from_micros(if pause { 200 } else { 0 }));
                live.push((extent, vec![byte; bytes]));
            }
            Step::Copy { which, up, keep } if !live.is_empty() => {
                let which = which % live.len();
                let (src, held) = &live[which];
                let to = match (src.tier(), up) {
                    (Tier::Hbm, _) | (Tier::Nvme, _) => Tier::Host,
                    (Tier::Host, true) => Tier::Hbm,
                    (Tier::Host, false) => Tier::Nvme,
                };
                let Ok(dst) = store.reserve(to, src.bytes()) else { continue };
                store.copy("copy", src, &dst, &[]).unwrap();
                live.push((dst, held.clone()));
                if !keep {
                    // Right after the submission: the copy has hardly begun.
                    store.release(live.swap_remove(which).0);
                }
            }
            Step::Check { which } if !live.is_empty() => {
                let (extent, held) = &live[which % live.len()];
                if extent.tier() != Tier::Nvme {
                    reads.push((contents(store, extent), held.clone()));
                }
            }
            Step::Release { which } if !live.is_empty() => {
                let which = which % live.len();
                store.release(live.swap_remove(which).0);
            }
            Step::Synchronize => store.synchronize().unwrap(),
            _ => {}
        }
        let padded = |e: &Extent| match e.tier() {
            Tier::Nvme => e.bytes().align_up(store.nvme_alignment().unwrap() as u64),
            _ => e.bytes(),
        };
        for tier in Tier::ALL {
            let held: Bytes = live.iter().filter(|(e, _)| e.tier() == tier).map(|(e, _)| padded(e)).sum();
            assert_eq!(store.live(tier), held);
        }
    }
    store.synchronize().unwrap();
    for (read, held) in reads {
        assert!(read.recv().unwrap() == held);
    }
    drop(live);
    assert!(Tier::ALL.iter().all(|&tier| store.live(tier) == Bytes::ZERO));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_read_returns_what_was_written(steps in prop::collection::vec(step(), 1..150), seed: u64, uring: bool) {
        let dir = folder();
        let backend = if uring { BackendChoice::Uring } else { BackendChoice::Posix };
        for order in [QueueOrder::Threads, QueueOrder::Seeded(seed)] {
            agrees_with_model(&store(order, 40_000, 60_000, Some((dir.path(), backend))), &steps);
        }
    }
}

#[test]
fn r1_memory_released_under_a_copy_is_not_overwritten_by_its_next_owner() {
    let orders = (0..300).map(QueueOrder::Seeded).chain([QueueOrder::Threads; 20]);
    for order in orders {
        let store = store(order, 4096, 1 << 20, None);
        let mut saved = Vec::new();
        for byte in 0..20 {
            // One range of HBM, used by all in turn.
            let x = store.reserve(Tier::Hbm, Bytes(4096)).unwrap();
            fill(&store, &x, byte, Duration::ZERO);
            let host = store.reserve(Tier::Host, Bytes(4096)).unwrap();
            store.copy("out", &x, &host, &[]).unwrap();
            saved.push(host);
        }
        let reads: Vec<_> = saved.iter().map(|host| contents(&store, host)).collect();
        store.synchronize().unwrap();
        for (byte, read) in reads.into_iter().enumerate() {
            assert!(read.recv().unwrap() == [byte as u8; 4096], "boundary {byte} in order {order:?}");
        }
    }
}

/// Forward through `LAYERS` layers, each boundary offloaded; backward with boundaries fetched `distance` layers ahead.
/// The result mixes every boundary in order, so that a wrong or late one changes it.
fn step_with_prefetch(order: QueueOrder, distance: usize) -> Vec<u8> {
    const LAYERS: usize = 16;
    const LEN: Bytes = Bytes(256);
    let store = store(order, 256 * (distance as u64 + 3), 256 * LAYERS as u64, None);
    let hbm = || store.reserve(Tier::Hbm, LEN).unwrap();
    let mut x = hbm();
    fill(&store, &x, 1, Duration::ZERO);
    let mut saved = VecDeque::new();
    for layer in 0..LAYERS {
        let host = store.reserve(Tier::Host, LEN).unwrap();
        store.copy(format!("out {layer}"), &x, &host, &[]).unwrap();
        saved.push_back(host);
        let y = hbm();
        store
            .submit(task(Lane::Compute, format!("forward {layer}"), &[&x], &[&y]), move |access| {
                let (mut reads, mut writes) = access.split();
                for (i, (y, x)) in std::iter::zip(writes.next().unwrap(), reads.next().unwrap()).enumerate() {
                    *y = x.wrapping_mul(5).wrapping_add((layer + i) as u8);
                }
                Ok(())
            })
            .unwrap();
        x = y;
    }
    let gradient = x;
    let mut fetched = VecDeque::new();
    for layer in (0..LAYERS).rev() {
        while fetched.len() <= distance
            && let Some(host) = saved.pop_back()
        {
            let x = hbm();
            store.copy("in", &host, &x, &[]).unwrap();
            fetched.push_back(x);
        }
        let x = fetched.pop_front().unwrap();
        store
            .submit(
                task(Lane::Compute, format!("backward {layer}"), &[&x, &gradient], &[&gradient]),
                |access| {
                    let (mut reads, mut writes) = access.split();
                    std::iter::zip(writes.next().unwrap(), reads.next().unwrap())
                        .for_each(|(g, x)| *g = g.wrapping_mul(3) ^ x);
                    Ok(())
                },
            )
            .unwrap();
    }
    let read = contents(&store, &gradient);
    store.synchronize().unwrap();
    read.recv().unwrap()
}

#[test]
fn r2_any_prefetch_distance_gives_the_same_bits_in_every_order() {
    let expected = step_with_prefetch(QueueOrder::Threads, 0);
    for distance in [0, 1, 2, 4] {
        for seed in 0..250 {
            assert!(step_with_prefetch(QueueOrder::Seeded(seed), distance) == expected, "seed {seed}");
        }
        for _ in 0..5 {
            assert!(step_with_prefetch(QueueOrder::Threads, distance) == expected, "distance {distance}");
        }
    }
}

#[test]
fn a_seed_replays_its_order() {
    let order_of = |seed| {
        let store = store(QueueOrder::Seeded(seed), 4096, 4096, None);
        let (sender, receiver) = mpsc::channel();
        for (i, lane) in Lane::ALL.into_iter().cycle().take(30).enumerate() {
            let sender = sender.clone();
            store.submit(task(lane, "note", &[], &[]), move |_| Ok(sender.send(i)?)).unwrap();
        }
        store.synchronize().unwrap();
        receiver.try_iter().collect::<Vec<_>>()
    };
    assert_eq!(order_of(1), order_of(1));
    assert_ne!(order_of(1), order_of(2));
}

#[test]
fn spans_say_what_ran_when_and_what_it_waited_for() {
    let store = store(QueueOrder::Threads, 8192, 8192, None);
    let x = store.reserve(Tier::Hbm, Bytes(4096)).unwrap();
    let host = store.reserve(Tier::Host, Bytes(4096)).unwrap();
    fill(&store, &x, 1, Duration::ZERO).wait();
    assert!(store.take_spans().is_empty(), "nothing is recorded before a step begins");
    store.start_step();
    assert_eq!(store.peak(Tier::Hbm), Bytes(4096));
    // The first task holds its lane until the others are submitted, so that they have to wait.
    let (go, gate) = mpsc::channel::<()>();
    store
        .submit(task(Lane::Compute, "forward 0", &[], &[&x]), move |_| {
            gate.recv()?;
            Ok(())
        })
        .unwrap();
    store.copy("boundary 1", &x, &host, &[]).unwrap();
    let free = store.submit(task(Lane::H2d, "free", &[], &[]), |_| Ok(())).unwrap();
    free.wait();
    go.send(()).unwrap();
    store.synchronize().unwrap();
    let spans = store.take_spans();
    let names: Vec<&str> = spans.iter().map(|s| &*s.name).collect();
    assert_eq!(names, ["forward 0", "boundary 1", "free"]);
    assert_eq!(spans.iter().map(|s| s.blocked_on).collect::<Vec<_>>(), [None, Some(0), None]);
    assert_eq!(spans.iter().map(|s| s.bytes).collect::<Vec<_>>(), [Bytes::ZERO, Bytes(4096), Bytes::ZERO]);
    assert_eq!(spans[1].lane, Lane::D2h);
    assert!(spans[1].start >= spans[0].end && spans[2].end <= spans[0].end);
    assert!(spans.iter().all(|s| s.end >= s.start));
    assert!(store.take_spans().is_empty());
}

#[test]
fn a_limited_link_takes_at_least_its_time() {
    let limits = LinkLimits { d2h: Some(BytesPerSecond(1e6)), ..LinkLimits::default() };
    let (hbm, host) = (Bytes(20_000), Bytes(20_000));
    let store = Store::open(StoreOptions { hbm, host, limits, ..StoreOptions::default() }).unwrap();
    let (x, saved) = (store.reserve(Tier::Hbm, hbm).unwrap(), store.reserve(Tier::Host, host).unwrap());
    store.start_step();
    fill(&store, &x, 1, Duration::ZERO);
    store.copy("out", &x, &saved, &[]).unwrap();
    store.synchronize().unwrap();
    // 20,000 bytes at 10^6 bytes a second.
    assert!(store.take_spans()[1].duration().get() >= 0.02);
    drop((x, saved));
    let rates = store.probe_links(Bytes(8192)).unwrap();
    assert!(rates.d2h.get() <= 1e6 && rates.h2d.get() > 0.0 && rates.nvme_read.is_none());
    // Never more than alone.
    assert!(rates.d2h_both.get() > 0.0 && rates.d2h_both <= rates.d2h, "{rates:?}");
    assert!(rates.h2d_both.get() > 0.0 && rates.h2d_both <= rates.h2d, "{rates:?}");
}

#[test]
fn the_drive_is_measured_by_copies_in_a_row() {
    let limit = BytesPerSecond(4e6);
    let limits = LinkLimits { nvme_read: Some(limit), nvme_write: Some(limit), ..LinkLimits::default() };
    let (dir, room) = (folder(), Bytes(8 * 16384));
    let store = Store::open(StoreOptions {
        hbm: Bytes(2 * 16384),
        host: room,
        nvme: Some(NvmeOptions::new(dir.path(), room)),
        limits,
        ..StoreOptions::default()
    })
    .unwrap();
    let rates = store.probe_links(Bytes(16384)).unwrap();
    for rate in [rates.nvme_read.unwrap(), rates.nvme_write.unwrap()] {
        assert!(rate.get() > 0.0 && rate <= limit, "{rates:?}");
    }
    assert!(Tier::ALL.iter().all(|tier| store.live(*tier) == Bytes::ZERO));
}

#[test]
fn t5_dropping_the_store_waits_for_what_is_in_flight() {
    let dir = folder();
    let store = store(QueueOrder::Threads, 8192, 8192, Some((dir.path(), BackendChoice::Auto)));
    let x = store.reserve(Tier::Host, Bytes(4096)).unwrap();
    let (sender, receiver) = mpsc::channel();
    store
        .submit(task(Lane::Compute, "slow", &[], &[&x]), move |access| {
            std::thread::sleep(Duration::from_millis(20));
            access.write(0).fill(1);
            Ok(sender.send(())?)
        })
        .unwrap();
    let nvme = store.reserve(Tier::Nvme, Bytes(4096)).unwrap();
    let spilled = store.copy("spill", &x, &nvme, &[]).unwrap();
    drop(x);
    drop(store);
    assert!(receiver.try_recv().is_ok() && spilled.is_done());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    // An extent may outlive its store.
    drop(nvme);
}

#[test]
fn t5_a_task_may_own_the_last_handle_of_its_store() {
    let dir = folder();
    let store = store(QueueOrder::Threads, 8192, 8192, Some((dir.path(), BackendChoice::Auto)));
    let x = store.reserve(Tier::Hbm, Bytes(64)).unwrap();
    let (go, gate) = mpsc::channel::<()>();
    let own = store.clone();
    let event = store
        .submit(task(Lane::Compute, "owner", &[], &[]), move |_| {
            gate.recv()?;
            drop((own, x));
            Ok(())
        })
        .unwrap();
    drop(store);
    go.send(()).unwrap();
    event.wait();
    drop(event);
    // The threads end on their own, and the last one removes the spill file.
    while std::fs::read_dir(dir.path()).unwrap().count() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn extents_and_events_of_another_store_are_refused() {
    let [a, b] = [(); 2].map(|()| store(QueueOrder::Threads, 4096, 4096, None));
    let x = a.reserve(Tier::Hbm, Bytes(64)).unwrap();
    let event = fill(&a, &x, 1, Duration::ZERO);
    assert!(b.submit(task(Lane::Compute, "t", &[&x], &[]), |_| Ok(())).is_err());
    let after = [event];
    assert!(
        b.submit(Submission { after: &after, ..task(Lane::Compute, "t", &[], &[]) }, |_| Ok(())).is_err()
    );
    let short = a.reserve(Tier::Host, Bytes(63)).unwrap();
    assert!(a.copy("c", &x, &short, &[]).is_err());
    assert!(a.copy("c", &x, &x, &[]).is_err());
}
