//! Files as one range of bytes: one file, or several that take turns.

use std::fs::File;
use std::path::PathBuf;

use super::meter::Meter;
use super::{MAX_REQUEST, Op};

/// An open file and what errors and alignment need to know of it.
pub(crate) struct OpenFile {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    /// Offsets, lengths and addresses of requests are multiples of this.
    pub(crate) granularity: usize,
    pub(crate) read: Meter,
    pub(crate) written: Meter,
}

impl OpenFile {
    pub(crate) fn new(file: File, path: PathBuf, granularity: usize) -> Self {
        OpenFile { file, path, granularity, read: Meter::default(), written: Meter::default() }
    }

    pub(crate) fn meter(&self, op: Op) -> &Meter {
        match op {
            Op::Read => &self.read,
            Op::Write => &self.written,
        }
    }
}

/// One file, or several over which a range of bytes is cut: unit `u`, of [`MAX_REQUEST`] bytes, lies in file `u mod n` as
/// its unit `u / n`. At least one file.
pub(crate) struct Stripes {
    first: OpenFile,
    others: Vec<OpenFile>,
    /// Multiple of the granularities: whatever is not as long is padded to it.
    pub(crate) alignment: usize,
}

/// Where a byte lies.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The file, by its number.
    pub(crate) file: usize,
    pub(crate) offset: u64,
    /// Bytes from here on that follow each other in that file.
    pub(crate) room: u64,
}

pub(crate) const UNIT: u64 = MAX_REQUEST as u64;

impl Stripes {
    pub(crate) fn one(file: OpenFile, alignment: usize) -> Self {
        Stripes { first: file, others: Vec::new(), alignment }
    }

    /// `None` of no file.
    pub(crate) fn over(files: Vec<OpenFile>, alignment: usize) -> Option<Self> {
        let mut files = files.into_iter();
        Some(Stripes { first: files.next()?, others: files.collect(), alignment })
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = &OpenFile> {
        std::iter::once(&self.first).chain(&self.others)
    }

    pub(crate) fn file(&self, number: usize) -> &OpenFile {
        number.checked_sub(1).and_then(|i| self.others.get(i)).unwrap_or(&self.first)
    }

    pub(crate) fn locate(&self, offset: u64) -> Place {
        if self.others.is_empty() {
            return Place { file: 0, offset, room: u64::MAX - offset };
        }
        let n = self.others.len() as u64 + 1;
        let (unit, within) = (offset / UNIT, offset % UNIT);
        Place { file: (unit % n) as usize, offset: unit / n * UNIT + within, room: UNIT - within }
    }

    /// Length of the piece that begins `at` bytes into `len` bytes at `offset`, which is less than `len`. A piece lies in one
    /// file and is at most a request long; what is left beyond the last multiple of the alignment is a piece of its own,
    /// since a direct file takes it padded. Checksums are of these pieces, so nothing but position and length decides.
    pub(crate) fn piece(&self, offset: u64, len: u64, at: u64) -> u64 {
        self.piece_up_to(UNIT, offset, len, at)
    }

    /// [`Stripes::piece`], at most `longest` bytes long instead: of memory of which this process makes no checksums.
    pub(crate) fn piece_up_to(&self, longest: u64, offset: u64, len: u64, at: u64) -> u64 {
        let whole = len - len % self.alignment as u64;
        let end = if at < whole { whole } else { len };
        (end - at).min(self.locate(offset + at).room).min(longest)
    }

    /// Lengths of the pieces of `len` bytes at `offset`.
    pub(crate) fn pieces(&self, offset: u64, len: u64) -> impl Iterator<Item = usize> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let piece = (at < len).then(|| self.piece(offset, len, at))?;
            at += piece;
            Some(piece as usize)
        })
    }

    /// Whether requests can move memory at this address where it lies.
    pub(crate) fn takes(&self, address: usize) -> bool {
        self.files().all(|file| address.is_multiple_of(file.granularity))
    }
}

/// Length of each of `n` files that together hold `len` bytes.
pub(crate) fn lengths(len: u64, n: usize) -> Vec<u64> {
    if n <= 1 {
        return vec![len; n];
    }
    let n = n as u64;
    let (whole, rest) = (len / UNIT, len % UNIT);
    let last = whole % n;
    (0..n)
        .map(|file| (whole / n + u64::from(file < last)) * UNIT + if file == last { rest } else { 0 })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stripes(n: usize) -> Stripes {
        let file = |i| OpenFile::new(tempfile::tempfile().unwrap(), PathBuf::from(format!("{i}")), 1);
        Stripes::over((0..n).map(file).collect(), 4096).unwrap()
    }

    #[test]
    fn every_byte_has_a_place_of_its_own_within_the_files() {
        for n in 1..=4 {
            let files = stripes(n);
            for len in [0, 4096, UNIT, UNIT + 4096, 5 * UNIT, 7 * UNIT + 8192] {
                let lengths = lengths(len, n);
                assert_eq!(lengths.iter().sum::<u64>(), len);
                let mut used = vec![0; n];
                let mut at = 0;
                while at < len {
                    let Place { file, offset, room } = files.locate(at);
                    // Units come in order, so each file fills up without a gap.
                    assert_eq!(offset, used[file], "{n} files, {at} of {len}");
                    let step = room.min(len - at).min(4096);
                    used[file] += step;
                    at += step;
                }
                assert_eq!(used, lengths);
            }
        }
    }

    #[test]
    fn what_is_beyond_the_last_multiple_of_the_alignment_is_a_piece_of_its_own() {
        let pieces = |n, offset, len| stripes(n).pieces(offset, len).collect::<Vec<_>>();
        assert!(pieces(1, 0, 0).is_empty());
        assert_eq!(pieces(1, 8192, 5), [5]);
        assert_eq!(pieces(1, 4096, 4097), [4096, 1]);
        assert_eq!(pieces(1, 0, (1 << 20) + 512_448), [1 << 20, 512_000, 448]);
        assert_eq!(pieces(1, 4096, (1 << 20) + 4095), [1 << 20, 4095]);
        // A unit ends 8192 bytes on.
        assert_eq!(pieces(2, (1 << 20) - 8192, (1 << 20) + 12_289), [8192, 1 << 20, 4096, 1]);
    }

    #[test]
    fn units_go_to_each_file_in_turn() {
        let files = stripes(3);
        assert_eq!(files.locate(4 * UNIT + 100), Place { file: 1, offset: UNIT + 100, room: UNIT - 100 });
        assert!(stripes(1).locate(9 * UNIT).room > 1 << 60);
        assert_eq!(files.file(2).path, PathBuf::from("2"));
    }
}
