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
