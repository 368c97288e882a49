//! The store beside fio on the same file system; prints the rows that `cargo xtask bench` shows.
//!
//! Without flags a full run of less than eight minutes and 4 GiB of disk; `--quick` is one of about a minute, with fewer
//! rows. `--dir PATH` is the folder of the drive to be measured (the current one; tmpfs is refused), `--pairs N` how often
//! the sides take turns (7, and no less), `--peer raw` a plain io_uring loop in place of fio, which also stands in where there is no
//! fio.
//!
//! Both sides move the same number of bytes between memory and a file that was allocated and written before, with
//! `O_DIRECT`, and take turns. The setting of the peer is the fastest of a short search over block sizes and queue depths: once
//! as fio comes, and once `tuned`, with buffers in huge pages and, like files, registered; the goals are the same. fio reads into
//! one buffer a request in flight, over and over, which may stay in a processor's cache; so a third peer is an io_uring
//! loop, tuned likewise, that uses as many bytes of buffers in turn as the store has for its extents. A goal counts
//! as met where the interval of the median reaches it: drives are noisy. Reads are cold: neither side's go through the
//! page cache, and the kernel's count of the bytes that it fetched from the drive for each read is a row of its own. What
//! a virtual machine's host keeps in memory nobody can tell from inside; it serves both sides.

mod bookkeeping;
mod fio;
mod flags;
mod ours;
mod peer;
#[cfg(target_os = "linux")]
mod raw;
mod rows;
mod side;
mod stats;
mod tasks;

use std::io::Write;
use std::path::{Path, PathBuf};

use lazy_store::scratch::{self, RunDir};
use serde_json::Value;

use flags::Flags;
use ours::{Ours, Way};
use peer::{Candidates, Peer, PeerFile};
use rows::{Figures, alone, compared};
use side::{FromDrive, Pairs, Side, Transfer, pairs};
use stats::Goal;

type Outcome<T> = Result<T, String>;

const MIB: u64 = 1 << 20;
/// Extents of sequential transfers, and those submitted by the thousand.
const LARGE: [u64; 2] = [4 * MIB, 64 * MIB];
const SMALL: u64 = 64 << 10;
/// Least share of the peer's rate, for large extents, small ones, and with checksums beside without.
const RATE: Goal = Goal::AtLeast(0.95);
const SMALL_RATE: Goal = Goal::AtLeast(0.85);
const CHECKSUM_RATE: Goal = Goal::AtLeast(0.98);
/// Most CPU time a byte, beside the peer's.
const CPU: Goal = Goal::AtMost(1.3);
/// Share of a cold read that comes from the drive (%).
const COLD: Goal = Goal::AtLeast(99.9);

fn main() -> Outcome<()> {
    let flags = Flags::parse(std::env::args().skip(1))?;
    let shown = flags.dir.display();
    if lazy_store::is_tmpfs(&flags.dir).map_err(|error| error.to_string())? {
        return Err(format!("{shown} is on tmpfs, which is memory: give a folder of a drive with --dir"));
    }
    // What a bench that was killed left here goes first.
    scratch::sweep(&flags.dir).map_err(|error| error.to_string())?;
    let run = RunDir::create(&flags.dir).map_err(|error| error.to_string())?;
    let mut rows = bookkeeping::rows(flags.pairs)?;
    rows.extend(tasks::rows(flags.pairs)?);
    rows.extend(Bench::new(&flags, run.path())?.rows()?);
    let text = format!("{:#}\n", Value::from(rows));
    std::io::stdout().write_all(text.as_bytes()).map_err(|error| format!("cannot print: {error}"))
}

/// `len` bytes that no drive can compress, the same ones for the same seed (xorshift).
fn fill(bytes: &mut [u8], seed: u64) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for chunk in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
}

/// A run on one drive.
struct Bench {
    quick: bool,
    pairs: usize,
    dir: PathBuf,
    peer: Peer,
    file: PeerFile,
    /// Bytes of each transfer of large extents, and of small ones.
    large: u64,
    small: u64,
    from_drive: FromDrive,
}

impl Bench {
    fn new(flags: &Flags, dir: &Path) -> Outcome<Bench> {
        let peer = match (flags.peer, fio::version()) {
            (Some(Peer::Raw), _) => Peer::Raw,
            (_, Some(version)) => {
                eprintln!("bench store: beside {version}");
                Peer::Fio
            }
            (Some(Peer::Fio), None) => return Err("fio cannot be started: install it".to_owned()),
            (None, None) => {
                eprintln!("bench store: there is no fio, so a plain io_uring loop stands in");
                Peer::Raw
            }
        };
        let (least, most, seconds) = if flags.quick { (128, 256, 0.3) } else { (256, 512, 0.5) };
        let file = PeerFile::create(dir, most * MIB)?;
        // Long enough for a rate, short enough for all rows; an even number of the largest extents.
        let step = 128 * MIB;
        let large = ((file.rate * seconds) as u64 / step * step).clamp(least * MIB, most * MIB);
        let small = large / 2;
        eprintln!(
            "bench store: {} pairs of {} MiB, small extents of {} MiB",
            flags.pairs,
            large >> 20,
            small >> 20
        );
        let (quick, pairs, dir) = (flags.quick, flags.pairs, dir.to_owned());
        Ok(Bench { quick, pairs, dir, peer, file, large, small, from_drive: FromDrive::default() })
    }

