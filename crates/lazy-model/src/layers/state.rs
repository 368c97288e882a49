//! Weights, gradients and optimizer state by format and sharding.

use std::num::NonZeroU64;

use crate::config::ModelSpec;
use crate::units::Bytes;

/// Elements that share a scale in 8-bit moments.
const BLOCK: u64 = 256;

/// How the two moments of Adam are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MomentFormat {
    /// 4 bytes an element and moment.
    Fp32,
    /// 2 bytes an element and moment.
    Bf16,
    /// 1 byte an element and moment, and an fp32 scale for every block of 256.
    EightBit,
}

/// What training holds for every parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateFormat {
    /// Bytes of an element of the weights that layers compute with.
    pub weight_bytes: u64,
    /// Bytes of an element of the gradients.
    pub gradient_bytes: u64,
    /// The optimizer has an fp32 copy of the weights.
    pub master: bool,
    /// Its moments.
    pub moments: MomentFormat,
}

/// What is cut over data-parallel ranks: the stages of ZeRO. Each includes the ones before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Sharding {
    /// Nothing: every rank has all (stage 0).
    Replicated,
    /// Master weights and moments (stage 1).
    Optimizer,
    /// Gradients too (stage 2).
    Gradients,
    /// Weights too (stage 3).
    Weights,
}

/// Bytes on each rank. Shards are of equal size: the last one is padded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateBytes {
    /// Weights that layers compute with.
    pub weights: Bytes,
    /// Gradients.
    pub gradients: Bytes,
    /// The optimizer's fp32 copy of the weights.
    pub master: Bytes,
    /// Both moments.
    pub moments: Bytes,
}

impl StateBytes {
    /// All four.
    pub fn total(&self) -> Bytes {
        self.weights + self.gradients + self.master + self.moments
    }
}

impl MomentFormat {
    /// Both moments of `elements`.
    fn bytes(self, elements: u64) -> Bytes {
        let one = match self {
            MomentFormat::Fp32 => Bytes(elements) * 4,
            MomentFormat::Bf16 => Bytes(elements) * 2,
            MomentFormat::EightBit => Bytes(elements) + Bytes(elements.div_ceil(BLOCK)) * 4,
        };
        one * 2
    }
}

impl ModelSpec {
    /// What each of `ranks` ranks holds of the whole model. A tied weight is held once.
    pub fn state_bytes(&self, format: StateFormat, sharding: Sharding, ranks: NonZeroU64) -> StateBytes {
        let all = self.total_parameters();
        let held = |from: Sharding| if sharding >= from { all.div_ceil(ranks.get()) } else { all };
        let optimizer = held(Sharding::Optimizer);
        StateBytes {
            weights: Bytes(held(Sharding::Weights)) * format.weight_bytes,
            gradients: Bytes(held(Sharding::Gradients)) * format.gradient_bytes,
            master: Bytes(if format.master { optimizer } else { 0 }) * 4,
            moments: format.moments.bytes(optimizer),
        }
    }
}
