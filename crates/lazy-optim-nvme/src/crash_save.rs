//! Power cuts, full disks and failed flushes at every point of saving, of the steps after it, and of going back.

use std::path::Path;

use lazy_store::durable::{DurableDir, IoOptions};
use lazy_store::fault::Faults;
use lazy_store::{BackendChoice, DirectChoice};

use crate::common::{State, cut, init, params, scratch, state, take_step};
use crate::source::Source;
use crate::{AdamOptions, Durability, LoadOptions, NvmeAdam, OptimError, ParamSpec, generations};

/// Two buckets.
const SIZES: [usize; 3] = [20_000, 300, 5_000];

fn io() -> IoOptions {
    IoOptions { backend: BackendChoice::Posix, direct: DirectChoice::Off, ..IoOptions::default() }
}

fn small() -> AdamOptions {
    AdamOptions { io: io(), ..cut(16_384, 64, 2) }
}

const REPLACE: LoadOptions = LoadOptions { replace: true, lossy: false };

/// A store of one or two steps with one generation, in a folder; and the states after steps 0 to 5 of a run that nothing disturbs.
struct Fixture {
    dir: tempfile::TempDir,
    options: AdamOptions,
    params: Vec<ParamSpec>,
    states: Vec<State>,
}

impl Fixture {
    fn new(durability: Durability) -> Self {
        let options = AdamOptions { durability, ..small() };
        let params = params(&SIZES);
        let dir = scratch();
        let mut adam = NvmeAdam::create(dir.path(), &params, &small(), init).unwrap();
        let mut states = vec![state(&mut adam, &params)];
        for step in 1..=5 {
            take_step(&mut adam, &params, step).unwrap();
            states.push(state(&mut adam, &params));
        }
        drop(adam);
        std::fs::remove_dir_all(dir.path()).unwrap();
        let mut adam = NvmeAdam::create(dir.path(), &params, &options, init).unwrap();
        take_step(&mut adam, &params, 1).unwrap();
        adam.save("at-1").unwrap().wait().unwrap();
        // Between saves there is no store to open where steps commit nothing.
        if durability == Durability::Step {
            take_step(&mut adam, &params, 2).unwrap();
        }
        drop(adam);
        Fixture { dir, options, params, states }
    }

    /// The store again, in a folder of its own.
    fn copy(&self) -> tempfile::TempDir {
        let to = scratch();
        copy(self.dir.path(), to.path());
        to
    }

    fn open(&self, dir: &Path, faults: &Faults) -> NvmeAdam {
        let dir = DurableDir::open_with_faults(dir, &io(), faults).unwrap();
        NvmeAdam::open_in(dir, &self.params, &self.options).unwrap()
    }

    /// Opens what a power cut has left, or goes back to what was saved last where that is all there can be.
    fn open_or_go_back(&self, dir: &Path, what: &str) -> NvmeAdam {
        match NvmeAdam::open(dir, &self.params, &self.options) {
            Err(OptimError::NotKept { .. }) if self.options.durability == Durability::Checkpoint => {
                let newest = generations(dir).unwrap().pop().unwrap();
                NvmeAdam::load(&[&newest.path], dir, &self.params, &self.options, REPLACE).unwrap()
            }
            opened => opened.unwrap_or_else(|error| panic!("{what}: {error}")),
        }
    }

    /// Every generation in the folder is what was saved; gives their names.
    fn check_generations(&self, dir: &Path, what: &str) -> Vec<String> {
        let found = generations(dir).unwrap();
        for generation in &found {
            let copy = scratch();
            let loaded = NvmeAdam::load(
                &[&generation.path],
                copy.path(),
                &self.params,
                &small(),
                LoadOptions::default(),
            );
            let mut loaded = loaded.unwrap_or_else(|error| panic!("{what}: {}: {error}", generation.name));
            assert_eq!(generation.name, format!("at-{}", loaded.sequence()), "{what}");
            self.check_state(&mut loaded, what);
        }
        found.into_iter().map(|generation| generation.name).collect()
    }

