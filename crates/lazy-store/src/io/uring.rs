//! Requests through io_uring. Buffers are not registered, so no locked memory is needed beyond the ring.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;

use super::{Done, Op, Queue, Request};

/// A wait without a completion for this long wakes the kernel's workers: see [`Uring::nudge`].
const NUDGE_AFTER: types::Timespec = types::Timespec::new().sec(1);
/// Tag of a nudge. Transfers number their tags from zero.
const NUDGE: u64 = u64::MAX;

pub(crate) struct Uring {
    ring: IoUring,
    depth: usize,
    /// Requests pushed, nudges included, whose completion was not seen.
    in_flight: usize,
    /// The ring failed; entries may be left in it that must never reach the kernel.
    broken: bool,
}

impl Uring {
    /// Makes a ring for `depth` requests, or says why there is none and what to do about it.
    pub(crate) fn new(depth: usize) -> Result<Self, String> {
        let depth = depth.clamp(1, 1024);
        let ring = IoUring::new(depth as u32).map_err(|e| reason(&e))?;
        Ok(Uring { ring, depth, in_flight: 0, broken: false })
    }

    fn collect(&mut self, done: &mut Vec<Done>) {
        for entry in self.ring.completion() {
            self.in_flight -= 1;
            if entry.user_data() == NUDGE {
                continue;
            }
            let result = match usize::try_from(entry.result()) {
                Ok(count) => Ok(count),
                Err(_) => Err(Errno::from_raw_os_error(entry.result().saturating_neg())),
            };
            done.push(Done { tag: entry.user_data() as usize, result });
        }
    }

    /// Submits what was pushed and waits for a completion, for a while.
    fn enter(&mut self) -> io::Result<()> {
        if !self.ring.params().is_feature_ext_arg() {
            return self.ring.submit_and_wait(1).map(|_| ());
        }
        let args = types::SubmitArgs::new().timespec(&NUDGE_AFTER);
        match self.ring.submitter().submit_with_args(1, &args) {
            Err(e) if Errno::from_io_error(&e) == Some(Errno::TIME) => self.nudge(),
            result => result.map(|_| ()),
        }
    }

    /// Gives the kernel's workers something to do.
    ///
    /// A request that would block is handed to a pool of kernel threads. Linux 6.18 was seen to queue one there, accept
    /// it, and start no thread: no completion ever came. A request that must run in the pool makes it start one, which
    /// then runs everything queued. Where the drive is only slow, this costs a request that does nothing.
    fn nudge(&mut self) -> io::Result<()> {
        let nop = opcode::Nop::new().build().flags(squeue::Flags::ASYNC).user_data(NUDGE);
        // SAFETY: the request uses no memory.
        let pushed = unsafe { self.ring.submission().push(&nop) };
        // A full ring has requests to submit, which wake the pool as well.
        if pushed.is_err() {
            return Ok(());
        }
        self.in_flight += 1;
        self.ring.submit().map(|_| ())
    }

    /// Gives the ring up: waits for what the kernel has taken, whose memory it still owns.
    fn give_up(&mut self, error: io::Error) -> io::Error {
        self.broken = true;
        let never_taken = self.ring.submission().len();
        let mut done = Vec::new();
        self.in_flight = self.in_flight.saturating_sub(never_taken);
        while self.in_flight > 0 {
            self.collect(&mut done);
            std::thread::sleep(Duration::from_millis(1));
        }
        error
    }
}

/// Says what most likely refused io_uring.
pub(crate) fn reason(error: &io::Error) -> String {
    let hint = match Errno::from_io_error(error) {
        Some(Errno::PERM | Errno::ACCESS) => {
            "most likely the kernel.io_uring_disabled sysctl or a container's seccomp profile; set the sysctl to 0 or \
             allow io_uring_setup, io_uring_enter and io_uring_register in the profile"
        }
        Some(Errno::NOSYS) => {
            "the kernel is older than 5.1, or a seccomp profile hides the call; allow io_uring_setup, io_uring_enter \
             and io_uring_register in the profile"
        }
        Some(Errno::NOMEM) => {
            "most likely the limit on locked memory, which all programs of a user share; raise it (ulimit -l)"
        }
        Some(Errno::MFILE | Errno::NFILE) => "too many open files; raise the limit (ulimit -n)",
        _ => "use the posix back end here",
    };
    format!("io_uring is refused: {error} ({hint})")
}

impl Queue for Uring {
    fn depth(&self) -> usize {
        self.depth
    }

    unsafe fn start(&mut self, request: Request<'_>) -> io::Result<()> {
        if self.broken {
            return Err(io::Error::other("the io_uring of this worker failed earlier; open the store again"));
        }
        let Request { tag, file, op, start, len, offset } = request;
        let fd = types::Fd(file.as_raw_fd());
        let len = u32::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let entry = match op {
            Op::Read => opcode::Read::new(fd, start, len).offset(offset).build(),
            Op::Write => opcode::Write::new(fd, start.cast_const(), len).offset(offset).build(),
        };
        let entry = entry.user_data(tag as u64);
        // SAFETY: the caller keeps file and memory alive until the completion is reported or `wait` fails, which it does
        // only after `give_up` has seen the end of everything that the kernel took.
        unsafe { self.ring.submission().push(&entry) }
            .map_err(|_| io::Error::other("more requests than the io_uring has entries"))?;
        self.in_flight += 1;
        Ok(())
    }

    fn wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        let before = done.len();
        loop {
            match self.enter() {
                Ok(()) => {}
                // The entries stay in the ring, and their memory with them, until a later call takes them.
                Err(e) if matches!(Errno::from_io_error(&e), Some(Errno::INTR)) => {}
                Err(e) if matches!(Errno::from_io_error(&e), Some(Errno::AGAIN | Errno::BUSY)) => {
                    std::thread::sleep(Duration::from_micros(100));
                }
                Err(e) => return Err(self.give_up(e)),
            }
            self.collect(done);
            if done.len() > before || self.in_flight == 0 {
                return Ok(());
            }
        }
    }
}
