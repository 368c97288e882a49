//! Which models this decoder can compute.

use lazy_model::{Attention, DenseMlp, Family, LayerIndex, LayerShape, Mixer, Mlp, ModelSpec};

use super::DecoderError;

/// The shape of a layer, the same for all of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) intermediate: usize,
    /// Elements of a layer's weights.
    pub(crate) parameters: usize,
}

impl Geometry {
    pub(crate) fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    pub(crate) fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// Refuses what would otherwise be computed wrongly: every setting of a config that Qwen3's plain form does not have.
pub(crate) fn check(spec: &ModelSpec) -> Result<Geometry, DecoderError> {
    let refuse = |problem: String| Err(DecoderError::Config { problem });
    let first = spec.layer_shapes.first().map(|layer| (layer.mixer, layer.mlp));
    let Some((Mixer::Attention(attention), Mlp::Dense(mlp))) = first else {
        return refuse(other_family(spec));
    };
    if spec.family != Family::Qwen3 || !attention.qk_norm {
        return refuse(other_family(spec));
    }
    if let Some(kind) = &spec.rope_scaling {
        return refuse(format!(
            "it asks for rotary scaling {kind:?}, which is not computed here: remove rope_scaling"
        ));
    }
    let biased = |layer: &LayerShape| {
        matches!(
            layer.mixer,
            Mixer::Attention(Attention { qkv_bias: true, .. } | Attention { output_bias: true, .. })
        ) || matches!(layer.mlp, Mlp::Dense(DenseMlp { bias: true, .. }))
    };
    let windowed =
        |layer: &LayerShape| matches!(layer.mixer, Mixer::Attention(Attention { window: Some(_), .. }));
    if spec.layer_shapes.iter().any(biased) {
        return refuse(
            "it asks for biases, which are not computed here: set attention_bias to false".to_owned(),
        );
    }
    if spec.layer_shapes.iter().any(windowed) {
        return refuse(
            "it has layers with a sliding window, which are not computed here: set use_sliding_window to false"
                .to_owned(),
        );
    }
    if spec.layer_shapes.windows(2).any(|pair| pair[0] != pair[1]) {
        return refuse(
            "its layers differ in shape, and this decoder computes layers that are alike".to_owned(),
        );
    }
    let head_dim = attention.head_dim;
    if !head_dim.is_multiple_of(2) {
        return refuse(format!(
            "its head_dim {head_dim} is odd, and the rotary embedding turns pairs: make it even"
        ));
    }
    Ok(Geometry {
        hidden: spec.hidden,
        heads: attention.heads,
        kv_heads: attention.kv_heads,
        head_dim,
        intermediate: mlp.intermediate,
        parameters: spec.layer_parameter_count(LayerIndex(0)) as usize,
    })
}

fn other_family(spec: &ModelSpec) -> String {
    format!("its model_type is {:?}, and this decoder computes \"qwen3\"", spec.family.model_type())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHIPPED: &str = include_str!("../../config.json");

    fn attention(spec: &mut ModelSpec, layer: usize) -> &mut Attention {
        match &mut spec.layer_shapes[layer].mixer {
            Mixer::Attention(attention) => attention,
            other => panic!("{other:?}"),
        }
    }

    fn message(change: impl FnOnce(&mut ModelSpec)) -> String {
        let mut spec = ModelSpec::from_json(SHIPPED).unwrap();
        change(&mut spec);
        check(&spec).unwrap_err().to_string()
    }

    #[test]
    fn the_shipped_config_is_computed_and_has_the_size_promised() {
        let spec = ModelSpec::from_json(SHIPPED).unwrap();
        check(&spec).unwrap();
        assert_eq!((spec.layers(), spec.vocab, spec.tied), (12, 256, true));
        assert_eq!(spec.total_parameters(), 5_363_136);
    }

    #[test]
    fn what_is_not_computed_is_refused_by_name() {
        assert!(message(|spec| spec.family = Family::Llama).contains("\"llama\""));
        assert!(message(|spec| spec.rope_scaling = Some("yarn".into())).contains("rotary scaling \"yarn\""));
        assert!(message(|spec| attention(spec, 0).qkv_bias = true).contains("attention_bias"));
        assert!(message(|spec| attention(spec, 3).window = Some(8)).contains("sliding window"));
        assert!(message(|spec| attention(spec, 5).heads *= 2).contains("differ in shape"));
        let odd = |spec: &mut ModelSpec| (0..12).for_each(|l| attention(spec, l).head_dim = 33);
        assert!(message(odd).contains("33 is odd"));
    }
}
