//! PyTorch on the same shape, by a program of the caller's.

use std::path::Path;
use std::process::{Command, Stdio};

use lazy_store::BoxError;
use serde_json::Value;

use crate::Args;

/// One way PyTorch was run.
pub(crate) struct Peer {
    pub(crate) mode: String,
    pub(crate) name: String,
    pub(crate) tokens_per_s: f64,
    /// Layers that keep their internals, under the cap.
    pub(crate) kept: Option<usize>,
}

/// Everything resident, everything checkpointed, and as many layers kept as fit under 70 GiB.
pub(crate) fn run(python: &Path, program: &Path, args: &Args) -> Result<Vec<Peer>, BoxError> {
    let mut peers = modes(python, program, args, "resident,ckpt", 0.0)?;
    // A layer's internals take about so much: the largest number that fits is near, and what does not fit says so.
    let around: Vec<String> = (22..=26).rev().map(|k| format!("keep:{k}")).collect();
    for mode in around {
        let kept = modes(python, program, args, &mode, 70.0)?;
        if !kept.is_empty() {
            peers.extend(kept);
            break;
        }
    }
    Ok(peers)
}

fn modes(python: &Path, program: &Path, args: &Args, modes: &str, cap: f64) -> Result<Vec<Peer>, BoxError> {
    let [batch, seq, steps] = [args.batch.to_string(), args.seq.to_string(), args.steps.to_string()];
    let cap = cap.to_string();
    let output = Command::new(python)
        .arg(program)
        .args([
            "--shape",
            &args.shape,
            "--batch",
            &batch,
            "--seq",
            &seq,
            "--steps",
            &steps,
            "--modes",
            modes,
            "--cap-gb",
            &cap,
        ])
        .stderr(Stdio::inherit())
        .output()?;
    let mut peers = Vec::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Ok(value) = serde_json::from_str::<Value>(line) else { continue };
        eprintln!("{line}");
        if let (Some(mode), Some(speed)) = (value["mode"].as_str(), value["tok_s"].as_f64()) {
            let kept = mode.strip_prefix("keep:").and_then(|k| k.parse().ok());
            peers.push(Peer {
                mode: mode.into(),
                name: format!("PyTorch, {mode}"),
                tokens_per_s: speed,
                kept,
            });
        }
    }
    Ok(peers)
}
