//! The NVMe tier: several drives, every back end, staging, checksums, reports.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::path::{Path, PathBuf};
use std::sync::mpsc;

use lazy_store::{
    Backend, BackendChoice, BoundarySide, Bytes, Checksum, DirectChoice, Extent, Lane, NvmeOptions, Store,
    StoreError, StoreOptions, Submission, Tier, ValueStats,
};

/// A folder on the file system of the build, which is a real one where /tmp may be tmpfs.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn open(nvme: NvmeOptions) -> Store {
    let (hbm, host) = (Bytes::from_mib(32), Bytes::from_mib(64));
    Store::open(StoreOptions { hbm, host, nvme: Some(nvme), poison: true, ..StoreOptions::default() })
        .unwrap()
}

fn pattern(i: usize) -> u8 {
    (i * 31 + i / 253 + (i >> 20) * 7) as u8
}

fn filled(store: &Store, tier: Tier, bytes: u64) -> Extent {
    let extent = store.reserve(tier, Bytes(bytes)).unwrap();
    let put = Submission { writes: &[&extent], ..Submission::new(Lane::Compute, "put") };
    let fill = |access: &mut lazy_store::Access<'_>| {
        access.write(0).iter_mut().enumerate().for_each(|(i, b)| *b = pattern(i));
        Ok(())
    };
    store.submit(put, fill).unwrap();
    extent
}

fn holds_the_pattern(store: &Store, extent: &Extent) -> bool {
    let (sender, receiver) = mpsc::channel();
    let get = Submission { reads: &[extent], ..Submission::new(Lane::Compute, "get") };
    let event = store
        .submit(get, move |access| {
            sender.send(access.read(0).iter().enumerate().all(|(i, &b)| b == pattern(i)))?;
            Ok(())
        })
        .unwrap();
    event.wait();
    receiver.recv().is_ok_and(|same| same)
}

/// Spills an extent from `tier` and fetches it back into a new one.
fn there_and_back(store: &Store, tier: Tier, bytes: u64) {
    let out = filled(store, tier, bytes);
    let spilled = store.reserve(Tier::Nvme, Bytes(bytes)).unwrap();
    let back = store.reserve(tier, Bytes(bytes)).unwrap();
    store.copy("out", &out, &spilled, &[]).unwrap();
    store.copy("in", &spilled, &back, &[]).unwrap();
    assert!(holds_the_pattern(store, &back), "{bytes} of {tier}: {:?}", store.nvme_mode());
    drop((out, spilled, back));
    store.synchronize().unwrap();
}

const LENGTHS: [u64; 7] = [1, 4095, 4097, (1 << 20) - 4096, 1 << 20, (1 << 20) + 1, 7_203_257];

#[test]
fn t1_extents_are_striped_over_drives_and_come_back_whole() {
    for drives in 1..=3 {
        let folders: Vec<_> = (0..drives).map(|_| folder()).collect();
        let dirs = folders.iter().map(|f| f.path().to_owned()).collect();
        let nvme =
            NvmeOptions { dirs, checksum: Checksum::Crc32c, ..NvmeOptions::new("", Bytes::from_mib(24)) };
        let store = open(nvme);
        // Something before it, so that units do not begin where the extent does.
        let before = store.reserve(Tier::Nvme, Bytes(12_288)).unwrap();
        for bytes in LENGTHS {
            there_and_back(&store, Tier::Host, bytes);
        }
        drop(before);
        let reports = store.drives();
        assert_eq!(reports.len(), drives);
        let written: u64 = reports.iter().map(|r| r.written.bytes.get()).sum();
        let padded: u64 = LENGTHS.iter().map(|bytes| bytes.next_multiple_of(4096)).sum();
        assert_eq!(written, padded);
        for (report, folder) in reports.iter().zip(&folders) {
            assert_eq!(report.dir, folder.path());
            assert!(report.written.bytes > Bytes::from_mib(1) && report.read.bytes == report.written.bytes);
            assert!(report.written.rate().is_some() && report.read.busy.get() > 0.0);
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        }
        drop(store);
        assert!(folders.iter().all(|f| std::fs::read_dir(f.path()).unwrap().count() == 0));
    }
}

