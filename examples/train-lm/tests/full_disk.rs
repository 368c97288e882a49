//! Runs whose disks are full, or get full in the middle: they end with status 1 and a message that says what to do, and go on where they
//! stopped once there is room. On file systems in RAM, mounted for these tests alone.
#![allow(clippy::unwrap_used, clippy::print_stderr, clippy::exit, reason = "tests")]

#[path = "common/machine.rs"]
mod machine;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Parser;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use serde_json::{Value, json};
use train_lm::cli::Cli;
use train_lm::phase::{self, Phase};

/// The command line, an argument a line, where this program is the trainer.
const ARGS: &str = "TRAIN_LM_ARGS";
/// A phase, and the folder whose file system another program fills up as that is first entered.
const FILL: &str = "TRAIN_LM_FILL";
/// The file system cannot allocate ahead: room is missed when it is written to.
const SPARSE: &str = "TRAIN_LM_SPARSE";
/// The folder with the small file systems.
const DISKS: &str = "TRAIN_LM_DISKS";

const LAYERS: usize = 8;
const STEPS: u64 = 6;

fn config() -> String {
    json!({
        "model_type": "qwen3", "vocab_size": 256, "hidden_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": true
    })
    .to_string()
}

fn fill_up(dir: &Path) {
    let mut file = File::create(dir.join("other")).unwrap();
    let block = [1; 4096];
    while file.write_all(&block).is_ok() {}
}

/// `fallocate` is not supported, in this thread and those that it starts.
fn cannot_allocate_ahead() {
    const FALLOCATE: i64 = if cfg!(target_arch = "aarch64") { 47 } else { 285 };
    const NOT_SUPPORTED: u32 = 95;
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let calls = std::iter::once((FALLOCATE, Vec::new())).collect();
    let refuse = SeccompAction::Errno(NOT_SUPPORTED);
    let filter: BpfProgram =
        SeccompFilter::new(calls, SeccompAction::Allow, refuse, arch).unwrap().try_into().unwrap();
    seccompiler::apply_filter(&filter).unwrap();
}

/// The trainer; without a command line, a test that does nothing.
#[test]
fn the_program() {
    let Ok(args) = std::env::var(ARGS) else { return };
    if std::env::var_os(SPARSE).is_some() {
        cannot_allocate_ahead();
    }
    if let Ok(fill) = std::env::var(FILL) {
        let (wanted, dir) =
            fill.split_once(' ').map(|(phase, dir)| (phase.to_owned(), dir.to_owned())).unwrap();
        let entered = AtomicU64::new(0);
        phase::watch(move |phase: Phase| {
            if format!("{phase:?}") == wanted && entered.fetch_add(1, Ordering::SeqCst) == 0 {
                fill_up(Path::new(&dir));
            }
        });
    }
    let code = Cli::parse_from(args.lines()).run();
    std::process::exit(if code == ExitCode::SUCCESS {
        0
    } else {
        i32::from(code == ExitCode::FAILURE) * 2 - 1
    });
}

/// How the trainer ended.
struct Ended {
    status: i32,
    said: String,
}

/// Folders of runs, and two small disks.
struct Place {
    dir: PathBuf,
    disks: PathBuf,
}

impl Place {
    fn disk(&self, name: &str) -> PathBuf {
        self.disks.join(name)
    }

    /// The other program gives its room back.
    fn make_room(&self) {
        for disk in ["spill", "state"] {
            let _ = fs::remove_file(self.disk(disk).join("other"));
        }
    }

    /// Files of the model's, and of runs' on the disks.
    fn run(&self, args: &[&str], env: &[(&str, String)]) -> Ended {
        let args = [&["train-lm", "train", "--json"], args].concat().join("\n");
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_program", "--nocapture"])
            .current_dir(&self.dir)
            .env(ARGS, args)
            .envs(env.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::null())
            .output()
            .unwrap();
        Ended { status: output.status.code().unwrap(), said: String::from_utf8(output.stderr).unwrap() }
    }

