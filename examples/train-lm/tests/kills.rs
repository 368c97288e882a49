//! Runs that are killed over and over, wherever they are, and resumed: they end with the weights of the run that nothing disturbed.
//!
//! The deep switch kills them until at least 100 kills have hit each of forward and backward, the optimizer's write-back and a save.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "tests")]

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use train_lm::habits::HabitArgs;
use train_lm::homes::WeightsHome;
use train_lm::phase::{self, Phase};
use train_lm::settings::{DurabilityChoice, StateHome, TrainArgs};
use train_lm::train::train;

/// The folder, where this program is the one to be killed.
const FOLDER: &str = "TRAIN_LM_KILLED_IN";
/// Which run it is, by its place in [`KINDS`].
const KIND: &str = "TRAIN_LM_KILLED_AS";
const STEPS: u64 = 10;
/// Kills of a run before it may come to its end.
const KILLS: usize = 12;

const CONFIG: &str = r#"{
  "model_type": "qwen3", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
  "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
  "tie_word_embeddings": true
}"#;

/// How a run keeps its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Every step is committed, and some are saved.
    Steps,
    /// The same with an optimizer beside backward.
    Beside,
    /// Saves alone are resumed from; state on the drive.
    Saves,
    /// The same with state in RAM.
    InRam,
    /// Every step is committed, and layers have their weights at home in RAM.
    Homes,
}

const KINDS: [Kind; 5] = [Kind::Steps, Kind::Beside, Kind::Saves, Kind::InRam, Kind::Homes];

impl Kind {
    fn needs_a_save(self) -> bool {
        matches!(self, Kind::Saves | Kind::InRam)
    }
}

/// Model, examples, profile and plan that all runs share.
fn args(place: &Path, kind: Kind, run: &Path) -> TrainArgs {
    let base = TrainArgs {
        steps: Some(STEPS),
        plan: place.join("plan.json").to_str().unwrap().to_owned(),
        nvme_dir: Some(run.parent().unwrap().join("spill")),
        json: true,
        weights: if kind == Kind::Homes { WeightsHome::Host } else { WeightsHome::Hbm },
        ..TrainArgs::default()
    };
    let mut args = if run.join("run.json").exists() {
        TrainArgs { resume: Some(run.to_owned()), ..base }
    } else {
        TrainArgs {
            model: Some(place.join("config.json")),
            text: vec![place.join("examples.jsonl")],
            batch: Some(2),
            seq: Some(24),
            accum: Some(2),
            dropout: Some(0.1),
            clip: Some(if kind == Kind::Beside { 0.0 } else { 1.0 }),
            durability: kind.needs_a_save().then_some(DurabilityChoice::Checkpoint),
            state: (kind == Kind::InRam).then_some(StateHome::Host),
            habits: HabitArgs {
                eval_text: vec![place.join("examples.jsonl")],
                eval_every: Some(4),
                save_every: Some(2),
                keep: Some(2),
                ..HabitArgs::default()
            },
            out: Some(run.to_owned()),
            ..base
        }
    };
    args.budgets.profile = Some(place.join("profile.json"));
    args
}

fn set_up(place: &Path) {
    fs::write(place.join("config.json"), CONFIG).unwrap();
    let lines =
        (0..40).map(|i| format!("{{\"prompt\": \"{} and \", \"answer\": \"{}\"}}\n", i * 7, i * 7 + 1));
    fs::write(place.join("examples.jsonl"), lines.collect::<String>()).unwrap();
    // Measured once, and planned once into all tiers.
    let mut first = args(place, Kind::Steps, &place.join("first/run"));
    first.budgets.profile = None;
    let profile = train_lm::prepare::probe_only(&first).unwrap();
    fs::write(place.join("profile.json"), profile.to_json()).unwrap();
    train(&TrainArgs { plan: "auto".into(), steps: Some(0), ..first }).unwrap_or_else(|e| panic!("{e}"));
    fs::copy(place.join("first/run/schedule.json"), place.join("plan.json")).unwrap();
}

/// A file in which the program notes what it is doing, for whoever kills it.
struct Notes(File);

const PHASES: [Phase; 6] =
    [Phase::Between, Phase::Passes, Phase::WriteBack, Phase::Save, Phase::Saved, Phase::Evaluation];
/// Places in the file: the phase, whether a save is under way, and how often passes have begun.
const AT_PHASE: u64 = 0;
const SAVING: u64 = 1;
const PASSES: u64 = 2;

impl Notes {
    fn open(dir: &Path) -> Self {
        let path = dir.join("notes");
        Notes(OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap())
    }

