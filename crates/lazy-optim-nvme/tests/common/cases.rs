//! Nine runs of 200 steps recorded from PyTorch's Adam and AdamW (float32, CPU): how each was made, and how another
//! run is compared with it.

use std::f64::consts::PI;

use lazy_optim_nvme::GroupOptions;
use safetensors::SafeTensors;

pub(crate) const NAMES: [&str; 4] = ["a", "b", "c", "d"];
pub(crate) const SIZES: [usize; 4] = [7, 33, 128, 1];
pub(crate) const STEPS: usize = 200;
/// The steps, from 1, whose state was recorded.
pub(crate) const RECORDED: [usize; 3] = [1, 10, STEPS];

/// How a run was made.
pub(crate) struct Case {
    /// Name of its file.
    pub(crate) file: &'static str,
    groups: Vec<GroupOptions>,
    /// Group of each parameter.
    pub(crate) group_of: [usize; 4],
    /// Whether a parameter has a gradient at a step, counted from 0.
    pub(crate) present: fn(usize, usize) -> bool,
    /// What the learning rate is multiplied by at a step.
    schedule: fn(usize) -> f64,
    /// Step counts at the end.
    pub(crate) counts: [u64; 4],
}

fn adamw() -> GroupOptions {
    GroupOptions { lr: 0.01, weight_decay: 0.1, ..GroupOptions::default() }
}

impl Case {
    fn new(file: &'static str, group: GroupOptions) -> Case {
        Case {
            file,
            groups: vec![group],
            group_of: [0; 4],
            present: |_, _| true,
            schedule: |_| 1.0,
            counts: [STEPS as u64; 4],
        }
    }

    pub(crate) fn all() -> [Case; 9] {
        let first = GroupOptions { betas: (0.9, 0.95), eps: 1e-6, ..adamw() };
        let second =
            GroupOptions { lr: 3e-3, betas: (0.8, 0.999), weight_decay: 0.0, ..GroupOptions::default() };
        [
            Case::new("adamw", adamw()),
            Case::new("adam_l2", GroupOptions { decoupled: false, ..adamw() }),
            Case {
                groups: vec![first, second],
                group_of: [0, 1, 0, 1],
                ..Case::new("adamw_groups", GroupOptions::default())
            },
            Case {
                schedule: |t| 0.5 + 0.5 * (PI * t as f64 / STEPS as f64).cos(),
                ..Case::new("adamw_schedule", adamw())
            },
            Case {
                present: |p, t| p != 1 || t.is_multiple_of(2),
                counts: [200, 100, 200, 200],
                ..Case::new("adamw_frozen_odd", adamw())
            },
            Case { present: |p, _| p != 3, counts: [200, 200, 200, 0], ..Case::new("adamw_never", adamw()) },
            Case::new("adamw_maximize", GroupOptions { maximize: true, ..adamw() }),
            Case::new("adamw_tiny_grads", adamw()),
            Case::new("adamw_huge_grads", adamw()),
        ]
    }

    /// Hyper-parameters of the groups at a step.
    pub(crate) fn groups(&self, step: usize) -> Vec<GroupOptions> {
        let lr = |g: &GroupOptions| GroupOptions { lr: g.lr * (self.schedule)(step), ..*g };
        self.groups.iter().map(lr).collect()
    }
}

/// The tensors of a run.
pub(crate) struct Recording<'a>(SafeTensors<'a>);

impl<'a> Recording<'a> {
    pub(crate) fn open(bytes: &'a [u8]) -> Result<Self, String> {
        SafeTensors::deserialize(bytes).map(Recording).map_err(|error| error.to_string())
    }

    fn tensor(&self, name: &str) -> Result<Vec<f32>, String> {
        let tensor = self.0.tensor(name).map_err(|error| format!("{name}: {error}"))?;
        Ok(tensor.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }

    pub(crate) fn initial(&self, param: usize) -> Result<Vec<f32>, String> {
        self.tensor(&format!("init.{}", NAMES[param]))
    }

    /// Gradients of all steps, one after the other.
    pub(crate) fn grads(&self, param: usize) -> Result<Vec<f32>, String> {
        self.tensor(&format!("grads.{}", NAMES[param]))
    }

    /// Main weights, first and second moments of every parameter against the run's after a step: the largest error,
    /// as a share of the largest magnitude of its kind at that step. More than a millionth is refused.
    pub(crate) fn compare(&self, step: usize, state: &[[Vec<f32>; 3]; 4]) -> Result<f64, String> {
        let mut worst = 0f64;
        for (section, suffix) in ["", ".exp_avg", ".exp_avg_sq"].iter().enumerate() {
            // PyTorch has no moments for a parameter that never had a gradient.
            let wanted: Vec<Vec<f32>> = (0..4)
                .map(|p| {
                    let found = self.tensor(&format!("step{step}.{}{suffix}", NAMES[p]));
                    found.unwrap_or_else(|_| vec![0.0; SIZES[p]])
                })
                .collect();
            let largest = f64::from(wanted.iter().flatten().fold(0f32, |a, b| a.max(b.abs())));
            for (param, wanted) in wanted.iter().enumerate() {
                let found = &state[param][section];
                if found.len() != wanted.len() {
                    return Err(format!("{} has {} elements", NAMES[param], found.len()));
                }
                for (w, f) in wanted.iter().zip(found) {
                    let error = (f64::from(*w) - f64::from(*f)).abs() / largest;
                    if error.is_nan() || error > 1e-6 {
                        let name = NAMES[param];
                        return Err(format!(
                            "step {step} {name}{suffix}: {f} instead of {w} (largest {largest})"
                        ));
                    }
                    worst = worst.max(error);
                }
            }
        }
        Ok(worst)
    }
}
