//! Nine runs of 200 steps recorded from PyTorch's Adam and AdamW (float32, CPU).

#![allow(clippy::unwrap_used, reason = "a test that cannot set up should stop")]

#[path = "common/cases.rs"]
mod cases;
mod common;

use cases::{Case, NAMES, RECORDED, Recording, SIZES, STEPS};
use common::options;
use lazy_optim_nvme::{Gradient, NvmeAdam, ParamSpec, StepInput};

fn check(file: &str) {
    let case = Case::all().into_iter().find(|case| case.file == file).unwrap();
    let bytes = std::fs::read(format!("tests/data/{file}.safetensors")).unwrap();
    let recording = Recording::open(&bytes).unwrap();
    let params: Vec<_> =
        (0..4).map(|p| ParamSpec::new(NAMES[p], &[SIZES[p]]).in_group(case.group_of[p])).collect();
    let init = [0, 1, 2, 3].map(|p| recording.initial(p).unwrap());
    let grads = [0, 1, 2, 3].map(|p| recording.grads(p).unwrap());
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &options(50), |param, first, values| {
        values.copy_from_slice(&init[param][first..first + values.len()]);
    })
    .unwrap();
    assert_eq!(adam.bucket_count(), 4);
    for t in 0..STEPS {
        let groups = case.groups(t);
        let grad = |p: usize| &grads[p][t * SIZES[p]..(t + 1) * SIZES[p]];
        let grads = [0, 1, 2, 3].map(|p| (case.present)(p, t).then(|| Gradient::F32(grad(p))));
        let input = StepInput { groups: &groups, ..StepInput::default() };
        adam.step(&grads, &input, &mut |_, _, _| {}).unwrap();
        if RECORDED.contains(&(t + 1)) {
            let mut state: [[Vec<f32>; 3]; 4] = Default::default();
            adam.read_state(&mut |part| {
                let parts = [part.main, part.exp_avg, part.exp_avg_sq];
                for (all, part) in state[part.param].iter_mut().zip(parts) {
                    all.extend(part);
                }
            })
            .unwrap();
            recording.compare(t + 1, &state).unwrap();
        }
    }
    assert_eq!(adam.step_counts(), case.counts, "{file}");
}

#[test]
fn adamw_constant() {
    check("adamw");
}

#[test]
fn adam_with_l2() {
    check("adam_l2");
}

#[test]
fn adamw_two_groups() {
    check("adamw_groups");
}

#[test]
fn adamw_cosine_schedule() {
    check("adamw_schedule");
}

#[test]
fn a_parameter_without_gradient_on_odd_steps_keeps_its_own_count() {
    check("adamw_frozen_odd");
}

#[test]
fn a_parameter_that_never_has_a_gradient_stays() {
    check("adamw_never");
}

#[test]
fn adamw_maximize() {
    check("adamw_maximize");
}

#[test]
fn gradients_so_small_that_eps_decides() {
    check("adamw_tiny_grads");
}

#[test]
fn gradients_of_1e12() {
    check("adamw_huge_grads");
}
