//! Run folders of any content under the sweep: lock files changed byte by byte, and trees of files, links and folders.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;

use proptest::prelude::*;

use super::tests::{dead_owner, folder};
use super::*;

/// One change of a lock file's bytes. Positions are shares of its length, in 65536ths.
#[derive(Clone, Debug)]
enum Change {
    Flip(u16, u8),
    Insert(u16, Vec<u8>),
    Remove(u16, u16),
    Cut(u16),
    /// The line by that number goes, or comes twice.
    Drop(usize),
    Double(usize),
}

fn change() -> impl Strategy<Value = Change> {
    // The numbers that name a process are at the end.
    let place = || prop_oneof![any::<u16>(), 60_000..=u16::MAX];
    let any_bytes = prop::collection::vec(any::<u8>(), 1..6);
    let digits = "[0-9\\n +-]{1,5}".prop_map(String::into_bytes);
    prop_oneof![
        (place(), any::<u8>()).prop_map(|(at, bits)| Change::Flip(at, bits)),
        (place(), any_bytes).prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        (place(), digits).prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        (place(), 1..20u16).prop_map(|(at, len)| Change::Remove(at, len)),
        place().prop_map(Change::Cut),
        (0..6usize).prop_map(Change::Drop),
        (0..6usize).prop_map(Change::Double),
    ]
}

fn apply(mut bytes: Vec<u8>, change: &Change) -> Vec<u8> {
    let place = |at: u16| usize::from(at) * bytes.len() / 65536;
    match change {
        Change::Flip(at, bits) => {
            let at = place(*at);
            bytes.get_mut(at).into_iter().for_each(|byte| *byte ^= bits);
        }
        Change::Insert(at, new) => {
            let at = place(*at);
            bytes.splice(at..at, new.iter().copied());
        }
        Change::Remove(at, len) => {
            let at = place(*at);
            bytes.drain(at..(at + usize::from(*len)).min(bytes.len()));
        }
        Change::Cut(at) => bytes.truncate(place(*at)),
        Change::Drop(line) | Change::Double(line) => {
            let lines: Vec<&[u8]> = bytes.split_inclusive(|&b| b == b'\n').collect();
            let times = |i| if i != *line { 1 } else { usize::from(matches!(change, Change::Double(_))) * 2 };
            return lines
                .iter()
                .enumerate()
                .flat_map(|(i, l)| [*l].repeat(times(i)))
                .flatten()
                .copied()
                .collect();
        }
    }
    bytes
}

/// Whether a lock file says with certainty that its owner, this process apart, is dead: what the format page says of it,
/// read line by line.
fn says_dead(bytes: &[u8]) -> bool {
    let this = Owner::this_process().unwrap();
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let lines: Vec<&str> = text.split('\n').collect();
    let [header, boot, host, pids, pid, started, ""] = lines[..] else { return false };
    let value = |line: &str, name: &str| line.strip_prefix(name).map(str::to_owned);
    let (Some(boot), Some(host), Some(pids), Some(pid), Some(started)) = (
        value(boot, "boot "),
        value(host, "host "),
        value(pids, "pids "),
        value(pid, "pid "),
        value(started, "started "),
    ) else {
        return false;
    };
    let number = |text: &str, most: u64| {
        let plain = text == "0" || !text.starts_with('0') && text.bytes().all(|b| b.is_ascii_digit());
        text.parse::<u64>().ok().filter(|&n| plain && n <= most)
    };
    let (Some(pid), Some(started)) = (number(&pid, u32::MAX.into()), number(&started, u64::MAX)) else {
        return false;
    };
    if header != "lazy run folder 1" || boot.is_empty() || bytes.len() > 4096 {
        return false;
    }
    if boot != this.boot {
        return host == this.host;
    }
    // The process of that number: gone, or another one since.
    let alive = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    pids != this.pids || alive.map_or(true, |stat| start_time(&stat) != Some(started))
}

/// Something in a folder.
#[derive(Clone, Debug)]
enum Thing {
    File,
    /// A link out of the root, to a file or a folder there, or to nothing.
    Link(usize),
    Folder(Vec<(Vec<u8>, Thing)>),
    Socket,
}

fn thing() -> impl Strategy<Value = Thing> {
    let leaf = prop_oneof![
        3 => Just(Thing::File),
        2 => (0..4usize).prop_map(Thing::Link),
        1 => Just(Thing::Socket),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop::collection::vec((name(), inner), 0..4).prop_map(Thing::Folder)
    })
}

