//! The peer's file, and the search for the setting that the peer is fastest with.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use memmap2::{Advice, MmapMut};
use rustix::fs::{FallocateFlags, Mode, OFlags};

use crate::Outcome;
use crate::fio::{Fio, Setting};
use crate::side::{Side, Transfer};

/// Length of the writes that fill the file.
const FILL: usize = 4 << 20;

/// Which peer there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    Fio,
    Raw,
}

impl Peer {
    pub(crate) fn open(self, file: &Path, bytes: u64, setting: Setting) -> Outcome<Box<dyn Side>> {
        match self {
            Peer::Fio => Ok(Box::new(Fio { file: file.to_owned(), bytes, setting })),
            #[cfg(target_os = "linux")]
            Peer::Raw => Ok(Box::new(crate::raw::Raw::open(file, bytes, setting)?)),
            #[cfg(not(target_os = "linux"))]
            Peer::Raw => Err("without Linux there is no io_uring: install fio".to_owned()),
        }
    }
}

/// A file of the peer's, allocated and written before anything is timed, as the store's is.
pub(crate) struct PeerFile {
    pub(crate) path: PathBuf,
    /// Bytes a second at which it was written.
    pub(crate) rate: f64,
}

impl PeerFile {
    pub(crate) fn create(dir: &Path, bytes: u64) -> Outcome<PeerFile> {
        let path = dir.join("peer");
        let failed = |error: rustix::io::Errno| format!("{}: {error}", path.display());
        let file = open_direct(&path, true)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes).map_err(failed)?;
        let mut memory = MmapMut::map_anon(FILL).map_err(|error| format!("no memory: {error}"))?;
        // Where there are none, small ones serve.
        let _ = memory.advise(Advice::HugePage);
        crate::fill(&mut memory, 0);
        let start = Instant::now();
        let mut at = 0;
        while at < bytes {
            let part = &memory[..FILL.min((bytes - at) as usize)];
            let count = rustix::io::pwrite(&file, part, at).map_err(failed)?;
            if count != part.len() {
                return Err(format!("{}: {count} bytes written of {}", path.display(), part.len()));
            }
            at += count as u64;
        }
        let rate = bytes as f64 / start.elapsed().as_secs_f64();
        Ok(PeerFile { path, rate })
    }
}

pub(crate) fn open_direct(path: &Path, create: bool) -> Outcome<File> {
    let mut flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::DIRECT;
    if create {
        flags |= OFlags::CREATE | OFlags::EXCL;
    }
    let opened = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR);
    Ok(opened.map_err(|error| format!("{} with O_DIRECT: {error}", path.display()))?.into())
}

/// Blocks and depths tried.
pub(crate) struct Candidates {
    pub(crate) blocks: &'static [u64],
    pub(crate) depths: &'static [u32],
    /// [`Setting::tuned`].
    pub(crate) tuned: bool,
    /// [`Setting::memory`].
    pub(crate) memory: Option<u64>,
}

impl Candidates {
    fn settings(&self, transfer: Transfer) -> Vec<Setting> {
        let layouts: &[bool] = if transfer == Transfer::Both { &[true, false] } else { &[false] };
        let mut settings = Vec::new();
        for &block in self.blocks {
            for &depth in self.depths {
                let setting =
                    |&two_jobs| Setting { block, depth, two_jobs, tuned: self.tuned, memory: self.memory };
                settings.extend(layouts.iter().map(setting));
            }
        }
        settings
    }

    /// The setting with the fastest run.
    pub(crate) fn best(&self, peer: Peer, file: &Path, bytes: u64, transfer: Transfer) -> Outcome<Setting> {
        let mut found: Option<(f64, Setting)> = None;
        for setting in self.settings(transfer) {
            // The raw loop has one job.
            if peer == Peer::Raw && setting.two_jobs {
                continue;
            }
            let mut side = peer.open(file, bytes, setting)?;
            let rate = side.run(transfer)?.rate();
            if found.is_none_or(|(best, _)| rate > best) {
                found = Some((rate, setting));
            }
        }
        let (rate, setting) = found.ok_or("nothing to try")?;
        eprintln!("bench store: {}: best with {}, {rate:.3} GB/s", transfer.name(), setting.label(transfer));
        Ok(setting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixed_transfers_are_tried_with_one_job_and_with_two() {
        let candidates = Candidates { blocks: &[1, 2], depths: &[1, 2, 4], tuned: true, memory: None };
        assert_eq!(candidates.settings(Transfer::Write).len(), 6);
        assert!(candidates.settings(Transfer::Read).iter().all(|setting| !setting.two_jobs));
        let both = candidates.settings(Transfer::Both);
        assert_eq!(both.iter().filter(|setting| setting.two_jobs).count(), 6);
        assert_eq!(both.len(), 12);
        assert!(both.iter().all(|setting| setting.tuned));
    }
}
