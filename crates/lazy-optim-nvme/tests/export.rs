//! One consolidated file: written from generations, read by other programs, read back.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot set up should stop")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::cut;
use common::ranks::{Ranks, flat};
use lazy_optim_nvme::{LoadOptions, Moments, OptimError, ParamSpec, export};
use safetensors::SafeTensors;

fn whole() -> Vec<ParamSpec> {
    vec![
        ParamSpec::new("p0", &[300, 2000]),
        ParamSpec::new("p1", &[70_001]).with_moments(Moments::Int8),
        ParamSpec::new("p2", &[]).with_moments(Moments::Bf16),
        ParamSpec::new("p3", &[0, 4]),
    ]
}

/// Two ranks after two steps, saved.
fn ranks() -> (Ranks, Vec<std::path::PathBuf>) {
    let mut ranks = Ranks::create(&flat(&whole(), 2), &cut(40_000, 64, 2));
    (1..=2).for_each(|step| ranks.step(step));
    let saved = ranks.save("here");
    (ranks, saved)
}

fn load(file: &Path, shards: &[Vec<ParamSpec>], lossy: bool) -> Result<Ranks, OptimError> {
    Ranks::load(&[file], shards, &cut(30_000, 64, 2), LoadOptions { lossy, ..LoadOptions::default() })
}

#[test]
fn an_exported_file_is_a_safetensors_file_of_whole_float32_tensors_and_is_loaded_again() {
    let (mut ranks, saved) = ranks();
    let state = ranks.state();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("state.safetensors");
    std::fs::write(&file, "an older one").unwrap();
    export(&saved, &file).unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);

    let bytes = std::fs::read(&file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.len(), 3 * whole().len());
    for (param, state) in whole().iter().zip(&state) {
        for (end, bits) in ["", ".exp_avg", ".exp_avg_sq"].into_iter().zip(state) {
            let tensor = tensors.tensor(&format!("{}{end}", param.name)).unwrap();
            assert_eq!((tensor.dtype(), tensor.shape()), (safetensors::Dtype::F32, param.shape.as_slice()));
            let found: Vec<_> = tensor.data().as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
            assert!(found == *bits, "{}{end}", param.name);
        }
    }
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = metadata.metadata().clone().unwrap();
    assert_eq!((metadata["format"].as_str(), metadata["version"].as_str()), ("lazy-optim-nvme", "2"));
    let counts: BTreeMap<String, u64> = serde_json::from_str(&metadata["step_counts"]).unwrap();
    assert!(counts.len() == 4 && counts.values().all(|count| *count == 2));

    // Into three ranks, with float32 moments as they are in the file: exact.
    let plain: Vec<_> = whole().iter().map(|param| ParamSpec::new(&param.name, &param.shape)).collect();
    let mut loaded = load(&file, &flat(&plain, 3), false).unwrap();
    assert!(loaded.state() == state);
    assert_eq!(loaded.0[2].adam.step_counts(), [2; 4]);
    assert_eq!((loaded.0[0].adam.sequence(), loaded.0[0].adam.blob()), (2, 2usize.to_le_bytes().as_slice()));
    // Into the formats it came from only if rounding is accepted; bfloat16 comes out as it was.
    assert!(matches!(load(&file, &flat(&whole(), 1), false), Err(OptimError::Lossy { .. })));
    let mut loaded = load(&file, &flat(&whole(), 1), true).unwrap();
    assert!(loaded.state()[2] == state[2] && loaded.state()[1][0] == state[1][0]);
}

#[test]
fn a_file_that_is_damaged_or_something_else_is_refused_by_name() {
    let (_ranks, saved) = ranks();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("state.safetensors");
    export(&saved, &file).unwrap();
    let good = std::fs::read(&file).unwrap();
    let header_end = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&good[8..header_end]).unwrap();
    let with = |from: &str, to: &str| {
        assert!(header.contains(from), "{from}: {header}");
        let header = header.replacen(from, to, 1);
        [(header.len() as u64).to_le_bytes().as_slice(), header.as_bytes(), &good[header_end..]].concat()
    };
    let longer = [&good[..], b"x"].concat();
    let foreign =
        safetensors::serialize(std::iter::empty::<(&str, safetensors::tensor::TensorView<'_>)>(), None);
    let mut flipped = good.clone();
    flipped[header_end + 4 * 262_149] ^= 4;
    let cases = [
        (flipped, "elements 262144..524288 of p0 do not match"),
        (with("\\\"p0\\\":2", "\\\"p0\\\":3"), "its header does not match its checksum"),
        (good[..7].to_vec(), "too short"),
        (good[..100].to_vec(), "its header does not fit it"),
        (good[..good.len() - 1].to_vec(), "its tensors do not fill it"),
        (longer, "its tensors do not fill it"),
        (with("{", "["), "its header cannot be read"),
        (with("\"version\":\"2\"", "\"version\":\"9\""), "its format version is 9"),
        (with("\\\"p0\\\":2", "\\\"p0\\\":x"), "its step counts cannot be read"),
        (with("\\\"p0\\\":2,", ""), "it has tensors that belong to no parameter"),
        (with("p0.exp_avg_sq", "p0.exp_avg_s2"), "it has no tensor p0.exp_avg_sq"),
        (with("[300,2000]", "[2000,300]"), "is not float32 of p0's shape"),
        (foreign.unwrap(), "it is no exported optimizer state"),
    ];
    for (bytes, why) in cases {
        std::fs::write(&file, bytes).unwrap();
        let error = load(&file, &flat(&whole(), 1), true).err().unwrap();
        assert!(matches!(error, OptimError::Damaged { .. }), "{error}");
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[test]
fn an_export_that_fails_leaves_what_was_there() {
    let (_ranks, saved) = ranks();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("state.safetensors");
    std::fs::write(&file, "an older one").unwrap();
    let error = export(&saved[..1], &file).unwrap_err();
    assert!(error.to_string().contains("of parameter p0 are missing"), "{error}");
    // A flipped bit late in what is exported.
    let slot = std::fs::read_dir(&saved[1]).unwrap().map(|e| e.unwrap().path());
    let slot = slot.filter(|p| p.to_str().unwrap().contains("bucket-")).max().unwrap();
    let mut bytes = std::fs::read(&slot).unwrap();
    bytes[4096 + 5] ^= 1;
    std::fs::write(&slot, bytes).unwrap();
    let error = export(&saved, &file).unwrap_err();
    assert!(matches!(error, OptimError::Checksum { .. }), "{error}");
    assert_eq!(std::fs::read(&file).unwrap(), b"an older one");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    let twice = [ParamSpec::new("p0", &[4]), ParamSpec::new("p0.exp_avg", &[4])];
    let store = dir.path().join("store");
    let mut adam =
        lazy_optim_nvme::NvmeAdam::create(&store, &twice, &cut(100, 64, 2), |_, _, v| v.fill(0.0)).unwrap();
    adam.save("here").unwrap().wait().unwrap();
    let error = export(&[store.join("here")], &file).unwrap_err();
    assert!(error.to_string().contains("rename one of them"), "{error}");
    let error = export(&saved[..0], &file).unwrap_err();
    assert!(error.to_string().contains("no generation"), "{error}");
}