/// Names of any bytes, and those that mean something here.
fn name() -> impl Strategy<Value = Vec<u8>> {
    let any_bytes =
        prop::collection::vec(any::<u8>().prop_filter("no name", |b| *b != 0 && *b != b'/'), 1..9)
            .prop_filter("no name", |name| name != b"." && name != b"..");
    prop_oneof![any_bytes, Just(LOCK.into()), Just(b"spill-1-0".to_vec()), Just(b"lazy-run-x".to_vec())]
}

fn make(at: &Path, thing: &Thing, outside: &Path) {
    let made = match thing {
        Thing::File => std::fs::write(at, "x"),
        Thing::Link(to) => {
            let target = ["kept/file", "kept", "absent", "."][*to];
            std::os::unix::fs::symlink(outside.join(target), at)
        }
        Thing::Folder(things) => std::fs::create_dir(at).map(|()| {
            for (name, thing) in things {
                make(&at.join(std::ffi::OsStr::from_bytes(name)), thing, outside);
            }
        }),
        Thing::Socket => std::os::unix::net::UnixListener::bind(at).map(drop),
    };
    // A second thing of one name, or a path too long for a socket: there are enough others.
    let _ = made;
}

/// Everything below a folder, links not followed, with the bytes of plain files.
fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            all.extend(contents(&entry.path()));
        }
        all.insert(
            entry.path(),
            if kind.is_file() { std::fs::read(entry.path()).unwrap() } else { Vec::new() },
        );
    }
    all
}

/// Sweeps, and checks that what is not among `removed` is as it was, and that everything was reported once.
fn swept(root: &Path, outside: &Path, runs: usize, removed: &[PathBuf]) {
    let (before, kept) = (contents(root), contents(outside));
    let report = sweep(root).unwrap();
    assert_eq!(report.removed, removed);
    assert_eq!(report.removed.len() + report.alive.len() + report.unsure.len(), runs, "{report:?}");
    let left: BTreeMap<_, _> =
        before.into_iter().filter(|(path, _)| !removed.iter().any(|run| path.starts_with(run))).collect();
    assert_eq!(contents(root), left);
    assert_eq!(contents(outside), kept);
}

fn places() -> (tempfile::TempDir, tempfile::TempDir) {
    let (root, outside) = (folder(), folder());
    std::fs::create_dir(outside.path().join("kept")).unwrap();
    std::fs::write(outside.path().join("kept/file"), "precious").unwrap();
    (root, outside)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn t8_a_changed_lock_file_removes_no_run_that_it_does_not_prove_dead(
        live in any::<bool>(),
        changes in prop::collection::vec(change(), 0..4),
    ) {
        let (root, outside) = places();
        let owner = if live { Owner::this_process().unwrap() } else { dead_owner() };
        let bytes = changes.iter().fold(owner.to_string().into_bytes(), apply);
        let run = root.path().join(format!("{PREFIX}a"));
        std::fs::create_dir(&run).unwrap();
        std::fs::write(run.join(LOCK), &bytes).unwrap();
        std::fs::write(run.join("spill-1-0"), "x").unwrap();
        let removed = if says_dead(&bytes) { vec![run] } else { Vec::new() };
        swept(root.path(), outside.path(), 1, &removed);
    }

    #[test]
    fn t8_whatever_lies_in_a_root_the_sweep_stays_within_dead_runs(
        dead in any::<bool>(),
        within in prop::collection::vec((name(), thing()), 0..6),
        beside in prop::collection::vec((name(), thing()), 0..4),
        run_is in prop::option::of(thing()),
    ) {
        let (root, outside) = places();
        let run = root.path().join(format!("{PREFIX}a"));
        std::fs::create_dir(&run).unwrap();
        let owner = if dead { dead_owner() } else { Owner::this_process().unwrap() };
        std::fs::write(run.join(LOCK), owner.to_string()).unwrap();
        make_all(&run, &within, outside.path());
        make_all(root.path(), &beside, outside.path());
        // Something of any kind under a run's name: whatever it holds, nothing says that its owner is dead.
        if let Some(thing) = run_is {
            make(&root.path().join(format!("{PREFIX}b")), &thing, outside.path());
        }
        let runs = std::fs::read_dir(root.path()).unwrap();
        let named = |entry: &io::Result<std::fs::DirEntry>| {
            entry.as_ref().unwrap().file_name().as_bytes().starts_with(PREFIX.as_bytes())
        };
        let runs = runs.filter(named).count();
        let removed = if dead { vec![run] } else { Vec::new() };
        swept(root.path(), outside.path(), runs, &removed);
    }
}

fn make_all(dir: &Path, things: &[(Vec<u8>, Thing)], outside: &Path) {
    for (name, thing) in things {
        let path = dir.join(std::ffi::OsStr::from_bytes(name));
        // What is there stays: `write` would follow a link.
        if std::fs::symlink_metadata(&path).is_err() {
            make(&path, thing, outside);
        }
    }
}
