//! A schedule: where every boundary goes, which layers keep their internals, and what was promised.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::json::parse;
use crate::step::{TierBytes, Transfer};
use crate::units::{Bytes, Placement, Seconds};

/// The schedule format this version writes. It reads this one and version 1, which had no transfers.
pub const SCHEDULE_VERSION: u32 = 2;

/// How far the transfers of a step may run beside its arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Execution {
    /// Blocks a boundary is read ahead of the block that needs it; 0 reads when the block starts.
    pub prefetch: usize,
    /// HBM buffers that may still be leaving while later layers run forward.
    pub writes_in_flight: usize,
    /// Host buffers between HBM and NVMe, in each direction; 0 counts as 1, since nothing moves without one.
    pub staging_buffers: usize,
}

impl Default for Execution {
    fn default() -> Self {
        Execution { prefetch: 1, writes_in_flight: 2, staging_buffers: 2 }
    }
}

/// Exposed time of each link, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExposedSeconds {
    /// Device to host.
    pub d2h: Seconds,
    /// Host to device.
    pub h2d: Seconds,
    /// Writes to NVMe.
    pub nvme_write: Seconds,
    /// Reads from NVMe.
    pub nvme_read: Seconds,
}

impl ExposedSeconds {
    /// Sum over the links.
    pub fn total(&self) -> Seconds {
        self.d2h + self.h2d + self.nvme_write + self.nvme_read
    }
}

impl std::ops::AddAssign for ExposedSeconds {
    fn add_assign(&mut self, other: Self) {
        self.d2h += other.d2h;
        self.h2d += other.h2d;
        self.nvme_write += other.nvme_write;
        self.nvme_read += other.nvme_read;
    }
}

/// What the planner promises of one optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Promise {
    /// The whole step.
    pub step_s: Seconds,
    /// Prologue and layers forward, all micro-batches.
    pub forward_s: Seconds,
    /// Loss and layers backward, recomputation included, all micro-batches.
    pub backward_s: Seconds,
    /// Optimizer, gradient norm and clearing of gradients included.
    pub optimizer_s: Seconds,
    /// Time in which the compute lane waits for each link, all micro-batches.
    pub exposed_s: ExposedSeconds,
    /// Most bytes held in each tier, everything counted.
    pub peak_bytes: TierBytes,
}

/// Who made the schedule, and how good it is known to be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SolveRecord {
    /// `optimal`, `feasible`, or `named` for a plan nobody solved for.
    pub status: String,
    /// The method, for example `mip`, `resident`, `checkpoint`.
    pub method: String,
    /// The solver and its version or back end.
    pub solver: String,
    /// Value of the chain's objective, where one was minimised.
    pub objective_ms: Option<f64>,
    /// Proven lower bound on it.
    pub bound_ms: Option<f64>,
    /// Time the solver took.
    pub solve_s: Seconds,
    /// What the objective predicted beside what the simulation of the plan says, where the objective was a step's time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<Prediction>,
}

/// How near an objective came to the plan's own time line.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prediction {
    /// Step time by the objective: arithmetic, recomputation and exposed transfers.
    pub step_s: Seconds,
    /// Step time of the simulated operations less that, relative to it.
    pub gap: f64,
    /// How often the problem was corrected by what the operations showed, and solved again.
    pub refinements: usize,
}

/// A decision for every boundary and layer of a model, in the form the runtime carries out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Format version: [`SCHEDULE_VERSION`].
    pub version: u32,
    /// Number of layers `N`.
    pub layers: usize,
    /// Placement of boundaries `0..=N`.
    pub placement: Vec<Placement>,
    /// Whether layers `0..N` keep their internals from forward to backward.
    pub keep: Vec<bool>,
    /// Room for transfers beside arithmetic.
    pub execution: Execution,
    /// When each of boundaries `0..N` that leaves HBM does so and comes back. Absent: as `execution` says; otherwise only its staging
    /// buffers count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfers: Option<Vec<Option<Transfer>>>,
    /// Hash of the shape the schedule is for: see [`shape_hash`].
    pub shape_hash: String,
    /// Hash of the cost chain it was solved for; empty for a named plan.
    pub chain_hash: String,
    /// Provenance.
    pub solve: SolveRecord,
    /// What was promised, where times were known.
    pub promise: Option<Promise>,
}

/// Number of boundaries by placement, and of layers that keep their internals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Boundaries in HBM.
    pub hbm: usize,
    /// Boundaries in pinned host RAM.
    pub host: usize,
    /// Boundaries on NVMe.
    pub nvme: usize,
    /// Boundaries that are recomputed.
    pub recompute: usize,
    /// Layers that keep their internals.
    pub kept: usize,
}

impl Counts {
    /// Saved boundaries.
    pub const fn checkpoints(&self) -> usize {
        self.hbm + self.host + self.nvme
    }
}

