//! Where the first weights of a run come from.

mod checkpoint;

use lazy_model::Parameter;

use crate::error::Result;
use crate::random::fill_initial;

pub use checkpoint::CheckpointWeights;

/// The first weights of a run.
pub enum InitialWeights {
    /// Drawn: see [`crate::random::initial_values`].
    Random {
        /// Seed of the run.
        seed: u64,
        /// Layers of the model.
        layers: usize,
    },
    /// Read from a folder.
    Checkpoint(CheckpointWeights),
}

impl InitialWeights {
    /// The elements of a parameter from `first` on, in row-major order.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn fill(&self, parameter: &Parameter, first: usize, values: &mut [f32]) -> Result<()> {
        let Parameter { name, shape } = parameter;
        match self {
            InitialWeights::Checkpoint(weights) => weights.fill(name, first, values)?,
            InitialWeights::Random { seed, layers } => {
                fill_initial(*seed, name, shape, first, values);
                if name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight") {
                    let scale = residual_scale(*layers);
                    values.iter_mut().for_each(|v| *v *= scale);
                }
            }
        }
        Ok(())
    }
}

/// Scale of the first weights of the two projections that add to the residual stream: one over the root of their number, so that
/// the sum starts out no larger in a deep model (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).
fn residual_scale(layers: usize) -> f32 {
    1.0 / (2.0 * layers as f32).sqrt()
}
