//! Where buckets are at home: in slot files, in RAM, or in a GPU's memory.

use std::slice;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use lazy_model::{Bytes, Tier};
use lazy_store::DeviceChoice;
use lazy_store::durable::{AlignedBuf, DurableFile, Pending};

use crate::accelerator::{Accelerator, Resident};
use crate::layout::Layout;
use crate::ring::{Chunk, Ring, Sections};
use crate::slot::{self, BLOCK, BlockSums, Identity, SECTIONS, SlotShape};
use crate::state::bad_block;
use crate::{AdamOptions, Durability, NvmeAdam, OptimError, UpdateOn};

/// One bucket.
pub(crate) struct Bucket {
    pub(crate) home: Home,
    /// Sequence of the step that wrote it last.
    pub(crate) generation: u64,
    /// Checksums of the live slot's blocks; none in memory.
    pub(crate) table: Vec<BlockSums>,
}

/// Where a bucket's state is.
pub(crate) enum Home {
    Nvme(Slots),
    Host(Arc<Memory>),
    Hbm(Arc<Resident>),
    /// In a file, while the memory of this tier is given back.
    Out(Tier),
}

impl Home {
    /// Memory for a bucket at home in one of the upper tiers.
    pub(crate) fn memory(tier: Tier, shape: SlotShape, ring: &Ring) -> Result<Home, OptimError> {
        Ok(match (tier, ring.accelerator()) {
            (Tier::Hbm, Some(accelerator)) => Home::Hbm(Arc::new(accelerator.resident(shape)?)),
            (_, accelerator) => Home::Host(Arc::new(Memory::new(shape, accelerator)?)),
        })
    }

    /// What it has in memory.
    pub(crate) fn in_memory(&self, ring: &Ring) -> Option<InMemory> {
        match self {
            Home::Host(memory) => Some(InMemory::Host(Arc::clone(memory))),
            Home::Hbm(there) => Some(InMemory::Hbm(Arc::clone(there), ring.shared_accelerator()?)),
            Home::Nvme(_) | Home::Out(_) => None,
        }
    }

    fn tier(&self) -> Tier {
        match self {
            Home::Nvme(_) => Tier::Nvme,
            Home::Host(_) => Tier::Host,
            Home::Hbm(_) => Tier::Hbm,
            Home::Out(tier) => *tier,
        }
    }

    /// Waits until a save under way has what is in memory: from then on it may change.
    pub(crate) fn wait_saved(&self) {
        match self {
            Home::Host(memory) => memory.gate.pass(),
            Home::Hbm(there) => there.gate.pass(),
            Home::Nvme(_) | Home::Out(_) => {}
        }
    }
}

/// A bucket in memory, kept there by whoever has this.
pub(crate) enum InMemory {
    Host(Arc<Memory>),
    Hbm(Arc<Resident>, Arc<Accelerator>),
}

impl InMemory {
    /// Reads a slot file into it, and checks that its blocks are those of `table`.
    fn read(&self, file: &DurableFile, identity: Identity, table: &[BlockSums]) -> Result<(), OptimError> {
        match self {
            InMemory::Host(memory) => memory.read(file, identity, table),
            InMemory::Hbm(there, accelerator) => Through { accelerator, there, file, identity }.read(table),
        }
    }

    /// Writes it into a slot file; the checksums of its blocks.
    pub(crate) fn write(&self, file: &DurableFile, identity: Identity) -> Result<Vec<BlockSums>, OptimError> {
        match self {
            InMemory::Host(memory) => memory.write(file, identity),
            InMemory::Hbm(there, accelerator) => Through { accelerator, there, file, identity }.write(),
        }
    }

    fn gate(&self) -> &Gate {
        match self {
            InMemory::Host(memory) => &memory.gate,
            InMemory::Hbm(there, _) => &there.gate,
        }
    }
}

/// Keeps those who would change a bucket away while it is saved.
#[derive(Default)]
pub(crate) struct Gate {
    shut: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    /// Waits until it is open.
    fn pass(&self) {
        drop(self.wait());
    }

    fn wait(&self) -> MutexGuard<'_, bool> {
        let shut = self.shut.lock().unwrap_or_else(PoisonError::into_inner);
        self.opened.wait_while(shut, |shut| *shut).unwrap_or_else(PoisonError::into_inner)
    }
}

/// A bucket in memory that nobody changes; dropping this lets them.
pub(crate) struct Held(InMemory);

impl Held {
    /// Waits for an earlier one.
    pub(crate) fn new(memory: InMemory) -> Held {
        *memory.gate().wait() = true;
        Held(memory)
    }

