//! Somebody else's model: residual blocks of candle-transformers, as they are, and the data they are trained on.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::stable_diffusion::resnet::{ResnetBlock2D, ResnetBlock2DConfig};
use lazy_model::Bytes;
use lazy_runtime::candle::{Parameter, tensor, write};
use lazy_runtime::{Context, LayerError, Loss, Output};

/// Images of a micro-batch: rows, channels, height, width.
pub(crate) const SHAPE: (usize, usize, usize, usize) = (2, 8, 16, 16);
pub(crate) const BLOCKS: usize = 6;

pub(crate) const BOUNDARY: Bytes = Bytes((4 * SHAPE.0 * SHAPE.1 * SHAPE.2 * SHAPE.3) as u64);

/// The blocks, and the variables of each with their names.
pub(crate) struct Blocks {
    pub(crate) blocks: Vec<ResnetBlock2D>,
    pub(crate) variables: Vec<Vec<Parameter>>,
}

impl Blocks {
    pub(crate) fn new() -> candle_core::Result<Blocks> {
        let map = VarMap::new();
        let builder = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let config = ResnetBlock2DConfig { temb_channels: None, groups: 4, ..ResnetBlock2DConfig::default() };
        let block = |l: usize| ResnetBlock2D::new(builder.pp(l), SHAPE.1, config);
        let blocks = (0..BLOCKS).map(block).collect::<candle_core::Result<_>>()?;
        let mut named: Vec<(String, Var)> = match map.data().lock() {
            Ok(data) => data.iter().map(|(name, variable)| (name.clone(), variable.clone())).collect(),
            Err(_) => candle_core::bail!("another thread failed while it made variables"),
        };
        named.sort_by(|a, b| a.0.cmp(&b.0));
        for (name, variable) in &named {
            // The same start in every run, and blocks that are not yet close to what they shall be.
            let count = variable.elem_count();
            let wave = (0..count).map(|i| ((i * 7 + name.len() * 13) as f32).sin() * 0.1);
            let base =
                if name.ends_with("norm1.weight") || name.ends_with("norm2.weight") { 1.0 } else { 0.0 };
            let values: Vec<f32> = wave.map(|v| base + v).collect();
            variable.set(&Tensor::from_vec(values, variable.dims(), &Device::Cpu)?)?;
        }
        let number = |(number, (name, variable))| Parameter { number, name, variable };
        let numbered: Vec<Parameter> = named.into_iter().enumerate().map(number).collect();
        let of =
            |l: usize| numbered.iter().filter(|p| p.name.starts_with(&format!("{l}."))).cloned().collect();
        Ok(Blocks { blocks, variables: (0..BLOCKS).map(of).collect() })
    }
}

/// What goes in and what shall come out: the picture, smoothed.
pub(crate) fn batch(step: u64) -> candle_core::Result<(Tensor, Tensor)> {
    let count = SHAPE.0 * SHAPE.1 * SHAPE.2 * SHAPE.3;
    let value = |i: usize| ((i as f32) * 0.37 + (step % 4) as f32).sin();
    let values: Vec<f32> = (0..count).map(value).collect();
    let x = Tensor::from_vec(values, SHAPE, &Device::Cpu)?;
    let y = (x.avg_pool2d(2)?.upsample_nearest2d(SHAPE.2, SHAPE.3)? * 0.5)?;
    Ok((x, y))
}

/// Where pictures come in.
pub(crate) fn picture(cx: &Context<'_>, out: Output<'_>) -> Result<(), LayerError> {
    write(&cx.inputs::<(Tensor, Tensor)>()?.0, out.bytes()?)
}

/// The mean square of what is off at the end.
pub(crate) fn loss(cx: &Context<'_>, call: Loss<'_>) -> Result<(), LayerError> {
    let off = (tensor(call.x.bytes()?, &SHAPE.into())? - &cx.inputs::<(Tensor, Tensor)>()?.1)?;
    call.loss.f32()?[0] = off.sqr()?.mean_all()?.to_scalar()?;
    let dx = (&off * (2.0 / off.elem_count() as f64))?;
    call.dx.map_or(Ok(()), |out| write(&dx, out.bytes()?))
}
