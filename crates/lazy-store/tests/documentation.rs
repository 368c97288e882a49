//! docs/failures.md quotes what users see. The page is the workspace's, so this file is not in the package.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::{Path, PathBuf};

use lazy_store::{Bytes, Lane, StoreError, Tier};

#[test]
fn the_page_of_failures_quotes_the_messages_as_they_are() {
    let spill = || PathBuf::from("/nvme/spill-71-0");
    let refused = |errno| std::io::Error::from_raw_os_error(errno);
    let (gib, mib) = (Bytes::from_gib, Bytes::from_mib);
    let forward = || "forward 3".to_owned();
    let errors = [
        StoreError::NoSpace { path: spill(), needed: gib(100.0), free: gib(61.25) },
        StoreError::Short { op: "read", path: spill(), offset: 1 << 20, wanted: 1 << 20, got: 0 },
        StoreError::Io { op: "read", path: spill(), offset: 4 << 20, bytes: mib(1), source: refused(5) },
        StoreError::Corrupt {
            path: spill(),
            offset: 8192,
            bytes: Bytes(4096),
            extent: 8192,
            wanted: 0x1c29_1ca3,
            got: 0x8d5b_60f1,
        },
        StoreError::NoSlot {
            op: "write",
            path: "/nvme/state/a".into(),
            offset: 0,
            bytes: Bytes(1 << 16),
            granularity: 16384,
        },
        StoreError::InUse { path: "/nvme/state".into() },
        StoreError::Exists { path: "/nvme/state/a".into() },
        StoreError::BadName { name: "../a".into() },
        StoreError::File { op: "make the folder", path: "/nvme".into(), source: refused(13) },
        StoreError::File { op: "find the folder", path: "".into(), source: refused(2) },
        StoreError::LibraryMissing {
            what: "the CUDA driver",
            names: "libcuda.so.1, libcuda.so".into(),
            reason: "…".into(),
        },
        StoreError::NoSpillDir,
        StoreError::NoNvme,
        StoreError::NotWritten { task: forward(), tier: Tier::Hbm, offset: 4096, bytes: Bytes(1024) },
        StoreError::Foreign { task: forward(), what: "event" },
        StoreError::OutOfBudget {
            tier: Tier::Host,
            wanted: mib(704),
            live: gib(13.125),
            budget: gib(13.5),
            staging: Bytes::ZERO,
            longest: mib(384),
        },
        StoreError::OutOfBudget {
            tier: Tier::Host,
            wanted: mib(704),
            live: gib(13.125),
            budget: gib(13.5),
            staging: mib(64),
            longest: mib(384),
        },
        StoreError::SameDir { path: "/nvme".into() },
        StoreError::OutsideBudget { tier: Tier::Hbm, offset: 4096, wanted: Bytes(1024), budget: Bytes(4096) },
        StoreError::StagingOverBudget { staging: gib(2.0), budget: gib(1.0) },
        StoreError::Memory { what: "the host arena", bytes: gib(512.0), source: refused(12) },
        StoreError::Panicked { task: "backward 7".into(), lane: Lane::Compute, message: "overflow".into() },
        StoreError::Worker { name: "lazy compute".into(), reason: refused(11).to_string() },
    ];
    // Code spans around a code span within a message are not part of it.
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/failures.md");
    let page = std::fs::read_to_string(page).unwrap().replace('`', "");
    for error in errors {
        let text = error.to_string().replace('`', "");
        assert!(page.contains(&text), "docs/failures.md lacks: {text}");
    }
}
