//! Weights that the trainer changed, and memory given back between steps.

#![allow(clippy::unwrap_used, reason = "a test that cannot set up should stop")]

mod common;

use common::{cut, init, params, state, take_step};
use lazy_optim_nvme::{
    AdamOptions, Bytes, Durability, LoadOptions, Moments, NvmeAdam, OptimError, ParamSpec,
};

fn specs() -> Vec<ParamSpec> {
    let formats = [Moments::F32, Moments::Int8, Moments::Bf16];
    params(&[70_001, 50_000, 4097]).into_iter().zip(formats).map(|(param, m)| param.with_moments(m)).collect()
}

fn ways() -> [AdamOptions; 3] {
    let kept =
        |host| AdamOptions { durability: Durability::Checkpoint, host: Bytes(host), ..cut(40_000, 64, 3) };
    [cut(40_000, 64, 3), kept(0), kept(1_000_000)]
}

#[test]
fn without_its_moments_a_store_goes_on_as_a_new_one_of_its_weights() {
    let params = specs();
    for options in ways() {
        let dir = tempfile::tempdir().unwrap();
        let mut adam = NvmeAdam::create(dir.path(), &params, &options, init).unwrap();
        (1..=2).for_each(|step| take_step(&mut adam, &params, step).unwrap());
        let main: Vec<Vec<u32>> = state(&mut adam, &params).into_iter().map(|[main, ..]| main).collect();
        adam.forget_moments().unwrap();
        assert_eq!((adam.sequence(), adam.step_counts()), (3, &[0; 3][..]));
        assert!(adam.blob() == common::blob(2));
        if options.durability == Durability::Step {
            drop(adam);
            adam = NvmeAdam::open(dir.path(), &params, &options).unwrap();
        }
        let other = tempfile::tempdir().unwrap();
        let same = |param: usize, first: usize, values: &mut [f32]| {
            for (value, bits) in values.iter_mut().zip(&main[param][first..]) {
                *value = f32::from_bits(*bits);
            }
        };
        let mut new = NvmeAdam::create(other.path(), &params, &options, same).unwrap();
        assert!(state(&mut adam, &params) == state(&mut new, &params));
        for adam in [&mut adam, &mut new] {
            take_step(adam, &params, 3).unwrap();
        }
        assert!(state(&mut adam, &params) == state(&mut new, &params));
    }
}

#[test]
fn space_for_the_next_step_is_taken_ahead() {
    let params = specs();
    let options = AdamOptions { durability: Durability::Checkpoint, ..cut(40_000, 64, 3) };
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &options, init).unwrap();
    take_step(&mut adam, &params, 1).unwrap();
    adam.save("one").unwrap().wait().unwrap();
    let paths = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
    let slots: Vec<_> = paths.filter(|path| path.to_str().unwrap().contains("bucket-")).collect();
    let before = state(&mut adam, &params);
    adam.reserve().unwrap();
    // Files of their own, which hold nothing yet.
    assert_eq!(slots.len(), adam.bucket_count());
    assert!(slots.iter().all(|path| std::fs::read(path).unwrap().iter().all(|byte| *byte == 0)));
    assert!(state(&mut adam, &params) == before);
    take_step(&mut adam, &params, 2).unwrap();
    drop(adam);
    // What was saved is loaded, as after any step.
    assert!(matches!(NvmeAdam::open(dir.path(), &params, &options), Err(OptimError::NotKept { .. })));
    let other = tempfile::tempdir().unwrap();
    let generation = &lazy_optim_nvme::generations(dir.path()).unwrap()[0].path;
    let mut loaded =
        NvmeAdam::load(&[generation], other.path(), &params, &options, LoadOptions::default()).unwrap();
    assert!(state(&mut loaded, &params) == before);
    loaded.reserve().unwrap();
    let others: u64 = common::files(other.path()).values().map(|bytes| bytes.len() as u64).sum();
    take_step(&mut loaded, &params, 2).unwrap();
    assert_eq!(others, common::files(other.path()).values().map(|bytes| bytes.len() as u64).sum::<u64>());
}

#[test]
fn reloaded_weights_replace_the_main_ones_and_leave_moments_and_counts() {
    let params = specs();
    let mut after = Vec::new();
    for options in ways() {
        let dir = tempfile::tempdir().unwrap();
        let mut adam = NvmeAdam::create(dir.path(), &params, &options, init).unwrap();
        take_step(&mut adam, &params, 1).unwrap();
        let before = state(&mut adam, &params);
        adam.reload_weights(&mut |param, first, values| {
            for (i, value) in values.iter_mut().enumerate() {
                // The weights that there are can be seen.
                assert_eq!(value.to_bits(), before[param][0][first + i]);
                *value = common::value(99, param, first + i);
            }
        })
        .unwrap();
        assert_eq!(
            (adam.sequence(), adam.step_counts(), adam.blob()),
            (2, &[1; 3][..], &common::blob(1)[..])
        );
        let reloaded = state(&mut adam, &params);
        for (param, [main, avg, sq]) in reloaded.iter().enumerate() {
            assert!(main.iter().enumerate().all(|(i, w)| *w == common::value(99, param, i).to_bits()));
            assert!(*avg == before[param][1] && *sq == before[param][2]);
        }
        if options.durability == Durability::Step {
            drop(adam);
            adam = NvmeAdam::open(dir.path(), &params, &options).unwrap();
            assert!(state(&mut adam, &params) == reloaded);
        }
        take_step(&mut adam, &params, 2).unwrap();
        after.push(state(&mut adam, &params));
    }
    assert!(after[0] == after[1] && after[0] == after[2]);
}

#[test]
fn a_suspended_store_refuses_work_and_goes_on_where_it_was() {
    let params = specs();
    for options in ways() {
        let dir = tempfile::tempdir().unwrap();
        let mut adam = NvmeAdam::create(dir.path(), &params, &options, init).unwrap();
        take_step(&mut adam, &params, 1).unwrap();
        let before = state(&mut adam, &params);
        let on_disk = common::files(dir.path()).len();
        adam.suspend().unwrap();
        adam.suspend().unwrap();
        assert!(adam.is_suspended());
        for refused in [
            take_step(&mut adam, &params, 2),
            adam.read_weights(&mut |_, _, _| {}),
            adam.reload_weights(&mut |_, _, _| {}),
            adam.save("now").map(drop),
        ] {
            assert!(matches!(refused, Err(OptimError::Suspended)), "{refused:?}");
        }
        adam.resume().unwrap();
        adam.resume().unwrap();
        assert!(!adam.is_suspended());
        assert_eq!(common::files(dir.path()).len(), on_disk);
        assert!(state(&mut adam, &params) == before);
        take_step(&mut adam, &params, 2).unwrap();
        // Loaded, suspended before any step, resumed.
        adam.save("two").unwrap().wait().unwrap();
        let two = state(&mut adam, &params);
        let other = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("two"), other.path().join("b"));
        let mut adam = NvmeAdam::load(&[&from], &to, &params, &options, LoadOptions::default()).unwrap();
        adam.suspend().unwrap();
        adam.resume().unwrap();
        assert!(state(&mut adam, &params) == two);
    }
}
