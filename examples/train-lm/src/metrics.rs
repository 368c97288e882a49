//! What is written down of every step.

use lazy_model::schedule::ExposedSeconds;
use lazy_model::{Bytes, Lane, Seconds, Span, TierBytes};
use serde::{Deserialize, Serialize};

/// A line of `metrics.jsonl`. Times are seconds, sizes bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Optimizer step, from 0.
    pub step: u64,
    /// Mean loss over the step's tokens, in nats; null where it is not finite.
    #[serde(deserialize_with = "null_as_nan")]
    pub loss: f32,
    /// Norm of all gradients before clipping; null where it is not finite.
    pub grad_norm: Option<f64>,
    /// The gradients were not finite and the step changed nothing.
    pub skipped: bool,
    /// Learning rate used.
    pub lr: f64,
    /// Where the time went.
    pub seconds: StepSeconds,
    /// Tokens a second, the whole step counted.
    pub tokens_per_s: f64,
    /// Model TFLOP/s by the 6N convention: six operations a parameter and token, recomputation not counted.
    pub tflops: f64,
    /// Bytes moved on each lane, activations and optimizer state together.
    pub bytes: LaneBytes,
    /// Time arithmetic waited for each link.
    pub exposed_s: ExposedSeconds,
    /// Time each link moved activations, weights and gradients, whatever ran beside it. Zero in lines of versions that did not tell.
    #[serde(default)]
    pub busy_s: LaneSeconds,
    /// Most bytes held in each tier.
    pub peak_bytes: TierBytes,
    /// Resident set of the process, all of it.
    pub rss_bytes: Bytes,
}

/// JSON has no NaN, so a loss that is none is written as null.
pub(crate) fn null_as_nan<'de, D, F>(deserializer: D) -> Result<F, D::Error>
where
    D: serde::Deserializer<'de>,
    F: Deserialize<'de> + From<f32>,
{
    Ok(Option::<F>::deserialize(deserializer)?.unwrap_or_else(|| f32::NAN.into()))
}

/// Parts of a step's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepSeconds {
    /// The whole step.
    pub step: Seconds,
    /// Prologue and layers forward.
    pub forward: Seconds,
    /// Loss and layers backward, recomputation included.
    pub backward: Seconds,
    /// The forwards in it that were run again. Zero in lines of versions that did not tell.
    #[serde(default)]
    pub recompute: Seconds,
    /// Norm of the gradients and clip coefficient.
    pub clip: Seconds,
    /// Streaming and updating the state, and the commit.
    pub optimizer: Seconds,
    /// Setting gradients to zero.
    pub zero_grad: Seconds,
}

impl StepSeconds {
    /// All that a promise counts as the optimizer: norm and clip coefficient, update and commit, setting gradients to zero.
    pub fn all_of_optimizer(&self) -> Seconds {
        self.clip + self.optimizer + self.zero_grad
    }
}

/// Bytes moved on each lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneBytes {
    /// Device to host.
    pub d2h: Bytes,
    /// Host to device.
    pub h2d: Bytes,
    /// Written to NVMe.
    pub nvme_write: Bytes,
    /// Read from NVMe.
    pub nvme_read: Bytes,
}

impl LaneBytes {
    /// Adds up the bytes of spans.
    pub fn of<'a>(spans: impl IntoIterator<Item = &'a Span>) -> Self {
        let mut bytes = LaneBytes::default();
        for span in spans {
            match span.lane {
                Lane::D2h => bytes.d2h += span.bytes,
                Lane::H2d => bytes.h2d += span.bytes,
                Lane::NvmeWrite => bytes.nvme_write += span.bytes,
                Lane::NvmeRead => bytes.nvme_read += span.bytes,
                Lane::Compute | Lane::Optimizer => {}
            }
        }
        bytes
    }
}

/// Time of each lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LaneSeconds {
    /// Device to host.
    pub d2h: Seconds,
    /// Host to device.
    pub h2d: Seconds,
    /// Writes to NVMe.
    pub nvme_write: Seconds,
    /// Reads from NVMe.
    pub nvme_read: Seconds,
}

impl LaneSeconds {
    /// Adds up the spans of each lane.
    pub fn of<'a>(spans: impl IntoIterator<Item = &'a Span>) -> Self {
        let mut seconds = LaneSeconds::default();
        for span in spans {
            match span.lane {
                Lane::D2h => seconds.d2h += span.duration(),
                Lane::H2d => seconds.h2d += span.duration(),
                Lane::NvmeWrite => seconds.nvme_write += span.duration(),
                Lane::NvmeRead => seconds.nvme_read += span.duration(),
                Lane::Compute | Lane::Optimizer => {}
            }
        }
        seconds
    }
}

/// Resident set of this process, in bytes; zero where `/proc` does not tell.
pub fn resident_bytes() -> Bytes {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
    Bytes(pages.unwrap_or(0) * rustix::param::page_size() as u64)
}
