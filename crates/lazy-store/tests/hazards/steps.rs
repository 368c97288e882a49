//! R1 and R2: training steps whose copies are slow, whose memory is given back early, and whose boundaries are fetched
//! ahead, for every order; and what is left of an earlier step.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use lazy_store::mutants::{Source, Wait};
use lazy_store::{
    Access, BoxError, Bytes, BytesPerSecond, Event, Extent, Lane, LinkLimits, QueueOrder, Routine, Store,
    StoreError, StoreOptions, Submission, Tier,
};

use crate::deep;
use crate::program::Random;

const LEN: Bytes = Bytes(256);
const LAYERS: usize = 16;

/// Memory for `hbm` boundaries in HBM and all of them in host RAM.
fn store(order: QueueOrder, hbm: u64, limits: LinkLimits) -> Store {
    let (hbm, host) = (Bytes(LEN.get() * hbm), Bytes(LEN.get() * 2 * LAYERS as u64));
    Store::open(StoreOptions { hbm, host, limits, poison: true, order, ..StoreOptions::default() }).unwrap()
}

/// A task that takes a random time, on threads; what it computes is exact, so that any wrong input changes the result.
struct Toy<'a> {
    store: &'a Store,
    random: Random,
    delays: bool,
}

/// A routine with one item, which is done once.
struct Once<F>(Mutex<Option<F>>);

impl<F: FnOnce(&mut Access<'_>) + Send> Routine for Once<F> {
    fn run(&self, _item: usize, access: &mut Access<'_>) -> Result<(), BoxError> {
        let run = self.0.lock().unwrap().take().ok_or("it ran twice")?;
        run(access);
        Ok(())
    }
}

impl Toy<'_> {
    fn submit(
        &mut self,
        lane: Lane,
        name: String,
        reads: &[&Extent],
        write: &Extent,
        work: impl FnOnce(&mut Access<'_>) + Send + 'static,
    ) -> Event {
        let pause = Duration::from_micros(if self.delays { self.random.below(100) as u64 } else { 0 });
        let writes = [write];
        let task = Submission { reads, writes: &writes, ..Submission::new(lane, name) };
        let run = move |access: &mut Access<'_>| {
            if pause > Duration::from_micros(30) {
                std::thread::sleep(pause);
            }
            work(access);
        };
        let routine: Arc<dyn Routine> = Arc::new(Once(Mutex::new(Some(run))));
        self.store.submit_routine(task, &routine, 0).unwrap()
    }

    fn hbm(&self) -> Extent {
        self.store.reserve(Tier::Hbm, LEN).unwrap()
    }

    /// Boundary `layer + 1` from boundary `layer`.
    fn forward(&mut self, lane: Lane, layer: usize, x: &Extent) -> Extent {
        let y = self.hbm();
        self.submit(lane, format!("forward {layer}"), &[x], &y, move |access| {
            let (mut reads, mut writes) = access.split();
            for (i, (y, x)) in std::iter::zip(writes.next().unwrap(), reads.next().unwrap()).enumerate() {
                *y = x.wrapping_mul(5).wrapping_add((layer + i) as u8);
            }
        });
        y
    }
}

/// Reads an extent on a lane of its own.
fn contents(store: &Store, extent: &Extent) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    let reads = [extent];
    let task = Submission { reads: &reads, ..Submission::new(Lane::Optimizer, "read") };
    store.submit(task, move |access| Ok(sender.send(access.read(0).to_vec())?)).unwrap();
    receiver
}

/// Sends boundary after boundary out of one range of HBM, which is given back before its copy has begun. Whether each
/// arrived as it was.
fn offload_through_one_range(store: &Store) -> bool {
    let mut toy = Toy { store, random: Random(0), delays: false };
    let mut saved = Vec::new();
    for byte in 0..LAYERS as u8 {
        let x = toy.hbm();
        toy.submit(Lane::Compute, format!("forward {byte}"), &[], &x, move |access| {
            access.write(0).fill(byte)
        });
        let host = store.reserve(Tier::Host, LEN).unwrap();
        store.copy(format!("boundary {byte} out"), &x, &host, &[]).unwrap();
        store.release(x);
        saved.push(host);
    }
    let reads: Vec<_> = saved.iter().map(|host| contents(store, host)).collect();
    store.synchronize().unwrap();
    reads.into_iter().enumerate().all(|(byte, read)| read.recv().unwrap() == [byte as u8; LEN.0 as usize])
}

