//! Systems that refuse io_uring, memory to lock, cuFile or a GPU: a run falls back and says so, or is refused and leaves nothing.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use train_lm::io::IoChoice;
use train_lm::settings::{DeviceChoice, TrainArgs};
use train_lm::train::{Summary, train};

const CONFIG: &str = r#"{
  "model_type": "qwen3", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
  "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
  "tie_word_embeddings": true
}"#;

/// A folder with a model, a text, and the schedule of a run that used every tier.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        fs::write(place.path("config.json"), CONFIG).unwrap();
        fs::write(place.path("text.txt"), "to be or not to be, that is the question. ".repeat(50)).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn args(&self, out: &str, io: IoChoice) -> TrainArgs {
        TrainArgs {
            device: DeviceChoice::Host,
            steps: Some(3),
            model: Some(self.path("config.json")),
            text: vec![self.path("text.txt")],
            batch: Some(2),
            seq: Some(32),
            plan: "auto".into(),
            out: Some(self.path(out)),
            json: true,
            io,
            ..TrainArgs::default()
        }
    }
}

fn run(args: &TrainArgs) -> Summary {
    train(args).unwrap_or_else(|e| panic!("{e}"))
}

/// Runs `check` on a thread of its own, and so in all threads that this one starts, without io_uring.
fn without_io_uring(check: impl FnOnce() + Send) {
    const SETUP: i64 = 425;
    const NOT_PERMITTED: u32 = 1;
    let rules = std::iter::once((SETUP, Vec::new())).collect();
    let (arch, refuse) = (std::env::consts::ARCH.try_into().unwrap(), SeccompAction::Errno(NOT_PERMITTED));
    let filter: BpfProgram =
        SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch).unwrap().try_into().unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            seccompiler::apply_filter(&filter).unwrap();
            check();
        });
        thread.join().unwrap();
    });
}

#[test]
fn t10_what_moves_bytes_is_chosen_reported_and_changes_no_bit() {
    let place = Place::new();
    let uring = run(&place.args("uring", IoChoice::Uring));
    assert!(uring.nvme_mode.starts_with("io_uring") && uring.state_mode.starts_with("io_uring"), "{uring:?}");
    let posix = run(&place.args("posix", IoChoice::Posix));
    assert!(posix.nvme_mode.starts_with("pread/pwrite") && posix.state_mode.starts_with("pread/pwrite"));
    assert_eq!(posix.weights_digest, uring.weights_digest);
    assert_eq!((uring.io, posix.io), (IoChoice::Uring, IoChoice::Posix));
    let report = fs::read_to_string(place.path("posix/report.html")).unwrap();
    assert!(report.contains("pread/pwrite") && report.contains("(--io posix)"));
    without_io_uring(|| {
        let fell_back = run(&place.args("fell back", IoChoice::Auto));
        assert_eq!(fell_back.weights_digest, uring.weights_digest);
        for mode in [&fell_back.nvme_mode, &fell_back.state_mode] {
            assert!(mode.starts_with("pread/pwrite") && mode.contains("io_uring is refused"), "{mode}");
        }
        let refused = train(&place.args("refused", IoChoice::Uring)).unwrap_err().to_string();
        assert!(refused.contains("io_uring was asked for and cannot be had"), "{refused}");
        assert!(!place.path("refused").exists());
    });
    // A run goes on by other means.
    let resumed = TrainArgs {
        resume: Some(place.path("uring")),
        steps: Some(4),
        plan: "auto".into(),
        io: IoChoice::Posix,
        json: true,
        ..TrainArgs::default()
    };
    let straight = run(&TrainArgs { steps: Some(4), ..place.args("straight", IoChoice::Auto) });
    assert_eq!(run(&resumed).weights_digest, straight.weights_digest);
}

#[test]
fn t11_a_low_limit_on_locked_memory_is_named_and_hinders_no_run() {
    let place = Place::new();
    let limit = getrlimit(Resource::Memlock);
    let low = Rlimit { current: Some(4096), ..limit };
    std::thread::scope(|scope| {
        let limited = scope.spawn(|| {
            // Root may lock what it likes, unless it gives that up; it does so for this thread and those that it starts.
            let mut mine = capabilities(None).unwrap();
            mine.effective.remove(CapabilitySet::IPC_LOCK);
            set_capabilities(None, mine).unwrap();
            setrlimit(Resource::Memlock, low).unwrap();
            run(&place.args("limited", IoChoice::Auto))
        });
        let limited = limited.join();
        setrlimit(Resource::Memlock, limit).unwrap();
        let limited = limited.unwrap();
        // Of the ring or of its buffers, as the kernel counts.
        assert!(limited.nvme_mode.contains("locked memory"), "{}", limited.nvme_mode);
        assert_eq!(limited.weights_digest, run(&place.args("unlimited", IoChoice::Auto)).weights_digest);
    });
}

/// By the program: the status, the message, and nothing new in the folder.
#[test]
fn t4_what_cannot_be_had_ends_with_status_1_and_leaves_nothing() {
    let place = Place::new();
    let mut other = place.args("other", IoChoice::Auto);
    other.batch = Some(4);
    run(&other);
    fs::copy(place.path("other/schedule.json"), place.path("schedule.json")).unwrap();
    fs::write(
        place.path("deep.json"),
        CONFIG.replace("\"num_hidden_layers\": 4", "\"num_hidden_layers\": 5"),
    )
    .unwrap();
    let listed = || {
        let mut names: Vec<_> =
            fs::read_dir(place.0.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = listed();
    let mut cases = vec![
        (vec!["--plan", "schedule.json"], "another model or workload"),
        (
            vec!["--plan", "schedule.json", "--batch", "4", "--model", "deep.json"],
            "another model or workload",
        ),
        // A machine that only the planner knows by name.
        (vec!["--profile", "h100"], "give a file that `train-lm probe --write FILE` or an earlier run wrote"),
    ];
    if lazy_store::cuda::device_count().is_err() {
        cases.push((vec!["--device", "cuda"], "the CUDA driver is not on this machine"));
        cases.push((vec!["--io", "cufile"], "cuFile was asked for and cannot be had"));
    }
    for (flags, words) in cases {
        let with = |flag: &str| flags.contains(&flag);
        let mut command = Command::new(env!("CARGO_BIN_EXE_train-lm"));
        command
            .current_dir(place.0.path())
            .args(["train", "--text", "text.txt", "--seq", "32", "--out", "run"]);
        if !with("--model") {
            command.args(["--model", "config.json"]);
        }
        if !with("--batch") {
            command.args(["--batch", "2"]);
        }
        if !with("--device") {
            command.args(["--device", "host"]);
        }
        let output = command.args(&flags).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{flags:?}: {said}");
        assert!(said.contains(words), "wanted {words:?} in: {said}");
        assert_eq!(listed(), before, "{said}");
        let spilled = fs::read_dir(place.path("spill")).unwrap().count();
        assert_eq!(spilled, 0, "{said}");
    }
}
