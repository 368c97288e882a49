//! Files and flags that `lazy-plan` must not take at face value: what it may write over, what it must read, what has no effect.

#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

const PUBLISHED: &str = "--model qwen3.6-27b-text --batch 72 --seq 1024 --peak-cap-gib 70 --baseline-peak-gib 60.4 \
    --layer-recompute-ms 20 --host-activation-gib 14 --nvme-activation-gib 32 --json";

fn run(words: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lazy-plan")).args(words.split_whitespace()).output().unwrap()
}

fn refusal(words: &str) -> String {
    let output = run(words);
    assert!(!output.status.success(), "{words} was taken");
    String::from_utf8(output.stderr).unwrap()
}

fn chain() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/given/tiny3_hand.json");
    format!("--chain {}", path.display())
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
#[cfg(unix)]
fn links_devices_and_permissions_survive_being_written_to() {
    use std::os::unix::fs::{PermissionsExt, symlink};

    let folder = folder("survive");
    let at = |name: &str| folder.join(name);
    fs::write(at("target"), "old").unwrap();
    fs::set_permissions(at("target"), fs::Permissions::from_mode(0o600)).unwrap();
    symlink("target", at("link")).unwrap();
    symlink("/dev/null", at("null")).unwrap();
    for name in ["link", "null"] {
        assert!(run(&format!("{} --out {}", chain(), at(name).display())).status.success());
        assert!(fs::symlink_metadata(at(name)).unwrap().is_symlink(), "{name} was replaced");
    }
    let written: Value = serde_json::from_slice(&fs::read(at("target")).unwrap()).unwrap();
    assert_eq!(written["layers"], 3);
    assert_eq!(fs::metadata(at("target")).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 3, "something was left behind");
}

#[test]
fn no_two_flags_name_one_file() {
    let folder = folder("one_file");
    let at = |name: &str| folder.join(name).display().to_string();
    let same = refusal(&format!("{} --out {} --report {}", chain(), at("plan"), at("./plan")));
    assert!(same.contains("--report") && same.contains("--out"), "{same}");
    assert!(!folder.join("plan").exists());
    fs::copy(chain().trim_start_matches("--chain "), at("chain.json")).unwrap();
    let input = refusal(&format!("--chain {0} --out {0}", at("chain.json")));
    assert!(input.contains("--chain"), "{input}");
    let nowhere = refusal(&format!("{} --out {}", chain(), at("absent/plan")));
    assert!(nowhere.contains("absent/plan") && nowhere.contains("choose another"), "{nowhere}");
    let place = refusal(&format!("{} --trace {}", chain(), folder.display()));
    assert!(place.contains("is a folder"), "{place}");
}

#[test]
fn flags_without_effect_are_refused() {
    for (words, named) in [
        ("--model qwen3-4b --out plan.json", "--out"),
        ("--model qwen3-4b --stream-weights", "--machine"),
        ("--model qwen3-4b --machine h200 --micro-batches 0", "--micro-batches"),
        ("--model qwen3-4b --machine h200 --loss-chunk-tokens 0", "--loss-chunk-tokens"),
        ("--model qwen3-4b --machine h200 --state-bytes 5000", "--state-bytes 5000"),
        (&format!("{PUBLISHED} --staging-buffers 3"), "--nvme-path"),
        (&format!("{PUBLISHED} --nvme-path host-staging --staging-buffers 0"), "--staging-buffers"),
        (&format!("{PUBLISHED} --mandatory off --mandatory-count exact"), "--mandatory off"),
        (&format!("{PUBLISHED} --h2d-gbps 1e300"), "1e300"),
    ] {
        let message = refusal(words);
        assert!(message.contains(named), "{words}: {message}");
    }
}

#[test]
fn edges_of_a_reference_schedule_are_a_path() {
    let file = folder("edges").join("reference.json");
    let locked = |text: &str| {
        fs::write(&file, text).unwrap();
        run(&format!("{} --json --lock-edges --reference-schedule {}", chain(), file.display()))
    };
    for wrong in ["[[0,1],[2,3]]", "[[3,2],[2,0]]", "[]", "[[0,2],[1,3]]"] {
        let output = locked(&format!("{{\"edges\": {wrong}}}"));
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && message.contains("`edges`"), "{wrong}: {message}");
    }
    let plan: Value = serde_json::from_slice(&locked("{\"edges\": [[2,3],[0,2]]}").stdout).unwrap();
    assert_eq!(plan["recompute"], serde_json::json!([1]));
    let twice = String::from_utf8(locked("{\"hbm\": [0], \"gpu\": [1]}").stderr).unwrap();
    assert!(twice.contains("`hbm`") && twice.contains("`gpu`"), "{twice}");
}

#[test]
fn files_of_other_editors_and_endless_ones() {
    let file = folder("editors").join("chain.json");
    let text = fs::read_to_string(chain().trim_start_matches("--chain ")).unwrap();
    fs::write(&file, format!("\u{feff}{}", text.replace('\n', "\r\n"))).unwrap();
    assert!(run(&format!("--chain {}", file.display())).status.success());
    if cfg!(unix) {
        assert!(refusal("--chain /dev/zero").contains("256 MiB"));
    }
}