    fn put(&self, at: u64, value: u64) {
        self.0.write_all_at(&value.to_le_bytes(), at * 8).unwrap();
    }

    fn get(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, at * 8).unwrap();
        u64::from_le_bytes(bytes)
    }

    /// As a program begins.
    fn clear(&self) {
        (0..3).for_each(|at| self.put(at, 0));
    }

    fn enter(&self, phase: Phase) {
        match phase {
            Phase::Save => self.put(SAVING, 1),
            Phase::Saved => self.put(SAVING, 0),
            Phase::Passes => self.put(PASSES, self.get(PASSES) + 1),
            _ => {}
        }
        self.put(AT_PHASE, PHASES.iter().position(|known| *known == phase).unwrap() as u64);
    }

    fn phase(&self) -> Phase {
        PHASES[self.get(AT_PHASE) as usize]
    }
}

/// The program that is killed; without a folder, a test that does nothing.
#[test]
fn the_program() {
    let Some(dir) = std::env::var_os(FOLDER) else { return };
    let kind = KINDS[std::env::var(KIND).unwrap().parse::<usize>().unwrap()];
    let (dir, notes) = (PathBuf::from(dir), Notes::open(Path::new(".")));
    phase::watch(move |phase| notes.enter(phase));
    let run = std::env::current_dir().unwrap().join("run");
    let summary = train(&args(&dir, kind, &run)).unwrap_or_else(|e| panic!("{e}"));
    fs::write("digest", summary.weights_digest).unwrap();
}

fn start(place: &Path, kind: Kind, dir: &Path) -> Child {
    let number = KINDS.iter().position(|known| *known == kind).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "the_program", "--nocapture"]).current_dir(dir);
    command.env(FOLDER, place).env(KIND, number.to_string());
    let log = File::create(dir.join("log")).unwrap();
    command.stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

/// Where kills have hit.
#[derive(Debug, Default)]
struct Counts {
    passes: usize,
    write_back: usize,
    /// A save was left unfinished, whatever else was done beside it.
    save: usize,
    evaluation: usize,
    between: usize,
}

impl Counts {
    fn all(&self) -> usize {
        self.passes + self.write_back + self.save + self.evaluation + self.between
    }

    fn note(&mut self, notes: &Notes, state: &Path) {
        let unfinished = unfinished_save(state);
        *match notes.phase() {
            _ if unfinished => &mut self.save,
            Phase::Passes => &mut self.passes,
            Phase::WriteBack => &mut self.write_back,
            Phase::Evaluation => &mut self.evaluation,
            Phase::Between | Phase::Save | Phase::Saved => &mut self.between,
        } += 1;
    }

    /// The phase that has been hit least, with its hits.
    fn rarest(&self) -> (Phase, usize) {
        let hits =
            [(Phase::Passes, self.passes), (Phase::WriteBack, self.write_back), (Phase::Save, self.save)];
        hits.into_iter().min_by_key(|(_, hits)| *hits).unwrap()
    }
}

/// Whether a save was cut short: a folder under its temporary name, newer than every whole generation (older ones were being removed).
fn unfinished_save(state: &Path) -> bool {
    let number = |name: &str| name.strip_prefix("step-")?.parse::<u64>().ok();
    let whole = lazy_optim_nvme::generations(state).unwrap();
    let newest = whole.iter().filter_map(|generation| number(&generation.name)).max();
    fs::read_dir(state).unwrap().any(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.strip_suffix(".tmp").and_then(number).is_some_and(|number| Some(number) > newest)
    })
}

/// A kill: in which phase, the how manieth time it comes by, and how much later.
struct Aim {
    phase: Phase,
    time: u64,
    moment: Duration,
}

fn aim(kill: usize, phase: Phase) -> Aim {
    let (scattered, longest) = (kill as u64 * 7919, if phase == Phase::Save { 400 } else { 4000 });
    Aim { phase, time: 1 + scattered % 3, moment: Duration::from_micros(scattered % longest) }
}

/// None at all.
const NEVER: Aim = Aim { phase: Phase::Passes, time: u64::MAX, moment: Duration::ZERO };

