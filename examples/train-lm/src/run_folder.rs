//! The folder a run leaves: what is written when, and how it is read again.

use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::dataset::TOKENIZER;
use crate::error::{Result, TrainError};
use crate::habits::Habits;
use crate::metrics::StepMetrics;
use crate::settings::Settings;

/// Format version of `run.json`.
const RUN_VERSION: u32 = 1;
/// The run's settings.
const RUN_FILE: &str = "run.json";
/// A line for every step.
const METRICS_FILE: &str = "metrics.jsonl";
/// A line for every evaluation.
pub const EVALUATIONS_FILE: &str = "evaluations.jsonl";
/// The hardware profile that the plan was made on.
pub const PROFILE_FILE: &str = "profile.json";
/// That profile, corrected by what the run showed.
pub const CORRECTED_FILE: &str = "corrected-profile.json";

/// A run's folder.
pub struct RunFolder {
    path: PathBuf,
    /// The folder was made by this process and holds nothing anyone needs yet: it goes when the run does not start.
    fresh: bool,
    /// Held as long as this process works in the folder.
    _lock: File,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RunFile {
    version: u32,
    /// Steps in all, where the run was told how many; a resumed run may be told another number.
    #[serde(default)]
    steps: Option<u64>,
    #[serde(default)]
    habits: Habits,
    settings: Settings,
}

/// What a run is remembered by.
pub struct Remembered {
    /// What decides every bit.
    pub settings: Settings,
    /// What does not.
    pub habits: Habits,
    /// Steps in all, where it was told how many.
    pub steps: Option<u64>,
}

impl RunFolder {
    /// Makes the folder and writes the run's settings, model configuration and tokenizer. If anything fails before
    /// [`RunFolder::started`], the folder is removed again.
    ///
    /// # Errors
    /// When the folder exists and is not empty, or cannot be made.
    pub fn create(
        path: &Path,
        remembered: &Remembered,
        config: &str,
        tokenizer: Option<&[u8]>,
    ) -> Result<RunFolder> {
        check_free(path)?;
        fs::create_dir_all(path).map_err(TrainError::io(path))?;
        let lock = lock(path)?;
        // Another run may have been as quick: looked at again now that it would hold the lock.
        check_free(path)?;
        let folder = RunFolder { path: path.to_owned(), fresh: true, _lock: lock };
        folder.remember(remembered)?;
        write_file(&folder.config(), config.as_bytes())?;
        if let Some(tokenizer) = tokenizer {
            write_file(&folder.tokenizer(), tokenizer)?;
        }
        Ok(folder)
    }

    /// Writes down what the run is remembered by.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn remember(&self, Remembered { settings, habits, steps }: &Remembered) -> Result<()> {
        let (settings, habits) = (settings.clone(), habits.clone());
        let file = RunFile { version: RUN_VERSION, steps: *steps, habits, settings };
        let text = serde_json::to_string_pretty(&file).map_err(TrainError::json(&self.run_file()))?;
        write_file(&self.run_file(), text.as_bytes())
    }

    /// Opens the folder of an earlier run.
    ///
    /// # Errors
    /// When it is not a run's folder of this version.
    pub fn open(path: &Path) -> Result<(RunFolder, Remembered)> {
        let remembered = read_run(path)?;
        let folder = RunFolder { path: path.to_owned(), fresh: false, _lock: lock(path)? };
        Ok((folder, remembered))
    }

    /// From here on the folder stays, whatever happens.
    pub fn started(&mut self) {
        self.fresh = false;
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn run_file(&self) -> PathBuf {
        self.path.join(RUN_FILE)
    }

    /// The model's configuration.
    pub fn config(&self) -> PathBuf {
        self.path.join("config.json")
    }

    /// The tokenizer, where the data was read by one.
    pub fn tokenizer(&self) -> PathBuf {
        self.path.join(TOKENIZER)
    }

    /// The schedule.
    pub fn schedule(&self) -> PathBuf {
        self.path.join("schedule.json")
    }

    /// A line for every step.
    pub fn metrics(&self) -> PathBuf {
        self.path.join(METRICS_FILE)
    }

    /// A line for every evaluation.
    pub fn evaluations(&self) -> PathBuf {
        self.path.join(EVALUATIONS_FILE)
    }

    /// The trace.
    pub fn trace(&self) -> PathBuf {
        self.path.join("trace.json")
    }

    /// What boundaries held on their way to NVMe and back, where that was asked for.
    pub fn boundaries(&self) -> PathBuf {
        self.path.join("boundaries.jsonl")
    }

    /// The report.
    pub fn report(&self) -> PathBuf {
        self.path.join(crate::report::REPORT_FILE)
    }

    /// The trained weights.
    pub fn checkpoint(&self) -> PathBuf {
        self.path.join("checkpoint")
    }

    /// The hardware profile that the plan was made on.
    pub fn profile(&self) -> PathBuf {
        self.path.join(PROFILE_FILE)
    }

    /// The same, corrected by what the run showed.
    pub fn corrected_profile(&self) -> PathBuf {
        self.path.join(CORRECTED_FILE)
    }

    /// Reads the lines of `metrics.jsonl` for steps before `step`; a torn last line, left by a kill, is dropped.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn read_metrics(&self, step: u64) -> Result<Vec<StepMetrics>> {
        read_metrics(&self.path, step)
    }

