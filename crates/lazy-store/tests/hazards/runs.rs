//! T3, T8: what a killed process and a full disk leave behind, and what a sweep makes of any folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lazy_store::scratch::{RunDir, sweep};
use lazy_store::{
    BackendChoice, Bytes, DirectChoice, Lane, NvmeOptions, Store, StoreError, StoreOptions, Submission, Tier,
};
use proptest::prelude::*;

use crate::program::Random;
use crate::{deep, folder};

/// Tells a test that it is the child of another one, and where to work.
const ROOT: &str = "LAZY_STORE_CHILD_ROOT";
/// Tells it that the spill file's blocks are not allocated ahead.
const SPARSE: &str = "LAZY_STORE_CHILD_SPARSE";

/// Starts this test program again for one test.
fn child(test: &str, root: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(ROOT, root);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

fn child_root() -> Option<PathBuf> {
    std::env::var_os(ROOT).map(PathBuf::from)
}

fn store(dir: &Path, bytes: Bytes, direct: DirectChoice) -> Result<Store, StoreError> {
    let nvme = NvmeOptions { backend: BackendChoice::Auto, direct, ..NvmeOptions::new(dir, bytes) };
    Store::open(StoreOptions { host: bytes, nvme: Some(nvme), ..StoreOptions::default() })
}

/// Writes `bytes` to the spill file.
fn spill(store: &Store, bytes: Bytes) -> Result<(), StoreError> {
    let (out, there) = (store.reserve(Tier::Host, bytes)?, store.reserve(Tier::Nvme, bytes)?);
    let writes = [&out];
    let fill = Submission { writes: &writes, ..Submission::new(Lane::Compute, "fill") };
    store.submit(fill, |access| {
        access.write(0).fill(7);
        Ok(())
    })?;
    store.copy("boundary 3 out", &out, &there, &[])?;
    drop((out, there));
    store.synchronize()
}

/// Every path under `root`, with the text of small files.
fn contents(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut all = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let kind = std::fs::symlink_metadata(&path).unwrap();
            let what = if kind.is_dir() {
                folders.push(path.clone());
                "folder".to_owned()
            } else if kind.is_symlink() {
                format!("link to {}", std::fs::read_link(&path).unwrap().display())
            } else if kind.is_file() {
                format!("file {:?}", std::fs::read(&path).unwrap())
            } else {
                "other".to_owned()
            };
            all.insert(path, what);
        }
    }
    all
}

/// Not a test of its own: what the killed process does. A store on a run folder, opened, used and closed in turn.
#[test]
fn child_that_spills_until_it_is_killed() {
    let Some(root) = child_root() else { return };
    loop {
        let run = RunDir::create(&root).unwrap();
        let store = store(run.path(), Bytes::from_mib(2), DirectChoice::Auto).unwrap();
        for _ in 0..5 {
            spill(&store, Bytes::from_mib(1)).unwrap();
        }
    }
}