#[test]
fn every_back_end_and_cache_mode_gives_back_what_it_was_given() {
    for backend in [BackendChoice::Uring, BackendChoice::Posix] {
        for direct in [DirectChoice::Auto, DirectChoice::Off] {
            let dir = folder();
            let nvme = NvmeOptions { backend, direct, ..NvmeOptions::new(dir.path(), Bytes::from_mib(24)) };
            let store = open(nvme);
            let mode = store.nvme_mode().unwrap();
            assert_eq!(mode.registered_files, mode.backend == Backend::Uring, "{mode}");
            assert!(mode.direct || mode.to_string().contains("buffered"));
            for bytes in LENGTHS {
                there_and_back(&store, Tier::Host, bytes);
            }
        }
    }
}

#[test]
fn hbm_and_nvme_are_connected_through_the_staging_ring() {
    for drives in [1, 2] {
        let folders: Vec<_> = (0..drives).map(|_| folder()).collect();
        let dirs = folders.iter().map(|f| f.path().to_owned()).collect();
        let staging = Bytes::from_mib(4);
        let checksum = Checksum::Crc32c;
        let store =
            open(NvmeOptions { dirs, staging, checksum, ..NvmeOptions::new("", Bytes::from_mib(24)) });
        assert_eq!(store.budget(Tier::Host), Bytes::from_mib(60), "the ring is charged to the host budget");
        for bytes in LENGTHS {
            there_and_back(&store, Tier::Hbm, bytes);
        }
        // Written from host, read into HBM: the same pieces.
        let out = filled(&store, Tier::Host, 5_000_001);
        let spilled = store.reserve(Tier::Nvme, Bytes(5_000_001)).unwrap();
        let back = store.reserve(Tier::Hbm, Bytes(5_000_001)).unwrap();
        store.copy("out", &out, &spilled, &[]).unwrap();
        store.copy("in", &spilled, &back, &[]).unwrap();
        assert!(holds_the_pattern(&store, &back));
    }
}

#[test]
fn staging_is_asked_for_and_fits_the_host_budget_or_is_refused() {
    let dir = folder();
    let store = open(NvmeOptions::new(dir.path(), Bytes::from_mib(1)));
    let hbm = filled(&store, Tier::Hbm, 4096);
    let nvme = store.reserve(Tier::Nvme, Bytes(4096)).unwrap();
    assert!(matches!(store.copy("out", &hbm, &nvme, &[]), Err(StoreError::NoStaging)));
    let nvme =
        NvmeOptions { staging: Bytes::from_mib(8), ..NvmeOptions::new(dir.path(), Bytes::from_mib(1)) };
    let options = StoreOptions { host: Bytes::from_mib(7), nvme: Some(nvme), ..StoreOptions::default() };
    let error = Store::open(options).unwrap_err();
    assert!(matches!(error, StoreError::StagingOverBudget { .. }), "{error}");
    let none = NvmeOptions { dirs: Vec::new(), ..NvmeOptions::new("", Bytes::from_mib(1)) };
    let error = Store::open(StoreOptions { nvme: Some(none), ..StoreOptions::default() }).unwrap_err();
    assert!(matches!(error, StoreError::NoSpillDir), "{error}");
}

#[test]
fn a_full_host_tier_says_what_staging_takes_of_it() {
    let dir = folder();
    // Less than two requests each way is as much.
    let staging = Bytes::from_mib(1);
    let nvme = NvmeOptions { staging, ..NvmeOptions::new(dir.path(), Bytes::from_mib(1)) };
    let options = StoreOptions { host: Bytes::from_mib(6), nvme: Some(nvme), ..StoreOptions::default() };
    let store = Store::open(options).unwrap();
    let full = store.reserve(Tier::Host, Bytes::from_mib(3)).unwrap_err();
    let said = full.to_string();
    assert!(
        said.contains("0 B of 2.00 MiB (staging for NVMe takes 4.00 MiB of the budget besides)"),
        "{said}"
    );
}

