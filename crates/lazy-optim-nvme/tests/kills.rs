//! A program that steps and saves in a loop, killed over and over: whatever it was doing, the state is that of the last step it
//! finished or of the one it was in, and every generation is whole.
//!
//! The deep switch kills it 500 times, at least 100 of them while slots are written and 100 while a save is made.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "tests")]

mod common;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{State, all, cut, grads, init, params, state};
use lazy_optim_nvme::{
    AdamOptions, Durability, GroupOptions, LoadOptions, NvmeAdam, OptimError, ParamSpec, StepInput,
    generations,
};

const SIZES: [usize; 3] = [150_000, 300, 50_000];
/// Generations kept.
const KEPT: usize = 2;
/// The folder, where this program is the one to be killed.
const FOLDER: &str = "LAZY_KILLED_IN";
/// Set where it keeps its state from save to save alone.
const CHECKPOINT: &str = "LAZY_KILLED_BETWEEN_SAVES";

fn options(durability: Durability) -> AdamOptions {
    AdamOptions { durability, ..cut(70_000, 64, 3) }
}

/// What the program says that it is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Opening,
    Between,
    /// A step up to its first chunk: norm, and new slots for those that were saved.
    Begin,
    /// From there to the commit: chunks read, updated and written back, slots flushed, the record.
    WriteBack,
    /// A save is made: links, manifest, flushes.
    Save,
    /// A step while a save is under way.
    StepBesideSave,
    Remove,
}

const PHASES: [Phase; 7] = [
    Phase::Opening,
    Phase::Between,
    Phase::Begin,
    Phase::WriteBack,
    Phase::Save,
    Phase::StepBesideSave,
    Phase::Remove,
];

/// A file in which the program notes its phase, the step it has finished and the one it has saved, for whoever kills it.
struct Notes(File);

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

    fn enter(&self, phase: Phase) {
        self.put(0, phase as u64);
    }

    fn phase(&self) -> Phase {
        PHASES[self.get(0) as usize]
    }
}

/// Step number `step`, telling of its phases.
fn take_step(adam: &mut NvmeAdam, params: &[ParamSpec], step: u64, mut working: impl FnMut()) {
    let grads = grads(params, step as usize);
    let group = GroupOptions { lr: 0.01, ..GroupOptions::default() };
    let blob = step.to_le_bytes();
    let input = StepInput { groups: &[group], max_norm: Some(1.0), blob: &blob, ..StepInput::default() };
    adam.step(&all(&grads), &input, &mut |_, _, _| working()).unwrap();
}

/// The program that is killed; without a folder, a test that does nothing.
#[test]
fn the_program() {
    let Some(dir) = std::env::var_os(FOLDER) else { return };
    let (dir, params, notes) = (Path::new(&dir), params(&SIZES), Notes::open(Path::new(&dir)));
    notes.enter(Phase::Opening);
    let store = dir.join("store");
    let checkpoint = std::env::var_os(CHECKPOINT).is_some();
    let durability = if checkpoint { Durability::Checkpoint } else { Durability::Step };
    let mut adam = NvmeAdam::open(&store, &params, &options(durability)).unwrap();
    loop {
        let step = adam.sequence() + 1;
        notes.enter(Phase::Begin);
        take_step(&mut adam, &params, step, || notes.enter(Phase::WriteBack));
        notes.put(1, step);
        let name = format!("step-{step}");
        if generations(&store).unwrap().iter().all(|generation| generation.name != name) {
            notes.enter(Phase::Save);
            let saving = adam.save(&name).unwrap();
            if step.is_multiple_of(3) {
                notes.enter(Phase::StepBesideSave);
                take_step(&mut adam, &params, step + 1, || ());
                notes.put(1, step + 1);
                notes.enter(Phase::Save);
            }
            saving.wait().unwrap();
            notes.put(2, step);
        }
        notes.enter(Phase::Remove);
        let found = generations(&store).unwrap();
        for old in &found[..found.len().saturating_sub(KEPT)] {
            adam.remove_generation(&old.name).unwrap();
        }
        notes.enter(Phase::Between);
    }
}

fn start(dir: &Path, durability: Durability) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "the_program", "--nocapture"]).env(FOLDER, dir);
    if durability == Durability::Checkpoint {
        command.env(CHECKPOINT, "1");
    }
    command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().unwrap()
}

/// The run that nothing disturbs, as far as it has been asked for.
struct Undisturbed {
    adam: NvmeAdam,
    params: Vec<ParamSpec>,
    states: Vec<State>,
    /// Of the first state that is held: older ones are not asked for any more.
    first: u64,
}

impl Undisturbed {
    fn at(&mut self, step: u64) -> &State {
        while self.adam.sequence() < step {
            let next = self.adam.sequence() + 1;
            take_step(&mut self.adam, &self.params, next, || ());
            self.states.push(state(&mut self.adam, &self.params));
            if self.states.len() > 12 {
                self.states.remove(0);
                self.first += 1;
            }
        }
        &self.states[(step - self.first) as usize]
    }
}

