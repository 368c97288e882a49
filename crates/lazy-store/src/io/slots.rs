//! Aligned memory in slots of one request each, through which bytes go that cannot be moved where they lie.

use lazy_model::Bytes;

use super::{MAX_REQUEST, Window};
use crate::buffer::AlignedBuf;
use crate::error::StoreError;

/// The slots of one direction: a part of a region.
pub(crate) struct Slots {
    region: Window,
    /// Number of the first slot among those of the whole region.
    first: usize,
    free: Vec<usize>,
}

/// Memory for the slots of both directions: one region, so that it can be pinned at once.
pub(crate) struct Region {
    /// Held for its pages; touched only by those who hold its slots.
    _memory: AlignedBuf,
    window: Window,
    slots: usize,
}

impl Region {
    /// At least one slot for each direction.
    pub(crate) fn new(bytes: Bytes, least: usize) -> Result<Self, StoreError> {
        let slots = (bytes.get() / (2 * MAX_REQUEST as u64)).max(least as u64) as usize * 2;
        let mut memory = AlignedBuf::zeroed(Bytes((slots * MAX_REQUEST) as u64))?;
        let window = Window::of_mut(memory.as_mut_slice());
        Ok(Region { _memory: memory, window, slots })
    }

    pub(crate) fn window(&self) -> Window {
        self.window
    }

    pub(crate) fn bytes(&self) -> Bytes {
        Bytes(self.window.len as u64)
    }

    /// The slots of each direction. They are places in this region, which has to outlive them.
    pub(crate) fn halves(&self) -> [Slots; 2] {
        let (half, window) = (self.slots / 2, self.window);
        [0, half].map(|first| {
            let region = window.part(first * MAX_REQUEST, half * MAX_REQUEST);
            Slots { region, first, free: (0..half).rev().collect() }
        })
    }
}

impl Slots {
    /// None: for files whose transfers are all aligned.
    pub(crate) fn none() -> Self {
        Slots { region: Window::of(&[]), first: 0, free: Vec::new() }
    }

    /// Takes a free slot.
    pub(crate) fn take(&mut self) -> Option<usize> {
        self.free.pop()
    }

    pub(crate) fn give_back(&mut self, slot: usize) {
        self.free.push(slot);
    }

    /// All slots are free.
    pub(crate) fn reset(&mut self) {
        self.free = (0..self.region.len / MAX_REQUEST).rev().collect();
    }

    /// The first `len` bytes of a slot.
    pub(crate) fn window(&self, slot: usize, len: usize) -> Window {
        self.region.part(slot * MAX_REQUEST, MAX_REQUEST).part(0, len)
    }

    /// The number of a slot among those of both directions.
    pub(crate) fn number(&self, slot: usize) -> usize {
        self.first + slot
    }
}
