//! Somebody else's model: residual blocks of candle-transformers, as they are, and the data they are trained on.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::stable_diffusion::resnet::{ResnetBlock2D, ResnetBlock2DConfig};

/// Images of a micro-batch: rows, channels, height, width.
pub(crate) const SHAPE: (usize, usize, usize, usize) = (2, 8, 16, 16);
pub(crate) const BLOCKS: usize = 6;

/// The blocks, and the variables of each with their names.
pub(crate) struct Blocks {
    pub(crate) blocks: Vec<ResnetBlock2D>,
    pub(crate) variables: Vec<Vec<(String, Var)>>,
}

impl Blocks {
    pub(crate) fn new() -> Result<Blocks> {
        let map = VarMap::new();
        let builder = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let config = ResnetBlock2DConfig { temb_channels: None, groups: 4, ..ResnetBlock2DConfig::default() };
        let block = |l: usize| ResnetBlock2D::new(builder.pp(l), SHAPE.1, config);
        let blocks = (0..BLOCKS).map(block).collect::<Result<_>>()?;
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
        let of = |l: usize| named.iter().filter(|(n, _)| n.starts_with(&format!("{l}."))).cloned().collect();
        Ok(Blocks { blocks, variables: (0..BLOCKS).map(of).collect() })
    }
}

/// What goes in and what shall come out: the picture, smoothed.
pub(crate) fn batch(step: u64) -> Result<(Tensor, Tensor)> {
    let count = SHAPE.0 * SHAPE.1 * SHAPE.2 * SHAPE.3;
    let value = |i: usize| ((i as f32) * 0.37 + (step % 4) as f32).sin();
    let values: Vec<f32> = (0..count).map(value).collect();
    let x = Tensor::from_vec(values, SHAPE, &Device::Cpu)?;
    let y = (x.avg_pool2d(2)?.upsample_nearest2d(SHAPE.2, SHAPE.3)? * 0.5)?;
    Ok((x, y))
}
