//! Which models this decoder can compute.

use lazy_model::{Family, LayerKind, ModelSpec};

use super::DecoderError;

/// Refuses what would otherwise be computed wrongly: every setting of a config that Qwen3's plain form does not have.
pub(crate) fn check(spec: &ModelSpec) -> Result<(), DecoderError> {
    let sliding = |kind: &LayerKind| matches!(kind, LayerKind::Sliding { .. });
    let problem = if spec.family != Family::Qwen3 || !spec.qk_norm {
        format!("its model_type is {:?}, and this decoder computes \"qwen3\"", spec.family.model_type())
    } else if let Some(kind) = &spec.rope_scaling {
        format!("it asks for rotary scaling {kind:?}, which is not computed here: remove rope_scaling")
    } else if spec.qkv_bias || spec.output_bias || spec.mlp_bias {
        "it asks for biases, which are not computed here: set attention_bias to false".to_owned()
    } else if spec.layer_kinds.iter().any(sliding) {
        "it has layers with a sliding window, which are not computed here: set use_sliding_window to false"
            .to_owned()
    } else if !spec.head_dim.is_multiple_of(2) {
        format!("its head_dim {} is odd, and the rotary embedding turns pairs: make it even", spec.head_dim)
    } else {
        return Ok(());
    };
    Err(DecoderError::Config { problem })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHIPPED: &str = include_str!("../../config.json");

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
        assert!(message(|spec| spec.qkv_bias = true).contains("attention_bias"));
        assert!(
            message(|spec| spec.layer_kinds[3] = LayerKind::Sliding { window: 8 }).contains("sliding window")
        );
        assert!(message(|spec| spec.head_dim = 33).contains("33 is odd"));
    }
}
