//! State at home in RAM, on NVMe, or in part on each; and steps that commit nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot set up should stop")]

mod common;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use common::{cut, grads, init, params, state, take_step};
use lazy_optim_nvme::{
    AdamOptions, Bytes, Durability, GroupOptions, LoadOptions, Moments, NvmeAdam, OptimError, StepInput,
};

const SIZES: [usize; 5] = [70_001, 511, 40_000, 4097, 300_000];

/// Buckets of 40,000 elements, of which `host` may live in RAM.
fn kept(host: Bytes) -> AdamOptions {
    AdamOptions { durability: Durability::Checkpoint, host, ..cut(40_000, 64, 3) }
}

fn specs() -> Vec<lazy_optim_nvme::ParamSpec> {
    let formats = [Moments::F32, Moments::Bf16, Moments::Int8, Moments::F32, Moments::Int8];
    params(&SIZES).into_iter().zip(formats).map(|(param, moments)| param.with_moments(moments)).collect()
}

#[test]
fn every_home_and_durability_gives_the_same_bits() {
    let params = specs();
    let run = |options: &AdamOptions| {
        let dir = tempfile::tempdir().unwrap();
        let mut adam = NvmeAdam::create(dir.path(), &params, options, init).unwrap();
        (1..=3).for_each(|t| take_step(&mut adam, &params, t).unwrap());
        assert_eq!(adam.step_counts(), [3; 5]);
        state(&mut adam, &params)
    };
    let committed = run(&cut(40_000, 64, 3));
    // None, a bucket or two, most, all.
    for host in [0, 1_000_000, 3_000_000, u64::MAX] {
        assert!(run(&kept(Bytes(host))) == committed, "{host} bytes in RAM");
    }
    let deeper = AdamOptions { chunk_bytes: Bytes(1), depth: 1, ..kept(Bytes(1_000_000)) };
    assert!(run(&deeper) == committed);
}

#[test]
fn a_bucket_is_at_home_in_ram_as_far_as_the_budget_goes() {
    let params = params(&[100_000]);
    // Three buckets of 40,000, 40,000 and 20,000 elements, twelve bytes each, three sections of whole pages.
    let page = |elements: u64| Bytes((elements * 4).next_multiple_of(4096) * 3);
    for (host, buckets, bytes) in [
        (page(40_000).0 - 1, 0, Bytes::ZERO),
        (page(40_000).0, 1, page(40_000)),
        (page(40_000).0 * 2 + page(20_000).0 - 1, 2, page(40_000) * 2),
        (u64::MAX, 3, page(40_000) * 2 + page(20_000)),
    ] {
        let options = kept(Bytes(host));
        let dir = tempfile::tempdir().unwrap();
        let adam = NvmeAdam::create(dir.path(), &params, &options, init).unwrap();
        let slots = common::files(dir.path()).keys().filter(|name| name.starts_with("bucket-")).count();
        assert_eq!(slots, adam.bucket_count() - buckets);
        let found: usize = common::files(dir.path()).values().map(Vec::len).sum();
        assert_eq!(NvmeAdam::bytes_on_disk(&params, &options).unwrap(), Bytes(found as u64));
        let ring = NvmeAdam::memory_bytes(&params, &kept(Bytes::ZERO)).unwrap();
        assert_eq!(NvmeAdam::memory_bytes(&params, &options).unwrap(), ring + bytes);
    }
}

#[test]
fn state_in_ram_cannot_be_promised_at_every_step() {
    let dir = tempfile::tempdir().unwrap();
    let options = AdamOptions { durability: Durability::Step, ..kept(Bytes(1)) };
    let error = NvmeAdam::create(dir.path(), &params(&[10]), &options, init).unwrap_err().to_string();
    assert!(error.contains("set durability to checkpoint"), "{error}");
    assert_eq!(common::files(dir.path()).len(), 0);
}

#[test]
fn a_store_that_was_left_between_saves_is_refused_by_name() {
    let params = params(&[100_000]);
    let dir = tempfile::tempdir().unwrap();
    let options = kept(Bytes::ZERO);
    let mut adam = NvmeAdam::create(dir.path(), &params, &options, init).unwrap();
    let first = state(&mut adam, &params);
    drop(adam);
    // Nothing was stepped: it is what was made.
    let mut adam = NvmeAdam::open(dir.path(), &params, &options).unwrap();
    assert!(state(&mut adam, &params) == first);
    take_step(&mut adam, &params, 1).unwrap();
    drop(adam);
    let error = NvmeAdam::open(dir.path(), &params, &options).unwrap_err();
    assert!(matches!(error, OptimError::NotKept { sequence: 0, .. }), "{error}");
    assert!(error.to_string().contains("load what was saved"), "{error}");
}