#[test]
fn r1_a_range_released_under_a_slow_copy_is_neither_poisoned_nor_overwritten() {
    // 256 bytes at 10^5 a second: each copy takes 2.5 ms, and its source is given back at once.
    let limits = LinkLimits { d2h: Some(BytesPerSecond(1e5)), ..LinkLimits::default() };
    assert!(offload_through_one_range(&store(QueueOrder::Threads, 1, limits)));
    let seeded = store(QueueOrder::Seeded(0), 1, LinkLimits::default());
    let bad_seeds = |without| {
        assert!(seeded.leave_out(without));
        let seeds = 0..1000 * deep(10);
        let bad = seeds.filter(|&seed| {
            seeded.reseed(seed);
            !offload_through_one_range(&seeded)
        });
        bad.count()
    };
    assert_eq!(bad_seeds(None), 0);
    // What a release hands on is what keeps it so.
    assert!(bad_seeds(Some(Wait::Release(Source::Reads, Tier::Hbm))) > 500);
}

/// Forward through all layers with each boundary offloaded, then backward: boundaries are fetched `distance` layers
/// ahead, and each third is recomputed on another lane instead. The result mixes all of them in order.
fn train_step(store: &Store, distance: usize, delays: Option<u64>) -> Vec<u8> {
    let mut toy = Toy { store, random: Random(delays.unwrap_or(0)), delays: delays.is_some() };
    let mut x = toy.hbm();
    toy.submit(Lane::Compute, "input".into(), &[], &x, |access| {
        access.write(0).iter_mut().zip(0..=255).for_each(|(b, i)| *b = i);
    });
    let mut saved = VecDeque::new();
    for layer in 0..LAYERS {
        if layer % 3 != 2 {
            let host = store.reserve(Tier::Host, LEN).unwrap();
            store.copy(format!("boundary {layer} out"), &x, &host, &[]).unwrap();
            saved.push_back((layer, host));
        }
        x = toy.forward(Lane::Compute, layer, &x);
    }
    let gradient = x;
    let mut fetched: VecDeque<(usize, Extent)> = VecDeque::new();
    for layer in (0..LAYERS).rev() {
        while fetched.len() <= distance
            && let Some((saved_layer, host)) = saved.pop_back()
        {
            let x = toy.hbm();
            store.copy(format!("boundary {saved_layer} in"), &host, &x, &[]).unwrap();
            fetched.push_back((saved_layer, x));
        }
        let x = if layer % 3 == 2 {
            toy.forward(Lane::Optimizer, layer - 1, &fetched[0].1)
        } else {
            fetched.pop_front().unwrap().1
        };
        toy.submit(Lane::Compute, format!("backward {layer}"), &[&x, &gradient], &gradient, |access| {
            let (mut reads, mut writes) = access.split();
            std::iter::zip(writes.next().unwrap(), reads.next().unwrap())
                .for_each(|(g, x)| *g = g.wrapping_mul(3) ^ x);
        });
    }
    let read = contents(store, &gradient);
    store.synchronize().unwrap();
    read.recv().unwrap()
}

/// The same arithmetic in a plain loop.
fn train_step_by_hand() -> Vec<u8> {
    let mut boundaries: Vec<Vec<u8>> = vec![(0..=255).collect()];
    for layer in 0..LAYERS {
        let y = boundaries[layer].iter().enumerate();
        boundaries.push(y.map(|(i, x)| x.wrapping_mul(5).wrapping_add((layer + i) as u8)).collect());
    }
    let mut gradient = boundaries.pop().unwrap();
    for x in boundaries.iter().rev() {
        gradient.iter_mut().zip(x).for_each(|(g, x)| *g = g.wrapping_mul(3) ^ x);
    }
    gradient
}

#[test]
fn r2_every_prefetch_distance_and_delay_gives_the_bits_of_a_plain_loop() {
    let expected = train_step_by_hand();
    for distance in [0, 1, 2, 4] {
        let hbm = distance as u64 + 4;
        let seeded = store(QueueOrder::Seeded(0), hbm, LinkLimits::default());
        for seed in 0..250 * deep(10) {
            seeded.reseed(seed);
            assert!(train_step(&seeded, distance, None) == expected, "distance {distance}, seed {seed}");
        }
        let threads = store(QueueOrder::Threads, hbm, LinkLimits::default());
        for delays in 0..20 * deep(10) {
            assert!(train_step(&threads, distance, Some(delays)) == expected, "distance {distance}");
        }
    }
}

#[test]
fn r2_without_the_wait_for_the_last_producer_the_bits_differ() {
    let expected = train_step_by_hand();
    let seeded = store(QueueOrder::Seeded(0), 8, LinkLimits::default());
    for wait in [Wait::Read(Lane::Compute), Wait::Read(Lane::D2h), Wait::Read(Lane::Optimizer)] {
        assert!(seeded.leave_out(Some(wait)));
        let noticed = (0..200).any(|seed| {
            seeded.reseed(seed);
            train_step(&seeded, 2, None) != expected
        });
        assert!(noticed, "{wait:?}");
    }
}

