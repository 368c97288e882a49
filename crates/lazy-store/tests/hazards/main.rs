//! Hazards: random programs of put, get, prefetch and release over three tiers, under seeds, faults and threads, against
//! a model that knows what every extent holds.
//!
//! A seed gives the program, the order in which its tasks run, and the faults of the spill file. A seed that fails says
//! so with the command that runs it again.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod mutants;
mod overtaking;
mod program;
mod runs;
mod steps;
mod streams;
mod sweep;

use std::path::Path;

use lazy_store::fault::Faults;
use lazy_store::{
    BackendChoice, Bytes, Checksum, DirectChoice, NvmeOptions, QueueOrder, Store, StoreOptions,
};

/// Seeds after which a store is opened anew, with another way to its spill file.
const BLOCK: u64 = 250;

/// For copies between HBM and NVMe; part of the host budget.
const STAGING: Bytes = Bytes(4 << 20);

/// A folder on the file system of the build, which is a real one where /tmp may be tmpfs.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// How many times as much the deep run does.
fn deep(times: u64) -> u64 {
    if std::env::var_os("PROPTEST_CASES").is_some() { times } else { 1 }
}

fn has_checksums(seed: u64) -> bool {
    seed / BLOCK % 4 < 2
}

/// What the store's HBM is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum On {
    Host,
    /// A simulated device: what runs on its streams is issued ahead of time, and the streams wait for each other.
    Streams,
}

/// A store small enough that ranges change hands all the time. Most blocks of seeds use the page cache, which is fast;
/// the others go around it, through io_uring, or over two drives. Half have checksums.
fn store(dir: &Path, on: On, order: QueueOrder, seed: u64, faults: &Faults) -> Store {
    let (backend, direct) = match seed / BLOCK % 8 {
        3 => (BackendChoice::Uring, DirectChoice::Off),
        5 => (BackendChoice::Posix, DirectChoice::Auto),
        7 => (BackendChoice::Uring, DirectChoice::Auto),
        _ => (BackendChoice::Posix, DirectChoice::Off),
    };
    let checksum = if has_checksums(seed) { Checksum::Crc32c } else { Checksum::Off };
    let mut nvme = NvmeOptions::new(dir.join("a"), Bytes(7 * 4096));
    nvme = NvmeOptions { backend, direct, checksum, staging: STAGING, ..nvme };
    if seed / BLOCK % 3 == 2 {
        nvme.dirs.push(dir.join("b"));
    }
    let options = StoreOptions {
        hbm: Bytes(12_000),
        host: Bytes(20_000) + STAGING,
        nvme: Some(nvme),
        poison: true,
        order,
        ..StoreOptions::default()
    };
    match on {
        On::Host => Store::open_with_faults(options, faults).unwrap(),
        On::Streams => Store::open_simulated(options, faults).unwrap(),
    }
}