    pub(crate) fn memory(&self) -> &InMemory {
        &self.0
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let gate = self.0.gate();
        *gate.shut.lock().unwrap_or_else(PoisonError::into_inner) = false;
        gate.opened.notify_all();
    }
}

/// The slot files of a bucket: two that take turns, or one that is updated in place.
pub(crate) struct Slots {
    /// Of the two slots, the one that holds the state.
    pub(crate) number: usize,
    live: DurableFile,
    /// The other slot, or the file that takes the place of one that may not be updated in place.
    other: Option<DurableFile>,
    in_place: bool,
}

impl Slots {
    /// `number` is that of `live`.
    pub(crate) fn two(number: usize, live: DurableFile, other: DurableFile) -> Self {
        Slots { number, live, other: Some(other), in_place: false }
    }

    pub(crate) fn in_place(number: usize, live: DurableFile) -> Self {
        Slots { number, live, other: None, in_place: true }
    }

    /// The number of the slot that a step writes.
    pub(crate) fn next(&self) -> usize {
        if self.in_place { self.number } else { 1 - self.number }
    }

    /// The file that holds the state.
    pub(crate) fn source(&self) -> &DurableFile {
        &self.live
    }

    /// The file that a step writes.
    pub(crate) fn target(&self) -> &DurableFile {
        self.other.as_ref().unwrap_or(&self.live)
    }

    /// Gives steps another file to write.
    pub(crate) fn replace_target(&mut self, file: DurableFile) {
        self.other = Some(file);
    }

    /// What a step wrote is the state.
    pub(crate) fn turn(&mut self) {
        self.number = self.next();
        if let Some(written) = self.other.take() {
            let old = std::mem::replace(&mut self.live, written);
            self.other = (!self.in_place).then_some(old);
        }
    }
}

/// The sections of a bucket in RAM.
pub(crate) struct Memory {
    shape: SlotShape,
    gate: Gate,
    sections: Mutex<[AlignedBuf; 3]>,
}

impl Memory {
    /// Pinned, where chunks of it may go to a GPU.
    fn new(shape: SlotShape, accelerator: Option<&Accelerator>) -> Result<Self, OptimError> {
        let pinned = accelerator.filter(|accelerator| accelerator.takes_chunks());
        let section = |section| {
            let mut buffer = AlignedBuf::zeroed(shape.padded(section, shape.elements))?;
            pinned.map_or(Ok(()), |accelerator| accelerator.pin(&mut buffer))?;
            Ok::<_, OptimError>(buffer)
        };
        let sections = Mutex::new([section(0)?, section(1)?, section(2)?]);
        Ok(Memory { shape, gate: Gate::default(), sections })
    }

    /// The sections, for one at a time.
    pub(crate) fn lock(&self) -> MutexGuard<'_, [AlignedBuf; 3]> {
        // What was half updated when a thread panicked is told by the latch of the store.
        self.sections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the sections of a chunk begin, for copies of a GPU.
    pub(crate) fn addresses(&self, chunk: Chunk) -> [u64; 3] {
        let mut section = 0;
        self.lock().each_mut().map(|buffer| {
            section += 1;
            buffer.address() + self.shape.bytes(section - 1, chunk.first) as u64
        })
    }

    fn read(&self, file: &DurableFile, identity: Identity, table: &[BlockSums]) -> Result<(), OptimError> {
        let mut sections = self.lock();
        for (section, buffer) in sections.iter_mut().enumerate() {
            let (read, result) = file.read_at(self.shape.offset(section, 0), take(buffer)?).wait();
            *buffer = read;
            result?;
        }
        for (block, (found, wanted)) in self.sums(&sections, identity).zip(table).enumerate() {
            if let Some(section) = (0..SECTIONS.len()).find(|s| found[*s] != wanted[*s]) {
                return Err(bad_block(file.path(), self.shape, identity.bucket, block, section));
            }
        }
        Ok(())
    }

    fn write(&self, file: &DurableFile, identity: Identity) -> Result<Vec<BlockSums>, OptimError> {
        let mut sections = self.lock();
        for (section, buffer) in sections.iter_mut().enumerate() {
            let (written, result) = file.write_at(self.shape.offset(section, 0), take(buffer)?).wait();
            *buffer = written;
            result?;
        }
        Ok(self.sums(&sections, identity).collect())
    }

    fn sums(&self, sections: &[AlignedBuf; 3], identity: Identity) -> impl Iterator<Item = BlockSums> {
        let mut section = 0;
        let exact = sections.each_ref().map(|buffer| {
            section += 1;
            &buffer.as_slice()[..self.shape.bytes(section - 1, self.shape.elements)]
        });
        let blocks = self.shape.blocks_of(exact).enumerate();
        blocks.map(move |(block, sections)| identity.sums(block, sections))
    }