#[test]
fn folders_that_cannot_hold_spill_files_are_refused_with_advice() {
    let dir = folder();
    let refused = |dirs: Vec<PathBuf>| {
        let nvme = NvmeOptions { dirs, ..NvmeOptions::new("", Bytes::from_mib(4)) };
        Store::open(StoreOptions { nvme: Some(nvme), ..StoreOptions::default() }).unwrap_err()
    };
    let twice = refused(vec![dir.path().to_owned(), dir.path().join(".")]);
    assert!(matches!(twice, StoreError::SameDir { .. }), "{twice}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    let empty = refused(vec![PathBuf::new()]).to_string();
    assert!(empty.contains("an empty path"), "{empty}");
    // Nobody makes files there, root included.
    if Path::new("/sys").exists() {
        let closed = refused(vec!["/sys".into()]).to_string();
        assert!(closed.contains("choose a folder that this user may write to"), "{closed}");
    }
}

#[test]
fn drives_report_the_step_the_run_and_the_share_of_their_endurance() {
    let dir = folder();
    let tbw = Some(Bytes::from_mib(100));
    let store = open(NvmeOptions { tbw, ..NvmeOptions::new(dir.path(), Bytes::from_mib(8)) });
    there_and_back(&store, Tier::Host, 4 << 20);
    store.start_step();
    there_and_back(&store, Tier::Host, 1 << 20);
    let [drive] = store.drives().try_into().unwrap();
    assert_eq!((drive.step_written.bytes, drive.written.bytes), (Bytes::from_mib(1), Bytes::from_mib(5)));
    assert_eq!((drive.step_read.bytes, drive.read.bytes), (Bytes::from_mib(1), Bytes::from_mib(5)));
    assert!(drive.step_read.busy.get() > 0.0 && drive.step_read.busy < drive.read.busy);
    assert_eq!(drive.tbw_used, Some(0.05));
    assert_eq!(drive.mode.filesystem, store.nvme_mode().unwrap().filesystem);
    assert!(!drive.slow, "alone, it is the fastest");
}

#[test]
fn records_of_boundaries_show_what_went_out_and_what_came_back() {
    let dir = folder();
    let staging = Bytes::from_mib(4);
    let nvme =
        NvmeOptions { debug_boundaries: true, staging, ..NvmeOptions::new(dir.path(), Bytes::from_mib(8)) };
    let store = open(nvme);
    // Three requests and a tail.
    let count = (3 << 20) / 4 + 3;
    let bytes = Bytes(4 * count as u64);
    for tier in [Tier::Host, Tier::Hbm] {
        let [out, back] = [(); 2].map(|()| store.reserve(tier, bytes).unwrap());
        let spilled = store.reserve(Tier::Nvme, bytes).unwrap();
        let put = Submission { writes: &[&out], ..Submission::new(Lane::Compute, "put") };
        let fill = |access: &mut lazy_store::Access<'_>| {
            access.write_f32(0).fill(0.5);
            access.write_f32(0)[7] = f32::NAN;
            access.write_f32(0)[300_000] = -8.5;
            Ok(())
        };
        store.submit(put, fill).unwrap();
        store.copy("out", &out, &spilled, &[]).unwrap();
        store.copy("in", &spilled, &back, &[]).unwrap();
        store.synchronize().unwrap();
        let [before, after] = store.take_boundary_records().try_into().unwrap();
        assert_eq!((before.side, after.side), (BoundarySide::BeforeWrite, BoundarySide::AfterRead));
        assert_eq!((before.bytes, before.offset), (bytes, spilled.offset()));
        assert_eq!((before.checksum, before.f32, before.bf16), (after.checksum, after.f32, after.bf16));
        let finite = count as u64 - 1;
        let abs_mean = (0.5 * (finite - 1) as f64 + 8.5) / finite as f64;
        assert_eq!(before.f32, ValueStats { count: finite + 1, finite, abs_max: 8.5, abs_mean });
        assert_eq!(before.bf16.count, 2 * count as u64);
        assert!(store.take_boundary_records().is_empty());
    }
}