/// Kills the program once it is in `phase`, a moment later; what it was doing then.
fn kill_in(phase: Phase, moment: Duration, mut child: Child, notes: &Notes) -> Phase {
    while notes.phase() != phase {
        assert!(child.try_wait().unwrap().is_none(), "the program ended by itself");
        std::thread::sleep(Duration::from_micros(50));
    }
    std::thread::sleep(moment);
    child.kill().unwrap();
    child.wait().unwrap();
    notes.phase()
}

/// Opens what a killed program has left, or goes back to what it saved last where that is all there can be.
fn open_or_go_back(store: &Path, params: &[ParamSpec], durability: Durability) -> NvmeAdam {
    match NvmeAdam::open(store, params, &options(durability)) {
        Err(OptimError::NotKept { .. }) if durability == Durability::Checkpoint => {
            let newest = generations(store).unwrap().pop().unwrap();
            let load = LoadOptions { replace: true, ..LoadOptions::default() };
            NvmeAdam::load(&[&newest.path], store, params, &options(durability), load).unwrap()
        }
        opened => opened.unwrap(),
    }
}

/// Kills the program `kills` times, and on until it has been killed in each phase as often as is asked for.
fn kill_and_check(durability: Durability, kills: usize, at_least: &[(Phase, usize)]) {
    let scratch = tempfile::tempdir().unwrap();
    let (dir, params) = (scratch.path(), params(&SIZES));
    let (options, store) = (options(durability), dir.join("store"));
    let adam = NvmeAdam::create(&dir.join("undisturbed"), &params, &cut(70_000, 64, 3), init).unwrap();
    let mut undisturbed = Undisturbed { adam, params: params.clone(), states: Vec::new(), first: 0 };
    undisturbed.states.push(state(&mut undisturbed.adam, &params));
    let mut adam = NvmeAdam::create(&store, &params, &options, init).unwrap();
    adam.save("step-0").unwrap().wait().unwrap();
    drop(adam);
    let notes = Notes::open(dir);
    (0..3).for_each(|at| notes.put(at, 0));
    let mut counts = [0; PHASES.len()];
    let wanted = [
        Phase::WriteBack,
        Phase::Save,
        Phase::WriteBack,
        Phase::Save,
        Phase::StepBesideSave,
        Phase::Begin,
        Phase::Remove,
    ];
    for kill in 0.. {
        if kill >= kills && at_least.iter().all(|(phase, least)| counts[*phase as usize] >= *least) {
            break;
        }
        let wanted = wanted[kill % wanted.len()];
        let moment = kill as u64 * 7919 % if wanted == Phase::WriteBack { 4000 } else { 700 };
        notes.enter(Phase::Opening);
        let phase = kill_in(wanted, Duration::from_micros(moment), start(dir, durability), &notes);
        counts[phase as usize] += 1;
        let (finished, saved) = (notes.get(1), notes.get(2));
        let mut adam = open_or_go_back(&store, &params, durability);
        let at = adam.sequence();
        let what = format!("{durability:?}, kill {kill}, {phase:?}, at {at} after {finished}");
        match durability {
            Durability::Step => assert!(at == finished || at == finished + 1, "{what}"),
            Durability::Checkpoint => assert!(at >= saved && at <= finished + 1, "{what}"),
        }
        notes.put(1, at);
        assert_eq!(adam.step_counts(), [at; 3], "{what}");
        assert!(at == 0 || adam.blob() == at.to_le_bytes(), "{what}");
        assert!(state(&mut adam, &params) == *undisturbed.at(at), "{what}: another state");
        drop(adam);
        let found = generations(&store).unwrap();
        assert!(found.iter().any(|g| g.sequence >= saved), "{what}: step {saved} was saved");
        for generation in found {
            let copy = tempfile::tempdir_in(dir).unwrap();
            let loaded =
                NvmeAdam::load(&[&generation.path], copy.path(), &params, &options, LoadOptions::default());
            let mut loaded = loaded.unwrap_or_else(|error| panic!("{what}: {}: {error}", generation.name));
            assert_eq!(generation.name, format!("step-{}", loaded.sequence()), "{what}");
            let found = state(&mut loaded, &params);
            assert!(found == *undisturbed.at(loaded.sequence()), "{what}: {} differs", generation.name);
        }
    }
    let counts: Vec<_> =
        PHASES.iter().zip(counts).map(|(phase, count)| format!("{phase:?} {count}")).collect();
    eprintln!("kills by phase, {durability:?}: {}", counts.join(", "));
}

fn deep() -> bool {
    std::env::var_os("PROPTEST_CASES").is_some()
}

#[test]
fn o3_whenever_the_program_is_killed_the_state_is_old_or_new_and_every_generation_loads() {
    let (kills, least) = if deep() { (500, 100) } else { (21, 1) };
    kill_and_check(Durability::Step, kills, &[(Phase::WriteBack, least), (Phase::Save, least)]);
}

#[test]
fn o3_whenever_a_program_that_keeps_its_saves_alone_is_killed_the_last_one_loads() {
    let (kills, least) = if deep() { (250, 50) } else { (14, 1) };
    kill_and_check(Durability::Checkpoint, kills, &[(Phase::WriteBack, least), (Phase::Save, least)]);
}
