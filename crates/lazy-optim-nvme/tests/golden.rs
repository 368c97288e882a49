//! Nine runs of 200 steps recorded from PyTorch's Adam and AdamW (float32, CPU).

#![allow(clippy::unwrap_used, reason = "a test that cannot set up should stop")]

mod common;

use std::f64::consts::PI;

use common::options;
use lazy_optim_nvme::{Gradient, GroupOptions, NvmeAdam, ParamSpec, StepInput};
use safetensors::SafeTensors;

const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const SIZES: [usize; 4] = [7, 33, 128, 1];
const STEPS: usize = 200;

struct Case {
    file: &'static str,
    groups: Vec<GroupOptions>,
    /// Group of each parameter.
    group_of: [usize; 4],
    /// Whether a parameter has a gradient at a step, counted from 0.
    present: fn(usize, usize) -> bool,
    /// What the learning rate is multiplied by at a step.
    schedule: fn(usize) -> f64,
    counts: [u64; 4],
}

fn adamw() -> GroupOptions {
    GroupOptions { lr: 0.01, weight_decay: 0.1, ..GroupOptions::default() }
}

fn case(file: &'static str, group: GroupOptions) -> Case {
    Case {
        file,
        groups: vec![group],
        group_of: [0; 4],
        present: |_, _| true,
        schedule: |_| 1.0,
        counts: [STEPS as u64; 4],
    }
}

fn tensor(file: &SafeTensors<'_>, name: &str) -> Option<Vec<f32>> {
    let bytes = file.tensor(name).ok()?.data().to_vec();
    Some(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

/// Every tensor of the case against the run's, by the largest magnitude of its kind at that step.
fn compare(adam: &mut NvmeAdam, golden: &SafeTensors<'_>, file: &str, step: usize) {
    let mut state: [[Vec<f32>; 3]; 4] = Default::default();
    adam.read_state(&mut |part| {
        let parts = [part.main, part.exp_avg, part.exp_avg_sq];
        for (all, part) in state[part.param].iter_mut().zip(parts) {
            all.extend(part);
        }
    })
    .unwrap();
    for (section, suffix) in ["", ".exp_avg", ".exp_avg_sq"].iter().enumerate() {
        let wanted = NAMES.map(|name| tensor(golden, &format!("step{step}.{name}{suffix}")));
        let largest = wanted.iter().flatten().flatten().fold(0f32, |a, b| a.max(b.abs()));
        for (param, wanted) in wanted.iter().enumerate() {
            // PyTorch has no moments for a parameter that never had a gradient.
            let zeros = vec![0.0; SIZES[param]];
            let wanted = wanted.as_ref().unwrap_or(&zeros);
            assert_eq!(wanted.len(), state[param][section].len());
            for (w, f) in wanted.iter().zip(&state[param][section]) {
                let error = (f64::from(*w) - f64::from(*f)).abs();
                assert!(
                    error <= 1e-6 * f64::from(largest),
                    "{file} step {step} {}{suffix}: {f} instead of {w} (largest {largest})",
                    NAMES[param]
                );
            }
        }
    }
}

fn check(case: &Case) {
    let bytes = std::fs::read(format!("tests/data/{}.safetensors", case.file)).unwrap();
    let golden = SafeTensors::deserialize(&bytes).unwrap();
    let params: Vec<_> =
        (0..4).map(|p| ParamSpec::new(NAMES[p], &[SIZES[p]]).in_group(case.group_of[p])).collect();
    let init = NAMES.map(|name| tensor(&golden, &format!("init.{name}")).unwrap());
    let grads = NAMES.map(|name| tensor(&golden, &format!("grads.{name}")).unwrap());
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &options(50), |param, first, values| {
        values.copy_from_slice(&init[param][first..first + values.len()]);
    })
    .unwrap();
    assert_eq!(adam.bucket_count(), 4);
    for t in 0..STEPS {
        let lr = |g: &GroupOptions| GroupOptions { lr: g.lr * (case.schedule)(t), ..*g };
        let groups: Vec<_> = case.groups.iter().map(lr).collect();
        let grad = |p: usize| &grads[p][t * SIZES[p]..(t + 1) * SIZES[p]];
        let grads = [0, 1, 2, 3].map(|p| (case.present)(p, t).then(|| Gradient::F32(grad(p))));
        let input = StepInput { groups: &groups, ..StepInput::default() };
        adam.step(&grads, &input, &mut |_, _, _| {}).unwrap();
        if [1, 10, STEPS].contains(&(t + 1)) {
            compare(&mut adam, &golden, case.file, t + 1);
        }
    }
    assert_eq!(adam.step_counts(), case.counts, "{}", case.file);
}

#[test]
fn adamw_constant() {
    check(&case("adamw", adamw()));
}

#[test]
fn adam_with_l2() {
    check(&case("adam_l2", GroupOptions { decoupled: false, ..adamw() }));
}

#[test]
fn adamw_two_groups() {
    let first = GroupOptions { betas: (0.9, 0.95), eps: 1e-6, ..adamw() };
    let second = GroupOptions { lr: 3e-3, betas: (0.8, 0.999), weight_decay: 0.0, ..GroupOptions::default() };
    check(&Case {
        groups: vec![first, second],
        group_of: [0, 1, 0, 1],
        ..case("adamw_groups", GroupOptions::default())
    });
}

#[test]
fn adamw_cosine_schedule() {
    let schedule = |t: usize| 0.5 + 0.5 * (PI * t as f64 / STEPS as f64).cos();
    check(&Case { schedule, ..case("adamw_schedule", adamw()) });
}

#[test]
fn a_parameter_without_gradient_on_odd_steps_keeps_its_own_count() {
    let present = |p: usize, t: usize| p != 1 || t.is_multiple_of(2);
    check(&Case { present, counts: [200, 100, 200, 200], ..case("adamw_frozen_odd", adamw()) });
}

#[test]
fn a_parameter_that_never_has_a_gradient_stays() {
    check(&Case { present: |p, _| p != 3, counts: [200, 200, 200, 0], ..case("adamw_never", adamw()) });
}

#[test]
fn adamw_maximize() {
    check(&case("adamw_maximize", GroupOptions { maximize: true, ..adamw() }));
}

#[test]
fn gradients_so_small_that_eps_decides() {
    check(&case("adamw_tiny_grads", adamw()));
}

#[test]
fn gradients_of_1e12() {
    check(&case("adamw_huge_grads", adamw()));
}
