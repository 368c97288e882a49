//! A plain io_uring loop on an `O_DIRECT` file: the peer where fio cannot be had, and the one that uses as much memory as the
//! store.

use std::collections::VecDeque;
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
    /// File and memory are registered.
    registered: bool,
    /// Taken only by the end.
    memory: Option<MmapMut>,
    /// Blocks of it that no request in flight has, the one that was used longest ago first.
    free: VecDeque<u64>,
    in_flight: u64,
}

impl Raw {
    pub(crate) fn open(path: &Path, bytes: u64, setting: Setting) -> Outcome<Raw> {
        let file = crate::peer::open_direct(path, false)?;
        let ring = IoUring::new(setting.depth).map_err(|error| format!("no io_uring: {error}"))?;
        let blocks = u64::from(setting.depth).max(setting.memory.unwrap_or(0) / setting.block);
        let len = (setting.block * blocks) as usize;
        let mut memory = MmapMut::map_anon(len).map_err(|error| format!("no memory: {error}"))?;
        if setting.tuned {
            // Where there are none, small ones serve.
            let _ = memory.advise(Advice::HugePage);
        }
        crate::fill(&mut memory, 1);
        let registered = setting.tuned && register(&ring, &file, &mut memory);
        let (memory, free) = (Some(memory), (0..blocks).collect());
        Ok(Raw { file, bytes, setting, ring, registered, memory, free, in_flight: 0 })
    }

    /// Queues the request for block `index`.
    fn start(&mut self, transfer: Transfer, index: u64) -> Outcome<()> {
        let block = self.setting.block;
        let slot = self.free.pop_front().ok_or("more requests than blocks of memory")?;
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
        let (len, place) = (block as u32, types::Fixed(0));
        let entry = match (writes, self.registered) {
            (true, false) => opcode::Write::new(fd, start, len).offset(offset).build(),
            (false, false) => opcode::Read::new(fd, start, len).offset(offset).build(),
            (true, true) => opcode::WriteFixed::new(place, start, len, 0).offset(offset).build(),
            (false, true) => opcode::ReadFixed::new(place, start, len, 0).offset(offset).build(),
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
            self.start(transfer, index)?;
        }
        let mut failure = None;
        while self.in_flight > 0 {
            self.ring.submit_and_wait(1).map_err(|error| format!("io_uring: {error}"))?;
            let done: Vec<_> =
                self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
            for (slot, result) in done {
                self.in_flight -= 1;
                self.free.push_back(slot);
                if i64::from(result) != self.setting.block as i64 {
                    failure = Some(format!("io_uring: {result} for a request of {}", self.setting.block));
                }
                if next < blocks && failure.is_none() {
                    self.start(transfer, next)?;
                    next += 1;
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }
}

/// Registers file and memory; `false` where the kernel does not take both.
fn register(ring: &IoUring, file: &File, memory: &mut MmapMut) -> bool {
    let vector = libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: memory.len() };
    let submitter = ring.submitter();
    // SAFETY: the kernel pins the pages, which stay mapped as long as the ring is used, and moves bytes only for requests.
    let memory = unsafe { submitter.register_buffers(&[vector]) };
    memory.is_ok() && submitter.register_files(&[file.as_raw_fd()]).is_ok()
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
        let plain = Setting { block: 64 << 10, depth: 5, two_jobs: false, tuned: false, memory: None };
        every_block_is_moved(plain);
        every_block_is_moved(Setting { tuned: true, memory: Some(512 << 10), ..plain });
    }

    fn every_block_is_moved(setting: Setting) {
        let dir = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
        let file = PeerFile::create(dir.path(), 1 << 20).unwrap();
        let before = std::fs::read(&file.path).unwrap();
        // A kernel or sandbox may refuse io_uring.
        let Ok(mut raw) = Raw::open(&file.path, 1 << 20, setting) else { return };
        raw.run(Transfer::Read).unwrap();
        assert_eq!(std::fs::read(&file.path).unwrap(), before);
        // With memory that holds nothing of the file.
        let mut raw = Raw::open(&file.path, 1 << 20, setting).unwrap();
        raw.run(Transfer::Both).unwrap();
        let after = std::fs::read(&file.path).unwrap();
        for (i, (before, after)) in before.chunks(64 << 10).zip(after.chunks(64 << 10)).enumerate() {
            assert_eq!(before == after, i % 2 == 1, "block {i}");
        }
        assert_eq!(raw.in_flight, 0);
    }
}