    fn new_run(&self, out: &str, steps: u64, flags: &[&str], without: &[&str]) -> Ended {
        let (spill, state) = (self.disk("spill"), self.disk("state").join(out));
        let (spill, state, steps) = (spill.to_str().unwrap(), state.to_str().unwrap(), steps.to_string());
        let defaults = [
            ["--model", "config.json"],
            ["--text", "text.txt"],
            ["--profile", "profile.json"],
            ["--device", "host"],
            ["--batch", "4"],
            ["--seq", "64"],
            ["--dropout", "0.1"],
            ["--save-every", "2"],
            ["--nvme-dir", spill],
            ["--state-dir", state],
            ["--out", out],
            ["--steps", &steps],
        ];
        let others = defaults
            .iter()
            .filter(|[flag, _]| !flags.contains(flag) && !without.contains(flag))
            .flatten()
            .copied();
        self.run(&others.chain(flags.iter().copied()).collect::<Vec<_>>(), &[])
    }

    fn resume(&self, run: &str, env: &[(&str, String)]) -> Ended {
        let (spill, steps) = (self.disk("spill"), STEPS.to_string());
        let spill = spill.to_str().unwrap();
        self.run(&["--resume", run, "--profile", "profile.json", "--nvme-dir", spill, "--steps", &steps], env)
    }

    fn digest(&self, run: &str) -> String {
        let summary = fs::read_to_string(self.dir.join(run).join("summary.json")).unwrap();
        let summary: Value = serde_json::from_str(&summary).unwrap();
        assert!(summary["measured"]["summary"]["nvme_peak_bytes"].as_u64().unwrap() > 0, "the plan spills");
        summary["measured"]["summary"]["weights_digest"].as_str().unwrap().to_owned()
    }

    fn committed(&self, run: &str) -> usize {
        fs::read_to_string(self.dir.join(run).join("metrics.jsonl")).unwrap().lines().count()
    }