    /// The part of the sections that is a chunk's.
    pub(crate) fn part<'a>(&self, sections: &'a mut [AlignedBuf; 3], chunk: Chunk) -> Sections<'a> {
        let mut section = 0;
        sections.each_mut().map(|buffer| {
            let start = self.shape.bytes(section, chunk.first);
            let end = start + self.shape.bytes(section, chunk.len);
            section += 1;
            &mut buffer.as_mut_slice()[start..end]
        })
    }
}

/// A transfer's buffer is its own until it is over.
fn take(buffer: &mut AlignedBuf) -> Result<AlignedBuf, OptimError> {
    Ok(std::mem::replace(buffer, AlignedBuf::zeroed(Bytes::ZERO)?))
}

/// A bucket in a GPU's memory on its way from or to a slot file, section by section through the accelerator's buffer.
struct Through<'a> {
    accelerator: &'a Accelerator,
    there: &'a Resident,
    file: &'a DurableFile,
    identity: Identity,
}

impl Through<'_> {
    /// Runs of whole blocks that the buffer holds, of every section.
    fn pieces(&self) -> impl Iterator<Item = (usize, Chunk)> + use<> {
        let (shape, bucket) = (self.there.shape, self.identity.bucket);
        let whole = shape.moments.blocks_in_pages() * BLOCK;
        let step = (self.accelerator.scratch().len() / 4 / whole).max(1) * whole;
        (0..SECTIONS.len()).flat_map(move |section| {
            let firsts = (0..shape.elements).step_by(step);
            firsts.map(move |first| (section, Chunk { bucket, first, len: step.min(shape.elements - first) }))
        })
    }

    /// The checksums of the blocks of a piece of a section in the buffer, with their numbers.
    fn sums<'a>(
        &'a self,
        buffer: &'a AlignedBuf,
        section: usize,
        chunk: Chunk,
    ) -> impl Iterator<Item = (usize, u32)> + 'a {
        let shape = self.there.shape;
        let bytes = &buffer.as_slice()[..shape.bytes(section, chunk.len)];
        let blocks = bytes.chunks(shape.bytes(section, BLOCK)).enumerate();
        blocks.map(move |(i, data)| {
            let block = chunk.first / BLOCK + i;
            (block, self.identity.sum(block, section, data))
        })
    }

    fn write(&self) -> Result<Vec<BlockSums>, OptimError> {
        let shape = self.there.shape;
        let mut table = vec![BlockSums::default(); shape.blocks()];
        for (section, chunk) in self.pieces() {
            // Piece by piece: steps want the buffer too.
            let mut buffer = self.accelerator.scratch();
            self.accelerator.fetch(self.there, chunk, section..section + 1, slice::from_mut(&mut *buffer))?;
            self.sums(&buffer, section, chunk).for_each(|(block, sum)| table[block][section] = sum);
            self.transfer(&mut buffer, section, chunk, |buffer, offset| self.file.write_at(offset, buffer))?;
        }
        Ok(table)
    }

    fn read(&self, table: &[BlockSums]) -> Result<(), OptimError> {
        let shape = self.there.shape;
        for (section, chunk) in self.pieces() {
            let mut buffer = self.accelerator.scratch();
            self.transfer(&mut buffer, section, chunk, |buffer, offset| self.file.read_at(offset, buffer))?;
            let wrong =
                self.sums(&buffer, section, chunk).find(|(block, sum)| table[*block][section] != *sum);
            if let Some((block, _)) = wrong {
                return Err(bad_block(self.file.path(), shape, self.identity.bucket, block, section));
            }
            self.accelerator.put(self.there, chunk, section..section + 1, slice::from_mut(&mut *buffer))?;
        }
        Ok(())
    }

    /// Moves a piece of a section between the buffer and the file, with zeros behind its bytes.
    fn transfer(
        &self,
        buffer: &mut AlignedBuf,
        section: usize,
        chunk: Chunk,
        start: impl Fn(AlignedBuf, u64) -> Pending,
    ) -> Result<(), OptimError> {
        let (shape, length) = (self.there.shape, buffer.len());
        buffer.set_len(shape.padded(section, chunk.len).0 as usize);
        buffer.as_mut_slice()[shape.bytes(section, chunk.len)..].fill(0);
        let (moved, result) = start(take(buffer)?, shape.offset(section, chunk.first)).wait();
        *buffer = moved;
        buffer.set_len(length);
        Ok(result?)
    }
}