    fn rows(mut self) -> Outcome<Vec<Value>> {
        let mut rows = self.large_rows()?;
        rows.extend(self.small_rows()?);
        rows.extend(self.way_rows(&Way::CHECKSUM, "checksum off", Some(CHECKSUM_RATE))?);
        if !self.quick {
            rows.extend(self.way_rows(&Way::POSIX, "io_uring", None)?);
            rows.extend(self.way_rows(&Way::TWO_DIRS, "one folder", None)?);
        }
        for (who, shares) in [("here", &self.from_drive.ours), ("the peer", &self.from_drive.theirs)] {
            let percent: Vec<f64> = shares.iter().map(|share| share * 100.0).collect();
            let name = format!("share of a read that the drive gave, {who}");
            let row = alone(&name, "%", &percent, Some(COLD));
            if row.is_none() {
                eprintln!(
                    "bench store: this kernel does not count what drives give: that reads are cold, O_DIRECT alone says"
                );
            }
            rows.extend(row);
        }
        Ok(rows)
    }

    /// Sequential transfers, one direction and both, beside the peer's best.
    fn large_rows(&mut self) -> Outcome<Vec<Value>> {
        let depths: &[u32] = if self.quick { &[4, 32] } else { &[1, 2, 4, 8, 16, 32] };
        let mut peers = Vec::new();
        for transfer in [Transfer::Write, Transfer::Read, Transfer::Both] {
            for (peer, tuned, memory) in self.peers(self.large) {
                let candidates = Candidates { blocks: &[MIB, 4 * MIB], depths, tuned, memory };
                let tried = self.large.min(256 * MIB);
                peers.push((transfer, peer, candidates.best(peer, &self.file.path, tried, transfer)?));
            }
        }
        let mut rows = Vec::new();
        for extent in LARGE.into_iter().skip(usize::from(self.quick)) {
            let mut ours = Ours::open(&Way::URING, &self.dir, self.large, extent)?;
            eprintln!("bench store: {}", ours.mode());
            for &(transfer, peer, setting) in &peers {
                let mut theirs = peer.open(&self.file.path, self.large, setting)?;
                let name = format!("{}, {} MiB extents", transfer.name(), extent >> 20);
                let pairs = self.compare(transfer, &mut ours, theirs.as_mut())?;
                let label = theirs.label(transfer);
                rows.extend(rate_row(&name, &pairs, &label, Some(RATE)));
                if transfer != Transfer::Both && setting.memory.is_none() {
                    rows.extend(cpu_row(&name, &pairs, &label));
                }
            }
        }
        Ok(rows)
    }

    fn small_rows(&mut self) -> Outcome<Vec<Value>> {
        let mut ours = Ours::open(&Way::URING, &self.dir, self.small, SMALL)?;
        let mut rows = Vec::new();
        for transfer in [Transfer::Write, Transfer::Read] {
            for (peer, tuned, memory) in self.peers(self.small) {
                let candidates = Candidates { blocks: &[SMALL], depths: &[1, 4, 8, 16, 32], tuned, memory };
                let setting = candidates.best(peer, &self.file.path, self.small, transfer)?;
                let mut theirs = peer.open(&self.file.path, self.small, setting)?;
                let pairs = self.compare(transfer, &mut ours, theirs.as_mut())?;
                let name = format!("{}, 64 KiB extents, all submitted at once", transfer.name());
                rows.extend(rate_row(&name, &pairs, &theirs.label(transfer), Some(SMALL_RATE)));
            }
        }
        Ok(rows)
    }

    /// The peers for transfers of `bytes`: who it is, whether it is tuned, and its memory, if that is the store's. A quick run
    /// has the fastest only.
    fn peers(&self, bytes: u64) -> Vec<(Peer, bool, Option<u64>)> {
        let tuned = (self.peer, true, None);
        if self.quick {
            return vec![tuned];
        }
        vec![(self.peer, false, None), tuned, (Peer::Raw, true, Some(bytes.min(ours::HOST)))]
    }

    /// One way to open a store beside the usual one.
    fn way_rows(&mut self, way: &Way, usual: &'static str, goal: Option<Goal>) -> Outcome<Vec<Value>> {
        let extent = LARGE[1];
        let usual = Way { label: usual, ..Way::URING };
        let mut ours = Ours::open(way, &self.dir, self.large, extent)?;
        let mut theirs = Ours::open(&usual, &self.dir, self.large, extent)?;
        let mut rows = Vec::new();
        for transfer in [Transfer::Write, Transfer::Read] {
            let pairs = self.compare(transfer, &mut ours, &mut theirs)?;
            let name = format!("{}, {} MiB extents, {}", transfer.name(), extent >> 20, way.label);
            rows.extend(rate_row(&name, &pairs, usual.label, goal));
        }
        Ok(rows)
    }

    fn compare(&mut self, transfer: Transfer, ours: &mut dyn Side, theirs: &mut dyn Side) -> Outcome<Pairs> {
        pairs(transfer, self.pairs, ours, theirs, &mut self.from_drive)
    }
}

fn rate_row(name: &str, pairs: &Pairs, label: &str, goal: Option<Goal>) -> Option<Value> {
    let [ours, theirs] =
        [&pairs.ours, &pairs.theirs].map(|side| side.iter().map(|s| s.rate()).collect::<Vec<_>>());
    let row = compared(name, "GB/s", &ours, &Figures { label, values: &theirs }, goal)?;
    eprintln!("bench store: {name}: {:.3} of {label}", row["ratio"].as_f64().unwrap_or(f64::NAN));
    Some(row)
}

fn cpu_row(name: &str, pairs: &Pairs, label: &str) -> Option<Value> {
    let [ours, theirs] =
        [&pairs.ours, &pairs.theirs].map(|side| side.iter().map(|s| s.cpu_per_gb()).collect::<Vec<_>>());
    let name = format!("{name}: CPU time");
    compared(&name, "CPU s/GB", &ours, &Figures { label, values: &theirs }, Some(CPU))
}
