//! Sizes and work.

use std::num::NonZeroU64;

use lazy_model::{
    AttentionKernel, Bytes, LayerIndex, ModelSpec, MomentFormat, Saving, Seconds, Sharding, StateFormat,
    Workload,
};
use serde_json::json;

use super::{GIVEN, json_of, spec, with};

#[test]
fn boundary_of_the_published_run() {
    // 72 x 1024 tokens of width 5120 in two bytes: 0.703125 GiB.
    let wide = with(json_of("llama-3.1-8b"), "hidden_size", Some(json!(5120)));
    let work = Workload::new(72, 1024, 2).unwrap();
    assert_eq!(spec(&wide).boundary_bytes(&work).get(), 754_974_720);
}

#[test]
fn work_of_a_small_decoder_by_brute_force() {
    let (h, heads, kv, d, m, v, s, b) = (6usize, 4usize, 2usize, 8usize, 10usize, 11usize, 5usize, 3usize);
    let config = json!({
        "model_type": "mistral", "hidden_size": h, "num_hidden_layers": 2, "intermediate_size": m,
        "vocab_size": v, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": d,
        "rms_norm_eps": 1e-6, "sliding_window": 3, "tie_word_embeddings": true,
    });
    // Count multiply-adds one output element at a time.
    let mut layer = 0usize;
    for _token in 0..b * s {
        layer += heads * d * h + 2 * kv * d * h + h * heads * d + 2 * m * h + h * m;
    }
    for _sequence in 0..b {
        for query in 0..s {
            let seen = (0..s).filter(|&key| key <= query && query - key < 3).count();
            layer += heads * seen * d * 2;
        }
    }
    let spec = spec(&config);
    let work = Workload::new(b, s, 4).unwrap();
    assert_eq!(spec.layer_forward_flops(LayerIndex(0), &work), 2.0 * layer as f64);
    let head = b * s * h * v;
    assert_eq!(spec.head_forward_flops(&work), 2.0 * head as f64);
    let per_token = 6.0 * (2 * layer + head) as f64 / (b * s) as f64;
    assert!((spec.flops_per_token_exact(&work) - per_token).abs() < 1e-9 * per_token);
    let layer_parameters = 2 * h + 2 * (heads * d * h) + 2 * (kv * d * h) + 3 * h * m;
    assert_eq!(spec.flops_per_token_6n(), 6.0 * (v * h + 2 * layer_parameters + h) as f64);
}

#[test]
fn internals_are_the_sum_of_the_documented_tensors() {
    // Qwen3-4B, 16 x 1024 tokens, bf16: widths 3 x 2560 (normed, residual, normed), 3 x 4096 (q twice, output),
    // 3 x 1024 (k twice, v), 3 x 9728; statistics of 2 + 2 x 32 + 8 numbers a token.
    let spec = spec(&json_of("qwen3-4b"));
    let work = Workload::new(16, 1024, 2).unwrap();
    let wide = 3 * (2560 + 4096 + 1024 + 9728) * 2;
    assert_eq!(spec.internals_bytes(LayerIndex(0), &work).get(), 16_384 * (wide + 74 * 4));
}

#[test]
fn impossible_workloads_are_refused() {
    assert!(Workload::new(0, 8, 2).is_err());
    assert!(Workload::new(1, 0, 2).is_err());
    assert!(Workload::new(1, 8, 3).is_err());
    assert!(Workload::new(usize::MAX, 2, 2).is_err());
    assert!(Workload::new(1 << 20, 1 << 11, 2).is_err());
}

/// 2 x 1024 tokens in bf16.
fn work() -> Workload {
    Workload::new(2, 1024, 2).unwrap()
}

/// Bytes of `wide` bf16 elements and `fp32` numbers for each of 2048 tokens.
fn bytes(wide: u64, fp32: u64) -> u64 {
    2048 * (2 * wide + 4 * fp32)
}

fn internals(name: &str, layer: usize) -> u64 {
    spec(&json_of(name)).internals_bytes(LayerIndex(layer), &work()).get()
}

