//! The optimizer's state of a run: made, opened, gone back to.

use std::path::{Path, PathBuf};

use lazy_model::{Bytes, Schedule};
use lazy_optim_nvme::{AdamOptions, LoadOptions, NvmeAdam, OptimError, ParamSpec};
use lazy_runtime::Executor;
use lazy_store::StoreError;
use serde::{Deserialize, Serialize};

use crate::backend::Trained;
use crate::error::{Result, TrainError, is_file_limit};
use crate::planning::{free_space, optimized, saved};
use crate::run_folder::RunFolder;
use crate::settings::{DurabilityChoice, Settings};
use crate::weights::InitialWeights;

/// What the optimizer commits with every step.
#[derive(Serialize, Deserialize)]
pub(super) struct Cursor {
    /// Steps done.
    pub(super) next_step: u64,
    pub(super) seed: u64,
    pub(super) shape_hash: String,
}

/// Goes back to the state that was saved last.
fn load_newest(dir: &Path, specs: &[ParamSpec], adam: &AdamOptions) -> Result<NvmeAdam> {
    match lazy_optim_nvme::generations(dir)?.last() {
        Some(newest) => {
            let load = LoadOptions { replace: true, ..LoadOptions::default() };
            Ok(NvmeAdam::load(&[&newest.path], dir, specs, adam, load)?)
        }
        None => Err(TrainError::Usage(format!(
            "the run was stopped before the state in {} was first saved, so there is nothing to continue: start it again (with \
             --durability step every step can be continued)",
            dir.display()
        ))),
    }
}

/// Refuses a folder without room for state in RAM or HBM, which goes there when it is saved. What is at home there is reserved at once.
pub(super) fn check_save(dir: &Path, specs: &[ParamSpec], adam: &AdamOptions) -> Result<()> {
    if adam.host == Bytes::ZERO && adam.hbm == Bytes::ZERO {
        return Ok(());
    }
    let needed = NvmeAdam::bytes_on_disk(specs, &saved(adam))?;
    let free = free_space(dir)?;
    if free < needed {
        return Err(TrainError::Usage(format!(
            "the optimizer's state takes {needed} on disk when it is saved, and there are {free} free for {}: free space, or choose \
             another folder with --state-dir",
            dir.display()
        )));
    }
    Ok(())
}

/// Where the optimizer's state of a run in a folder lies.
pub(super) fn state_dir(settings: &Settings, run: &Path) -> PathBuf {
    settings.state_dir.clone().unwrap_or_else(|| run.join("state"))
}

/// Opens the optimizer's state, from which the weights are rebuilt, or makes it of the first weights.
pub(super) fn open_state(
    settings: &Settings,
    folder: &RunFolder,
    (trained, executor): (&Trained, &Executor),
    adam: &AdamOptions,
    new: Option<&InitialWeights>,
    schedule: &Schedule,
) -> Result<(NvmeAdam, Cursor)> {
    let specs = optimized(trained.spec(), settings);
    let dir = &state_dir(settings, folder.path());
    if let Some(initial) = new {
        let absent = !dir.exists();
        let parameters = trained.spec().parameters();
        let mut failed = None;
        let created = NvmeAdam::create(dir, &specs, adam, |parameter, first, values| {
            let filled = initial
                .fill(&parameters[parameter], first, values)
                .and_then(|()| trained.write(executor, parameter, first, values));
            if let Err(error) = filled {
                failed.get_or_insert(error);
            }
        });
        if created.is_err() && absent {
            // Only what this run made, and only if nothing is in it.
            let _ = std::fs::remove_dir(dir);
        }
        let elsewhere = "--state-dir names another folder for it";
        let if_full = match settings.durability {
            DurabilityChoice::Step => format!("--durability checkpoint takes half of that, {elsewhere}"),
            DurabilityChoice::Checkpoint => elsewhere.into(),
        };
        let optimizer = created.map_err(|e| match e {
            OptimError::Store(StoreError::File { ref source, .. }) if !is_file_limit(source) => {
                TrainError::from(e).advise(
                    "name a writable folder for it with --state-dir, or another run folder with --out",
                )
            }
            e => TrainError::from(e).advise_if_full(if_full),
        })?;
        let cursor = Cursor { next_step: 0, seed: settings.seed, shape_hash: schedule.shape_hash.clone() };
        return failed.map_or(Ok((optimizer, cursor)), Err);
    }
    let mut optimizer = match NvmeAdam::open(dir, &specs, adam) {
        Err(OptimError::NoStore { .. } | OptimError::Incomplete { .. }) if !folder.metrics().exists() => {
            return Err(TrainError::Usage(format!(
                "{} was stopped before its first state was written, so there is nothing to continue: remove it{}, and start \
                 the run again",
                folder.path().display(),
                settings.state_dir.as_ref().map(|d| format!(" and {}", d.display())).unwrap_or_default()
            )));
        }
        Err(OptimError::NotKept { dir, .. }) => load_newest(&dir, &specs, adam)?,
        // What a library's user would do (make it anew, take files away) ends a run.
        Err(
            e @ (OptimError::NoStore { .. }
            | OptimError::Incomplete { .. }
            | OptimError::Damaged { .. }
            | OptimError::Store(StoreError::BadRange { .. } | StoreError::File { .. })),
        ) => {
            let checkpoint = folder.checkpoint();
            let begin = format!(
                "for this run: put the state back as it was, or start a new one from the weights it wrote last, --model {}",
                checkpoint.display()
            );
            let otherwise = "for this run: put the state back as it was, or start a new one";
            let there = checkpoint.exists();
            return Err(TrainError::from(e).advise(if there { begin } else { otherwise.to_owned() }));
        }
        opened => opened?,
    };
    let mut failed = None;
    optimizer.read_weights(&mut |parameter, first, values| {
        if let Err(error) = trained.write(executor, parameter, first, values) {
            failed.get_or_insert(error);
        }
    })?;
    if let Some(error) = failed {
        return Err(error);
    }
    let cursor = match optimizer.blob() {
        [] => Cursor { next_step: 0, seed: settings.seed, shape_hash: schedule.shape_hash.clone() },
        blob => serde_json::from_slice(blob).map_err(TrainError::json(dir))?,
    };
    if cursor.seed != settings.seed || cursor.shape_hash != schedule.shape_hash {
        return Err(TrainError::Usage(format!(
            "the state in {} belongs to another run (seed {} there, {} here)",
            dir.display(),
            cursor.seed,
            settings.seed
        )));
    }
    Ok((optimizer, cursor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_in_ram_that_could_not_be_saved_is_refused_at_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let adam = AdamOptions {
            host: Bytes(u64::MAX),
            durability: lazy_optim_nvme::Durability::Checkpoint,
            bucket_elements: 1 << 45,
            ..AdamOptions::default()
        };
        let absent = dir.path().join("run/state");
        let error = check_save(&absent, &[ParamSpec::new("w", &[1 << 50])], &adam).unwrap_err().to_string();
        assert!(
            error.contains("takes 12583680") && error.contains("--state-dir") && !absent.exists(),
            "{error}"
        );
        check_save(&absent, &[ParamSpec::new("w", &[10])], &adam).unwrap();
        let on_drive = AdamOptions { host: Bytes::ZERO, ..adam };
        check_save(&absent, &[ParamSpec::new("w", &[1 << 50])], &on_drive).unwrap();
    }
}
