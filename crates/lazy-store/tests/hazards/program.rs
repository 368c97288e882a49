//! A random program, carried out on a store and on a model of it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use lazy_store::fault::{Fault, Faults};
use lazy_store::{Access, BoxError, Bytes, Event, Extent, Lane, Store, StoreError, Submission, Tier};

/// Few lengths, so that extents of equal length meet; the longest takes three blocks of the spill file.
const LENGTHS: [u64; 4] = [200, 1000, 4096, 9000];
/// Different contents. Each is a window of [`NOISE`], so that bytes of another extent or offset differ.
const CONTENTS: u64 = 1 << 16;

static NOISE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut random = Random(1);
    (0..CONTENTS as usize + 9000).map(|_| random.next() as u8).collect()
});

/// splitmix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// What an extent holds: a window of the noise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Content(usize);

impl Content {
    fn bytes(self, len: usize) -> &'static [u8] {
        &NOISE[self.0..self.0 + len]
    }
}

/// An extent, and what the model says it holds; nothing, if it was never written or its last writer failed.
struct Held {
    extent: Extent,
    content: Option<Content>,
}

/// What goes wrong besides what the order does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    None,
    /// Faults of the spill file, drawn from the seed.
    Faults,
    /// Tasks take random times; for real threads.
    Delays,
}

/// A program under way.
struct Run<'a> {
    store: &'a Store,
    random: Random,
    trouble: Trouble,
    live: Vec<Held>,
    /// Tasks, and whether each ran.
    events: Vec<(Event, Arc<AtomicBool>)>,
    /// What tasks found wrong.
    wrong: Arc<Mutex<Vec<String>>>,
    tasks: u64,
}

/// What a program did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) tasks: u64,
    /// Failures that were reported, each by a typed error.
    pub(crate) failures: u64,
}

/// Runs the program of `seed`. The error says what was read that was not written.
pub(crate) fn run(store: &Store, faults: &Faults, seed: u64, trouble: Trouble) -> Result<Outcome, String> {
    faults.reset(seed);
    store.reseed(seed);
    let mut run = Run {
        store,
        random: Random(seed ^ 0x5eed),
        trouble,
        live: Vec::new(),
        events: Vec::new(),
        wrong: Arc::default(),
        tasks: 0,
    };
    if trouble == Trouble::Faults {
        run.arm(faults, crate::has_checksums(seed));
    }
    let mut failures = 0;
    for _ in 0..30 + run.random.below(30) {
        failures += run.step()?;
    }
    failures += run.finish()?;
    Ok(Outcome { tasks: run.tasks, failures })
}

