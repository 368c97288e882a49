//! What is refused, by which name, and that nothing moves when it is.

#![allow(clippy::unwrap_used, reason = "a test that cannot set up should stop")]

mod common;

use std::path::Path;

use common::{files, grad, init, options, params, restore, state, take_step};
use lazy_optim_nvme::{Gradient, GroupOptions, MAX_BLOB_BYTES, NvmeAdam, OptimError, ParamSpec, StepInput};

const SIZES: [usize; 3] = [100, 200, 2_000];

/// A store of three steps, its folder, and its files.
fn store() -> (tempfile::TempDir, NvmeAdam, Vec<ParamSpec>) {
    let params = params(&SIZES);
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &options(250), init).unwrap();
    (1..=3).for_each(|t| take_step(&mut adam, &params, t).unwrap());
    (dir, adam, params)
}

fn open(dir: &Path, params: &[ParamSpec]) -> Result<NvmeAdam, OptimError> {
    NvmeAdam::open(dir, params, &options(250))
}

/// The message of what opening or reading everything refuses.
fn refusal(dir: &Path, params: &[ParamSpec]) -> String {
    match open(dir, params).and_then(|mut adam| adam.read_state(&mut |_| {})) {
        Ok(()) => String::new(),
        Err(error) => error.to_string(),
    }
}

fn step_error(adam: &mut NvmeAdam, grads: &[Option<Gradient<'_>>], input: &StepInput<'_>) -> OptimError {
    adam.step(grads, input, &mut |_, _, _| unreachable!("nothing may be handed out")).unwrap_err()
}

#[test]
fn non_finite_gradients_leave_files_and_counters_alone() {
    let (dir, mut adam, params) = store();
    let before = files(dir.path());
    let groups = [GroupOptions::default()];
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut grads = common::grads(&params, 4);
        grads[1][7] = bad;
        let input = StepInput {
            groups: &groups,
            max_norm: Some(1.0),
            blob: b"not committed",
            ..StepInput::default()
        };
        let outcome = adam
            .step(&common::all(&grads), &input, &mut |_, _, _| panic!("nothing may be handed out"))
            .unwrap();
        assert!(outcome.skipped && !outcome.grad_norm.is_finite());
        assert!(outcome.warning.unwrap().contains("skipped"));
        assert_eq!((adam.sequence(), adam.step_counts()), (3, [3; 3].as_slice()));
    }
    assert!(files(dir.path()) == before);
    take_step(&mut adam, &params, 4).unwrap();
}

#[test]
fn bad_norms_and_hyper_parameters_are_refused_before_anything_moves() {
    let (dir, mut adam, params) = store();
    let before = files(dir.path());
    let grads = common::grads(&params, 4);
    let grads = common::all(&grads);
    let good = GroupOptions::default();
    let groups = [good];
    let input = StepInput { groups: &groups, ..StepInput::default() };
    for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = step_error(&mut adam, &grads, &StepInput { max_norm: Some(bad), ..input });
        assert!(matches!(error, OptimError::MaxNorm { .. }), "{error}");
        let error = step_error(&mut adam, &grads, &StepInput { scale: bad, ..input });
        assert!(matches!(error, OptimError::Scale { .. }), "{error}");
    }
    for bad in [
        GroupOptions { lr: -1.0, ..good },
        GroupOptions { lr: f64::NAN, ..good },
        GroupOptions { betas: (1.0, 0.9), ..good },
        GroupOptions { betas: (0.9, -0.1), ..good },
        GroupOptions { eps: f64::INFINITY, ..good },
        GroupOptions { weight_decay: -0.1, ..good },
    ] {
        let error = step_error(&mut adam, &grads, &StepInput { groups: &[bad], ..input });
        assert!(matches!(error, OptimError::HyperParameter { group: 0, .. }), "{error}");
    }
    let error = step_error(&mut adam, &grads, &StepInput { groups: &[], ..input });
    assert!(matches!(error, OptimError::GroupCount { wanted: 1, found: 0 }), "{error}");
    let error = step_error(&mut adam, &grads[..2], &input);
    assert!(matches!(error, OptimError::GradCount { wanted: 3, found: 2 }), "{error}");
    let error = step_error(&mut adam, &[grads[0], None, grads[1]], &input);
    assert!(error.to_string().contains("p2 has 200 elements, its parameter 2000"), "{error}");
    let blob = vec![0; MAX_BLOB_BYTES + 1];
    let error = step_error(&mut adam, &grads, &StepInput { blob: &blob, ..input });
    assert!(matches!(error, OptimError::BlobTooLarge { .. }), "{error}");
    assert!(files(dir.path()) == before);
    take_step(&mut adam, &params, 4).unwrap();
}

