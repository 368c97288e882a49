//! Saving, listing, removing and going back, as a trainer does it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot set up should stop")]

mod common;

use std::path::Path;

use common::{cut, init, params, state, take_step};
use lazy_optim_nvme::{AdamOptions, LoadOptions, NvmeAdam, OptimError, ParamSpec, generations};

const SIZES: [usize; 4] = [70_001, 1, 0, 40_000];

fn options() -> AdamOptions {
    cut(40_000, 64, 3)
}

fn create(dir: &Path) -> (NvmeAdam, Vec<ParamSpec>) {
    let params = params(&SIZES);
    (NvmeAdam::create(dir, &params, &options(), init).unwrap(), params)
}

fn load(from: &Path, to: &Path, replace: bool) -> Result<NvmeAdam, OptimError> {
    NvmeAdam::load(
        &[from],
        to,
        &params(&SIZES),
        &options(),
        LoadOptions { replace, ..LoadOptions::default() },
    )
}

fn names(dir: &Path) -> Vec<(String, u64)> {
    generations(dir).unwrap().into_iter().map(|g| (g.name, g.sequence)).collect()
}

#[test]
fn o2_saved_at_5_and_loaded_it_goes_on_to_10_as_if_it_had_not_stopped() {
    let scratch = tempfile::tempdir().unwrap();
    let (first, second) = (scratch.path().join("first"), scratch.path().join("second"));
    let (mut adam, params) = create(&first);
    (1..=5).for_each(|step| take_step(&mut adam, &params, step).unwrap());
    adam.save("step-5").unwrap().wait().unwrap();
    // Training goes on beside the generation and never changes it.
    (6..=10).for_each(|step| take_step(&mut adam, &params, step).unwrap());
    let straight = state(&mut adam, &params);
    let mut resumed = load(&first.join("step-5"), &second, false).unwrap();
    assert_eq!((resumed.sequence(), resumed.step_counts()), (5, [5; 4].as_slice()));
    assert_eq!(resumed.blob(), common::blob(5));
    (6..=10).for_each(|step| take_step(&mut resumed, &params, step).unwrap());
    assert!(state(&mut resumed, &params) == straight);
    // Both trained on from the same files; the generation is still what it was.
    let mut again = load(&first.join("step-5"), &scratch.path().join("third"), false).unwrap();
    (6..=10).for_each(|step| take_step(&mut again, &params, step).unwrap());
    assert!(state(&mut again, &params) == straight);
}

#[test]
fn o7_saving_before_the_first_step_twice_and_right_after_loading() {
    let scratch = tempfile::tempdir().unwrap();
    let (first, second) = (scratch.path().join("first"), scratch.path().join("second"));
    let (mut adam, params) = create(&first);
    let saving = adam.save("fresh").unwrap();
    let twice = adam.save("twice").unwrap();
    // A step while both are under way.
    let initial = state(&mut adam, &params);
    take_step(&mut adam, &params, 1).unwrap();
    saving.wait().unwrap();
    twice.wait().unwrap();
    take_step(&mut adam, &params, 2).unwrap();
    let after = state(&mut adam, &params);
    adam.save("later").unwrap().wait().unwrap();
    adam.save("later-again").unwrap().wait().unwrap();
    let found = names(&first);
    let found: Vec<_> = found.iter().map(|(name, at)| (name.as_str(), *at)).collect();
    assert_eq!(found, [("fresh", 0), ("twice", 0), ("later", 2), ("later-again", 2)]);
    drop(adam);
    for name in ["fresh", "twice"] {
        let mut loaded = load(&first.join(name), &first, true).unwrap();
        assert!(state(&mut loaded, &params) == initial);
        loaded.save(&format!("{name}-copy")).unwrap().wait().unwrap();
    }
    let mut loaded = load(&first.join("later"), &second, false).unwrap();
    loaded.save("at-once").unwrap().wait().unwrap();
    drop(loaded);
    let mut loaded = load(&second.join("at-once"), &scratch.path().join("third"), false).unwrap();
    assert!(state(&mut loaded, &params) == after);
}

