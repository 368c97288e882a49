//! However the state is cut and streamed, the bits are the same; stopping and opening again changes nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot set up should stop")]

mod common;

use common::{all, cut, grad, grads, init, options, params, state, take_step};
use lazy_model::Lane;
use lazy_optim_nvme::{AdamOptions, Bytes, GroupOptions, NvmeAdam, ParamSpec, StepInput};

/// Several checksum blocks, several norm blocks, and sizes that fit nothing.
const SIZES: [usize; 6] = [70_001, 1, 511, 0, 40_000, 4097];

fn run(options: &AdamOptions, steps: usize) -> common::State {
    let params = params(&SIZES);
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, options, init).unwrap();
    (1..=steps).for_each(|t| take_step(&mut adam, &params, t).unwrap());
    state(&mut adam, &params)
}

#[test]
fn any_bucket_chunk_and_depth_gives_the_same_bits() {
    let whole = run(&cut(1 << 20, 16 << 10, 3), 3);
    assert_ne!(whole[0][0][0], common::value(0, 0, 0).to_bits(), "the steps did something");
    for (bucket, chunk_kib, depth) in [
        (1 << 20, 64, 1),
        (1 << 20, 64, 2),
        (1 << 20, 128, 5),
        (40_000, 64, 3),
        (16_384, 64, 3),
        (9_973, 1, 4),
    ] {
        assert!(
            run(&cut(bucket, chunk_kib, depth), 3) == whole,
            "bucket {bucket} chunk {chunk_kib} KiB depth {depth}"
        );
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run(&cut(60_000, 64, 3), 2))
    };
    assert!(on(1) == on(3));
}

#[test]
fn stopping_and_opening_again_changes_no_bit() {
    let params = params(&SIZES);
    let straight = run(&cut(30_000, 64, 3), 10);
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &cut(30_000, 64, 3), init).unwrap();
    (1..=5).for_each(|t| take_step(&mut adam, &params, t).unwrap());
    drop(adam);
    // The chunk size and the depth are free to change.
    let mut adam = NvmeAdam::open(dir.path(), &params, &cut(30_000, 128, 2)).unwrap();
    assert_eq!(adam.sequence(), 5);
    assert_eq!(adam.blob(), common::blob(5));
    assert_eq!(adam.step_counts(), [5; 6]);
    (6..=10).for_each(|t| take_step(&mut adam, &params, t).unwrap());
    assert!(state(&mut adam, &params) == straight);
}

#[test]
fn weights_arrive_once_in_order_and_equal_the_committed_ones() {
    let params = params(&SIZES);
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &cut(30_000, 64, 3), init).unwrap();
    let grads = grads(&params, 1);
    let mut during: Vec<Vec<f32>> = vec![Vec::new(); params.len()];
    let groups = [GroupOptions::default()];
    let input = StepInput { groups: &groups, ..StepInput::default() };
    let outcome = adam
        .step(&all(&grads), &input, &mut |param, first, values| {
            assert_eq!(during[param].len(), first);
            during[param].extend(values);
        })
        .unwrap();
    let mut after: Vec<Vec<f32>> = vec![Vec::new(); params.len()];
    adam.read_weights(&mut |param, first, values| {
        assert_eq!(after[param].len(), first);
        after[param].extend(values);
    })
    .unwrap();
    assert_eq!(during, after);
    assert_eq!(after.iter().map(Vec::len).collect::<Vec<_>>(), SIZES);
    // The account: twelve bytes an element each way, padding and heads on top.
    let elements: usize = SIZES.iter().sum();
    assert!(outcome.bytes_read >= Bytes(12 * elements as u64));
    assert!(outcome.bytes_written > outcome.bytes_read);
    let moved = |lane: Lane| outcome.spans.iter().filter(|s| s.lane == lane).map(|s| s.bytes).sum::<Bytes>();
    assert_eq!(moved(Lane::NvmeRead), outcome.bytes_read);
    assert!(outcome.spans.iter().any(|s| s.lane == Lane::Optimizer && s.name.starts_with("update")));
    assert_eq!(moved(Lane::NvmeWrite), outcome.bytes_written);
}