#[test]
fn durability_is_fixed_when_the_store_is_made() {
    let params = params(&[100]);
    let dir = tempfile::tempdir().unwrap();
    drop(NvmeAdam::create(dir.path(), &params, &cut(40_000, 64, 3), init).unwrap());
    let error = NvmeAdam::open(dir.path(), &params, &kept(Bytes::ZERO)).unwrap_err();
    assert!(matches!(error, OptimError::LayoutMismatch { .. }), "{error}");
    assert!(error.to_string().contains("durability is Step on disk, Checkpoint asked for"), "{error}");
}

#[test]
fn a_step_in_place_writes_the_bytes_of_the_state_and_nothing_else() {
    let params = params(&[100_000]);
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &kept(Bytes::ZERO), init).unwrap();
    let grads = grads(&params, 1);
    let groups = [GroupOptions::default()];
    let input = StepInput { groups: &groups, ..StepInput::default() };
    let mut step = || adam.step(&common::all(&grads), &input, &mut |_, _, _| {}).unwrap();
    let first = step();
    let second = step();
    // The mark that a step was begun is written once.
    assert!(first.bytes_written > second.bytes_written);
    assert_eq!(second.bytes_written, second.bytes_read);
    let padded = |n: u64| (n * 4).next_multiple_of(4096);
    assert_eq!(second.bytes_read, Bytes(3 * (2 * padded(40_000) + padded(20_000))));
}

#[test]
fn what_was_saved_from_any_home_is_loaded_into_any_other() {
    let params = specs();
    let straight = {
        let dir = tempfile::tempdir().unwrap();
        let mut adam = NvmeAdam::create(dir.path(), &params, &cut(40_000, 64, 3), init).unwrap();
        (1..=6).for_each(|t| take_step(&mut adam, &params, t).unwrap());
        state(&mut adam, &params)
    };
    let ways = [cut(40_000, 64, 3), kept(Bytes::ZERO), kept(Bytes(1_000_000)), kept(Bytes(u64::MAX))];
    for from in &ways {
        let dir = tempfile::tempdir().unwrap();
        let mut adam = NvmeAdam::create(&dir.path().join("a"), &params, from, init).unwrap();
        take_step(&mut adam, &params, 1).unwrap();
        take_step(&mut adam, &params, 2).unwrap();
        adam.save("two").unwrap().wait().unwrap();
        // Nothing that follows changes what was saved.
        take_step(&mut adam, &params, 3).unwrap();
        adam.save("three").unwrap().wait().unwrap();
        let three = state(&mut adam, &params);
        take_step(&mut adam, &params, 4).unwrap();
        take_step(&mut adam, &params, 5).unwrap();
        drop(adam);
        for (i, to) in ways.iter().enumerate() {
            let (source, dir) = (dir.path().join("a"), dir.path().join(format!("b{i}")));
            let load = |name| {
                let options = LoadOptions { replace: true, ..LoadOptions::default() };
                NvmeAdam::load(&[source.join(name)], &dir, &params, to, options).unwrap()
            };
            let mut adam = load("three");
            assert!(state(&mut adam, &params) == three);
            assert_eq!((adam.sequence(), adam.blob()), (3, &common::blob(3)[..]));
            drop(adam);
            let mut adam = load("two");
            (3..=6).for_each(|t| take_step(&mut adam, &params, t).unwrap());
            assert!(state(&mut adam, &params) == straight);
        }
    }
}

#[test]
fn steps_beside_a_save_change_nothing_of_what_is_saved() {
    let params = specs();
    for host in [0, 1_000_000, u64::MAX] {
        let dir = tempfile::tempdir().unwrap();
        let options = kept(Bytes(host));
        let mut adam = NvmeAdam::create(&dir.path().join("a"), &params, &options, init).unwrap();
        let (mut saves, mut states) = (Vec::new(), Vec::new());
        for t in 1..=4 {
            take_step(&mut adam, &params, t).unwrap();
            states.push(state(&mut adam, &params));
            // The one before may still be under way, and the step begins at once.
            saves.push(adam.save(&format!("{t}")).unwrap());
        }
        // So may the last one when the memory is given back.
        adam.suspend().unwrap();
        adam.resume().unwrap();
        assert!(state(&mut adam, &params) == states[3]);
        saves.into_iter().for_each(|save| save.wait().unwrap());
        drop(adam);
        for (i, wanted) in states.iter().enumerate() {
            let (source, to) = (dir.path().join(format!("a/{}", i + 1)), dir.path().join(format!("b{i}")));
            let load = LoadOptions::default();
            let mut adam = NvmeAdam::load(&[source], &to, &params, &options, load).unwrap();
            assert!(state(&mut adam, &params) == *wanted, "save {i}, {host} bytes in RAM");
        }
    }
}