/// Kills the program at `aim`; false where it comes to its end before.
fn kill(aim: &Aim, mut child: Child, notes: &Notes, dir: &Path) -> bool {
    let arrived = || match aim.phase {
        Phase::Save => notes.get(SAVING) == 1,
        phase => notes.phase() == phase && notes.get(PASSES) >= aim.time,
    };
    while !arrived() {
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{}", fs::read_to_string(dir.join("log")).unwrap());
            return false;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    std::thread::sleep(aim.moment);
    child.kill().unwrap();
    !child.wait().unwrap().success()
}

/// What a run leaves that must not depend on kills: losses of steps, of evaluations, and the weights.
fn result(dir: &Path) -> (Vec<Value>, Vec<Value>, String) {
    let column = |file: &str| -> Vec<Value> {
        let text = fs::read_to_string(dir.join("run").join(file)).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.map(|line| serde_json::json!([line["step"], line["loss"], line["grad_norm"]])).collect()
    };
    let digest = fs::read_to_string(dir.join("digest")).unwrap();
    (column("metrics.jsonl"), column("evaluations.jsonl"), digest)
}

/// Removes what dead runs have left, as a user does: how many folders.
fn clean(spill: &Path) -> usize {
    let before = fs::read_dir(spill).unwrap().count();
    let status = Command::new(env!("CARGO_BIN_EXE_train-lm"))
        .args(["clean", "--nvme-dir"])
        .arg(spill)
        .stderr(Stdio::null())
        .status();
    assert!(status.unwrap().success());
    assert_eq!(fs::read_dir(spill).unwrap().count(), 0, "what dead runs left is removed");
    before
}

fn is_resumable(kind: Kind, state: &Path) -> bool {
    !kind.needs_a_save() || lazy_optim_nvme::generations(state).is_ok_and(|found| !found.is_empty())
}

/// Kills runs until each phase has been hit `least` times and there were so many kills in `all`; every run is then left to come to its end.
fn sweep(kind: Kind, least: usize, all: usize) {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let place = place.path();
    set_up(place);
    let undisturbed = place.join("undisturbed");
    fs::create_dir(&undisturbed).unwrap();
    let notes = Notes::open(&undisturbed);
    notes.clear();
    assert!(!kill(&NEVER, start(place, kind, &undisturbed), &notes, &undisturbed));
    let expected = result(&undisturbed);
    assert_eq!(expected.0.len() as u64, STEPS);

    let (mut counts, mut runs, mut kills, mut left) = (Counts::default(), 0, 0, 0);
    while counts.rarest().1 < least || kills < all {
        let dir = place.join(format!("run-{runs}"));
        fs::create_dir(&dir).unwrap();
        let (notes, run) = (Notes::open(&dir), dir.join("run"));
        for nth in 0.. {
            notes.clear();
            // The rarest phase, but not it alone.
            let phase = [counts.rarest().0, Phase::Save, counts.rarest().0, Phase::Passes, Phase::WriteBack]
                [kills % 5];
            let aim = if nth < KILLS { aim(kills, phase) } else { NEVER };
            if !kill(&aim, start(place, kind, &dir), &notes, &dir) {
                break;
            }
            kills += 1;
            counts.note(&notes, &run.join("state"));
            if !is_resumable(kind, &run.join("state")) {
                fs::remove_dir_all(&run).unwrap();
            }
        }
        let (steps, evaluations, digest) = result(&dir);
        assert_eq!(digest, expected.2, "{kind:?}, run {runs}, after {kills} kills");
        assert_eq!(evaluations, expected.1, "{kind:?}, run {runs}, after {kills} kills");
        // A kill between the commit of a step and its line leaves it without one.
        let strange = steps.iter().find(|step| !expected.0.contains(step));
        assert!(strange.is_none(), "{kind:?}, run {runs}, after {kills} kills: {strange:?}");
        left += clean(&dir.join("spill"));
        runs += 1;
        fs::remove_dir_all(&dir).unwrap();
    }
    assert_eq!(counts.all(), kills);
    eprintln!(
        "{kind:?}: {kills} kills in {runs} runs, all with the weights of the run that nothing disturbed: {} in forward and backward, {} \
         in write-back, {} in saves, {} in evaluations, {} elsewhere; {left} spill folders cleaned",
        counts.passes, counts.write_back, counts.save, counts.evaluation, counts.between
    );
}

fn deep() -> bool {
    std::env::var_os("PROPTEST_CASES").is_some()
}

#[test]
fn o2_o3_a_run_that_is_killed_anywhere_ends_with_the_same_weights() {
    let least = if deep() { 100 } else { 1 };
    sweep(Kind::Steps, least, 0);
}

/// Beside backward, from saves on a drive and of state in RAM, and with weights at home in RAM.
#[test]
fn o2_o3_a_run_that_is_killed_ends_with_the_same_weights_however_its_state_is_kept() {
    for kind in [Kind::Beside, Kind::Saves, Kind::InRam, Kind::Homes] {
        sweep(kind, 0, if deep() { 60 } else { 3 });
    }
}