/// Why a schedule file was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// Not JSON of this format.
    #[error("the schedule is not valid: {0}; make a new one with `lazy-plan --out FILE`")]
    Json(#[from] serde_json::Error),
    /// A key that is absent, unknown, or of the wrong kind.
    #[error("the schedule's `{key}`: {problem}; make a new one with `lazy-plan --out FILE`")]
    Value {
        /// Its path, or that of the object it is missing in.
        key: String,
        /// What is wrong.
        problem: String,
    },
    /// Written by another version.
    #[error(
        "the schedule has format version {found}, this program reads versions 1 and {SCHEDULE_VERSION}: make it again with this version"
    )]
    Version {
        /// The version it has.
        found: u64,
    },
    /// Made for another model, batch or sequence length.
    #[error("the schedule was made for another model or workload ({detail}): solve again for this one")]
    OtherShape {
        /// First difference.
        detail: String,
    },
}

/// SHA-256, in hex, over the boundary sizes in order: two workloads share it when a schedule of one can be carried out
/// for the other.
pub fn shape_hash(boundary_bytes: &[Bytes]) -> String {
    let mut hasher = Sha256::new();
    hasher.update((boundary_bytes.len() as u64).to_le_bytes());
    for bytes in boundary_bytes {
        hasher.update(bytes.get().to_le_bytes());
    }
    hasher.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

impl Schedule {
    /// A plan that needs no solver: every placement `hbm`, and all layers keep their internals (`keep`) or none does.
    pub fn named(method: &str, boundary_bytes: &[Bytes], keep: bool) -> Schedule {
        let layers = boundary_bytes.len().saturating_sub(1);
        Schedule {
            version: SCHEDULE_VERSION,
            layers,
            placement: vec![Placement::Hbm; layers + 1],
            keep: vec![keep; layers],
            execution: Execution::default(),
            transfers: None,
            shape_hash: shape_hash(boundary_bytes),
            chain_hash: String::new(),
            solve: SolveRecord {
                status: "named".into(),
                method: method.into(),
                solver: "none".into(),
                objective_ms: None,
                bound_ms: None,
                solve_s: Seconds::ZERO,
                prediction: None,
            },
            promise: None,
        }
    }

    /// Reads a schedule; checks version and lengths, not whether it fits a machine.
    ///
    /// # Errors
    /// When the text is not a schedule of this version; the message names the key path.
    pub fn from_json(text: &str) -> Result<Schedule, ScheduleError> {
        let value = parse(text)?;
        if let Some(found) = value.get("version").and_then(serde_json::Value::as_u64)
            && !(1..=u64::from(SCHEDULE_VERSION)).contains(&found)
        {
            return Err(ScheduleError::Version { found });
        }
        let schedule: Schedule = serde_path_to_error::deserialize(value).map_err(|error| {
            let path = error.path().to_string();
            let key = if path == "." { "(top level)".into() } else { path };
            ScheduleError::Value { key, problem: error.into_inner().to_string() }
        })?;
        let boundaries = schedule.layers.checked_add(1);
        if boundaries != Some(schedule.placement.len()) || schedule.keep.len() != schedule.layers {
            return Err(ScheduleError::OtherShape {
                detail: format!(
                    "it names {} layers but has {} placements and {} keep flags",
                    schedule.layers,
                    schedule.placement.len(),
                    schedule.keep.len()
                ),
            });
        }
        Ok(schedule)
    }

    /// The schedule as readable JSON.
    ///
    /// # Errors
    /// When a promised number is not finite.
    pub fn to_json(&self) -> Result<String, ScheduleError> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// Refuses a schedule that was made for boundaries of other sizes.
    ///
    /// # Errors
    /// When number or sizes of the boundaries differ.
    pub fn check_shape(&self, boundary_bytes: &[Bytes]) -> Result<(), ScheduleError> {
        if self.layers.checked_add(1) != Some(boundary_bytes.len()) {
            return Err(ScheduleError::OtherShape {
                detail: format!(
                    "it has {} layers, the model has {}",
                    self.layers,
                    boundary_bytes.len().saturating_sub(1)
                ),
            });
        }
        if shape_hash(boundary_bytes) != self.shape_hash {
            return Err(ScheduleError::OtherShape {
                detail: "same number of layers, other boundary sizes".into(),
            });
        }
        Ok(())
    }

    /// Number of boundaries by placement, and of kept layers.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for placement in &self.placement {
            *match placement {
                Placement::Hbm => &mut counts.hbm,
                Placement::Host => &mut counts.host,
                Placement::Nvme => &mut counts.nvme,
                Placement::Recompute => &mut counts.recompute,
            } += 1;
        }
        counts.kept = self.keep.iter().filter(|&&k| k).count();
        counts
    }

    /// The placement as a string over `G C N -`.
    pub fn placement_letters(&self) -> String {
        self.placement.iter().map(|p| p.letter()).collect()
    }
}