#[test]
fn a_store_between_saves_opens_again_after_a_save() {
    let params = params(&[100_000]);
    let dir = tempfile::tempdir().unwrap();
    let options = kept(Bytes::ZERO);
    let mut adam = NvmeAdam::create(dir.path(), &params, &options, init).unwrap();
    take_step(&mut adam, &params, 1).unwrap();
    adam.save("one").unwrap().wait().unwrap();
    let one = state(&mut adam, &params);
    drop(adam);
    let mut adam = NvmeAdam::open(dir.path(), &params, &options).unwrap();
    assert_eq!(adam.sequence(), 1);
    assert!(state(&mut adam, &params) == one);
    take_step(&mut adam, &params, 2).unwrap();
    drop(adam);
    let error = NvmeAdam::open(dir.path(), &params, &options).unwrap_err();
    assert!(matches!(error, OptimError::NotKept { sequence: 1, .. }), "{error}");
    let back = LoadOptions { replace: true, ..LoadOptions::default() };
    let mut adam = NvmeAdam::load(&[dir.path().join("one")], dir.path(), &params, &options, back).unwrap();
    assert!(state(&mut adam, &params) == one);
    // What is in RAM is not on disk after a save, but in what was saved.
    let options = kept(Bytes(u64::MAX));
    let other = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(other.path(), &params, &options, init).unwrap();
    adam.save("none").unwrap().wait().unwrap();
    drop(adam);
    assert!(matches!(
        NvmeAdam::open(other.path(), &params, &options),
        Err(OptimError::NotKept { sequence: 0, .. })
    ));
}

/// Bytes that slot files take on disk, in the folder and those inside it, each file once however many names it has.
fn bytes_of_slots(dir: &Path) -> u64 {
    let mut files = BTreeMap::new();
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
            let data = entry.metadata().unwrap();
            if data.is_dir() {
                folders.push(entry.path());
            } else if entry.file_name().to_str().unwrap().starts_with("bucket-") {
                files.insert(data.ino(), data.len());
            }
        }
    }
    files.values().sum()
}

#[test]
fn going_back_to_a_generation_takes_no_space_before_the_next_step_and_one_copy_then() {
    let params = specs();
    let dir = tempfile::tempdir().unwrap();
    let options = kept(Bytes::ZERO);
    let mut adam = NvmeAdam::create(dir.path(), &params, &options, init).unwrap();
    let once = bytes_of_slots(dir.path());
    take_step(&mut adam, &params, 1).unwrap();
    let one = state(&mut adam, &params);
    adam.save("one").unwrap().wait().unwrap();
    assert_eq!(bytes_of_slots(dir.path()), once);
    take_step(&mut adam, &params, 2).unwrap();
    assert_eq!(bytes_of_slots(dir.path()), 2 * once);
    let two = state(&mut adam, &params);
    drop(adam);
    for _ in 0..2 {
        let back = LoadOptions { replace: true, ..LoadOptions::default() };
        let source = dir.path().join("one");
        let mut adam = NvmeAdam::load(&[source], dir.path(), &params, &options, back).unwrap();
        assert_eq!(bytes_of_slots(dir.path()), once);
        assert!(state(&mut adam, &params) == one);
        take_step(&mut adam, &params, 2).unwrap();
        assert_eq!(bytes_of_slots(dir.path()), 2 * once);
        assert!(state(&mut adam, &params) == two);
    }
}

#[test]
fn a_flipped_bit_is_noticed_on_the_way_into_ram() {
    let params = params(&[50_000]);
    let dir = tempfile::tempdir().unwrap();
    let options = kept(Bytes(u64::MAX));
    let mut adam = NvmeAdam::create(&dir.path().join("a"), &params, &options, init).unwrap();
    take_step(&mut adam, &params, 1).unwrap();
    adam.save("one").unwrap().wait().unwrap();
    let slot = dir.path().join("a/one/bucket-00000.slot-0");
    let mut bytes = std::fs::read(&slot).unwrap();
    bytes[100_000] ^= 4;
    std::fs::write(&slot, bytes).unwrap();
    let source = dir.path().join("a/one");
    let error = NvmeAdam::load(&[&source], &dir.path().join("b"), &params, &options, LoadOptions::default());
    assert!(
        matches!(error, Err(OptimError::Checksum { bucket: 0, section: "main", first: 16_384, .. })),
        "{error:?}"
    );
}