#[test]
fn a_finite_norm_that_clipping_pushes_under_eps_is_warned_about() {
    let params = params(&[4]);
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &options(250), init).unwrap();
    let groups = [GroupOptions { eps: 1e-8, ..GroupOptions::default() }];
    let input = StepInput { groups: &groups, max_norm: Some(1e-9), ..StepInput::default() };
    let outcome = adam.step(&[grad(&[1e10, 0.0, 1e10, 0.0])], &input, &mut |_, _, _| {}).unwrap();
    assert!(outcome.warning.unwrap().contains("below eps"));
    // Squares that overflow float32 are an ordinary step otherwise.
    let input = StepInput { max_norm: Some(1.0), ..input };
    let outcome = adam.step(&[grad(&[1e20, 0.0, 1e20, 0.0])], &input, &mut |_, _, _| {}).unwrap();
    assert!((outcome.grad_norm / 1e20 - 2f64.sqrt()).abs() < 1e-6);
    assert!(!outcome.skipped && outcome.warning.is_none());
}

#[test]
fn other_parameters_or_another_cut_are_refused_by_the_first_difference() {
    let (dir, adam, params) = store();
    drop(adam);
    let check = |params: &[ParamSpec], bucket: usize, wanted: &str| {
        let error = NvmeAdam::open(dir.path(), params, &options(bucket)).unwrap_err();
        assert!(matches!(error, OptimError::LayoutMismatch { .. }));
        assert!(error.to_string().contains(wanted), "{error}");
    };
    check(&params, 300, "bucket_elements is 250 on disk, 300 asked for");
    let mut other = params.clone();
    other[1].name = "q".into();
    check(&other, 250, "parameter 1 is named p1 on disk, q asked for");
    let mut other = params.clone();
    other[1].shape = vec![2, 100];
    check(&other, 250, "parameter p1 has shape [200] on disk, [2, 100] asked for");
    let mut other = params.clone();
    other[2].group = 1;
    check(&other, 250, "parameter p2 is in group 0 on disk, 1 asked for");
    check(&params[..2], 250, "3 parameters on disk, 2 asked for");
    open(dir.path(), &params).unwrap();
}

#[test]
fn names_shapes_and_sizes_that_cannot_work_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let create =
        |params: &[ParamSpec], options| NvmeAdam::create(dir.path(), params, &options, init).unwrap_err();
    let twice = [ParamSpec::new("a", &[1]), ParamSpec::new("b", &[1]), ParamSpec::new("a", &[1])];
    let error = create(&twice, options(8));
    assert_eq!(error.to_string(), "parameters 0 and 2 are both named a; give each its own name");
    let one = [ParamSpec::new("a", &[1])];
    assert!(create(&one, options(0)).to_string().contains("bucket_elements"));
    assert!(create(&one, common::cut(8, 64, 0)).to_string().contains("depth"));
    assert!(create(&one, common::cut(8, 2 << 20, 1)).to_string().contains("chunk_bytes"));
    // More than any disk has: refused with both numbers, and nothing is left behind.
    let error = create(&[ParamSpec::new("a", &[1 << 50])], options(1 << 50));
    assert!(matches!(error, OptimError::NoSpace { .. }), "{error}");
    assert_eq!(files(dir.path()).len(), 0);
}

#[test]
fn a_folder_with_a_store_is_not_overwritten_and_one_without_is_not_opened() {
    let (dir, adam, params) = store();
    drop(adam);
    let before = files(dir.path());
    let error = NvmeAdam::create(dir.path(), &params, &options(250), init).unwrap_err();
    assert!(matches!(error, OptimError::AlreadyExists { .. }), "{error}");
    assert!(files(dir.path()) == before);
    let empty = tempfile::tempdir().unwrap();
    for path in [empty.path().to_path_buf(), empty.path().join("absent")] {
        assert!(matches!(open(&path, &params).unwrap_err(), OptimError::NoStore { .. }));
    }
    assert!(!empty.path().join("absent").exists());
}

#[test]
fn a_flipped_bit_anywhere_in_committed_files_is_noticed() {
    let (dir, adam, params) = store();
    drop(adam);
    let good = files(dir.path());
    assert_eq!(refusal(dir.path(), &params), "");
    // Three steps: the committed slots are the second ones.
    for (name, offset, wanted) in [
        ("bucket-00002.slot-1", 4096, "elements 0..250 of section main of bucket 2"),
        ("bucket-00002.slot-1", 8192 + 999, "section exp_avg of bucket 2"),
        ("bucket-00002.slot-1", 12288 + 17, "section exp_avg_sq of bucket 2"),
        ("bucket-00002.slot-1", 70, "its checksum does not match its bytes"),
        ("bucket-00002.slot-1", 0, "magic"),
        ("adam.layout", 100, "its checksum does not match its bytes"),
    ] {
        let mut bytes = good[name].clone();
        bytes[offset] ^= 4;
        std::fs::write(dir.path().join(name), bytes).unwrap();
        let message = refusal(dir.path(), &params);
        assert!(message.contains(name) && message.contains(wanted), "{name} {offset}: {message}");
        restore(dir.path(), &good);
    }
    // In the slots that hold no committed state it does not matter.
    let mut bytes = good["bucket-00002.slot-0"].clone();
    bytes[4096] ^= 4;
    std::fs::write(dir.path().join("bucket-00002.slot-0"), bytes).unwrap();
    assert_eq!(refusal(dir.path(), &params), "");
}

