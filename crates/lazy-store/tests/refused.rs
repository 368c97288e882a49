//! Systems that refuse io_uring or direct I/O.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::path::Path;

use lazy_store::durable::{AlignedBuf, DurableDir, IoOptions};
use lazy_store::{Backend, BackendChoice, Bytes, NvmeOptions, Store, StoreError, StoreOptions, is_tmpfs};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

const SETUP: i64 = 425;
const ENTER: i64 = 426;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Runs `check` on a thread of its own, and so in all threads that this one starts, without the given system calls.
fn without(calls: &[i64], errno: u32, check: impl FnOnce() + Send + 'static) {
    let rules = calls.iter().map(|&call| (call, Vec::new())).collect();
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Errno(errno), arch).unwrap();
    let filter: BpfProgram = filter.try_into().unwrap();
    let thread = std::thread::spawn(move || {
        seccompiler::apply_filter(&filter).unwrap();
        check();
    });
    thread.join().unwrap();
}

fn options(backend: BackendChoice) -> IoOptions {
    IoOptions { backend, ..IoOptions::default() }
}

#[test]
fn t10_refused_io_uring_falls_back_with_the_likely_cause() {
    // EPERM, as a container's profile or the sysctl answers; ENOSYS, as older profiles do.
    for (calls, errno, hint) in [
        (&[SETUP, ENTER, 427][..], 1, "kernel.io_uring_disabled"),
        (&[SETUP][..], 38, "seccomp"),
        (&[ENTER][..], 1, "not permitted"),
    ] {
        without(calls, errno, move || {
            let folder = folder();
            let dir = DurableDir::open(folder.path(), &options(BackendChoice::Auto)).unwrap();
            assert_eq!(dir.mode().backend, Backend::Posix);
            let line = dir.mode().to_string();
            assert!(line.starts_with("pread/pwrite, ") && line.contains(hint), "{line}");
            let block = Bytes(dir.alignment() as u64);
            let file = dir.create_file("a", block).unwrap();
            file.write_at(0, AlignedBuf::zeroed(block).unwrap()).wait().1.unwrap();

            let refused = DurableDir::open(folder.path(), &options(BackendChoice::Uring)).unwrap_err();
            let StoreError::BackendRefused { asked: "io_uring", reason } = &refused else {
                panic!("{refused}")
            };
            assert!(reason.contains(hint), "{reason}");
        });
    }
}

#[test]
fn t10_io_uring_is_used_where_it_is_allowed() {
    let folder = folder();
    let dir = DurableDir::open(folder.path(), &options(BackendChoice::Uring)).unwrap();
    assert_eq!(dir.mode().backend, Backend::Uring);
    assert!(dir.mode().to_string().starts_with("io_uring, "));
}

#[test]
fn t13_the_probe_decides_and_leaves_nothing_behind() {
    let folder = folder();
    let dir = DurableDir::open(folder.path(), &IoOptions::default()).unwrap();
    let mode = dir.mode();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    assert!(mode.alignment >= 4096 && mode.alignment.is_multiple_of(mode.granularity));
    // Where it is not direct, it says why.
    assert!(mode.direct || mode.fallbacks.iter().any(|f| f.contains("O_DIRECT")), "{mode}");
}

#[test]
fn t13_tmpfs_is_known_and_held_to_the_same_alignment() {
    let shm = Path::new("/dev/shm");
    if !shm.exists() {
        return;
    }
    assert!(is_tmpfs(shm).unwrap());
    let folder = tempfile::tempdir_in(shm).unwrap();
    let dir = DurableDir::open(folder.path(), &IoOptions::default()).unwrap();
    assert_eq!(dir.mode().filesystem, "tmpfs");
    let line = dir.mode().to_string();
    assert!(line.contains(" on tmpfs") && line.contains("lies in RAM"), "{line}");
    let file = dir.create_file("a", Bytes(2 * dir.alignment() as u64)).unwrap();
    let (_, result) = file.write_at(1000, AlignedBuf::zeroed(Bytes(1000)).unwrap()).wait();
    assert!(matches!(result, Err(StoreError::BadRange { .. })));
}

/// A store with a host arena of 256 MiB and no tasks.
fn store(folder: &Path) -> Store {
    let nvme = NvmeOptions { backend: BackendChoice::Uring, ..NvmeOptions::new(folder, Bytes::from_mib(1)) };
    let host = Bytes::from_mib(256);
    Store::open(StoreOptions { host, nvme: Some(nvme), ..StoreOptions::default() }).unwrap()
}

#[test]
fn t10_io_uring_without_registration_is_used_and_says_so() {
    without(&[427], 1, || {
        let folder = folder();
        let store = store(folder.path());
        let mode = store.nvme_mode().unwrap();
        assert_eq!(
            (mode.backend, mode.registered_files, mode.registered_buffers),
            (Backend::Uring, false, false)
        );
        assert!(mode.to_string().contains("files are not registered"), "{mode}");
        assert!(mode.to_string().contains("buffers are not registered"), "{mode}");
    });
}

#[test]
fn t11_a_low_limit_on_locked_memory_leaves_buffers_unregistered_and_is_named() {
    let limit = getrlimit(Resource::Memlock);
    let low = Rlimit { current: Some(64 << 10), ..limit };
    let checked = std::thread::spawn(move || {
        // Root may lock what it likes, unless it gives that up; it does so for this thread alone.
        let mut mine = capabilities(None).unwrap();
        mine.effective.remove(CapabilitySet::IPC_LOCK);
        set_capabilities(None, mine).unwrap();
        setrlimit(Resource::Memlock, low).unwrap();
        let folder = folder();
        let store = store(folder.path());
        let mode = store.nvme_mode().unwrap();
        assert!(mode.backend == Backend::Uring && !mode.registered_buffers, "{mode}");
        let line = mode.to_string();
        assert!(line.contains("256.00 MiB of locked memory needed") && line.contains("64.0 KiB"), "{line}");
    })
    .join();
    setrlimit(Resource::Memlock, limit).unwrap();
    checked.unwrap();
}