/// Waits until the child has a run folder.
fn wait_for_run(child: &mut Child, root: &Path, known: usize) {
    let start = Instant::now();
    let runs = || std::fs::read_dir(root).unwrap().filter(|e| named_run(&e.as_ref().unwrap().path())).count();
    while runs() <= known {
        assert!(child.try_wait().unwrap().is_none() && start.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn named_run(path: &Path) -> bool {
    path.file_name().unwrap().to_string_lossy().starts_with("lazy-run-")
}

#[test]
fn t8_after_each_kill_a_sweep_removes_the_dead_run_and_nothing_else() {
    let root = folder();
    // What has to stay: a live run with a spill file, a stranger's folder, and one that only looks like a run's.
    let alive = RunDir::create(root.path()).unwrap();
    std::fs::write(alive.path().join("spill"), "mine").unwrap();
    std::fs::create_dir(root.path().join("checkpoints")).unwrap();
    std::fs::write(root.path().join("checkpoints/step-10"), "weights").unwrap();
    std::fs::create_dir(root.path().join("lazy-run-notes")).unwrap();
    let kept = contents(root.path());
    let mut random = Random(3);
    let mut removed = 0;
    let kills = 10 * deep(10);
    for _ in 0..kills {
        let mut child = child("runs::child_that_spills_until_it_is_killed", root.path()).spawn().unwrap();
        wait_for_run(&mut child, root.path(), 2);
        std::thread::sleep(Duration::from_micros(random.below(30_000) as u64));
        child.kill().unwrap();
        child.wait().unwrap();
        let report = sweep(root.path()).unwrap();
        // Between two stores there is no folder to be left.
        assert!(report.removed.len() <= 1, "{report:?}");
        assert_eq!(report.alive, [alive.path()]);
        assert_eq!(report.unsure.len(), 1, "{report:?}");
        removed += report.removed.len();
        let left = contents(root.path());
        let new: Vec<_> = left.iter().filter(|(path, _)| !kept.contains_key(*path)).collect();
        assert!(new.is_empty(), "left behind: {new:?}");
        assert_eq!(left, kept);
    }
    eprintln!("{kills} kills, {removed} folders of dead runs removed");
    assert!(removed as u64 * 2 > kills);
}

/// Not a test of its own: runs that spill and check what they spilled, beside others under the same root, each of which
/// begins with a sweep. Its exit says whether all went well.
#[test]
fn child_that_runs_beside_others() {
    let Some(root) = child_root() else { return };
    for _ in 0..20 {
        sweep(&root).unwrap();
        let run = RunDir::create(&root).unwrap();
        std::fs::write(run.path().join("mine"), std::process::id().to_string()).unwrap();
        let store = store(run.path(), Bytes::from_mib(2), DirectChoice::Auto).unwrap();
        spill(&store, Bytes::from_mib(1)).unwrap();
        assert!(sweep(&root).unwrap().alive.iter().any(|alive| alive == run.path()));
        assert_eq!(std::fs::read_to_string(run.path().join("mine")).unwrap(), std::process::id().to_string());
    }
}

#[test]
fn t8_processes_under_one_root_leave_each_other_alone() {
    let root = folder();
    let start = || child("runs::child_that_runs_beside_others", root.path()).spawn().unwrap();
    for mut one in [(); 3].map(|()| start()) {
        assert!(one.wait().unwrap().success());
    }
    assert_eq!(contents(root.path()).len(), 0, "everybody removed what was his");
}

/// Mounts in a namespace of its own, for a test that then runs there.
#[derive(Clone, Copy)]
enum Disk {
    /// Any user may have one, where the system has user namespaces.
    Tmpfs,
    /// A file system that cannot allocate ahead, in a file; for root alone.
    Ext2,
}

/// Runs [`child_on_a_small_disk`]; false where the system allows no such mounts.
fn on_small_disk(root: &Path, disk: Disk, mib: u32) -> bool {
    let image = root.with_extension("img");
    let (user, mount) = match disk {
        Disk::Tmpfs => {
            (&["--user", "--map-root-user"][..], format!("mount -t tmpfs -o size={mib}m none \"$DISK\""))
        }
        Disk::Ext2 => {
            std::fs::File::create(&image).unwrap().set_len(u64::from(mib) << 20).unwrap();
            (&[][..], "mkfs.ext2 -q -F -m 0 \"$IMAGE\" && mount -o loop \"$IMAGE\" \"$DISK\"".to_owned())
        }
    };
    let script = format!(
        "{{ {mount}; }} 2> /dev/null || exit 77; exec \"$PROGRAM\" --exact runs::child_on_a_small_disk --nocapture"
    );
    let status = Command::new("unshare")
        .args(user)
        .args(["--mount", "sh", "-c", &script])
        .env("PROGRAM", std::env::current_exe().unwrap())
        .env("DISK", root)
        .env("IMAGE", &image)
        .env(ROOT, root)
        .env(SPARSE, if matches!(disk, Disk::Ext2) { "1" } else { "0" })
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status();
    let _ = std::fs::remove_file(image);
    match status {
        Ok(status) if status.success() => true,
        // The mount was refused, or `unshare` itself.
        Ok(status) if matches!(status.code(), Some(1 | 77)) => false,
        Ok(status) => panic!("on {mib} MiB: {status}"),
        Err(_) => false,
    }
}

/// Not a test of its own: opens stores on a disk of 1 to 8 MiB.
#[test]
fn child_on_a_small_disk() {
    let Some(root) = child_root() else { return };
    let disk = rustix::fs::statvfs(&root).unwrap();
    let free = disk.f_bavail * disk.f_frsize;
    let dir = root.join("spill");
    // More than there is: refused at open, with both figures.
    let error = store(&dir, Bytes(free + (1 << 20)), DirectChoice::Auto).unwrap_err();
    let StoreError::NoSpace { needed, free: told, .. } = &error else { exit_with(&error) };
    if *needed < Bytes(free + (1 << 20))
        || *told > Bytes(free)
        || std::fs::read_dir(&dir).unwrap().count() > 0
    {
        exit_with(&error);
    }
    // Another program takes the room between the opening and the first write. Allocated blocks it cannot take.
    let small = Bytes(free / 2).align_up(4096);
    let opened = store(&dir, small, DirectChoice::Auto).unwrap();
    let rest = std::fs::File::create(root.join("other")).unwrap();
    fill_up(&rest);
    let sparse = std::env::var(SPARSE).unwrap() == "1";
    match spill(&opened, Bytes(small.get() / 4096 / 2 * 4096)) {
        Ok(()) if !sparse => {}
        Err(StoreError::Task { source, .. }) if sparse => match source.downcast_ref() {
            Some(error @ StoreError::NoSpace { needed, free, .. }) if needed > free => {
                eprintln!("at the first write: {error}");
            }
            _ => panic!("{source}"),
        },
        other => panic!("sparse {sparse}: {other:?}"),
    }
    // A second store finds no room at all, not even for its probe file.
    let error = store(&dir, small, DirectChoice::Auto).unwrap_err();
    eprintln!("with no room at all: {error}");
    drop(opened);
    if std::fs::read_dir(&dir).unwrap().count() > 0 {
        exit_with(&error);
    }
}

fn fill_up(mut file: &std::fs::File) {
    use std::io::Write;
    let block = [1; 4096];
    while file.write_all(&block).is_ok() {}
}

/// Ends the child with a status of its own.
fn exit_with(error: &StoreError) -> ! {
    eprintln!("not as it should be: {error:?}");
    std::process::exit(3);
}

#[test]
fn t3_a_disk_that_is_or_gets_full_is_told_with_both_figures_and_leaves_nothing() {
    let root = folder();
    let mut tried = 0;
    let wide = deep(2) > 1;
    for mib in 1..=if wide { 8 } else { 2 } {
        tried += u32::from(on_small_disk(root.path(), Disk::Tmpfs, mib));
        if wide {
            tried += u32::from(on_small_disk(root.path(), Disk::Ext2, mib));
        }
    }
    // Containers may forbid mounts; the fault double covers the same errors.
    eprintln!("{tried} small disks");
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
}

/// The lines of a lock file, as docs/formats.md gives them.
#[derive(Clone, Debug)]
struct Lines {
    boot: String,
    host: String,
    pids: String,
    pid: u32,
    started: u64,
}

fn this_process() -> Lines {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    Lines {
        boot: std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned(),
        host: std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_owned(),
        pids: std::fs::read_link("/proc/self/ns/pid").unwrap().to_str().unwrap().to_owned(),
        pid: std::process::id(),
        started: stat.rsplit(')').next().unwrap().split_whitespace().nth(19).unwrap().parse().unwrap(),
    }
}

fn text(lines: &Lines) -> String {
    let Lines { boot, host, pids, pid, started } = lines;
    format!("lazy run folder 1\nboot {boot}\nhost {host}\npids {pids}\npid {pid}\nstarted {started}\n")
}

/// What lies under the root, and what the sweep has to do with it.
#[derive(Clone, Debug)]
enum Entry {
    /// A dead run's: our process number at another start.
    Dead { started_before: u64, files: Vec<(String, Vec<u8>)> },
    /// A dead run's, with so many bytes of its lock file changed or cut off.
    Damaged { at: usize, bytes: Vec<u8>, cut: bool },
    /// Ours, though it holds no lock.
    Ours,
    /// Any bytes for a lock file.
    Anything(Vec<u8>),
    /// No lock file, or a folder, a link or a pipe in its place.
    OddLock(u8),
    /// A link, a file or a pipe by the name of a run folder.
    NoFolder(u8),
    /// A folder by another name, with a dead owner's lock file.
    OtherName(String),
}

fn entry() -> impl Strategy<Value = Entry> {
    let file = ("[a-z]{1,8}", prop::collection::vec(any::<u8>(), 0..40));
    prop_oneof![
        3 => (1..100u64, prop::collection::vec(file, 0..4)).prop_map(|(started_before, files)| Entry::Dead { started_before, files }),
        4 => (0..180usize, prop::collection::vec(any::<u8>(), 1..4), any::<bool>())
            .prop_map(|(at, bytes, cut)| Entry::Damaged { at, bytes, cut }),
        1 => Just(Entry::Ours),
        2 => prop::collection::vec(any::<u8>(), 0..300).prop_map(Entry::Anything),
        2 => (0..4u8).prop_map(Entry::OddLock),
        2 => (0..3u8).prop_map(Entry::NoFolder),
        1 => "[a-z-]{1,12}".prop_map(Entry::OtherName),
    ]
}

/// Makes the entry; whether a sweep may remove it. `None` where either is right.
fn make(root: &Path, outside: &Path, i: usize, entry: &Entry) -> (PathBuf, Option<bool>) {
    let mut path = root.join(format!("lazy-run-{i}"));
    let this = this_process();
    let dead = Lines { started: this.started.saturating_sub(1), ..this.clone() };
    let pipe = |path: &Path| {
        rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
            .unwrap();
    };
    let folder_with = |path: &Path, lock: &[u8]| {
        std::fs::create_dir(path).unwrap();
        std::fs::write(path.join("owner.lock"), lock).unwrap();
        std::fs::write(path.join("spill-1-0"), "bytes").unwrap();
    };
    let removable = match entry {
        Entry::Dead { started_before, files } => {
            folder_with(&path, text(&Lines { started: this.started - started_before, ..this }).as_bytes());
            for (name, bytes) in files {
                std::fs::create_dir_all(path.join("deeper")).unwrap();
                std::fs::write(path.join("deeper").join(name), bytes).unwrap();
            }
            std::os::unix::fs::symlink(outside, path.join("way-out")).unwrap();
            Some(true)
        }
        Entry::Damaged { at, bytes, cut } => {
            let mut lock = text(&dead).into_bytes();
            let at = at % lock.len();
            if *cut {
                lock.truncate(at);
            } else {
                let end = (at + bytes.len()).min(lock.len());
                lock[at..end].copy_from_slice(&bytes[..end - at]);
            }
            folder_with(&path, &lock);
            // It may still say that a process is dead: another number, another start.
            if std::str::from_utf8(&lock).is_ok() { None } else { Some(false) }
        }
        Entry::Ours => {
            folder_with(&path, text(&this).as_bytes());
            Some(false)
        }
        Entry::Anything(bytes) => {
            folder_with(&path, bytes);
            Some(false)
        }
        Entry::OddLock(kind) => {
            std::fs::create_dir(&path).unwrap();
            let lock = path.join("owner.lock");
            match kind {
                0 => {}
                1 => std::fs::create_dir(lock).unwrap(),
                2 => std::os::unix::fs::symlink(outside.join("owner.lock"), lock).unwrap(),
                _ => pipe(&lock),
            }
            Some(false)
        }
        Entry::NoFolder(kind) => {
            match kind {
                0 => std::os::unix::fs::symlink(outside, &path).unwrap(),
                1 => std::fs::write(&path, text(&dead)).unwrap(),
                _ => pipe(&path),
            }
            Some(false)
        }
        Entry::OtherName(name) => {
            path = root.join(format!("x{name}{i}"));
            folder_with(&path, text(&dead).as_bytes());
            Some(false)
        }
    };
    (path, removable)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn t8_a_sweep_of_any_folder_removes_what_is_certainly_dead_and_changes_nothing_else(entries in prop::collection::vec(entry(), 1..8)) {
        let (root, outside) = (folder(), folder());
        let dead = Lines { started: 1, ..this_process() };
        std::fs::write(outside.path().join("owner.lock"), text(&dead)).unwrap();
        let made: Vec<_> = entries.iter().enumerate().map(|(i, e)| make(root.path(), outside.path(), i, e)).collect();
        let (before, before_outside) = (contents(root.path()), contents(outside.path()));
        let report = sweep(root.path()).unwrap();
        let after = contents(root.path());
        prop_assert_eq!(contents(outside.path()), before_outside);
        let root_path = std::fs::canonicalize(root.path()).unwrap();
        for ((path, removable), entry) in made.iter().zip(&entries) {
            let there = std::fs::symlink_metadata(path).is_ok();
            let reported = report.removed.contains(&root_path.join(path.file_name().unwrap()));
            prop_assert_eq!(there, !reported, "{:?}", entry);
            if let Some(removable) = removable {
                prop_assert_eq!(there, !removable, "{:?} of {:?}", entry, report);
            }
            // Whole or not at all.
            for (inner, what) in before.iter().filter(|(p, _)| p.starts_with(path)) {
                prop_assert_eq!(after.get(inner), there.then_some(what), "{:?}", entry);
            }
        }
    }
}