#[test]
fn a_step_on_damaged_state_commits_nothing_and_latches() {
    let (dir, mut adam, params) = store();
    let good = files(dir.path());
    let before = state(&mut adam, &params);
    let name = "bucket-00008.slot-1";
    let mut bytes = good[name].clone();
    bytes[8192] ^= 1;
    // Through the page cache of the same inode the optimizer has open.
    std::fs::write(dir.path().join(name), bytes).unwrap();
    let error = take_step(&mut adam, &params, 4).unwrap_err();
    assert!(matches!(error, OptimError::Checksum { bucket: 8, section: "exp_avg", .. }), "{error}");
    let error = take_step(&mut adam, &params, 4).unwrap_err();
    assert!(matches!(error, OptimError::Latched { .. }), "{error}");
    assert!(error.to_string().contains("read_weights"), "{error}");
    assert_eq!((adam.sequence(), adam.step_counts()), (3, [3; 3].as_slice()));
    std::fs::write(dir.path().join(name), &good[name]).unwrap();
    adam.read_weights(&mut |_, _, _| {}).unwrap();
    assert!(state(&mut adam, &params) == before);
    take_step(&mut adam, &params, 4).unwrap();
    assert_eq!(adam.sequence(), 4);
}

#[test]
fn swapped_stale_and_foreign_files_are_refused_by_name() {
    let (dir, mut adam, params) = store();
    let third = files(dir.path());
    (4..=5).for_each(|t| take_step(&mut adam, &params, t).unwrap());
    drop(adam);
    let fifth = files(dir.path());
    let check = |change: &[(&str, &[u8])], wanted: &str| {
        for (name, bytes) in change {
            std::fs::write(dir.path().join(name), bytes).unwrap();
        }
        let message = refusal(dir.path(), &params);
        assert!(message.contains(wanted), "{message}");
        restore(dir.path(), &fifth);
    };
    let (a, b) = ("bucket-00003.slot-1", "bucket-00004.slot-1");
    check(
        &[(a, &fifth[b]), (b, &fifth[a])],
        "bucket-00003.slot-1 is not the file that was committed: its bucket is 4",
    );
    let (a, b) = ("bucket-00003.slot-0", "bucket-00003.slot-1");
    check(&[(a, &fifth[b]), (b, &fifth[a])], "its slot is 0, 1 was expected");
    check(&[(b, &third[b])], "bucket-00003.slot-1 is not the file that was committed: its generation is 3");
    check(&[("adam.record", &third["adam.record"])], "its generation is 5, 3 was expected");
    check(&[(b, &fifth[b][..4096])], "its length is 4096");
    // Another store with the same parameters.
    let (other, adam, _) = store();
    drop(adam);
    let foreign = files(other.path());
    check(&[(b, &foreign[b])], "bucket-00003.slot-1 is not the file that was committed: its store id is");
    check(
        &[("adam.record", &foreign["adam.record"])],
        "adam.record is not the file that was committed: its store id",
    );
    check(
        &[("adam.layout", &foreign["adam.layout"])],
        "adam.record is not the file that was committed: its store id",
    );
    assert_eq!(refusal(dir.path(), &params), "");
}

#[test]
fn a_record_cut_while_it_was_written_leaves_the_state_before() {
    let (dir, mut adam, params) = store();
    let third = state(&mut adam, &params);
    let before = files(dir.path());
    take_step(&mut adam, &params, 4).unwrap();
    let fourth = state(&mut adam, &params);
    drop(adam);
    let after = files(dir.path());
    let (old, new) = (&before["adam.record"], &after["adam.record"]);
    let page = old.len() / 2;
    let changed: Vec<_> = (0..old.len()).filter(|i| old[*i] != new[*i]).collect();
    assert!(
        !changed.is_empty() && changed.iter().all(|i| i / page == changed[0] / page),
        "one page is written"
    );
    // Old bytes from some point on, as a torn write leaves them.
    for sectors in 0..=(changed[changed.len() - 1] % page).div_ceil(512) {
        let cut = changed[0] / page * page + sectors * 512;
        let torn: Vec<u8> = [&new[..cut], &old[cut..]].concat();
        std::fs::write(dir.path().join("adam.record"), torn).unwrap();
        let mut adam = open(dir.path(), &params).unwrap();
        let found = state(&mut adam, &params);
        assert!(if adam.sequence() == 3 { found == third } else { found == fourth }, "{sectors} sectors");
    }
}