#[test]
fn r2_an_event_of_an_earlier_step_is_done_and_one_of_another_store_is_refused() {
    let store_a = store(QueueOrder::Threads, 4, LinkLimits::default());
    let mut toy = Toy { store: &store_a, random: Random(0), delays: false };
    let x = toy.hbm();
    let old = toy.submit(Lane::Compute, "step 1".into(), &[], &x, |access| access.write(0).fill(1));
    let host = store_a.reserve(Tier::Host, LEN).unwrap();
    store_a.synchronize().unwrap();
    let failed = store_a.submit(Submission::new(Lane::H2d, "fails"), |_| Err("on purpose".into())).unwrap();
    assert!(matches!(store_a.synchronize(), Err(StoreError::Task { .. })));
    store_a.start_step();
    // Both are over: a copy that waits for them runs, and nobody hangs.
    let stale = [old.clone(), failed.clone()];
    store_a.copy("step 2", &x, &host, &stale).unwrap();
    assert_eq!(contents(&store_a, &host).recv().unwrap(), [1; LEN.0 as usize]);
    assert!(old.is_done() && failed.is_done());
    failed.wait();
    // An event outlives its store, and means nothing to another one.
    drop((x, host));
    drop(store_a);
    assert!(old.is_done());
    let store_b = store(QueueOrder::Threads, 4, LinkLimits::default());
    let stale = [old];
    let task = Submission { after: &stale, ..Submission::new(Lane::Compute, "step 3") };
    assert!(matches!(store_b.submit(task, |_| Ok(())), Err(StoreError::Foreign { what: "event", .. })));
}

#[test]
fn t5_handles_dropped_at_once_leave_nothing_in_the_next_owners_bytes() {
    let store = store(QueueOrder::Threads, 4, LinkLimits::default());
    let mut toy = Toy { store: &store, random: Random(0), delays: false };
    let (sender, wrong) = mpsc::channel();
    let times = 10_000 * deep(10);
    for i in 0..times {
        // Everything of a round is given back while it is queued, and some of it panics.
        let byte = i as u8;
        let (x, host) = (toy.hbm(), store.reserve(Tier::Host, LEN).unwrap());
        toy.submit(Lane::Compute, format!("fill {i}"), &[], &x, move |access| access.write(0).fill(byte));
        store.copy("out", &x, &host, &[]).unwrap();
        drop(x);
        let sender = sender.clone();
        let reads = [&host];
        let check = Submission { reads: &reads, ..Submission::new(Lane::Optimizer, format!("check {i}")) };
        store
            .submit(check, move |access| {
                if access.read(0) != [byte; LEN.0 as usize] {
                    sender.send(i)?;
                }
                Ok(())
            })
            .unwrap();
        if i % 1000 == 999 {
            store.submit(Submission::new(Lane::Compute, "bad"), |_| panic!("on purpose")).unwrap();
            drop(host);
            assert!(matches!(store.synchronize(), Err(StoreError::Panicked { .. })));
        }
    }
    store.synchronize().unwrap();
    assert_eq!(wrong.try_iter().next(), None);
    assert!(Tier::ALL.iter().all(|&tier| store.live(tier) == Bytes::ZERO));
}

#[test]
fn r1_what_a_new_owner_leaves_unwritten_is_poison_in_every_tier_of_memory() {
    for order in [QueueOrder::Threads, QueueOrder::Seeded(1)] {
        let store = store(order, 1, LinkLimits::default());
        let mut toy = Toy { store: &store, random: Random(0), delays: false };
        for tier in [Tier::Hbm, Tier::Host] {
            let first = store.reserve(tier, LEN).unwrap();
            toy.submit(Lane::Compute, "fill".into(), &[], &first, |access| access.write(0).fill(1));
            store.release(first);
            // The same bytes, of which the new owner writes the first half.
            let second = store.reserve_at(tier, 0, LEN).unwrap();
            toy.submit(Lane::H2d, "fill half".into(), &[], &second, |access| access.write(0)[..128].fill(2));
            let read = contents(&store, &second);
            // A second write is an update: what is there stays.
            toy.submit(Lane::D2h, "update".into(), &[], &second, |access| access.write(0)[..64].fill(3));
            let again = contents(&store, &second);
            store.synchronize().unwrap();
            assert_eq!(read.recv().unwrap(), [[2; 128], [0xff; 128]].concat());
            assert_eq!(again.recv().unwrap()[60..130], [vec![3; 4], vec![2; 64], vec![0xff; 2]].concat());
        }
    }
}