#[test]
fn old_generations_are_removed_and_their_space_is_used_again() {
    let dir = tempfile::tempdir().unwrap();
    let (mut adam, params) = create(dir.path());
    // As many bytes as the files take, each counted once whatever its names.
    let space = || {
        use std::os::unix::fs::MetadataExt;
        let mut seen = std::collections::BTreeMap::new();
        let mut folders = vec![dir.path().to_path_buf()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let entry = entry.unwrap();
                match entry.metadata().unwrap() {
                    metadata if metadata.is_dir() => folders.push(entry.path()),
                    metadata => drop(seen.insert(metadata.ino(), metadata.blocks())),
                }
            }
        }
        seen.values().sum::<u64>()
    };
    let mut most = 0;
    for step in 1..=8 {
        take_step(&mut adam, &params, step).unwrap();
        adam.save(&format!("step-{step}")).unwrap().wait().unwrap();
        // Two are kept.
        let found = generations(dir.path()).unwrap();
        for old in &found[..found.len().saturating_sub(2)] {
            adam.remove_generation(&old.name).unwrap();
        }
        if step == 4 {
            most = space();
        }
        assert!(step < 4 || space() <= most, "step {step}");
    }
    assert_eq!(names(dir.path()), [("step-7".to_owned(), 7), ("step-8".to_owned(), 8)]);
    assert!(matches!(adam.remove_generation("step-6"), Err(OptimError::NoStore { .. })));
}

#[test]
fn a_store_that_is_opened_again_still_knows_which_slots_a_generation_holds() {
    let dir = tempfile::tempdir().unwrap();
    let (mut adam, params) = create(dir.path());
    take_step(&mut adam, &params, 1).unwrap();
    let saved = state(&mut adam, &params);
    adam.save("step-1").unwrap().wait().unwrap();
    for step in 2..=4 {
        drop(adam);
        adam = NvmeAdam::open(dir.path(), &params, &options()).unwrap();
        take_step(&mut adam, &params, step).unwrap();
    }
    let mut loaded = load(&dir.path().join("step-1"), &dir.path().join("elsewhere"), false).unwrap();
    assert!(state(&mut loaded, &params) == saved);
}

#[test]
fn names_that_cannot_be_and_folders_in_use_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (mut adam, _) = create(dir.path());
    for name in ["", ".", "..", ".hidden", "a/b", "adam.record", "bucket-00000.slot-0", "x.tmp", "nul\0"] {
        assert!(matches!(adam.save(name), Err(OptimError::Option { .. })), "{name}");
        assert!(matches!(adam.remove_generation(name), Err(OptimError::Option { .. })), "{name}");
    }
    adam.save("a").unwrap().wait().unwrap();
    assert!(matches!(adam.save("a"), Err(OptimError::GenerationExists { .. })));
    // The store is open, and then it is there.
    let from = dir.path().join("a");
    assert!(matches!(load(&from, dir.path(), true), Err(OptimError::Store(_))));
    drop(adam);
    assert!(matches!(load(&from, dir.path(), false), Err(OptimError::AlreadyExists { .. })));
    // A folder without optimizer state is a typed error, from which a trainer starts fresh.
    for absent in [dir.path().to_path_buf(), dir.path().join("b")] {
        let error = load(&absent, &dir.path().join("c"), false).unwrap_err();
        assert!(matches!(error, OptimError::NoStore { .. }), "{error}");
    }
    assert!(!dir.path().join("c").exists());
}

#[test]
fn a_generation_on_another_file_system_is_copied() {
    use std::os::unix::fs::MetadataExt;
    let (from, to) = (common::scratch(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
    let (mut adam, params) = create(from.path());
    take_step(&mut adam, &params, 1).unwrap();
    let saved = state(&mut adam, &params);
    adam.save("here").unwrap().wait().unwrap();
    let mut loaded = load(&from.path().join("here"), &to.path().join("store"), false).unwrap();
    assert!(state(&mut loaded, &params) == saved);
    let names = |path: &Path| std::fs::metadata(path.join("bucket-00000.slot-1")).unwrap().nlink();
    let [one, other] = [from.path(), to.path()].map(|path| std::fs::metadata(path).unwrap().dev());
    assert_eq!(names(&from.path().join("here")), if one == other { 3 } else { 2 });
    // What the folder holds goes only when it is asked for.
    drop(loaded);
    assert!(load(&from.path().join("here"), &to.path().join("store"), false).is_err());
    load(&from.path().join("here"), &to.path().join("store"), true).unwrap();
}
