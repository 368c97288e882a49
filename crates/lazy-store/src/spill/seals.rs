//! What is remembered of the extents in the spill files: length and checksums.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Checksums of extents, by where they begin. In memory: the spill files do not outlive the process.
#[derive(Default)]
pub(crate) struct Seals(BTreeMap<u64, Seal>);

struct Seal {
    /// Length without padding.
    len: u64,
    /// Of each piece.
    checksums: Arc<[u32]>,
}

impl Seals {
    /// Forgets what is about to be overwritten.
    pub(crate) fn open(&mut self, offset: u64, len: u64) {
        let end = offset.saturating_add(len);
        // Sealed ranges do not overlap, so they end in the order in which they begin.
        let overlapping = self.0.range(..end).rev().take_while(|(start, seal)| *start + seal.len > offset);
        let starts: Vec<u64> = overlapping.map(|(&start, _)| start).collect();
        for start in starts {
            self.0.remove(&start);
        }
    }

    /// Remembers what was written. Nothing for nothing.
    pub(crate) fn seal(&mut self, offset: u64, len: u64, checksums: Arc<[u32]>) {
        if len > 0 {
            self.0.insert(offset, Seal { len, checksums });
        }
    }

    /// What a read of this very range has to give.
    pub(crate) fn wanted(&self, offset: u64, len: u64) -> Option<Arc<[u32]>> {
        self.0.get(&offset).filter(|seal| seal.len == len).map(|seal| Arc::clone(&seal.checksums))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_forgets_what_it_overlaps_and_nothing_else() {
        let mut seals = Seals::default();
        for start in [0, 10, 20, 30] {
            seals.seal(start, 10, Arc::new([start as u32]));
        }
        seals.open(15, 6);
        let left: Vec<u64> = (0..4).map(|i| i * 10).filter(|&s| seals.wanted(s, 10).is_some()).collect();
        assert_eq!(left, [0, 30]);
        assert!(seals.wanted(0, 9).is_none());
        seals.open(10, 20);
        assert_eq!(seals.wanted(30, 10).unwrap()[0], 30);
    }
}
