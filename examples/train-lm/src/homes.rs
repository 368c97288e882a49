//! Weights and gradients of layers that are at home in host RAM: set, read and updated there between steps.

use lazy_optim_nvme::{Gradient, WeightsOut};
use lazy_runtime::{Executor, FinalGradient, LayerError, ModelOptions, RuntimeError};
use serde::{Deserialize, Serialize};

use crate::cuda::Real;

/// Where weights and gradients of layers are when no layer uses them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightsHome {
    /// In HBM
    #[default]
    Hbm,
    /// In pinned host RAM: they come into HBM layer by layer, and gradients go out the same way
    Host,
}

impl WeightsHome {
    /// The options of a model whose step has so many micro-batches.
    pub fn options(self, micro_batches: usize) -> ModelOptions {
        let streamed = self == WeightsHome::Host;
        ModelOptions { micro_batches, stream_weights: streamed, stream_gradients: streamed, on_nvme: false }
    }
}

/// Whether a model's layers have their weights there.
pub(crate) fn are_in_ram(options: &ModelOptions) -> bool {
    options.stream_weights && options.stream_gradients && !options.on_nvme
}

/// Sets bytes of a parameter at home in RAM from `first` on.
pub(crate) fn write(
    executor: &Executor,
    parameter: usize,
    first: usize,
    bytes: Vec<u8>,
) -> Result<(), RuntimeError> {
    executor.update_in_ram(move |all| {
        let weights = weights_of(all, parameter)?;
        let end = first.checked_add(bytes.len());
        let room =
            end.and_then(|end| weights.get_mut(first..end)).ok_or("weights are outside their parameter")?;
        room.copy_from_slice(&bytes);
        Ok(())
    })
}

/// The bytes of a parameter at home in RAM, and no others of its layer.
pub(crate) fn read(executor: &Executor, parameter: usize) -> Result<Vec<u8>, RuntimeError> {
    executor.update_in_ram(move |all| Ok(weights_of(all, parameter)?.to_vec()))
}

fn weights_of(all: Vec<FinalGradient<'_>>, parameter: usize) -> Result<&mut [u8], LayerError> {
    let home = all.into_iter().find(|home| home.parameter.id.0 == parameter);
    home.and_then(|home| home.weights).ok_or("weights are not in RAM")?.bytes()
}

/// A parameter at home in RAM as the optimizer takes it: its gradient, and room for its weights.
pub(crate) fn to_update<'a>(
    home: FinalGradient<'a>,
    [weights, gradients]: [Real; 2],
) -> Result<(Gradient<'a>, WeightsOut<'a>), LayerError> {
    let (room, gradient) = home.in_memory()?;
    let gradient = match gradients {
        Real::F32 => Gradient::F32(gradient.f32()?),
        Real::Bf16 => Gradient::Bf16(bits(bytemuck::try_cast_slice(gradient.bytes()?))?),
    };
    let room = match weights {
        Real::F32 => WeightsOut::F32(room.f32()?),
        Real::Bf16 => WeightsOut::Bf16(bits(bytemuck::try_cast_slice_mut(room.bytes()?))?),
    };
    Ok((gradient, room))
}

/// Buffers begin at multiples of 256 bytes, so that numbers lie whole in them.
fn bits<T>(cast: Result<T, bytemuck::PodCastError>) -> Result<T, LayerError> {
    cast.map_err(|e| format!("bytes of a parameter are no bfloat16: {e}").into())
}

#[cfg(test)]
mod tests {
    use lazy_runtime::{Input, Output, Parameter};

    use super::*;

    #[test]
    fn bytes_are_handed_to_the_optimizer_in_their_types() {
        let parameter = Parameter::own(0, "w");
        // 1, -2 and 0.5 as bfloat16, and 1.5 as float32.
        let (gradient, mut weights) = ([0x3f80u16, 0xc000, 0x3f00, 0], [1.5f32, 0.0]);
        let mut home = |types| {
            let home = FinalGradient {
                parameter: &parameter,
                gradient: Some(Input::of(bytemuck::bytes_of(&gradient))),
                weights: Some(Output::of(bytemuck::bytes_of_mut(&mut weights))),
                stream: None,
            };
            match to_update(home, types).unwrap() {
                (Gradient::Bf16(gradient), WeightsOut::F32(weights)) => {
                    assert_eq!(gradient, [0x3f80, 0xc000, 0x3f00, 0]);
                    assert_eq!(weights, [1.5, 0.0]);
                }
                (Gradient::F32(gradient), WeightsOut::Bf16(weights)) => {
                    assert_eq!(
                        gradient.iter().map(|g| g.to_bits()).collect::<Vec<_>>(),
                        [0xc000_3f80, 0x3f00]
                    );
                    assert_eq!(weights, [0, 0x3fc0, 0, 0]);
                }
                other => panic!("{other:?}"),
            }
        };
        home([Real::F32, Real::Bf16]);
        home([Real::Bf16, Real::F32]);
        // Three bytes are no numbers; what is not handed over is no update.
        let odd = FinalGradient {
            parameter: &parameter,
            gradient: Some(Input::of(&[0; 3])),
            weights: Some(Output::of(&mut [])),
            stream: None,
        };
        assert!(to_update(odd, [Real::Bf16, Real::Bf16]).is_err());
        let absent = FinalGradient { parameter: &parameter, gradient: None, weights: None, stream: None };
        assert!(to_update(absent, [Real::F32, Real::F32]).is_err());
    }
}
