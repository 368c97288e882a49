//! Spilled and recomputed, the blocks have the gradients of candle's own one graph, and train the same way under every plan.
#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;

/// Losses of gradient descent by candle alone, every step one graph.
fn by_candle(blocks: &Blocks, steps: u64) -> Vec<f32> {
    let mut losses = Vec::new();
    for step in 0..steps {
        let (x, y) = batch(step).unwrap();
        let out = blocks.blocks.iter().fold(x, |x, block| block.forward(&x, None).unwrap());
        let loss = (out - y).unwrap().sqr().unwrap().mean_all().unwrap();
        losses.push(loss.to_scalar::<f32>().unwrap());
        let gradients = loss.backward().unwrap();
        for Parameter { variable, .. } in blocks.variables.iter().flatten() {
            let gradient = gradients.get(variable).unwrap();
            variable.set(&(variable.as_tensor() - (gradient * RATE).unwrap()).unwrap()).unwrap();
        }
    }
    losses
}

fn values(variables: &[Vec<Parameter>]) -> Vec<f32> {
    variables
        .iter()
        .flatten()
        .flat_map(|p| p.variable.flatten_all().unwrap().to_vec1::<f32>().unwrap())
        .collect()
}

#[test]
fn every_plan_trains_as_one_graph_does() {
    let alone = Blocks::new().unwrap();
    let first = values(&alone.variables);
    let wanted = by_candle(&alone, 4);
    let wanted_weights = values(&alone.variables);
    let mut bits = None;
    for letters in ["GGGGGGG", "CN-G--G", "N---C-G"] {
        let blocks = Blocks::new().unwrap();
        let variables = blocks.variables.clone();
        let losses = train(blocks, letters, 4).unwrap();
        for (loss, wanted) in losses.iter().zip(&wanted) {
            assert!((loss - wanted).abs() <= 1e-6 * wanted.abs(), "{letters}: {losses:?}, not {wanted:?}");
        }
        // What the steps changed, by norm: frameworks add shared gradients in another order.
        let norm = |a: &[f32], b: &[f32]| -> f64 {
            a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
        };
        let trained = values(&variables);
        let (off, moved) = (norm(&trained, &wanted_weights), norm(&wanted_weights, &first));
        assert!(
            off <= 1e-6 * moved.max(norm(&wanted_weights, &vec![0.0; first.len()])),
            "{letters}: {off} of {moved}"
        );
        // Among plans every bit is the same.
        assert!(*bits.get_or_insert_with(|| trained.clone()) == trained, "{letters}");
    }
}

#[test]
fn it_trains() {
    main().unwrap();
}
