//! Requests through io_uring, with registered files and, where the limit on locked memory allows, registered buffers.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};
use lazy_model::Bytes;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::{Done, Op, Queue, Request, Window};

/// A wait without a completion for this long wakes the kernel's workers: see [`Uring::nudge`].
const NUDGE_AFTER: types::Timespec = types::Timespec::new().sec(1);
/// Tag of a nudge. Transfers number their tags from zero.
const NUDGE: u64 = u64::MAX;
/// The kernel registers no longer buffer than this.
const MAX_REGISTERED: usize = 1 << 30;

/// The entry for a request. The two kinds of file have no type in common.
macro_rules! entry {
    ($file:expr, $op:expr, $start:expr, $len:expr, $offset:expr, $buffer:expr) => {
        match ($op, $buffer) {
            (Op::Read, None) => opcode::Read::new($file, $start, $len).offset($offset).build(),
            (Op::Write, None) => opcode::Write::new($file, $start.cast_const(), $len).offset($offset).build(),
            (Op::Read, Some(buffer)) => {
                opcode::ReadFixed::new($file, $start, $len, buffer).offset($offset).build()
            }
            (Op::Write, Some(buffer)) => {
                opcode::WriteFixed::new($file, $start.cast_const(), $len, buffer).offset($offset).build()
            }
        }
    };
}
pub(crate) struct Uring {
    ring: IoUring,
    depth: usize,
    /// Requests pushed, nudges included, whose completion was not seen.
    in_flight: usize,
    /// The ring failed; entries may be left in it that must never reach the kernel.
    broken: bool,
    /// Registered files, by their place in the kernel's table.
    files: Vec<RawFd>,
    /// Registered buffers, likewise.
    buffers: Vec<Window>,
}

impl Uring {
    /// Makes a ring for `depth` requests, or says why there is none and what to do about it.
    pub(crate) fn new(depth: usize) -> Result<Self, String> {
        let depth = depth.clamp(1, 1024);
        // Completions are only looked for in `enter`, so the kernel need not interrupt this thread for them (5.19).
        let ring = IoUring::builder()
            .setup_coop_taskrun()
            .build(depth as u32)
            .or_else(|_| IoUring::new(depth as u32))
            .map_err(|e| reason(&e))?;
        Ok(Uring { ring, depth, in_flight: 0, broken: false, files: Vec::new(), buffers: Vec::new() })
    }

    fn collect(&mut self, done: &mut Vec<Done>) {
        for entry in self.ring.completion() {
            self.in_flight -= 1;
            if entry.user_data() == NUDGE {
                continue;
            }
            let result = match usize::try_from(entry.result()) {
                Ok(count) => Ok(count),
                Err(_) => Err(io::Error::from_raw_os_error(entry.result().saturating_neg())),
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

    /// The registered buffer that holds all of `memory`.
    fn buffer(&self, memory: Window) -> Option<u16> {
        let (start, end) = (memory.start.addr(), memory.start.addr() + memory.len);
        let holds = |b: &Window| b.start.addr() <= start && end <= b.start.addr() + b.len;
        self.buffers.iter().position(holds).and_then(|i| u16::try_from(i).ok())
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
        let Request { tag, file, op, memory, offset } = request;
        let Window { start, .. } = memory;
        let len = u32::try_from(memory.len).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let (fd, buffer) = (file.as_raw_fd(), self.buffer(memory));
        let entry = match self.files.iter().position(|&registered| registered == fd) {
            Some(place) => entry!(types::Fixed(place as u32), op, start, len, offset, buffer),
            None => entry!(types::Fd(fd), op, start, len, offset, buffer),
        };
        let entry = entry.user_data(tag as u64);
        // SAFETY: the caller keeps file and memory alive until the completion is reported or `wait` fails, which it
        // does only after `give_up` has seen the end of everything that the kernel took.
        unsafe { self.ring.submission().push(&entry) }
            .map_err(|_| io::Error::other("more requests than the io_uring has entries"))?;
        self.in_flight += 1;
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        if !self.ring.submission().is_empty() {
            match self.ring.submit() {
                Ok(_) => {}
                // The entries stay in the ring, and their memory with them, until a later call takes them.
                Err(e) if may_pass(&e) => {}
                Err(e) => return Err(self.give_up(e)),
            }
        }
        self.collect(done);
        Ok(())
    }

    fn wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        let before = done.len();
        loop {
            match self.enter() {
                Ok(()) => {}
                // As in `poll`.
                Err(e) if Errno::from_io_error(&e) == Some(Errno::INTR) => {}
                Err(e) if may_pass(&e) => std::thread::sleep(Duration::from_micros(100)),
                Err(e) => return Err(self.give_up(e)),
            }
            self.collect(done);
            if done.len() > before || self.in_flight == 0 {
                return Ok(());
            }
        }
    }

    fn register_files(&mut self, files: &[BorrowedFd<'_>]) -> Result<(), String> {
        let files: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let registered = self.ring.submitter().register_files(&files);
        registered.map_err(|e| format!("files are not registered: {e}"))?;
        self.files = files;
        Ok(())
    }

    unsafe fn register_memory(&mut self, regions: &[Window]) -> Result<(), String> {
        if !std::mem::take(&mut self.buffers).is_empty() {
            let _ = self.ring.submitter().unregister_buffers();
        }
        if regions.is_empty() {
            return Ok(());
        }
        let cut = |region: &Window| {
            let region = *region;
            (0..region.len).step_by(MAX_REGISTERED).map(move |at| region.part(at, MAX_REGISTERED))
        };
        let buffers: Vec<Window> = regions.iter().flat_map(cut).collect();
        let vectors: Vec<libc::iovec> =
            buffers.iter().map(|b| libc::iovec { iov_base: b.start.cast(), iov_len: b.len }).collect();
        // SAFETY: the kernel pins the pages and moves bytes only for requests, whose memory their callers answer for; the
        // caller keeps the addresses what they are.
        let registered = unsafe { self.ring.submitter().register_buffers(&vectors) };
        registered.map_err(|e| {
            let needed = Bytes(regions.iter().map(|r| r.len as u64).sum());
            format!("buffers are not registered: {}", memory_reason(&e, needed))
        })?;
        self.buffers = buffers;
        Ok(())
    }
}

/// Whether a refused submission can be tried again.
fn may_pass(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::INTR | Errno::AGAIN | Errno::BUSY))
}

/// Says why memory could not be registered: most often the limit on locked memory, which counts for each user and which
/// other programs use up too.
fn memory_reason(error: &io::Error, needed: Bytes) -> String {
    if Errno::from_io_error(error) != Some(Errno::NOMEM) {
        return error.to_string();
    }
    let limit =
        getrlimit(Resource::Memlock).current.map_or_else(|| "none".to_owned(), |l| Bytes(l).to_string());
    format!(
        "{needed} of locked memory needed, in each direction, and the limit is {limit}, which all programs of a user \
         share; raise it (ulimit -l, or LimitMEMLOCK of the service)"
    )
}