    /// Opens `metrics.jsonl` for appending, with the lines of `earlier` steps in it and no others.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn metrics_writer(&self, earlier: &[StepMetrics]) -> Result<MetricsWriter> {
        let path = self.metrics();
        let mut text = Vec::new();
        for metrics in earlier {
            serde_json::to_writer(&mut text, metrics).map_err(TrainError::json(&path))?;
            text.push(b'\n');
        }
        write_file(&path, &text)?;
        let file = OpenOptions::new().append(true).open(&path).map_err(TrainError::io(&path))?;
        Ok(MetricsWriter { file, path })
    }

    /// A buffered writer to `trace.json`.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn trace_writer(&self) -> Result<BufWriter<File>> {
        let path = self.trace();
        Ok(BufWriter::new(File::create(&path).map_err(TrainError::io(&path))?))
    }
}

/// What the run in a folder is remembered by. Anyone may look, also while the run goes on.
///
/// # Errors
/// When it is not a run's folder of this version.
pub fn read_run(path: &Path) -> Result<Remembered> {
    let file = path.join(RUN_FILE);
    let text = fs::read_to_string(&file).map_err(|source| {
        TrainError::Usage(format!("{}: {source}; give the folder of a run", file.display()))
    })?;
    let run: RunFile = serde_json::from_str(&text).map_err(TrainError::json(&file))?;
    if run.version != RUN_VERSION {
        return Err(TrainError::Usage(format!(
            "{} has version {}, this program reads version {RUN_VERSION}",
            file.display(),
            run.version
        )));
    }
    run.settings
        .check()
        .map_err(|e| TrainError::Usage(format!("{}: {e}; the file was changed", file.display())))?;
    let RunFile { settings, habits, steps, .. } = run;
    Ok(Remembered { settings, habits, steps })
}

/// The lines of `metrics.jsonl` in a run's folder for steps before `step`; none where there is no such file yet.
///
/// # Errors
/// When the file cannot be read.
pub fn read_metrics(run: &Path, step: u64) -> Result<Vec<StepMetrics>> {
    let path = run.join(METRICS_FILE);
    let text = match fs::read_to_string(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(TrainError::io(&path))?,
    };
    let lines = text.lines().filter_map(|line| serde_json::from_str(line).ok());
    Ok(lines.filter(|m: &StepMetrics| m.step < step).collect())
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        if self.fresh {
            // The run did not start: leave nothing half-written. The state folder, if it lies elsewhere, is the caller's.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Claims the folder for this process; the claim ends with it.
fn lock(path: &Path) -> Result<File> {
    let folder = File::open(path).map_err(TrainError::io(path))?;
    match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(folder),
        Err(Errno::WOULDBLOCK) => Err(TrainError::Usage(format!(
            "another process is running in {}: wait for it or stop it, or name another folder",
            path.display()
        ))),
        // Some shared file systems have no locks: the optimizer's state is still guarded by what is written in it.
        Err(Errno::NOTSUP | Errno::NOSYS) => Ok(folder),
        Err(e) => Err(TrainError::io(path)(e.into())),
    }
}

/// Refuses a folder that holds something already.
///
/// # Errors
/// When it does, or cannot be looked into.
pub fn check_free(path: &Path) -> Result<()> {
    match fs::read_dir(path) {
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(_) => Err(TrainError::Usage(format!(
                "{} is not empty: name a new folder with --out, or continue its run with --resume",
                path.display()
            ))),
        },
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(TrainError::io(path)(e)),
    }
}

/// Appends to `metrics.jsonl`, a whole line at a time.
pub struct MetricsWriter {
    file: File,
    path: PathBuf,
}

impl MetricsWriter {
    /// Appends one line.
    ///
    /// # Errors
    /// When the disk is full or gone.
    pub fn write(&mut self, metrics: &StepMetrics) -> Result<()> {
        let mut line = serde_json::to_vec(metrics).map_err(TrainError::json(&self.path))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(TrainError::io(&self.path))
    }
}

/// Writes a whole file under a temporary name and renames it, so that it is there whole or not at all.
///
/// # Errors
/// When the folder is not writable or the disk is full.
pub fn write_file(path: &Path, contents: &[u8]) -> Result<()> {
    replace(path, |partial| fs::write(partial, contents))
}

/// Has a file written under a temporary name, and renames it.
pub(crate) fn replace(path: &Path, write: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let whole = || {
        // Made here, so that others may read it as far as the process lets them.
        let file = File::create(&partial)?;
        write(&partial)?;
        file.sync_data()?;
        fs::rename(&partial, path)?;
        // The name too is there after a power cut.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    };
    whole().map_err(|source| {
        let _ = fs::remove_file(&partial);
        TrainError::Io { path: path.to_owned(), source }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o3_what_could_not_be_written_whole_leaves_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        write_file(&path, b"old").unwrap();
        let full = |partial: &Path| {
            fs::write(partial, "half")?;
            Err(std::io::Error::from(std::io::ErrorKind::StorageFull))
        };
        let error = replace(&path, full).unwrap_err().to_string();
        assert!(error.contains("model.safetensors") && error.contains("has room"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        // What a kill leaves half-written is in nobody's way.
        fs::write(dir.path().join("model.safetensors.partial"), "half").unwrap();
        write_file(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
