//! Generations whose files were swapped, changed, cut short or taken from elsewhere.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot set up should stop")]

mod common;

use std::path::Path;

use common::{cut, init, params, state, take_step};
use lazy_optim_nvme::{AdamOptions, LoadOptions, NvmeAdam, OptimError, ParamSpec};

const SIZES: [usize; 2] = [40_000, 300];
const MANIFEST: &str = "adam.manifest";

fn options() -> AdamOptions {
    cut(20_000, 64, 2)
}

/// Copies of two generations of one store, `one` and `two`, and one of another store, `other`.
fn generations(dir: &Path) -> Vec<ParamSpec> {
    let params = params(&SIZES);
    for (store, names) in [("a", vec!["one", "two"]), ("b", vec!["other"])] {
        let path = dir.join(store);
        let mut adam = NvmeAdam::create(&path, &params, &options(), init).unwrap();
        for (step, name) in (1..).zip(names) {
            take_step(&mut adam, &params, step).unwrap();
            adam.save(name).unwrap().wait().unwrap();
            std::fs::create_dir(dir.join(name)).unwrap();
            for (file, bytes) in common::files(&path.join(name)) {
                std::fs::write(dir.join(name).join(file), bytes).unwrap();
            }
        }
    }
    params
}

/// Loads a generation as it is, by links, and into another cut, by reading it. The errors, if any: of a flipped bit in the
/// data the first one comes when the store is read.
fn load(dir: &Path, name: &str, params: &[ParamSpec]) -> [Option<OptimError>; 2] {
    let to = tempfile::tempdir_in(dir).unwrap();
    let load = |to: &str, options: &AdamOptions, into: &Path| {
        let mut adam =
            NvmeAdam::load(&[dir.join(name)], &into.join(to), params, options, LoadOptions::default())?;
        adam.read_state(&mut |_| {})
    };
    [load("same", &options(), to.path()).err(), load("other", &cut(30_000, 64, 2), to.path()).err()]
}

fn refused(dir: &Path, name: &str, params: &[ParamSpec], file: &str, why: &str) {
    for error in load(dir, name, params) {
        let message = error.unwrap_or_else(|| panic!("{file}: {why}")).to_string();
        assert!(message.contains(file) && message.contains(why), "{message}");
    }
}

/// The slot files of a generation, in order.
fn slots(dir: &Path, name: &str) -> Vec<String> {
    let mut names: Vec<_> = common::files(&dir.join(name)).into_keys().collect();
    names.retain(|name| name != MANIFEST);
    names
}

#[test]
fn o2_swapped_stale_and_foreign_files_of_a_generation_are_refused_by_name() {
    let scratch = common::scratch();
    let dir = scratch.path();
    let params = generations(dir);
    assert!(load(dir, "one", &params).iter().chain(&load(dir, "two", &params)).all(Option::is_none));
    let (one, two) = (slots(dir, "one"), slots(dir, "two"));
    let at = |generation: &str, file: &str| dir.join(generation).join(file);
    let swap = |a: &Path, b: &Path| {
        let held = dir.join("held");
        std::fs::rename(a, &held).unwrap();
        std::fs::rename(b, a).unwrap();
        std::fs::rename(&held, b).unwrap();
    };
    // Two buckets of one generation.
    swap(&at("one", &one[0]), &at("one", &one[1]));
    refused(dir, "one", &params, &one[0], "its bucket is 1, 0 was expected");
    swap(&at("one", &one[0]), &at("one", &one[1]));
    // The manifest of a later generation: the slots have the other number there.
    swap(&at("one", MANIFEST), &at("two", MANIFEST));
    for (generation, missing) in [("one", &two[0]), ("two", &one[0])] {
        refused(dir, generation, &params, missing, "No such file");
    }
    swap(&at("one", MANIFEST), &at("two", MANIFEST));
    // A slot that is as old as the file's name, but of another store.
    swap(&at("one", &one[0]), &at("other", &one[0]));
    refused(dir, "one", &params, &one[0], "its store id is");
    refused(dir, "other", &params, &one[0], "its store id is");
    swap(&at("one", MANIFEST), &at("other", MANIFEST));
    refused(dir, "one", &params, &one[1], "its store id is");
    // A slot taken away, and the manifest.
    std::fs::remove_file(at("two", &two[1])).unwrap();
    refused(dir, "two", &params, &two[1], "No such file");
    std::fs::remove_file(at("two", MANIFEST)).unwrap();
    refused(dir, "two", &params, "two", "holds no optimizer state");
}