    fn nothing_spilled(&self) {
        let status = Command::new(env!("CARGO_BIN_EXE_train-lm"))
            .args(["clean", "--nvme-dir"])
            .arg(self.disk("spill"))
            .stderr(Stdio::null())
            .status();
        assert!(status.unwrap().success());
        let left: Vec<_> =
            fs::read_dir(self.disk("spill")).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

/// The path, what is needed, what is free, and what to do.
fn assert_said(ended: &Ended, case: &str, words: &[&str]) {
    let Ended { status, said } = ended;
    assert_eq!(*status, 1, "{case}: {said}");
    for word in words {
        assert!(said.contains(word), "{case}: wanted {word:?} in: {said}");
    }
}

/// A run in which another program takes all the room that is left.
struct Case {
    name: &'static str,
    /// Steps of its first process. After every second one state is saved, and the step but one after it needs new files.
    begun: u64,
    /// When the second process finds no room any more.
    phase: Phase,
    disk: &'static str,
    /// The disk cannot allocate ahead.
    sparse: bool,
    /// What its steps leave on disk.
    durability: &'static str,
    words: &'static str,
    /// Steps committed by then.
    committed: usize,
}

const CASES: [Case; 5] = [
    Case {
        name: "forward's spill",
        begun: 2,
        phase: Phase::Passes,
        disk: "spill",
        sparse: true,
        durability: "step",
        words: "on lane nvme_write failed: no space for",
        committed: 2,
    },
    Case {
        name: "the optimizer's write-back",
        begun: 3,
        phase: Phase::WriteBack,
        disk: "state",
        sparse: true,
        durability: "step",
        words: "optimizer state: no space for",
        committed: 3,
    },
    Case {
        name: "a save",
        begun: 2,
        phase: Phase::Save,
        disk: "state",
        sparse: false,
        durability: "step",
        words: "the optimizer state needs",
        committed: 4,
    },
    Case {
        name: "new files after a save",
        begun: 2,
        phase: Phase::Passes,
        disk: "state",
        sparse: false,
        durability: "step",
        words: "the optimizer state needs",
        committed: 3,
    },
    Case {
        name: "a save where steps leave nothing",
        begun: 2,
        phase: Phase::Save,
        disk: "state",
        sparse: false,
        durability: "checkpoint",
        words: "the optimizer state needs",
        committed: 4,
    },
];

/// Not a test of its own: the runs, where the small disks are.
#[test]
fn child_on_small_disks() {
    let Some(disks) = std::env::var_os(DISKS).map(PathBuf::from) else { return };
    let place = Place { dir: disks.parent().unwrap().to_owned(), disks };
    let undisturbed = place.new_run("undisturbed", STEPS, &[], &[]);
    assert_eq!(undisturbed.status, 0, "{}", undisturbed.said);
    let expected = place.digest("undisturbed");
    fs::remove_dir_all(place.disk("state").join("undisturbed")).unwrap();

    // No room for the spill file, and none for the optimizer's files.
    let small = place.disk("small");
    let small = small.to_str().unwrap();
    let cases = [
        ("--nvme-dir", "free; ", &[][..]),
        ("--state-dir", "are free; ", &[]),
        // While drives are measured.
        ("--nvme-dir", "free; ", &["--profile"]),
    ];
    for (flag, free, without) in cases {
        let refused = place.new_run("refused", STEPS, &[flag, small], without);
        assert_said(&refused, flag, &[small, "need", free, "KiB", &format!("{flag} names another folder")]);
        assert!(!place.dir.join("refused").exists(), "{}", refused.said);
        assert_eq!(fs::read_dir(small).unwrap().count(), 0, "{}", refused.said);
        place.nothing_spilled();
    }

    for (number, case) in CASES.into_iter().enumerate() {
        let Case { name, begun, phase, disk, sparse, durability, words, committed } = case;
        let run = &format!("run-{number}");
        // Without a spill file, whose room the system may be slow to give back.
        let first = place.new_run(run, begun, &["--plan", "checkpoint", "--durability", durability], &[]);
        assert_eq!(first.status, 0, "{}", first.said);
        let path = place.disk(disk);
        let mut env = vec![(FILL, format!("{phase:?} {}", path.display()))];
        if sparse {
            env.push((SPARSE, "1".into()));
        }
        let failed = place.resume(run, &env);
        let kept = if durability == "step" { "every committed step" } else { "what was saved" };
        let advice = format!("{kept} is kept: --resume {run} goes on there");
        assert_said(&failed, name, &[words, path.to_str().unwrap(), "need", "free", &advice]);
        assert_eq!(place.committed(run), committed, "{name}");
        place.make_room();
        place.nothing_spilled();
        let resumed = place.resume(run, &[]);
        assert_eq!(resumed.status, 0, "{name}: {}", resumed.said);
        assert_eq!(place.digest(run), expected, "{name}");
        fs::remove_dir_all(place.disk("state").join(run)).unwrap();
        eprintln!("{name}: {}", failed.said.lines().last().unwrap_or_default());
    }
}

#[test]
fn t3_o3_a_full_disk_ends_a_run_with_what_to_do_and_it_goes_on_to_the_same_weights() {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let dir = place.path();
    fs::write(dir.join("config.json"), config()).unwrap();
    fs::write(dir.join("profile.json"), machine::profile(LAYERS, [20.0; 2])).unwrap();
    fs::write(dir.join("text.txt"), "to be or not to be, that is the question. ".repeat(50)).unwrap();
    for disk in ["spill", "state", "small"] {
        fs::create_dir_all(dir.join("disks").join(disk)).unwrap();
    }
    let mount = "mount -t tmpfs -o size=$size none \"$TRAIN_LM_DISKS/$disk\" 2> /dev/null || exit 77";
    let script = format!(
        "size=40k; disk=small; {mount}; size=16m; for disk in spill state; do {mount}; done; exec \"$PROGRAM\" --exact child_on_small_disks --nocapture"
    );
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", &script])
        .env("PROGRAM", std::env::current_exe().unwrap())
        .env(DISKS, dir.join("disks"))
        .stdin(Stdio::null())
        .output();
    match output {
        Ok(output) if output.status.success() => eprintln!("{}", String::from_utf8_lossy(&output.stderr)),
        // Containers may forbid mounts; the crates' tests meet the same errors by a double.
        Ok(output) if matches!(output.status.code(), Some(1 | 77)) => eprintln!("no small disks here"),
        Ok(output) => {
            panic!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
        }
        Err(error) => eprintln!("no small disks here: {error}"),
    }
}
