//! The transfer loop: moves the bytes of jobs between memory and files through one queue, several jobs at once.
//!
//! A job is cut into pieces of at most one request. A piece moves where it lies, if its address and length suit the file;
//! otherwise through a slot of aligned memory, into and out of which a device may copy on a stream of its own. Checksums
//! and copies are done while other pieces are in flight; those of long pieces that were read, by a thread beside this one.

mod job;
mod look;
mod piece;

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;

use self::job::Running;
pub(crate) use self::job::{Job, Memory, StagedCopy};
use self::piece::Piece;
use super::helper::Helper;
use super::slots::Slots;
use super::{Done, Op, Queue, Request, Window};
use crate::error::StoreError;
use crate::io::note::Note;

/// Copies out of slots that may be under way while the drive is waited for: they are far quicker than it, so the oldest of
/// more than these is as good as done.
const COPIES: usize = 1;

/// Where jobs come from, and where their results go.
pub(crate) trait Feed<'a> {
    /// The next job and a key for it, if there is one now. Asked again whenever there is room for another request.
    fn next(&mut self) -> Option<(u64, Job<'a>)>;

    /// A job ended, with what was noted of its pieces. Jobs may end in another order than they came in.
    fn ended(&mut self, key: u64, result: Result<Vec<Note>, StoreError>);
}

/// A request queue with slots, for one direction.
pub(crate) struct Engine {
    pub(crate) queue: Box<dyn Queue>,
    op: Op,
    slots: Slots,
    /// Started when there is something for it.
    helper: Option<Helper>,
    /// There is none to be had.
    no_helper: bool,
}

impl Engine {
    pub(crate) fn new(queue: Box<dyn Queue>, op: Op, slots: Slots) -> Self {
        Engine { queue, op, slots, helper: None, no_helper: false }
    }

    /// [`Queue::register_memory`].
    ///
    /// # Safety
    ///
    /// The memory stays mapped, at its address, for as long as jobs are carried out.
    pub(crate) unsafe fn register_memory(&mut self, regions: &[Window]) -> Result<(), String> {
        // SAFETY: the caller's promise; requests are started only by jobs.
        unsafe { self.queue.register_memory(regions) }
    }

    /// Carries out jobs until the feed has none. Returns only when nothing is under way.
    pub(crate) fn run<'a>(&mut self, feed: &mut dyn Feed<'a>) {
        self.slots.reset();
        let Engine { queue, op, slots, helper, no_helper } = self;
        let run = Run {
            queue: queue.as_mut(),
            op: *op,
            slots,
            helper,
            no_helper,
            helped: VecDeque::new(),
            jobs: Vec::new(),
            current: None,
            pieces: Vec::new(),
            free: Vec::new(),
            in_flight: 0,
            copying: VecDeque::new(),
            chores: VecDeque::new(),
            broken: None,
        };
        run.drive(feed);
    }

    /// Carries out one job.
    pub(crate) fn one(&mut self, job: Job<'_>) -> Result<Vec<Note>, StoreError> {
        struct One<'a>(Option<Job<'a>>, Result<Vec<Note>, StoreError>);
        impl<'a> Feed<'a> for One<'a> {
            fn next(&mut self) -> Option<(u64, Job<'a>)> {
                self.0.take().map(|job| (0, job))
            }

            fn ended(&mut self, _key: u64, result: Result<Vec<Note>, StoreError>) {
                self.1 = result;
            }
        }
        let unmoved = Running::new(0, job);
        let error = unmoved.no_slot(self.op);
        let mut feed = One(Some(unmoved.job), Err(error));
        self.run(&mut feed);
        feed.1
    }
}