#[test]
fn t3_a_drive_without_room_is_named_and_nothing_is_left_on_the_others() {
    let shm = Path::new("/dev/shm");
    if !shm.exists() {
        return;
    }
    let (roomy, small) = (folder(), tempfile::tempdir_in(shm).unwrap());
    let dirs = vec![roomy.path().to_owned(), small.path().to_owned()];
    let space = rustix::fs::statvfs(small.path()).unwrap();
    // Half of it does not fit the second folder; the first one is asked for its half before.
    let bytes = Bytes(2 * (space.f_bavail * space.f_frsize + (64 << 20)));
    let on_disk = rustix::fs::statvfs(roomy.path()).unwrap();
    if on_disk.f_bavail * on_disk.f_frsize < bytes.get() {
        return;
    }
    let nvme = NvmeOptions { dirs, ..NvmeOptions::new("", bytes) };
    let error = Store::open(StoreOptions { nvme: Some(nvme), ..StoreOptions::default() }).unwrap_err();
    let StoreError::NoSpace { path, .. } = &error else { panic!("{error}") };
    assert!(path.starts_with(small.path()), "{error}");
    assert!([roomy, small].iter().all(|dir| std::fs::read_dir(dir.path()).unwrap().count() == 0));
}

#[test]
fn t4_cufile_is_used_and_reported_or_refused_with_the_reason() {
    let dir = folder();
    let backend = BackendChoice::Cufile;
    let nvme = NvmeOptions { backend, ..NvmeOptions::new(dir.path(), Bytes::from_mib(24)) };
    match Store::open(StoreOptions { host: Bytes::from_mib(64), nvme: Some(nvme), ..StoreOptions::default() })
    {
        // Where there is a GPU.
        Ok(store) => {
            let mode = store.nvme_mode().unwrap();
            assert!([Backend::CufileDirect, Backend::CufileCompat].contains(&mode.backend), "{mode}");
            assert_eq!(mode.asked_backend, BackendChoice::Cufile);
            there_and_back(&store, Tier::Host, 5_000_001);
        }
        Err(StoreError::BackendRefused { asked: "cuFile", reason }) => assert!(!reason.is_empty()),
        Err(error) => panic!("{error}"),
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn many_small_extents_travel_together_and_complete_in_order() {
    for checksum in [Checksum::Off, Checksum::Crc32c] {
        let dir = folder();
        let store = open(NvmeOptions { checksum, ..NvmeOptions::new(dir.path(), Bytes::from_mib(24)) });
        store.start_step();
        let bytes = 64 << 10;
        let mut back = Vec::new();
        let mut events = Vec::new();
        for i in 0..48 {
            let out = filled(&store, Tier::Host, bytes);
            let spilled = store.reserve(Tier::Nvme, Bytes(bytes)).unwrap();
            let extent = store.reserve(Tier::Host, Bytes(bytes)).unwrap();
            store.copy(format!("out {i}"), &out, &spilled, &[]).unwrap();
            events.push(store.copy(format!("in {i}"), &spilled, &extent, &[]).unwrap());
            back.push(extent);
        }
        for (i, event) in events.iter().enumerate() {
            event.wait();
            assert!(events[..i].iter().all(|earlier| earlier.is_done()));
        }
        assert!(back.iter().all(|extent| holds_the_pattern(&store, extent)));
        store.synchronize().unwrap();
        let spans = store.take_spans();
        for lane in [Lane::NvmeWrite, Lane::NvmeRead] {
            let of_lane = spans.iter().filter(|span| span.lane == lane);
            let times: Vec<(f64, f64)> = of_lane.map(|span| (span.start.get(), span.end.get())).collect();
            assert!(times.len() == 48 && times.is_sorted_by(|a, b| a.1 <= b.0), "{lane}: {times:?}");
        }
    }
}