#[test]
fn a_parameter_without_gradient_keeps_every_bit_and_an_untouched_bucket_is_not_written() {
    let params = params(&[100, 200, 300]);
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &options(150), init).unwrap();
    assert_eq!(adam.bucket_count(), 4);
    take_step(&mut adam, &params, 1).unwrap();
    let before = state(&mut adam, &params);
    let files = common::files(dir.path());
    let grads = grads(&params, 2);
    let groups = [GroupOptions::default()];
    let input = StepInput { groups: &groups, ..StepInput::default() };
    let mut seen = Vec::new();
    adam.step(&[grad(&grads[0]), None, None], &input, &mut |param, _, _| seen.push(param)).unwrap();
    let after = state(&mut adam, &params);
    assert_eq!(seen, [0]);
    assert_eq!(adam.step_counts(), [2, 1, 1]);
    assert_ne!(before[0], after[0]);
    assert_eq!(before[1..], after[1..]);
    let now = common::files(dir.path());
    let changed: Vec<_> =
        now.iter().filter(|(name, bytes)| files[*name] != **bytes).map(|(n, _)| n.as_str()).collect();
    assert_eq!(changed, ["adam.record", "bucket-00000.slot-0"]);
    // No gradient at all is a step that changes nothing but the record.
    adam.step(&[None, None, None], &input, &mut |_, _, _| unreachable!()).unwrap();
    assert_eq!(adam.sequence(), 3);
    assert_eq!(state(&mut adam, &params), after);
}

#[test]
fn a_small_update_accumulates_in_the_float32_main_weight() {
    // Each step moves 1.0 by about 1e-4, less than half of bfloat16's spacing there.
    let params = params(&[1]);
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &options(8), |_, _, v| v.fill(1.0)).unwrap();
    let groups = [GroupOptions { lr: 1e-4, weight_decay: 0.0, ..GroupOptions::default() }];
    let input = StepInput { groups: &groups, ..StepInput::default() };
    let mut weight = 0.0;
    for _ in 0..100 {
        adam.step(&[grad(&[1.0])], &input, &mut |_, _, values| weight = values[0]).unwrap();
    }
    assert!((weight - 0.99).abs() < 1e-5, "{weight}");
}

#[test]
fn the_files_take_the_space_announced() {
    for bucket in [100, 16_385, 200_000_000] {
        let params = params(&SIZES);
        let options = options(bucket);
        let dir = tempfile::tempdir().unwrap();
        NvmeAdam::create(dir.path(), &params, &options, init).unwrap();
        let found: usize = common::files(dir.path()).values().map(Vec::len).sum();
        assert_eq!(NvmeAdam::bytes_on_disk(&params, &options).unwrap(), Bytes(found as u64));
    }
    let large = [ParamSpec::new("w", &[1 << 30])];
    let ring = NvmeAdam::memory_bytes(&large, &AdamOptions::default()).unwrap();
    assert_eq!(ring, Bytes::from_mib(3 * 3 * 16));
}

/// Fourteen steps in which parameter 1 has a gradient on odd steps only; opened again after the seventh if asked.
fn run_with_frozen_steps(reopen: bool) -> (common::State, Vec<u64>) {
    let params = params(&[300, 200, 100]);
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &options(250), init).unwrap();
    let groups = [GroupOptions::default()];
    let input = StepInput { groups: &groups, max_norm: Some(1.0), ..StepInput::default() };
    for step in 1..=14 {
        let grads = grads(&params, step);
        let mut grads = all(&grads);
        if step.is_multiple_of(2) {
            grads[1] = None;
        }
        adam.step(&grads, &input, &mut |_, _, _| {}).unwrap();
        if reopen && step == 7 {
            drop(adam);
            adam = NvmeAdam::open(dir.path(), &params, &options(250)).unwrap();
        }
    }
    (state(&mut adam, &params), adam.step_counts().to_vec())
}

#[test]
fn counters_of_parameters_that_sometimes_lack_a_gradient_survive_opening_again() {
    let straight = run_with_frozen_steps(false);
    assert_eq!(straight.1, [14, 7, 14]);
    assert!(run_with_frozen_steps(true) == straight);
}

#[test]
fn no_tail_is_lost_whatever_the_size() {
    // Around a page, around a checksum block, and 28,824,000 bytes.
    for size in [1, 127, 128, 129, 1023, 1024, 1025, 16_383, 16_385, 7_206_000] {
        let params = params(&[size]);
        let options = AdamOptions::default();
        let dir = tempfile::tempdir().unwrap();
        drop(NvmeAdam::create(dir.path(), &params, &options, init).unwrap());
        let mut adam = NvmeAdam::open(dir.path(), &params, &options).unwrap();
        let mut read = 0;
        adam.read_weights(&mut |_, first, values| {
            assert_eq!(first, read);
            read += values.len();
            assert!(values.iter().enumerate().all(|(i, v)| *v == common::value(0, 0, first + i)));
        })
        .unwrap();
        assert_eq!(read, size);
    }
}