impl NvmeAdam {
    /// Puts what is at home in memory into files, and gives the memory back.
    pub(crate) fn move_out(&mut self) -> Result<(), OptimError> {
        if self.buckets.iter().any(|bucket| bucket.slots().is_none()) {
            // The files are for this process alone.
            self.begin()?;
        }
        for index in 0..self.buckets.len() {
            let (shape, identity) = (self.layout.slot(index), self.out_identity(index));
            let bucket = &mut self.buckets[index];
            let (tier, Some(memory)) = (bucket.home.tier(), bucket.home.in_memory(&self.ring)) else {
                continue;
            };
            // A save under way keeps the memory, too.
            bucket.home.wait_saved();
            let file = self.dir.create_file(&slot::file_name(index, 0), shape.file_bytes())?;
            bucket.table = memory.write(&file, identity)?;
            bucket.home = Home::Out(tier);
        }
        Ok(())
    }

    /// Takes it back.
    pub(crate) fn move_in(&mut self) -> Result<(), OptimError> {
        for index in 0..self.buckets.len() {
            let bucket = &self.buckets[index];
            let Home::Out(tier) = bucket.home else { continue };
            let (name, identity) = (slot::file_name(index, 0), self.out_identity(index));
            let fresh = Home::memory(tier, self.layout.slot(index), &self.ring)?;
            if let Some(memory) = fresh.in_memory(&self.ring) {
                memory.read(&self.dir.open_file(&name)?, identity, &bucket.table)?;
            }
            self.dir.remove(&name)?;
            let bucket = &mut self.buckets[index];
            (bucket.home, bucket.table) = (fresh, Vec::new());
        }
        Ok(())
    }

    fn out_identity(&self, bucket: usize) -> Identity {
        Identity { id: self.id, bucket, generation: self.record.sequence }
    }
}

impl Bucket {
    /// The slot files, where it has any.
    pub(crate) fn slots(&self) -> Option<&Slots> {
        match &self.home {
            Home::Nvme(slots) => Some(slots),
            Home::Host(_) | Home::Hbm(_) | Home::Out(_) => None,
        }
    }

    /// Takes a bucket from its slot file into memory.
    pub(crate) fn move_in(
        &mut self,
        tier: Tier,
        shape: SlotShape,
        identity: Identity,
        ring: &Ring,
    ) -> Result<(), OptimError> {
        if let (Tier::Hbm | Tier::Host, Home::Nvme(slots)) = (tier, &self.home) {
            let home = Home::memory(tier, shape, ring)?;
            if let Some(memory) = home.in_memory(ring) {
                memory.read(slots.source(), identity, &self.table)?;
            }
            (self.home, self.table) = (home, Vec::new());
        }
        Ok(())
    }
}

/// Where the buckets of a layout are at home.
pub(crate) struct Homes {
    /// By bucket.
    pub(crate) tiers: Vec<Tier>,
    /// Bytes of those in RAM.
    pub(crate) host: Bytes,
    /// Bytes of those in HBM.
    pub(crate) hbm: Bytes,
}

impl Homes {
    /// The first buckets in HBM, the next ones in RAM, as far as the budgets go.
    pub(crate) fn new(layout: &Layout, options: &AdamOptions) -> Homes {
        let mut homes = Homes { tiers: Vec::new(), host: Bytes::ZERO, hbm: Bytes::ZERO };
        let mut tier = Tier::Hbm;
        for shape in layout.slots() {
            let bytes = (0..3).map(|section| shape.padded(section, shape.elements)).sum::<Bytes>();
            if tier == Tier::Hbm && homes.hbm + bytes > options.hbm {
                tier = Tier::Host;
            }
            if tier == Tier::Host && homes.host + bytes > options.host {
                tier = Tier::Nvme;
            }
            match tier {
                Tier::Hbm => homes.hbm += bytes,
                Tier::Host => homes.host += bytes,
                Tier::Nvme => {}
            }
            homes.tiers.push(tier);
        }
        homes
    }
}

/// Slot files of each bucket on NVMe.
pub(crate) fn slot_count(durability: Durability) -> usize {
    match durability {
        Durability::Step => 2,
        Durability::Checkpoint => 1,
    }
}

/// Refuses what cannot be kept as asked.
pub(crate) fn check(options: &AdamOptions) -> Result<(), OptimError> {
    let refused = |what: &str| Err(OptimError::Option { what: what.into() });
    if (options.host > Bytes::ZERO || options.hbm > Bytes::ZERO) && options.durability == Durability::Step {
        return refused(
            "state in RAM or HBM cannot be committed at every step: set durability to checkpoint, or host and hbm to 0",
        );
    }
    if options.device == DeviceChoice::Host {
        if options.hbm > Bytes::ZERO {
            return refused("state in HBM needs a GPU: set device, or hbm to 0");
        }
        if options.update == UpdateOn::Cuda {
            return refused("updates on a GPU need one: set device, or update to cpu or auto");
        }
    }
    Ok(())
}