#[test]
fn saved_tensors_of_gated_full_attention() {
    // h 5120, q 24 x 256, k 4 x 256, m 17408. Normed input, residual, normed residual; q before its norm, rotated, attention output, gate,
    // gated output; k before its norm, rotated, v; gate, up, product. Statistics: two norms, 24 + 4 heads' norms, 24 log-sum-exps.
    let wide = 3 * 5120 + 5 * 6144 + 3 * 1024 + 3 * 17408;
    assert_eq!(internals("qwen3.6-27b-text", 3), bytes(wide, 2 + 28 + 24));
}

#[test]
fn saved_tensors_of_linear_attention() {
    // 16 key heads and 48 value heads of 128. Convolution input 2 x 2048 + 6144; q, k; v, output, gate, gated output; beta; the inverse's 64.
    // Statistics: two norms of the stream, 2 x 16 of q and k, decay before and after softplus and summed up, output norm.
    let wide = 3 * 5120 + 10_240 + 2 * 2048 + 4 * 6144 + 48 + 48 * 64 + 3 * 17408;
    assert_eq!(internals("qwen3.6-27b-text", 0), bytes(wide, 2 + 32 + 3 * 48 + 48));
}

#[test]
fn saved_tensors_between_four_norms() {
    // Gemma 3 1B: h 1152, q 4 x 256, k 256, m 6912. Results of attention and MLP are kept for their norms.
    let wide = 5 * 1152 + 3 * 1024 + 3 * 256 + 3 * 6912;
    let sliding = internals("gemma-3-1b", 0);
    assert_eq!(sliding, bytes(wide, 4 + 5 + 4));
    assert_eq!(sliding, internals("gemma-3-1b", 5));
}

#[test]
fn saved_tensors_of_latent_attention_with_dense_mlp_and_with_experts() {
    // h 7168, ranks 1536 and 512, 128 heads with queries of 192 and values of 128.
    let attention = 3 * 7168 + 2 * 1536 + 2 * 512 + 2 * 128 * 192 + 2 * 128 * 128;
    let statistics = 2 + 2 + 128;
    assert_eq!(internals("deepseek-v3", 2), bytes(attention + 3 * 18_432, statistics));
    // 256 experts of 2048, 8 a token, one shared: rows in and out, gate, up, product; scores, weights, and indices of 8 bytes.
    let experts = 8 * (2 * 7168 + 3 * 2048) + 3 * 2048;
    assert_eq!(internals("deepseek-v3", 3), bytes(attention + experts, statistics + 256 + 8 + 2 * 8));
}

#[test]
fn saved_tensors_of_a_gated_shared_expert() {
    // Qwen3-Next: h 2048, q 16 x 256, k 2 x 256; 512 experts of 512, 10 a token; a shared one of 512 whose output is kept for its gate.
    let attention = 3 * 2048 + 5 * 4096 + 3 * 512;
    let experts = 10 * (2 * 2048 + 3 * 512) + 3 * 512 + 2048 + 1;
    assert_eq!(internals("qwen3-next-80b", 3), bytes(attention + experts, 2 + 18 + 16 + 512 + 10 + 20));
}

#[test]
fn eager_attention_saves_scores_and_repeated_keys() {
    let llama = spec(&json_of("llama-3.1-8b"));
    let of = |work: &Workload| llama.internals_bytes(LayerIndex(0), work).get();
    let eager = work().with_attention(AttentionKernel::Eager);
    // 32 heads x 1024 keys a token, once in fp32 and once in bf16; k and v grow from 1024 to 4096; no log-sum-exp.
    let more = 2048 * (32 * 1024 * 6 + 2 * 2 * (4096 - 1024)) - 2048 * 4 * 32;
    assert_eq!(of(&eager) - of(&work()), more);
    // In fp32 the softmax is kept once.
    let wide = |kernel| Workload::new(2, 1024, 4).unwrap().with_attention(kernel);
    let more = of(&wide(AttentionKernel::Eager)) - of(&wide(AttentionKernel::Fused));
    assert_eq!(more, 2048 * (32 * 1024 * 4 + 2 * 4 * (4096 - 1024)) - 2048 * 4 * 32);
    // Linear attention has no scores.
    let hybrid = spec(&json_of("qwen3.6-27b-text"));
    assert_eq!(hybrid.saved_tensors(LayerIndex(0), &eager), hybrid.saved_tensors(LayerIndex(0), &work()));
}

