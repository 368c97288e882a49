//! Run folders, live, dead and uncertain, and what sweeps do with them.

use super::*;

pub(super) fn folder() -> tempfile::TempDir {
    let program = std::env::current_exe().unwrap();
    tempfile::tempdir_in(program.parent().unwrap()).unwrap()
}

/// A run folder as a killed process leaves it: no lock held, `owner` in the lock file, a spill file.
fn left_behind(root: &Path, name: &str, owner: &str) -> PathBuf {
    let path = root.join(format!("{PREFIX}{name}"));
    std::fs::create_dir(&path).unwrap();
    std::fs::write(path.join(LOCK), owner).unwrap();
    std::fs::write(path.join("spill-1-0"), [1; 100]).unwrap();
    path
}

pub(super) fn dead_owner() -> Owner {
    // Our own number, which a process before us had.
    let this = Owner::this_process().unwrap();
    Owner { started: this.started - 1, ..this }
}

#[test]
fn t8_two_runs_under_one_root_have_two_folders() {
    let root = folder();
    let (a, b) = (RunDir::create(root.path()).unwrap(), RunDir::create(root.path()).unwrap());
    assert_ne!(a.path(), b.path());
    std::fs::write(a.path().join("file"), "a").unwrap();
    let mut report = sweep(root.path()).unwrap();
    report.alive.sort();
    let mut both = vec![a.path().to_owned(), b.path().to_owned()];
    both.sort();
    assert_eq!((report.alive, report.removed.len(), report.unsure.len()), (both, 0, 0));
    let metadata = std::fs::metadata(a.path()).unwrap();
    assert_eq!(metadata.mode() & 0o777, 0o700);
    drop((a, b));
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn t8_the_folder_of_a_dead_run_is_removed_whatever_the_clock_says() {
    let root = folder();
    let path = left_behind(root.path(), "a", &dead_owner().to_string());
    let two_days_ahead = std::time::SystemTime::now() + std::time::Duration::from_secs(48 * 3600);
    File::open(&path).unwrap().set_modified(two_days_ahead).unwrap();
    assert_eq!(sweep(root.path()).unwrap().removed, [path]);
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn t8_what_is_not_certain_is_left_alone() {
    let root = folder();
    let this = Owner::this_process().unwrap();
    let init = std::fs::read_to_string("/proc/1/stat").unwrap();
    let cases = [
        ("own", this.to_string()),
        ("init", Owner { pid: 1, started: start_time(&init).unwrap(), ..this.clone() }.to_string()),
        ("host", Owner { boot: "elsewhere".into(), host: "elsewhere".into(), ..this.clone() }.to_string()),
        ("empty", String::new()),
        ("number", "12345".to_owned()),
        ("half", this.to_string()[..40].to_owned()),
    ];
    let paths: Vec<PathBuf> = cases.iter().map(|(name, text)| left_behind(root.path(), name, text)).collect();
    let bare = root.path().join(format!("{PREFIX}bare"));
    std::fs::create_dir(&bare).unwrap();
    let report = sweep(root.path()).unwrap();
    assert_eq!(report.removed, Vec::<PathBuf>::new());
    assert_eq!(report.unsure.len(), cases.len() + 1, "{report:?}");
    assert!(paths.iter().all(|p| p.join("spill-1-0").exists()));
    assert!(bare.exists());
}

#[test]
fn t8_a_reboot_of_this_host_makes_its_runs_dead() {
    let this = Owner::this_process().unwrap();
    let before = Owner { boot: "an earlier boot".into(), ..this.clone() };
    assert!(before.is_dead(true, &this).is_ok());
    // On a shared file system the lock may be another host's, whatever its name.
    assert!(before.is_dead(false, &this).is_err());
}

#[test]
fn t8_links_and_strangers_in_the_root_are_not_followed_and_not_removed() {
    let (root, outside) = (folder(), folder());
    let target = left_behind(outside.path(), "target", &dead_owner().to_string());
    std::os::unix::fs::symlink(&target, root.path().join(format!("{PREFIX}link"))).unwrap();
    std::fs::create_dir(root.path().join("checkpoints")).unwrap();
    std::fs::write(root.path().join(format!("{PREFIX}file")), "not a folder").unwrap();
    // A dead run's folder with a link in it: the link goes, its target stays.
    let dead = left_behind(root.path(), "dead", &dead_owner().to_string());
    std::os::unix::fs::symlink(outside.path(), dead.join("way-out")).unwrap();
    // A lock file that is a link to a dead owner's is no lock file.
    let trap = root.path().join(format!("{PREFIX}trap"));
    std::fs::create_dir(&trap).unwrap();
    std::os::unix::fs::symlink(target.join(LOCK), trap.join(LOCK)).unwrap();
    let report = sweep(root.path()).unwrap();
    assert_eq!(report.removed, [dead]);
    assert_eq!(report.unsure.len(), 3, "{report:?}");
    assert!(target.join("spill-1-0").exists() && trap.exists());
    assert!(root.path().join("checkpoints").exists());
}

#[test]
fn t8_runs_made_while_others_sweep_are_never_lost() {
    let root = folder();
    std::thread::scope(|scope| {
        let sweeping = scope.spawn(|| {
            for _ in 0..300 {
                let report = sweep(root.path()).unwrap();
                assert_eq!(report.removed, Vec::<PathBuf>::new());
            }
        });
        while !sweeping.is_finished() {
            let run = RunDir::create(root.path()).unwrap();
            std::fs::write(run.path().join("spill"), "x").unwrap();
        }
    });
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn t8_a_link_in_the_place_of_a_run_folder_is_not_followed_at_the_end() {
    let (root, outside) = (folder(), folder());
    std::fs::write(outside.path().join("precious"), "x").unwrap();
    let run = RunDir::create(root.path()).unwrap();
    let path = run.path().to_owned();
    std::fs::rename(&path, root.path().join("moved")).unwrap();
    std::os::unix::fs::symlink(outside.path(), &path).unwrap();
    drop(run);
    assert!(outside.path().join("precious").exists() && path.is_symlink());
}

#[test]
fn t8_any_number_of_runs_at_once_have_folders_of_their_own() {
    let root = folder();
    let make = || (0..40).map(|_| RunDir::create(root.path()).unwrap()).collect::<Vec<_>>();
    let runs: Vec<RunDir> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let paths: std::collections::BTreeSet<_> = runs.iter().map(|run| run.path().to_owned()).collect();
    assert_eq!(paths.len(), 320);
    assert_eq!(sweep(root.path()).unwrap().alive.len(), 320);
}

#[test]
fn t8_two_sweeps_at_once_remove_each_dead_run_once() {
    let root = folder();
    for i in 0..40 {
        left_behind(root.path(), &i.to_string(), &dead_owner().to_string());
    }
    let removed: usize = std::thread::scope(|scope| {
        let sweeps: Vec<_> = (0..4).map(|_| scope.spawn(|| sweep(root.path()).unwrap())).collect();
        sweeps.into_iter().map(|s| s.join().unwrap().removed.len()).sum()
    });
    assert_eq!(removed, 40);
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn a_program_name_with_parentheses_does_not_hide_the_start_time() {
    let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 99 1 18446744073709551615";
    assert_eq!(start_time(stat), Some(4711));
}

#[test]
fn t8_what_a_killed_maker_left_unfinished_is_removed_unless_it_is_locked_or_holds_more() {
    let root = folder();
    let new = |name: &str| {
        let path = root.path().join(format!("{NEW_PREFIX}{name}"));
        std::fs::create_dir(&path).unwrap();
        path
    };
    new("empty");
    std::fs::write(new("unwritten").join(LOCK), "").unwrap();
    std::fs::write(new("whole").join(LOCK), dead_owner().to_string()).unwrap();
    let (held, more) = (new("held"), new("more"));
    let lock = File::create(held.join(LOCK)).unwrap();
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
    std::fs::write(more.join("somebody's"), "data").unwrap();
    std::os::unix::fs::symlink(root.path(), root.path().join(format!("{NEW_PREFIX}link"))).unwrap();
    assert_eq!(sweep(root.path()).unwrap(), SweepReport::default());
    let mut left: Vec<_> = std::fs::read_dir(root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, [".lazy-new-held", ".lazy-new-link", ".lazy-new-more"]);
    assert_eq!(std::fs::read(more.join("somebody's")).unwrap(), b"data");
}

#[test]
fn t8_runs_are_made_beside_sweeps_that_take_their_unfinished_folders() {
    let root = folder();
    std::thread::scope(|threads| {
        let makers: Vec<_> = (0..2)
            .map(|_| {
                threads.spawn(|| {
                    for _ in 0..500 {
                        let run = RunDir::create(root.path()).unwrap();
                        assert!(run.path().join(LOCK).is_file());
                    }
                })
            })
            .collect();
        while makers.iter().any(|maker| !maker.is_finished()) {
            let report = sweep(root.path()).unwrap();
            assert!(report.removed.is_empty(), "{report:?}");
        }
    });
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
}
