//! What can go wrong with a run.

use std::io;
use std::path::{Path, PathBuf};

use lazy_model::VerifyError;
use lazy_model::schedule::ScheduleError;
use lazy_optim_nvme::OptimError;
use lazy_runtime::{LayerError, RuntimeError};
use lazy_solver::step::StepFailure;
use lazy_store::StoreError;
use rustix::io::Errno;

use crate::cuda::CudaError;
use crate::data::DataError;
use crate::decoder::DecoderError;

/// Why a run did not start or did not finish. Messages say what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// Flags or files that do not go together.
    #[error("{0}")]
    Usage(String),
    /// A configuration or profile.
    #[error(transparent)]
    Model(#[from] lazy_model::Error),
    /// The training text.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The decoder.
    #[error(transparent)]
    Decoder(#[from] DecoderError),
    /// The decoder on a GPU.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// No plan was found.
    #[error("{0}{flags}", flags = flags(.0))]
    Plan(#[from] StepFailure),
    /// A schedule file.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// A schedule that does not fit.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// The tiers.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A step.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// The optimizer's state.
    #[error(transparent)]
    Optimizer(#[from] OptimError),
    /// One of the others, and what this program can do about it.
    #[error("{source}; {advice}")]
    Advised {
        /// What went wrong.
        source: Box<TrainError>,
        /// Flags that help.
        advice: String,
    },
    /// Asked to stop before there was anything to keep.
    #[error("interrupted before the first step: nothing was kept")]
    Interrupted,
    /// A layer, called outside a step.
    #[error("{0}")]
    Layer(LayerError),
    /// A file or folder.
    #[error("{path}: {source}; {advice}", path = .path.display(), advice = of_file(.source))]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// JSON that this program wrote and cannot read back, or the other way round.
    #[error("{path}: {source}; the file was changed or belongs to another version", path = .path.display())]
    Json {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
}

impl From<LayerError> for TrainError {
    fn from(error: LayerError) -> Self {
        TrainError::Layer(error)
    }
}

impl TrainError {
    /// The same, with what this program can do about it.
    pub fn advise(self, advice: impl Into<String>) -> TrainError {
        TrainError::Advised { source: Box::new(self), advice: advice.into() }
    }

    /// The same where a disk has no room for a file.
    pub fn advise_if_full(self, advice: impl Into<String>) -> TrainError {
        match &self {
            TrainError::Store(StoreError::NoSpace { .. })
            | TrainError::Optimizer(
                OptimError::NoSpace { .. } | OptimError::Store(StoreError::NoSpace { .. }),
            ) => self.advise(advice),
            _ => self,
        }
    }

    /// For `map_err` on a file operation.
    pub fn io(path: &Path) -> impl FnOnce(io::Error) -> TrainError + '_ {
        move |source| TrainError::Io { path: path.to_owned(), source }
    }

    /// For `map_err` on JSON of a file.
    pub fn json(path: &Path) -> impl FnOnce(serde_json::Error) -> TrainError + '_ {
        move |source| TrainError::Json { path: path.to_owned(), source }
    }
}

/// Short for this program's results.
pub type Result<T> = std::result::Result<T, TrainError>;

/// What to look at where a file or folder could not be read or written.
fn of_file(source: &io::Error) -> &'static str {
    match source.kind() {
        _ if is_file_limit(source) => "raise the limit on open files (ulimit -n)",
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => "check the path",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "check that this user may read and write there"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "see that the disk has room",
        _ => "check that the folder exists, is writable and has room",
    }
}

/// Whether it is the limit on open files, which no other folder helps against.
pub(crate) fn is_file_limit(source: &io::Error) -> bool {
    source.raw_os_error() == Some(Errno::MFILE.raw_os_error())
}

/// The flags that do what the planner's library advises.
fn flags(failure: &StepFailure) -> String {
    match failure {
        StepFailure::Fixed { tier, needed, .. } => {
            format!(" (--{tier}-mib sets it: above {} MiB)", needed.mib_rounded_up())
        }
        StepFailure::Infeasible { .. } | StepFailure::Verify(_) => {
            " (--hbm-mib, --host-mib and --nvme-mib set the budgets)".to_owned()
        }
        StepFailure::NoIncumbent | StepFailure::Failed(_) => " (--plan checkpoint)".to_owned(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_fails_says_what_to_look_at() {
        for (number, words) in [
            (2, "check the path"),
            (13, "may read and write there"),
            (24, "limit on open files (ulimit -n)"),
            (28, "see that the disk has room"),
            (5, "is writable and has room"),
        ] {
            let message = TrainError::io(Path::new("x"))(io::Error::from_raw_os_error(number)).to_string();
            assert!(message.starts_with("x: ") && message.ends_with(words), "{message}");
        }
    }
}