/// Jobs under way. However it ends, it ends with nothing in flight.
struct Run<'e, 'a> {
    queue: &'e mut dyn Queue,
    op: Op,
    slots: &'e mut Slots,
    helper: &'e mut Option<Helper>,
    no_helper: &'e mut bool,
    /// Pieces that the helper looks at, in its order.
    helped: VecDeque<usize>,
    jobs: Vec<Option<Running<'a>>>,
    /// The job whose pieces are being started.
    current: Option<usize>,
    /// Pieces by tag.
    pieces: Vec<Piece>,
    /// Tags that can be used again.
    free: Vec<usize>,
    /// Requests in the queue.
    in_flight: usize,
    /// Pieces whose slot a device is copying into or out of, oldest first.
    copying: VecDeque<usize>,
    /// Pieces whose bytes are to be looked at, or copied out of their slot.
    chores: VecDeque<usize>,
    /// Why the queue is of no more use.
    broken: Option<String>,
}

impl<'a> Run<'_, 'a> {
    fn drive(mut self, feed: &mut dyn Feed<'a>) {
        let mut done = Vec::new();
        loop {
            self.take_notes(false, feed);
            self.start_pieces(feed);
            let waiting = match self.op {
                Op::Write => 0,
                Op::Read => COPIES,
            };
            let idle = self.in_flight == 0 && self.chores.is_empty() && self.helped.is_empty();
            let polled = if self.copying.len() > waiting || (idle && !self.copying.is_empty()) {
                let polled = self.queue.poll(&mut done);
                self.end_oldest_copy(feed);
                polled
            } else if let Some(tag) = self.chores.pop_front() {
                let polled = self.queue.poll(&mut done);
                self.look_at(tag, feed);
                polled
            } else if self.in_flight > 0 {
                self.queue.wait(&mut done)
            } else if !self.helped.is_empty() {
                self.take_notes(true, feed);
                continue;
            } else if self.fail_stuck(feed) {
                continue;
            } else {
                return;
            };
            for Done { tag, result } in done.drain(..) {
                self.complete(tag, result, feed);
            }
            if let Err(error) = polled {
                self.broken(&error, feed);
            }
        }
    }

    /// Starts pieces while there is room for them.
    fn start_pieces(&mut self, feed: &mut dyn Feed<'a>) {
        while self.in_flight + self.copying.len() < self.queue.depth().max(1) {
            let Some(job) = self.current_job(feed) else { return };
            if !self.start_next(job, feed) {
                return;
            }
        }
    }

    /// The job that has the next piece to start.
    fn current_job(&mut self, feed: &mut dyn Feed<'a>) -> Option<usize> {
        loop {
            if let Some(id) = self.current
                && let Some(Some(running)) = self.jobs.get(id)
                && running.failure.is_none()
                && running.next < running.window.len as u64
            {
                return Some(id);
            }
            self.current = None;
            let (key, job) = feed.next()?;
            let running = Running::new(key, job);
            let id = self.jobs.iter().position(Option::is_none).unwrap_or(self.jobs.len());
            if id == self.jobs.len() {
                self.jobs.push(None);
            }
            self.jobs[id] = Some(running);
            self.current = Some(id);
            self.end_job(id, feed);
        }
    }

    /// Starts the next piece of a job; `false` where it needs a slot and none is free.
    fn start_next(&mut self, id: usize, feed: &mut dyn Feed<'a>) -> bool {
        let Some(Some(running)) = self.jobs.get_mut(id) else { return true };
        let mut piece = running.piece(id);
        let through_slot = !running.in_place || piece.at >= running.whole;
        if through_slot {
            let Some(slot) = self.slots.take() else { return false };
            piece.slot = Some(slot);
            piece.request = piece.len.next_multiple_of(running.job.files.alignment);
        }
        running.next += piece.len as u64;
        running.pieces += 1;
        running.notes.push(Note::default());
        let tag = self.free.pop().unwrap_or(self.pieces.len());
        if tag == self.pieces.len() {
            self.pieces.push(piece);
        } else {
            self.pieces[tag] = piece;
        }
        match (through_slot, self.op) {
            (true, Op::Write) => self.fill_slot(tag, feed),
            _ => self.start(tag, feed),
        }
        true
    }

    /// Brings the bytes of a piece to be written into its slot.
    fn fill_slot(&mut self, tag: usize, feed: &mut dyn Feed<'a>) {
        let Piece { job, at, len, slot, request, .. } = self.pieces[tag];
        let (Some(slot), Some(Some(running))) = (slot, self.jobs.get_mut(job)) else { return };
        let window = self.slots.window(slot, request);
        // SAFETY: the slot was taken for this piece and nothing is in flight with it; the slots' memory is initialised and
        // outlives them.
        let (bytes, padding) = unsafe { window.bytes_mut() }.split_at_mut(len);
        padding.fill(0);
        if let Memory::Staged(_, copy) = &mut running.job.memory {
            match copy.start(self.slots.number(slot), at, bytes) {
                Ok(()) => self.copying.push_back(tag),
                Err(error) => self.fail(tag, StoreError::staged(error), feed),
            }
            return;
        }
        // SAFETY: the job borrows its memory, and nobody changes it.
        bytes.copy_from_slice(unsafe { running.window.part(at as usize, len).bytes() });
        self.start(tag, feed);
    }

    fn end_oldest_copy(&mut self, feed: &mut dyn Feed<'a>) {
        let Some(tag) = self.copying.pop_front() else { return };
        let Piece { job, slot, .. } = self.pieces[tag];
        let number = self.slots.number(slot.unwrap_or_default());
        let waited = match self.jobs.get_mut(job) {
            Some(Some(Running { job: Job { memory: Memory::Staged(_, copy), .. }, .. })) => copy.wait(number),
            _ => Ok(()),
        };
        match (waited, self.op) {
            (Err(error), _) => self.fail(tag, StoreError::staged(error), feed),
            (Ok(()), Op::Write) => self.start(tag, feed),
            (Ok(()), Op::Read) => self.close(tag, feed),
        }
    }

    /// Starts what is left of a piece.
    fn start(&mut self, tag: usize, feed: &mut dyn Feed<'a>) {
        let piece = &mut self.pieces[tag];
        let Some(Some(running)) = self.jobs.get(piece.job) else { return };
        let memory = match piece.slot {
            Some(slot) => self.slots.window(slot, piece.request),
            None => running.window.part(piece.at as usize, piece.len),
        };
        let file = running.job.files.file(piece.file);
        let request = Request {
            tag,
            file: file.file.as_fd(),
            op: self.op,
            memory: memory.part(piece.got, piece.request - piece.got),
            offset: piece.offset + piece.got as u64,
        };
        let started = match &self.broken {
            Some(reason) => Err(io::Error::other(reason.clone())),
            // SAFETY: `drive` ends, also by unwinding (`drop`), only when all completions were seen, and until then the
            // job holds its files and its memory, borrowed for longer than `drive` runs, exclusively for a read
            // and shared for a write. Pieces do not overlap. A slot is its piece's until it is given back.
            None => unsafe { self.queue.start(request) },
        };
        if let Err(source) = started {
            let error = piece.refused(self.op, file, source);
            return self.fail(tag, error, feed);
        }
        self.in_flight += 1;
        piece.queued = true;
        file.meter(self.op).started();
        // The bytes of a write are looked at while it is in flight.
        if self.op == Op::Write && running.job.watch.looks() && !std::mem::replace(&mut piece.looked_at, true)
        {
            piece.holds += 1;
            self.chores.push_back(tag);
        }
    }

    /// Takes one completion into account.
    fn complete(&mut self, tag: usize, result: io::Result<usize>, feed: &mut dyn Feed<'a>) {
        self.in_flight -= 1;
        let piece = &mut self.pieces[tag];
        piece.queued = false;
        let Some(Some(running)) = self.jobs.get(piece.job) else { return };
        let file = running.job.files.file(piece.file);
        file.meter(self.op).ended(result.as_ref().map_or(0, |&count| count));
        match piece.take(self.op, file, result) {
            Ok(true) if self.op == Op::Read && (piece.slot.is_some() || running.job.watch.looks()) => {
                if !self.help(tag) {
                    self.chores.push_back(tag);
                }
            }
            Ok(true) => self.close(tag, feed),
            // After a failure the rest is only waited for.
            Ok(false) if running.failure.is_some() => self.close(tag, feed),
            Ok(false) => self.start(tag, feed),
            Err(error) => self.fail(tag, error, feed),
        }
    }

    /// A piece failed, and its job with it.
    fn fail(&mut self, tag: usize, error: StoreError, feed: &mut dyn Feed<'a>) {
        if let Some(Some(running)) = self.jobs.get_mut(self.pieces[tag].job) {
            running.failure.get_or_insert(error);
        }
        self.close(tag, feed);
    }

    /// Takes one hold off a piece; after the last one, its slot and its tag are free.
    fn close(&mut self, tag: usize, feed: &mut dyn Feed<'a>) {
        let piece = &mut self.pieces[tag];
        piece.holds -= 1;
        if piece.holds > 0 {
            return;
        }
        if let Some(slot) = piece.slot.take() {
            self.slots.give_back(slot);
        }
        self.free.push(tag);
        let id = piece.job;
        if let Some(Some(running)) = self.jobs.get_mut(id) {
            running.pieces -= 1;
        }
        self.end_job(id, feed);
    }

    /// Ends a job if nothing of it is left to do.
    fn end_job(&mut self, id: usize, feed: &mut dyn Feed<'a>) {
        let ended = self.jobs.get_mut(id).and_then(|slot| slot.take_if(|running| running.has_ended()));
        if let Some(Running { key, notes, failure, .. }) = ended {
            feed.ended(key, failure.map_or(Ok(notes), Err));
        }
    }

    /// Fails the jobs that are open although nothing is under way: one needs a slot, and there is none.
    fn fail_stuck(&mut self, feed: &mut dyn Feed<'a>) -> bool {
        let stuck: Vec<Running<'a>> = self.jobs.iter_mut().filter_map(Option::take).collect();
        for running in &stuck {
            feed.ended(running.key, Err(running.no_slot(self.op)));
        }
        !stuck.is_empty()
    }

    /// The queue failed, and nothing is in it any more.
    fn broken(&mut self, error: &io::Error, feed: &mut dyn Feed<'a>) {
        self.broken = Some(error.to_string());
        self.in_flight = 0;
        for tag in 0..self.pieces.len() {
            let piece = &mut self.pieces[tag];
            if !std::mem::replace(&mut piece.queued, false) {
                continue;
            }
            let Some(Some(running)) = self.jobs.get(piece.job) else { continue };
            let file = running.job.files.file(piece.file);
            file.meter(self.op).ended(0);
            let error = piece.refused(self.op, file, io::Error::new(error.kind(), error.to_string()));
            self.fail(tag, error, feed);
        }
    }
}

impl Drop for Run<'_, '_> {
    /// Waits for what is under way, where `drive` did not: on a panic.
    fn drop(&mut self) {
        while self.helped.pop_front().is_some() {
            // Once it is gone, it looks at nothing any more.
            let _ = self.helper.as_ref().map(|helper| helper.note(true));
        }
        let mut done = Vec::new();
        while self.in_flight > 0 && self.queue.wait(&mut done).is_ok() {
            self.in_flight = self.in_flight.saturating_sub(done.len());
            done.clear();
        }
        while let Some(tag) = self.copying.pop_front() {
            let Piece { job, slot, .. } = self.pieces[tag];
            let number = self.slots.number(slot.unwrap_or_default());
            if let Some(Some(Running { job: Job { memory: Memory::Staged(_, copy), .. }, .. })) =
                self.jobs.get_mut(job)
            {
                // Whether it worked matters to nobody any more.
                let _ = copy.wait(number);
            }
        }
    }
}

#[cfg(test)]
mod tests;
