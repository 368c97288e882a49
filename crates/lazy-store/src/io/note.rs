//! What is noted of the bytes of a piece on their way: a checksum, and in debugging their values.

use std::sync::Arc;

use crate::options::ValueStats;

/// What to note of each piece of a job.
#[derive(Clone, Default)]
pub(crate) struct Watch {
    pub(crate) checksum: bool,
    pub(crate) values: bool,
    /// What the checksums of a read have to be.
    pub(crate) wanted: Option<Arc<[u32]>>,
}

/// What was noted of a piece.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Note {
    pub(crate) len: usize,
    /// CRC32C.
    pub(crate) checksum: u32,
    /// The bytes as `f32` and as `bf16`.
    pub(crate) values: [Values; 2],
}

/// Sums over values of one format.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Values {
    count: u64,
    finite: u64,
    abs_max: f64,
    abs_sum: f64,
}

impl Watch {
    pub(crate) fn looks(&self) -> bool {
        self.checksum || self.values
    }

    pub(crate) fn note(&self, bytes: &[u8]) -> Note {
        let values = if self.values { [Values::f32(bytes), Values::bf16(bytes)] } else { Default::default() };
        Note { len: bytes.len(), checksum: crc32c::crc32c(bytes), values }
    }

    /// The checksum that a read piece should have and the one it has, where they differ.
    pub(crate) fn differs(&self, index: usize, checksum: u32) -> Option<(u32, u32)> {
        let wanted = *self.wanted.as_ref()?.get(index)?;
        (wanted != checksum).then_some((wanted, checksum))
    }
}

impl Note {
    /// The note of the bytes of both, one after the other.
    pub(crate) fn join(self, next: &Note) -> Note {
        let values = [0, 1].map(|format| self.values[format].join(&next.values[format]));
        let checksum = crc32c::crc32c_combine(self.checksum, next.checksum, next.len);
        Note { len: self.len + next.len, checksum, values }
    }
}

impl Values {
    fn f32(bytes: &[u8]) -> Self {
        let (numbers, _) = bytes.as_chunks::<4>();
        Self::of(numbers.iter().map(|&number| f32::from_le_bytes(number)))
    }

    fn bf16(bytes: &[u8]) -> Self {
        let (numbers, _) = bytes.as_chunks::<2>();
        // The upper half of an f32.
        Self::of(numbers.iter().map(|&[low, high]| f32::from_le_bytes([0, 0, low, high])))
    }

    fn of(numbers: impl ExactSizeIterator<Item = f32>) -> Self {
        let count = numbers.len() as u64;
        numbers.filter(|number| number.is_finite()).fold(
            Values { count, ..Values::default() },
            |sums, number| {
                let magnitude = f64::from(number.abs());
                let (finite, abs_max) = (sums.finite + 1, sums.abs_max.max(magnitude));
                Values { finite, abs_max, abs_sum: sums.abs_sum + magnitude, ..sums }
            },
        )
    }

    fn join(&self, next: &Values) -> Values {
        Values {
            count: self.count + next.count,
            finite: self.finite + next.finite,
            abs_max: self.abs_max.max(next.abs_max),
            abs_sum: self.abs_sum + next.abs_sum,
        }
    }

    pub(crate) fn stats(&self) -> ValueStats {
        let abs_mean = if self.finite == 0 { 0.0 } else { self.abs_sum / self.finite as f64 };
        ValueStats { count: self.count, finite: self.finite, abs_max: self.abs_max, abs_mean }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_two_parts_add_up_to_those_of_the_whole() {
        let numbers = [1.0f32, -3.5, f32::NAN, 0.25, f32::INFINITY, -0.25];
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        let watch = Watch { values: true, ..Watch::default() };
        let whole = watch.note(&bytes);
        let joined = watch.note(&bytes[..8]).join(&watch.note(&bytes[8..]));
        for note in [whole, joined] {
            let stats = note.values[0].stats();
            assert_eq!(stats, ValueStats { count: 6, finite: 4, abs_max: 3.5, abs_mean: 1.25 });
            assert_eq!((note.len, note.checksum), (24, crc32c::crc32c(&bytes)));
        }
        // 1.0, -3.5, 0.25 and -0.25 are bf16 in their upper halves, and zeros in their lower ones.
        let stats = whole.values[1].stats();
        assert_eq!(stats, ValueStats { count: 12, finite: 10, abs_max: 3.5, abs_mean: 0.5 });
    }

    #[test]
    fn the_checksum_is_crc32c() {
        // The check value of the polynomial: CRC-32/ISCSI of "123456789".
        let watch = Watch { checksum: true, ..Watch::default() };
        assert_eq!(watch.note(b"123456789").checksum, 0xe306_9283);
        assert!(Watch { wanted: Some(Arc::new([1, 2])), ..watch }.differs(1, 3) == Some((2, 3)));
    }
}