#[test]
fn workspaces_are_the_largest_moments() {
    let llama = spec(&json_of("llama-3.1-8b"));
    let fused = llama.layer_workspace(LayerIndex(0), &work());
    // Residual, gate, up, product; gradients of the last three.
    assert_eq!(fused.forward.get(), bytes(4096 + 3 * 14_336, 0));
    assert_eq!(fused.backward.get(), bytes(3 * 14_336, 0));
    let eager = llama.layer_workspace(LayerIndex(0), &work().with_attention(AttentionKernel::Eager));
    // q, k, v, both repeated; scores in bf16 and their softmax in fp32.
    assert_eq!(eager.forward.get(), bytes(4096 + 2 * 1024 + 2 * 4096, 0) + 2048 * 32 * 1024 * 6);
    // Residual's gradient, those of output, q, k, v, of repeated k and v; of softmax and scores in fp32.
    assert_eq!(eager.backward.get(), bytes(4096 + 2 * 4096 + 2 * 1024 + 2 * 4096, 2 * 32 * 1024));
}

#[test]
fn workspaces_of_mixers_beside_a_small_mlp() {
    let of = |name: &str, layer| {
        let narrow = spec(&with(json_of(name), "intermediate_size", Some(json!(64))));
        let workspace = narrow.layer_workspace(LayerIndex(layer), &work());
        (workspace.forward.get(), workspace.backward.get())
    };
    // Gated full attention: queries and keys before and after norm and rotation, v, gate. Gradients of the residual, gate, output, q, k, v;
    // q's in fp32, and a number for each of 24 heads.
    let (h, q, k) = (5120, 6144, 1024);
    let forward = bytes(2 * q + 3 * k + q, 0);
    assert_eq!(of("qwen3.6-27b-text", 3), (forward, bytes(h + 3 * q + 2 * k, q + 24)));
    // Delta rule with 48 heads of 128: q, k, v and gate, beta; inverse, transformed keys and values, corrected values, output; states of
    // 128 x 128 between 2 x 16 chunks; decay and its sum.
    let (conv, v, states) = (10_240, 6144, 2 * 16 * 48 * 128 * 128 * 2);
    let forward = bytes(conv + v + 48 + 48 * (64 + 3 * 128) + v, 2 * 48) + states;
    // Recomputed keys, values, corrected values; gradients of q, k, v, of transformed keys and values, output and gate, residual.
    let backward = bytes(h + 48 * 3 * 128 + conv + 48 * 2 * 128 + 2 * v, 48 * 66) + 2 * states;
    assert_eq!(of("qwen3.6-27b-text", 0), (forward, backward));
    // Latent attention: q and what the latent is projected up to; assembled q and k, v.
    let (h, q, v) = (7168, 128 * 192, 128 * 128);
    let forward = bytes(3 * q + 128 * 256 + v, 0);
    assert_eq!(of("deepseek-v3", 0), (forward, bytes(h + 2 * v + 2 * q, q + 128)));
}

#[test]
fn workspaces_of_experts() {
    // Mixtral: two of 8 experts of 14336 a token. Residual, normed residual, gate, up, product; scores, weights, two indices of 8 bytes.
    let mixtral = spec(&json_of("mixtral-8x7b")).layer_workspace(LayerIndex(0), &work());
    let work = 2 * 14_336;
    assert_eq!(mixtral.forward.get(), bytes(2 * 4096 + 3 * work, 8 + 2 + 4));
    assert_eq!(mixtral.backward.get(), bytes(4096 + 3 * work, 8 + 2));
}

#[test]
fn loss_holds_the_logits_of_a_chunk() {
    let qwen = spec(&json_of("qwen3-4b"));
    let chunked = qwen.loss_bytes(&work(), 128);
    assert_eq!(chunked.logits.get(), 128 * 151_936 * 2);
    assert_eq!(chunked.workspace.get(), 128 * (151_936 * 6 + 2 * 2560 * 2 + 4));
    assert_eq!(chunked.gradient, qwen.boundary_bytes(&work()));
    let whole = qwen.loss_bytes(&work(), u64::MAX);
    assert_eq!((whole.chunk_tokens, whole.logits.get()), (2048, 2048 * 151_936 * 2));
    assert_eq!(qwen.loss_bytes(&work(), 0).chunk_tokens, 1);
}