    fn check_state(&self, adam: &mut NvmeAdam, what: &str) {
        let at = adam.sequence();
        assert!(state(adam, &self.params) == self.states[at as usize], "{what}: a mix at {at}");
        assert_eq!(adam.step_counts(), [at; 3], "{what}");
    }
}

/// Copies a store's folder; files that share their content go on sharing it.
fn copy(from: &Path, to: &Path) {
    use std::os::unix::fs::MetadataExt;
    let mut copied = std::collections::HashMap::new();
    let mut folders = vec![(from.to_path_buf(), to.to_path_buf())];
    while let Some((from, to)) = folders.pop() {
        for entry in std::fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            let to = to.join(entry.file_name());
            let metadata = entry.metadata().unwrap();
            if metadata.is_dir() {
                std::fs::create_dir(&to).unwrap();
                folders.push((entry.path(), to));
                continue;
            }
            match copied.entry(metadata.ino()) {
                std::collections::hash_map::Entry::Occupied(first) => {
                    std::fs::hard_link(first.get(), to).unwrap()
                }
                std::collections::hash_map::Entry::Vacant(vacant) => {
                    std::fs::copy(entry.path(), &to).unwrap();
                    vacant.insert(to);
                }
            }
        }
    }
}

/// Two saves with steps between and behind, one of them under way while a step is taken, and a generation removed.
fn work(adam: &mut NvmeAdam, params: &[ParamSpec], saved: &mut Vec<&'static str>) -> Result<(), OptimError> {
    if adam.sequence() < 2 {
        take_step(adam, params, 2)?;
    }
    adam.save("at-2")?.wait()?;
    saved.push("at-2");
    take_step(adam, params, 3)?;
    adam.remove_generation("at-1")?;
    saved.retain(|name| *name != "at-1");
    take_step(adam, params, 4)?;
    adam.save("at-4")?.wait()?;
    saved.push("at-4");
    take_step(adam, params, 5)
}

#[test]
fn o3_a_power_cut_anywhere_in_saves_and_steps_leaves_whole_generations_and_a_whole_state() {
    cut_everywhere(&Fixture::new(Durability::Step));
}

#[test]
fn o3_a_power_cut_anywhere_between_saves_is_told_and_the_last_one_is_whole() {
    cut_everywhere(&Fixture::new(Durability::Checkpoint));
}

fn cut_everywhere(fixture: &Fixture) {
    let every_step = fixture.options.durability == Durability::Step;
    let mut cuts_with = std::collections::BTreeMap::new();
    for k in 0.. {
        let mut finished = false;
        for seed in 0..if std::env::var_os("PROPTEST_CASES").is_some() { 8 } else { 2 } {
            let what = format!("cut at {k}, seed {seed}");
            let (dir, faults) = (fixture.copy(), Faults::new(k * 7 + seed));
            let mut adam = fixture.open(dir.path(), &faults);
            let before = faults.operations().len() as u64;
            faults.cut_at(before + k);
            let mut saved = vec!["at-1"];
            finished = work(&mut adam, &fixture.params, &mut saved).is_ok();
            let reached = adam.sequence();
            drop(adam);
            faults.restart().unwrap();
            let mut adam = fixture.open_or_go_back(dir.path(), &what);
            fixture.check_state(&mut adam, &what);
            let last =
                if every_step { reached } else { saved.last().map_or(0, |name| name[3..].parse().unwrap()) };
            assert!(adam.sequence() >= last, "{what}");
            let found = fixture.check_generations(dir.path(), &what);
            // What was promised is there, but for one whose removal had begun.
            let promised = saved.iter().filter(|name| **name != "at-1" || reached < 3);
            promised.for_each(|name| assert!(found.iter().any(|f| f == name), "{what}: {name} is lost"));
            *cuts_with.entry(found.join(" ")).or_insert(0) += 1;
            // Nothing is left of what was cut short, and training goes on.
            let names =
                std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
            let left: Vec<_> = names.filter(|n| n.ends_with(".tmp") || n.ends_with(".new")).collect();
            assert!(left.is_empty(), "{what}: {left:?}");
            for step in adam.sequence() as usize + 1..=5 {
                take_step(&mut adam, &fixture.params, step).unwrap();
            }
            fixture.check_state(&mut adam, &what);
            assert_eq!(fixture.check_generations(dir.path(), &what), found);
        }
        if finished {
            break;
        }
    }
    let seen: Vec<_> = cuts_with.keys().map(String::as_str).collect();
    assert_eq!(seen, ["at-1", "at-1 at-2", "at-2", "at-2 at-4"]);
}

