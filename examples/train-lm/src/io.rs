//! How files are read and written: what a run asks for.

use std::fmt;

use lazy_store::BackendChoice;
use lazy_store::durable::IoOptions;
use serde::{Deserialize, Serialize};

/// The back end that moves bytes to and from drives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IoChoice {
    /// io_uring where the kernel allows it, else a pool of threads
    #[default]
    Auto,
    /// io_uring
    Uring,
    /// A pool of threads with positioned reads and writes
    Posix,
    /// GPUDirect Storage, for spill files alone: the optimizer's state takes what `auto` does
    Cufile,
}

impl fmt::Display for IoChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IoChoice::Auto => "auto",
            IoChoice::Uring => "uring",
            IoChoice::Posix => "posix",
            IoChoice::Cufile => "cufile",
        })
    }
}

impl IoChoice {
    /// For spill files.
    pub const fn spill(self) -> BackendChoice {
        match self {
            IoChoice::Auto => BackendChoice::Auto,
            IoChoice::Uring => BackendChoice::Uring,
            IoChoice::Posix => BackendChoice::Posix,
            IoChoice::Cufile => BackendChoice::Cufile,
        }
    }

    /// For the optimizer's state, whose chunks are in RAM.
    pub fn state(self) -> IoOptions {
        let backend = match self {
            IoChoice::Cufile => BackendChoice::Auto,
            choice => choice.spill(),
        };
        IoOptions { backend, ..IoOptions::default() }
    }
}