impl Run<'_> {
    fn arm(&mut self, faults: &Faults, checksums: bool) {
        let random = &mut self.random;
        faults.rates(random.below(300) as u32, random.below(200) as u32, random.below(200) as u32);
        faults.reorder();
        for _ in 0..random.below(3) {
            let fault = [Fault::Io, Fault::NoSpace, Fault::Short(0)][random.below(3)];
            let nth = random.below(12) as u64;
            if random.one_in(2) { faults.on_write(nth, fault) } else { faults.on_read(nth, fault) }
        }
        if checksums && random.one_in(2) {
            faults.on_read(random.below(6) as u64, Fault::FlipBit);
        }
        if random.one_in(8) {
            faults.space(random.below(100_000) as u64);
        }
    }

    /// One step of the program; the number of failures it reported.
    fn step(&mut self) -> Result<u64, String> {
        match self.random.below(40) {
            0..6 => self.put(),
            6..16 => self.copy_to_new(),
            16..22 => self.copy_over(),
            22..25 => self.compute(),
            25..27 => self.spill_and_fetch(),
            27..30 => self.check_one(),
            30..32 => self.ordered_by_event(),
            32..37 => self.release_one(),
            37 => self.read_unwritten()?,
            38 => self.wait_for_one(),
            _ => return self.synchronize(),
        }
        self.count_live()?;
        Ok(0)
    }

    fn reserve(&mut self, tier: Tier, bytes: Bytes) -> Option<Extent> {
        let reserved = if self.random.one_in(3) {
            let budget = self.store.budget(tier).get();
            let alignment = if tier == Tier::Nvme { 4096 } else { 64 };
            let offset = self.random.below((budget / alignment) as usize) as u64 * alignment;
            self.store.reserve_at(tier, offset, bytes)
        } else {
            self.store.reserve(tier, bytes)
        };
        match reserved {
            Ok(extent) => Some(extent),
            Err(
                StoreError::OutOfBudget { .. }
                | StoreError::OutsideBudget { .. }
                | StoreError::Overlap { .. },
            ) => {
                // Room for what comes next.
                self.release_one();
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn content(&mut self) -> Content {
        Content(self.random.below(CONTENTS as usize))
    }

    /// The lane of a task: mostly those that compute, but any lane takes any task.
    fn lane(&mut self) -> Lane {
        match self.random.below(4) {
            0 | 1 => Lane::Compute,
            2 => Lane::Optimizer,
            _ => Lane::ALL[self.random.below(Lane::ALL.len())],
        }
    }

    /// Index of a live extent that satisfies `wanted`.
    fn pick(&mut self, wanted: impl Fn(&Held) -> bool) -> Option<usize> {
        let all: Vec<usize> = (0..self.live.len()).filter(|&i| wanted(&self.live[i])).collect();
        if all.is_empty() { None } else { Some(all[self.random.below(all.len())]) }
    }

    /// Submits a task that checks what it reads, and overwrites the last of `used` where it has a new content.
    fn submit(&mut self, lane: Lane, reads: &[usize], write: Option<(usize, Content)>, after: &[Event]) {
        let ran = Arc::new(AtomicBool::new(false));
        let name = format!("task {}", self.tasks);
        self.tasks += 1;
        let expected: Vec<_> = reads
            .iter()
            .map(|&i| {
                (
                    self.live[i].content.unwrap(),
                    self.live[i].extent.bytes(),
                    write.is_some_and(|(w, _)| w == i),
                )
            })
            .collect();
        let pause = match self.trouble {
            Trouble::Delays => Duration::from_micros(self.random.below(150) as u64),
            _ => Duration::ZERO,
        };
        let (wrong, done, label) = (Arc::clone(&self.wrong), Arc::clone(&ran), name.clone());
        let work = move |access: &mut Access<'_>| -> Result<(), BoxError> {
            if pause > Duration::from_micros(20) {
                std::thread::sleep(pause);
            }
            for (i, (content, bytes, in_place)) in expected.iter().enumerate() {
                let found = if *in_place { &*access.write(0) } else { access.read(i) };
                if found != content.bytes(bytes.get() as usize) {
                    let poison = found.iter().all(|&b| b == 0xff);
                    let what = if poison { "poison" } else { "other bytes than were written" };
                    wrong.lock().unwrap().push(format!("{label} reads {what} as its extent {i}"));
                }
            }
            if let Some((_, content)) = write {
                let bytes = access.write(0);
                bytes.copy_from_slice(content.bytes(bytes.len()));
            }
            done.store(true, Ordering::SeqCst);
            Ok(())
        };
        let reads: Vec<&Extent> = reads.iter().map(|&i| &self.live[i].extent).collect();
        let writes: Vec<&Extent> = write.iter().map(|&(i, _)| &self.live[i].extent).collect();
        let task = Submission { reads: &reads, writes: &writes, after, ..Submission::new(lane, name) };
        let event = self.store.compute(task, work).unwrap();
        self.events.push((event, ran));
        if let Some((i, content)) = write {
            self.live[i].content = Some(content);
        }
    }

    fn put(&mut self) {
        let tier = match self.random.below(5) {
            0 | 1 => Tier::Hbm,
            2 | 3 => Tier::Host,
            // No task writes there; a later copy may.
            _ => Tier::Nvme,
        };
        let bytes = Bytes(LENGTHS[self.random.below(LENGTHS.len())]);
        let Some(extent) = self.reserve(tier, bytes) else { return };
        self.live.push(Held { extent, content: None });
        // Some are released before anything writes them, and pass on what they inherited.
        if tier != Tier::Nvme && !self.random.one_in(6) {
            let (lane, content) = (self.lane(), self.content());
            self.submit(lane, &[], Some((self.live.len() - 1, content)), &[]);
        }
    }

    /// Copies an extent to a neighbouring tier, and often releases it before the copy has begun.
    fn copy_to_new(&mut self) {
        let Some(from) = self.pick(|h| h.content.is_some()) else { return self.put() };
        let to = match (self.live[from].extent.tier(), self.random.one_in(3)) {
            (Tier::Hbm, false) | (Tier::Nvme, false) => Tier::Host,
            (Tier::Host | Tier::Nvme, true) => Tier::Hbm,
            // Between HBM and NVMe, through the staging ring.
            (Tier::Host, false) | (Tier::Hbm, true) => Tier::Nvme,
        };
        let bytes = self.live[from].extent.bytes();
        let name = (self.live[from].extent.tier(), self.live[from].extent.offset());
        let Some(extent) = self.reserve(to, bytes) else { return };
        // Making room may have released the source.
        let Some(from) = self.pick(|h| (h.extent.tier(), h.extent.offset()) == name && h.content.is_some())
        else {
            return;
        };
        self.live.push(Held { extent, content: None });
        self.copy(from, self.live.len() - 1);
        if self.random.one_in(2) {
            drop(self.live.swap_remove(from));
        }
    }

    /// Spills an extent, fetches it again, and gives its place on NVMe back before either has begun; then takes a part of
    /// that place, so that what is left of it has other owners.
    fn spill_and_fetch(&mut self) {
        let Some(from) = self.pick(|h| h.extent.tier() == Tier::Host && h.content.is_some()) else { return };
        let bytes = self.live[from].extent.bytes();
        let (Ok(there), Ok(back)) =
            (self.store.reserve(Tier::Nvme, bytes), self.store.reserve(Tier::Host, bytes))
        else {
            return self.release_one();
        };
        let place = there.offset();
        self.live.extend([there, back].map(|extent| Held { extent, content: None }));
        let last = self.live.len() - 1;
        self.copy(from, last - 1);
        self.copy(last - 1, last);
        drop(self.live.swap_remove(last - 1));
        if let Ok(extent) =
            self.store.reserve_at(Tier::Nvme, place + 4096 * self.random.below(3) as u64, Bytes(1000))
        {
            self.live.push(Held { extent, content: None });
        }
    }

    /// Copies an extent over another one.
    fn copy_over(&mut self) {
        let Some(from) = self.pick(|h| h.content.is_some()) else { return };
        let (tier, bytes) = (self.live[from].extent.tier(), self.live[from].extent.bytes());
        let Some(to) = self.pick(|h| h.extent.tier() != tier && h.extent.bytes() == bytes) else { return };
        self.copy(from, to);
    }

    fn copy(&mut self, from: usize, to: usize) {
        let name = format!("copy {}", self.tasks);
        self.tasks += 1;
        self.store.copy(name, &self.live[from].extent, &self.live[to].extent, &[]).unwrap();
        self.live[to].content = self.live[from].content;
    }

    /// Reads one or two extents and overwrites a third, or one of them in place.
    fn compute(&mut self) {
        let in_memory = |h: &Held| h.extent.tier() != Tier::Nvme;
        let Some(first) = self.pick(|h| in_memory(h) && h.content.is_some()) else { return };
        let mut reads = vec![first];
        reads.extend(self.pick(|h| in_memory(h) && h.content.is_some()).filter(|&i| i != first));
        let Some(write) = self.pick(in_memory) else { return };
        let (lane, content) = (self.lane(), self.content());
        self.submit(lane, &reads, Some((write, content)), &[]);
    }

    fn check_one(&mut self) {
        let Some(i) = self.pick(|h| h.extent.tier() != Tier::Nvme && h.content.is_some()) else { return };
        let lane = self.lane();
        self.submit(lane, &[i], None, &[]);
    }

    /// A task ordered by nothing but the events it names.
    fn ordered_by_event(&mut self) {
        if self.events.is_empty() {
            return;
        }
        let last = self.events.len() - 1;
        let (event, ran) = self.events[last - self.random.below(last.min(6) + 1)].clone();
        let lane = Lane::ALL[self.random.below(Lane::ALL.len())];
        let (wrong, name) = (Arc::clone(&self.wrong), format!("task {}", self.tasks));
        self.tasks += 1;
        let after = [event];
        let task = Submission { after: &after, ..Submission::new(lane, name.clone()) };
        let check = move |_: &mut Access<'_>| {
            if !ran.load(Ordering::SeqCst) {
                wrong.lock().unwrap().push(format!("{name} runs before the event that it names"));
            }
            Ok(())
        };
        self.store.compute(task, check).unwrap();
    }

    fn release_one(&mut self) {
        if !self.live.is_empty() {
            let i = self.random.below(self.live.len());
            self.store.release(self.live.swap_remove(i).extent);
        }
    }

    fn read_unwritten(&mut self) -> Result<(), String> {
        let Some(i) = self.pick(|h| h.extent.tier() != Tier::Nvme && h.content.is_none()) else {
            return Ok(());
        };
        let reads = [&self.live[i].extent];
        let task = Submission { reads: &reads, ..Submission::new(Lane::Compute, "too early") };
        match self.store.compute(task, |_| Ok(())) {
            Err(StoreError::NotWritten { .. }) => Ok(()),
            other => Err(format!("reading what nothing wrote gives {other:?}")),
        }
    }

    fn wait_for_one(&mut self) {
        if let Some((event, _)) = self.events.last() {
            event.wait();
        }
    }

    /// Waits for everything, and takes a failure into account: 1 if there was one.
    fn synchronize(&mut self) -> Result<u64, String> {
        let failed = self.store.synchronize();
        if let Some(first) = self.wrong.lock().unwrap().first() {
            return Err(first.clone());
        }
        let Err(error) = failed else { return Ok(0) };
        match &error {
            StoreError::Task { lane: Lane::NvmeWrite | Lane::NvmeRead, source, .. }
                if self.trouble == Trouble::Faults && source.is::<StoreError>() => {}
            other => return Err(format!("an error that nothing explains: {other}")),
        }
        self.events.clear();
        for held in &mut self.live {
            if !held.extent.is_written() {
                held.content = None;
            }
        }
        Ok(1)
    }

    /// The store's counts, against the sum of what is held.
    fn count_live(&self) -> Result<(), String> {
        for tier in Tier::ALL {
            let held = self.live.iter().map(|h| &h.extent).filter(|e| e.tier() == tier);
            let bytes = |e: &Extent| if tier == Tier::Nvme { e.bytes().align_up(4096) } else { e.bytes() };
            let (counted, held) = (self.store.live(tier), held.map(bytes).sum::<Bytes>());
            if counted != held {
                return Err(format!("{tier} counts {counted} live, {held} are held"));
            }
        }
        Ok(())
    }

    /// Reads everything that is left, and gives it back.
    fn finish(&mut self) -> Result<u64, String> {
        while let Some(i) = self.pick(|h| h.extent.tier() != Tier::Nvme) {
            if self.live[i].content.is_some() {
                let lane = self.lane();
                self.submit(lane, &[i], None, &[]);
            }
            drop(self.live.swap_remove(i));
        }
        while !self.live.is_empty() {
            let bytes = self.live[0].extent.bytes();
            if self.live[0].content.is_some() {
                let extent = self.store.reserve(Tier::Host, bytes).unwrap();
                self.live.push(Held { extent, content: None });
                let last = self.live.len() - 1;
                self.copy(0, last);
                self.submit(Lane::Compute, &[last], None, &[]);
                self.live.pop();
            }
            drop(self.live.swap_remove(0));
        }
        let failures = self.synchronize()?;
        match Tier::ALL.iter().find(|&&tier| self.store.live(tier) != Bytes::ZERO) {
            Some(tier) => Err(format!("{tier} has live bytes though everything was released")),
            None => Ok(failures),
        }
    }
}
