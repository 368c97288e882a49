//! The peer where fio cannot be had: a plain io_uring loop on an `O_DIRECT` file.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use io_uring::{IoUring, opcode, types};
use memmap2::{Advice, MmapMut};

use crate::Outcome;
use crate::fio::Setting;
use crate::side::{Sample, Side, Transfer};

pub(crate) struct Raw {
    file: File,
    bytes: u64,
    setting: Setting,
    ring: IoUring,
    /// One block a request in flight; taken only by the end.
    memory: Option<MmapMut>,
    in_flight: u64,
}

impl Raw {
    pub(crate) fn open(path: &Path, bytes: u64, setting: Setting) -> Outcome<Raw> {
        let file = crate::peer::open_direct(path, false)?;
        let ring = IoUring::new(setting.depth).map_err(|error| format!("no io_uring: {error}"))?;
        let len = setting.block as usize * setting.depth as usize;
        let mut memory = MmapMut::map_anon(len).map_err(|error| format!("no memory: {error}"))?;
        if setting.tuned {
            // Where there are none, small ones serve.
            let _ = memory.advise(Advice::HugePage);
        }
        crate::fill(&mut memory, 1);
        Ok(Raw { file, bytes, setting, ring, memory: Some(memory), in_flight: 0 })
    }

    /// Queues the request for block `index` with the memory of `slot`.
    fn start(&mut self, transfer: Transfer, index: u64, slot: u64) -> Outcome<()> {
        let block = self.setting.block;
        let memory = self.memory.as_deref_mut().and_then(|memory| {
            let at = (slot * block) as usize;
            memory.get_mut(at..at + block as usize)
        });
        let start = memory.ok_or("a request without memory")?.as_mut_ptr();
        // With both directions, even blocks are written and odd ones read.
        let writes = match transfer {
            Transfer::Write => true,
            Transfer::Read => false,
            Transfer::Both => index.is_multiple_of(2),
        };
        let (fd, offset) = (types::Fd(self.file.as_raw_fd()), index * block);
        let entry = match writes {
            true => opcode::Write::new(fd, start, block as u32).offset(offset).build(),
            false => opcode::Read::new(fd, start, block as u32).offset(offset).build(),
        };
        // SAFETY: the slot's `block` bytes lie within `memory`, no other request in flight has them, and `memory` goes only
        // when nothing is in flight (`drop`). The file is open as long as the ring.
        unsafe { self.ring.submission().push(&entry.user_data(slot)) }.map_err(|error| error.to_string())?;
        self.in_flight += 1;
        Ok(())
    }

    fn transfer(&mut self, transfer: Transfer) -> Outcome<()> {
        let blocks = self.bytes / self.setting.block;
        let mut next = u64::from(self.setting.depth).min(blocks);
        for index in 0..next {
            self.start(transfer, index, index)?;
        }
        let mut failure = None;
        while self.in_flight > 0 {
            self.ring.submit_and_wait(1).map_err(|error| format!("io_uring: {error}"))?;
            let done: Vec<_> =
                self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
            for (slot, result) in done {
                self.in_flight -= 1;
                if i64::from(result) != self.setting.block as i64 {
                    failure = Some(format!("io_uring: {result} for a request of {}", self.setting.block));
                }
                if next < blocks && failure.is_none() {
                    self.start(transfer, next, slot)?;
                    next += 1;
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            // After an error, what is in flight may still use it.
            std::mem::forget(self.memory.take());
        }
    }
}

impl Side for Raw {
    fn label(&self, transfer: Transfer) -> String {
        format!("raw io_uring loop, {}", self.setting.label(transfer))
    }

    fn run(&mut self, transfer: Transfer) -> Outcome<Sample> {
        Sample::of(self.bytes, || self.transfer(transfer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::PeerFile;

    #[test]
    fn every_block_is_moved_once() {
        let dir = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
        let file = PeerFile::create(dir.path(), 1 << 20).unwrap();
        let before = std::fs::read(&file.path).unwrap();
        let setting = Setting { block: 64 << 10, depth: 5, two_jobs: false, tuned: false };
        // A kernel or sandbox may refuse io_uring.
        let Ok(mut raw) = Raw::open(&file.path, 1 << 20, setting) else { return };
        raw.run(Transfer::Read).unwrap();
        assert_eq!(std::fs::read(&file.path).unwrap(), before);
        raw.run(Transfer::Both).unwrap();
        let after = std::fs::read(&file.path).unwrap();
        for (i, (before, after)) in before.chunks(64 << 10).zip(after.chunks(64 << 10)).enumerate() {
            assert_eq!(before == after, i % 2 == 1, "block {i}");
        }
        assert_eq!(raw.in_flight, 0);
    }
}