#[test]
fn o3_a_disk_that_is_full_anywhere_in_saves_and_steps_is_an_error_and_harms_nothing() {
    let fixture = Fixture::new(Durability::Step);
    for k in 0.. {
        let what = format!("full from {k}");
        let (dir, faults) = (fixture.copy(), Faults::new(k));
        let mut adam = fixture.open(dir.path(), &faults);
        faults.full_from(faults.operations().len() as u64 + k);
        let mut saved = vec!["at-1"];
        let done = work(&mut adam, &fixture.params, &mut saved);
        let message = done.as_ref().err().map_or(String::new(), OptimError::to_string);
        faults.reset(0);
        drop(adam);
        let mut adam = fixture.open(dir.path(), &faults);
        fixture.check_state(&mut adam, &what);
        assert_eq!(fixture.check_generations(dir.path(), &what), saved, "{what}: {message}");
        for step in adam.sequence() as usize + 1..=5 {
            take_step(&mut adam, &fixture.params, step).unwrap();
        }
        fixture.check_state(&mut adam, &what);
        if done.is_ok() {
            break;
        }
    }
}

#[test]
fn o3_a_failed_flush_of_a_save_leaves_no_generation_and_the_save_can_be_made_again() {
    let fixture = Fixture::new(Durability::Step);
    // Of the manifest, of the new folder, of the store's folder.
    for nth in 0..4 {
        let (dir, faults) = (fixture.copy(), Faults::new(nth));
        let mut adam = fixture.open(dir.path(), &faults);
        faults.on_sync(nth);
        let failed = adam.save("at-2").unwrap().wait().is_err();
        assert_eq!(failed, nth < 3);
        let found = fixture.check_generations(dir.path(), "a failed flush");
        assert_eq!(found, if failed { vec!["at-1"] } else { vec!["at-1", "at-2"] });
        if failed {
            take_step(&mut adam, &fixture.params, 3).unwrap();
            adam.save("at-3").unwrap().wait().unwrap();
            assert_eq!(fixture.check_generations(dir.path(), "afterwards"), ["at-1", "at-3"]);
        }
    }
}

#[test]
fn o3_a_power_cut_anywhere_in_going_back_leaves_the_state_before_the_generation_or_a_refusal() {
    let fixture = Fixture::new(Durability::Step);
    let mut seen = std::collections::BTreeSet::new();
    for k in 0.. {
        let (dir, faults) = (fixture.copy(), Faults::new(k));
        let source = vec![Source::open(&dir.path().join("at-1")).unwrap()];
        let folder = DurableDir::open_with_faults(dir.path(), &io(), &faults).unwrap();
        faults.cut_at(k);
        let replace = REPLACE;
        let done = NvmeAdam::load_in(source, folder, &fixture.params, &small(), replace).is_ok();
        faults.restart().unwrap();
        let what = format!("cut at {k}");
        match NvmeAdam::open(dir.path(), &fixture.params, &small()) {
            Ok(mut adam) => {
                fixture.check_state(&mut adam, &what);
                assert!(!done || adam.sequence() == 1, "{what}");
                seen.insert(adam.sequence());
            }
            Err(OptimError::Incomplete { .. } | OptimError::NoStore { .. }) => assert!(!done, "{what}"),
            Err(error) => panic!("{what}: {error}"),
        }
        // Whatever is there, the generation can be loaded.
        let again =
            NvmeAdam::load(&[dir.path().join("at-1")], dir.path(), &fixture.params, &small(), replace);
        let mut adam = again.unwrap();
        fixture.check_state(&mut adam, &what);
        take_step(&mut adam, &fixture.params, 2).unwrap();
        fixture.check_state(&mut adam, &what);
        fixture.check_generations(dir.path(), &what);
        if done {
            break;
        }
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [1, 2]);
}