#[test]
fn projections_do_two_operations_for_every_matrix_element_a_token_meets() {
    for name in GIVEN {
        let spec = spec(&json_of(name));
        // One token attends to itself alone, so attention is next to nothing and can be told apart.
        let one = Workload::new(1, 1, 2).unwrap();
        for layer in [0, spec.layers() - 1] {
            let mut elements = 0.0;
            for parameter in spec.layer_parameters(LayerIndex(layer)) {
                let share = match &spec.layer_shapes[layer].mlp {
                    lazy_model::Mlp::Moe(moe) if parameter.name.contains(".experts.") => {
                        moe.top_k as f64 / moe.experts as f64
                    }
                    _ => 1.0,
                };
                if parameter.shape.len() > 1 {
                    elements += share * parameter.elements() as f64;
                }
            }
            let mixing = match &spec.layer_shapes[layer].mixer {
                lazy_model::Mixer::Attention(a) => 4 * a.heads * a.head_dim,
                lazy_model::Mixer::Latent(a) => 2 * a.heads * (a.nope_dim + a.rope_dim + a.value_dim),
                lazy_model::Mixer::Linear(n) => {
                    let (k, v) = (n.key_dim, n.value_dim);
                    n.value_heads * (6 * k * v + 128 * (3 * k + 2 * v))
                }
            };
            let flops = spec.layer_forward_flops(LayerIndex(layer), &one) - mixing as f64;
            assert!((flops - 2.0 * elements).abs() < 1e-9 * flops, "{name}: {flops} against {elements}");
        }
    }
}