#[test]
fn o2_a_manifest_of_a_later_save_of_the_same_slots_is_noticed() {
    let scratch = common::scratch();
    let (dir, params) = (scratch.path(), params(&SIZES));
    let mut adam = NvmeAdam::create(&dir.join("store"), &params, &options(), init).unwrap();
    for step in 1..=3 {
        take_step(&mut adam, &params, step).unwrap();
        adam.save(&format!("at-{step}")).unwrap().wait().unwrap();
    }
    // Two steps apart the slots have the same numbers.
    let store = dir.join("store");
    let stale = std::fs::read(store.join("at-1").join(MANIFEST)).unwrap();
    std::fs::write(store.join("at-3").join(MANIFEST), stale).unwrap();
    refused(&store, "at-3", &params, "bucket-00000.slot-1", "its generation is 3, 1 was expected");
}

#[test]
fn o3_files_cut_short_and_manifests_of_another_version_are_refused_by_name() {
    let scratch = common::scratch();
    let dir = scratch.path();
    let params = generations(dir);
    let slot = slots(dir, "one").remove(0);
    for (file, keep, why) in [
        (slot.as_str(), 0, "its length is 0"),
        (&slot, 4096, "its length is 4096"),
        (&slot, 200_000, "its length is 200000"),
        (MANIFEST, 0, "length field"),
        (MANIFEST, 15, "length field"),
        (MANIFEST, 100, "length field"),
    ] {
        let path = dir.join("one").join(file);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..keep]).unwrap();
        refused(dir, "one", &params, file, why);
        std::fs::write(&path, bytes).unwrap();
    }
    let path = dir.join("one").join(MANIFEST);
    let mut bytes = std::fs::read(&path).unwrap();
    let end = u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
    bytes[8] = 9;
    let crc = crc32c::crc32c(&bytes[..end - 4]);
    bytes[end - 4..end].copy_from_slice(&crc.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    refused(dir, "one", &params, MANIFEST, "its format version is 9");
}

#[test]
fn o2_a_flipped_bit_anywhere_in_a_generation_is_noticed() {
    let scratch = common::scratch();
    let dir = scratch.path();
    let params = generations(dir);
    let good = {
        let mut adam = NvmeAdam::load(
            &[dir.join("one")],
            &dir.join("good"),
            &params,
            &options(),
            LoadOptions::default(),
        )
        .unwrap();
        state(&mut adam, &params)
    };
    let mut noticed = 0;
    for file in slots(dir, "one").iter().map(String::as_str).chain([MANIFEST]) {
        let path = dir.join("one").join(file);
        let bytes = std::fs::read(&path).unwrap();
        for i in 0..24 {
            let at = (bytes.len() * i / 24 + 7 * i).min(bytes.len() - 1);
            let mut bad = bytes.clone();
            bad[at] ^= 1 << (i % 8);
            std::fs::write(&path, bad).unwrap();
            let errors = load(dir, "one", &params);
            if errors.iter().all(Option::is_some) {
                noticed += 1;
                continue;
            }
            // Padding means nothing.
            assert!(errors.iter().all(Option::is_none), "{file} byte {at}: {errors:?}");
            let to = tempfile::tempdir_in(dir).unwrap();
            let mut adam = NvmeAdam::load(
                &[dir.join("one")],
                to.path(),
                &params,
                &cut(9_000, 64, 2),
                LoadOptions::default(),
            )
            .unwrap();
            assert!(state(&mut adam, &params) == good, "{file} byte {at}");
        }
        std::fs::write(&path, bytes).unwrap();
    }
    assert!(noticed > 60, "{noticed}");
}
