//! Where buckets are at home: in slot files, or in RAM.

use std::sync::{Mutex, MutexGuard, PoisonError};

use lazy_model::Bytes;
use lazy_store::durable::{AlignedBuf, DurableFile};

use crate::layout::Layout;
use crate::ring::{Chunk, Sections};
use crate::slot::{self, BlockSums, Identity, SECTIONS, SlotShape};
use crate::state::bad_block;
use crate::{AdamOptions, Durability, NvmeAdam, OptimError};

/// One bucket.
pub(crate) struct Bucket {
    pub(crate) home: Home,
    /// Sequence of the step that wrote it last.
    pub(crate) generation: u64,
    /// Checksums of the live slot's blocks; none in RAM.
    pub(crate) table: Vec<BlockSums>,
}

/// Where a bucket's state is.
pub(crate) enum Home {
    Nvme(Slots),
    Host(Memory),
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
    sections: Mutex<[AlignedBuf; 3]>,
}

impl Memory {
    pub(crate) fn new(shape: SlotShape) -> Result<Self, OptimError> {
        let section = |section| AlignedBuf::zeroed(shape.padded(section, shape.elements));
        let sections = Mutex::new([section(0)?, section(1)?, section(2)?]);
        Ok(Memory { shape, sections })
    }

    /// The sections, for one at a time.
    pub(crate) fn lock(&self) -> MutexGuard<'_, [AlignedBuf; 3]> {
        // What was half updated when a thread panicked is told by the latch of the store.
        self.sections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives its memory back; what it held is in a file.
    fn empty(&self) -> Result<(), OptimError> {
        for buffer in self.lock().iter_mut() {
            take(buffer)?;
        }
        Ok(())
    }

    /// Whether its memory was given back.
    fn is_out(&self) -> bool {
        self.shape.elements > 0 && self.lock()[0].is_empty()
    }

    /// Reads a slot file into it, and checks that its blocks are those of `table`.
    pub(crate) fn read(
        &self,
        file: &DurableFile,
        identity: Identity,
        table: &[BlockSums],
    ) -> Result<(), OptimError> {
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

    /// Writes it into a slot file; the checksums of its blocks.
    pub(crate) fn write(&self, file: &DurableFile, identity: Identity) -> Result<Vec<BlockSums>, OptimError> {
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

impl NvmeAdam {
    /// Puts what is at home in RAM into files, and gives the memory back.
    pub(crate) fn move_out(&mut self) -> Result<(), OptimError> {
        if self.buckets.iter().any(|bucket| bucket.slots().is_none()) {
            // The files are for this process alone.
            self.begin()?;
        }
        for index in 0..self.buckets.len() {
            let shape = self.layout.slot(index);
            let Home::Host(memory) = &self.buckets[index].home else { continue };
            if memory.is_out() {
                continue;
            }
            let file = self.dir.create_file(&slot::file_name(index, 0), shape.file_bytes())?;
            let table = memory.write(&file, self.out_identity(index))?;
            let emptied = memory.empty();
            self.buckets[index].table = table;
            emptied?;
        }
        Ok(())
    }

    /// Takes it back.
    pub(crate) fn move_in(&mut self) -> Result<(), OptimError> {
        for index in 0..self.buckets.len() {
            let shape = self.layout.slot(index);
            let Home::Host(memory) = &self.buckets[index].home else { continue };
            if !memory.is_out() {
                continue;
            }
            let name = slot::file_name(index, 0);
            let fresh = Memory::new(shape)?;
            fresh.read(&self.dir.open_file(&name)?, self.out_identity(index), &self.buckets[index].table)?;
            self.dir.remove(&name)?;
            let bucket = &mut self.buckets[index];
            (bucket.home, bucket.table) = (Home::Host(fresh), Vec::new());
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
            Home::Host(_) => None,
        }
    }

    /// Takes a bucket from its slot file into RAM.
    pub(crate) fn move_in(&mut self, shape: SlotShape, identity: Identity) -> Result<(), OptimError> {
        if let Home::Nvme(slots) = &self.home {
            let memory = Memory::new(shape)?;
            memory.read(slots.source(), identity, &self.table)?;
            (self.home, self.table) = (Home::Host(memory), Vec::new());
        }
        Ok(())
    }
}

/// Bytes of a bucket in RAM.
fn memory_bytes(shape: SlotShape) -> Bytes {
    (0..3).map(|section| shape.padded(section, shape.elements)).sum()
}

/// How many buckets, from the first on, are at home in RAM, and the bytes they take there.
pub(crate) fn in_memory(layout: &Layout, options: &AdamOptions) -> (usize, Bytes) {
    let mut bytes = Bytes::ZERO;
    let mut count = 0;
    for shape in layout.slots() {
        let more = bytes + memory_bytes(shape);
        if more > options.host {
            break;
        }
        (bytes, count) = (more, count + 1);
    }
    (count, bytes)
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
    if options.host > Bytes::ZERO && options.durability == Durability::Step {
        let what =
            "state in RAM cannot be committed at every step: set durability to checkpoint, or host to 0";
        return Err(OptimError::Option { what: what.into() });
    }
    Ok(())
}