/// The products of the chunked gated delta rule, one multiply-add at a time.
#[test]
fn work_of_the_delta_rule_by_brute_force() {
    let (key, value, heads, chunk) = (3usize, 5usize, 2usize, 64usize);
    let mut adds = 0usize;
    let mut product = |rows: usize, inner: usize, columns: usize| adds += rows * inner * columns;
    for _head in 0..heads {
        for _chunk in 0..2 {
            product(chunk, key, chunk); // keys with keys
            product(chunk, key, chunk); // queries with keys
            product(chunk, chunk, value); // inverse on values
            product(chunk, chunk, key); // inverse on keys
            product(chunk, key, value); // what the state predicts
            product(chunk, key, value); // what queries read from it
            product(chunk, chunk, value); // what they read from the chunk
            product(key, chunk, value); // the state's update
        }
    }
    let config = json!({
        "model_type": "qwen3_5_text", "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 8,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-6,
        "layer_types": ["linear_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": heads,
        "linear_key_head_dim": key, "linear_value_head_dim": value, "linear_conv_kernel_dim": 4,
    });
    let spec = spec(&config);
    let work = Workload::new(1, 2 * chunk, 2).unwrap();
    let conv = 2 * key + heads * value;
    let weights = 8 * (conv + 2 * heads * value + 2 * heads) + 4 * conv + 3 * 8 * 8;
    let flops = 2.0 * (adds + 2 * chunk * weights) as f64;
    assert_eq!(spec.layer_forward_flops(LayerIndex(0), &work), flops);
}

#[test]
fn both_conventions_of_the_published_run() {
    // 72 x 1024 tokens in 52.819 s: reported as 225.65, which is 26.94e9 parameters; the model has 26,895,998,464.
    let model = spec(&json_of("qwen3.6-27b-text"));
    let work = Workload::new(72, 1024, 2).unwrap();
    let step = Seconds(52.819);
    assert!((model.tflops_6n(&work, step) - 225.3).abs() < 0.05);
    let implied: f64 = 225.65e12 * 52.819 / (6.0 * 73_728.0);
    assert!((implied - 26.94e9).abs() < 0.005e9);
    assert!((model.mfu_6n(&work, step, 989.0) - model.tflops_6n(&work, step) / 989.0).abs() < 1e-12);
    // Exactly: the look-up of the embedding multiplies nothing, attention and delta rule do.
    let (exact, rough) = (model.flops_per_token_exact(&work), model.flops_per_token_6n());
    let lookup = 6.0 * 248_320.0 * 5120.0;
    assert!(exact > rough - lookup && exact < rough);
    assert!(model.tflops_exact(&work, step) < model.tflops_6n(&work, step));
    assert_eq!(
        model.layer_backward_flops(LayerIndex(0), &work),
        2.0 * model.layer_recompute_flops(LayerIndex(0), &work)
    );
}

/// The last product of a dense MLP is not run again for what the backward reads, unless a norm behind it does.
#[test]
fn recompute_of_products_leaves_the_output_out() {
    let work = Workload::new(16, 1024, 2).unwrap().with_saving(Saving::Products);
    let saved = |name: &str| {
        let model = spec(&json_of(name));
        let layer = LayerIndex(0);
        model.layer_forward_flops(layer, &work) - model.layer_recompute_flops(layer, &work)
    };
    assert_eq!(saved("qwen3-4b"), 2.0 * 16_384.0 * 2560.0 * 9728.0);
    assert_eq!(saved("gemma-2-2b"), 0.0);
}

#[test]
fn weight_bytes_of_a_layer_as_the_reference_counts_them() {
    let model = spec(&json_of("qwen3.6-27b-text"));
    let (h, k, m) = (5120u64, 1024u64, 17_408u64);
    let reference = 2 * (2 * h * h + 2 * h * k + 3 * h * m + 2 * h);
    assert_eq!(model.reference_layer_weight_bytes(2), Some(Bytes(reference)));
    assert_ne!(2 * model.layer_parameter_count(LayerIndex(0)), reference);
    // It says nothing of experts, nor of latent attention.
    for name in ["mixtral-8x7b", "deepseek-v3"] {
        assert_eq!(spec(&json_of(name)).reference_layer_weight_bytes(2), None);
    }
}

#[test]
fn training_state_by_format_and_sharding() {
    let model = spec(&json_of("qwen3-8b"));
    let n = 8_190_735_360u64;
    let format =
        StateFormat { weight_bytes: 2, gradient_bytes: 4, master: true, moments: MomentFormat::Fp32 };
    let ranks = NonZeroU64::new(7).unwrap();
    let of = |sharding| model.state_bytes(format, sharding, ranks);
    let shard = n.div_ceil(7);
    assert_eq!(of(Sharding::Replicated).total().get(), n * (2 + 4 + 4 + 8));
    assert_eq!(of(Sharding::Optimizer).total().get(), n * (2 + 4) + shard * 12);
    assert_eq!(of(Sharding::Gradients).total().get(), n * 2 + shard * 16);
    assert_eq!(of(Sharding::Weights).total().get(), shard * 18);
    let alone = |moments| {
        let format = StateFormat { master: false, moments, ..format };
        model.state_bytes(format, Sharding::Weights, NonZeroU64::MIN).moments.get()
    };
    assert_eq!(alone(MomentFormat::Bf16), 4 * n);
    // 8 bits and a scale for every 256 elements.
    assert_eq!(alone(MomentFormat::EightBit), 2 * n + 2 * 4 * n.div_ceil(256));
}

#[test]
fn m7_budgets_are_binary_and_carry_their_unit() {
    let model = spec(&json_of("qwen3.6-27b-text"));
    let boundary = model.boundary_bytes(&Workload::new(72, 1024, 2).unwrap());
    assert_eq!(boundary.as_gib(), 0.703125);
    let fit = |budget: Bytes| budget.get() / boundary.get();
    assert_eq!([8.0, 10.0, 12.0, 14.0, 15.0].map(|gib| fit(Bytes::from_gib(gib))), [11, 14, 17, 19, 21]);
    assert_eq!([8, 10, 12, 14, 15].map(|gb| fit(Bytes(gb * 1_000_000_000))), [10, 13, 15, 18, 19]);
    assert!(boundary.to_string().ends_with("MiB"));
}

#[test]
fn a_model_without_windows_does_more_work_than_one_with() {
    let gemma = spec(&json_of("gemma-3-1b"));
    let long = Workload::new(1, 8192, 2).unwrap();
    assert!(
        gemma.layer_forward_flops(LayerIndex(0), &long) < gemma.layer_forward_flops(LayerIndex(5), &long)
    );
    // A window wider than the sequence hides nothing.
    let short = Workload::new(1, 512, 2).unwrap();
    let flops = |l| gemma.layer_forward_flops(LayerIndex(l), &short);
    assert_eq!(flops(0), flops(5));
    let all: fn(&ModelSpec) -> u64 = ModelSpec::total_parameters;
    let wide = with(json_of("gemma-3-1b"), "sliding_window", Some(json!(1 << 20)));
    assert_eq!(all(&spec(&wide)), all(&gemma));
}
