//! Looks at the bytes of pieces (checksums, in debugging their values), and copies what was read out of slots.

use lazy_model::Bytes;

use super::job::{Memory, Running};
use super::piece::Piece;
use super::{Feed, Run};
use crate::error::StoreError;
use crate::io::helper::Helper;
use crate::io::{Op, Window};

/// Pieces read that are at least this long are looked at by the helper: for shorter ones, waking it costs as much.
const HELPED: usize = 1 << 18;

impl<'a> Run<'_, 'a> {
    /// Where the bytes of a piece are.
    fn window(&self, piece: &Piece, running: &Running<'_>) -> Window {
        let in_memory = running.window.part(piece.at as usize, piece.len);
        piece.slot.map_or(in_memory, |slot| self.slots.window(slot, piece.len))
    }

    /// Lets the helper look at a piece that was read; `false` where that is left to this thread.
    pub(super) fn help(&mut self, tag: usize) -> bool {
        let piece = &self.pieces[tag];
        let Some(Some(running)) = self.jobs.get(piece.job) else { return false };
        if piece.len < HELPED || !running.job.watch.looks() || *self.no_helper {
            return false;
        }
        let window = self.window(piece, running);
        if self.helper.is_none() {
            *self.helper = Helper::start();
            *self.no_helper = self.helper.is_none();
        }
        // SAFETY: the piece holds its slot, or the job its memory, initialised, and nothing is in flight with it; it is held
        // until its note is taken, by `drop` at the latest.
        let helped = self.helper.as_ref().is_some_and(|h| unsafe { h.look(window, &running.job.watch) });
        if helped {
            self.helped.push_back(tag);
        }
        helped
    }

    /// Goes on with the pieces that the helper has looked at; where that is wanted, waits for one.
    pub(super) fn take_notes(&mut self, mut wait: bool, feed: &mut dyn Feed<'a>) {
        while let (Some(&tag), Some(helper)) = (self.helped.front(), self.helper.as_ref()) {
            match helper.note(wait) {
                Ok(Some(note)) => {
                    self.helped.pop_front();
                    let Piece { job, index, .. } = self.pieces[tag];
                    if let Some(Some(running)) = self.jobs.get_mut(job) {
                        running.notes[index] = note;
                    }
                    self.looked_at(tag, feed);
                }
                Ok(None) => return,
                // It is gone: what is left is this thread's.
                Err(()) => {
                    (*self.helper, *self.no_helper) = (None, true);
                    self.chores.extend(self.helped.drain(..));
                }
            }
            wait = false;
        }
    }

    /// Notes what the bytes of a piece are, and goes on with it.
    pub(super) fn look_at(&mut self, tag: usize, feed: &mut dyn Feed<'a>) {
        let piece = &self.pieces[tag];
        let Some(Some(running)) = self.jobs.get(piece.job) else { return };
        let (job, index, watch) = (piece.job, piece.index, &running.job.watch);
        if watch.looks() {
            // SAFETY: the piece holds its slot, or the job its memory, initialised; a write in flight only reads it, and a
            // read has ended.
            let note = watch.note(unsafe { self.window(piece, running).bytes() });
            if let Some(Some(running)) = self.jobs.get_mut(job) {
                running.notes[index] = note;
            }
        }
        match self.op {
            Op::Write => self.close(tag, feed),
            Op::Read => self.looked_at(tag, feed),
        }
    }

    /// Compares what was noted of a piece that was read, and copies it out of its slot.
    fn looked_at(&mut self, tag: usize, feed: &mut dyn Feed<'a>) {
        let piece = &self.pieces[tag];
        let Some(Some(running)) = self.jobs.get(piece.job) else { return };
        let window = self.window(piece, running);
        let Some(Some(running)) = self.jobs.get_mut(piece.job) else { return };
        let watch = &running.job.watch;
        if let Some((wanted, got)) = watch.differs(piece.index, running.notes[piece.index].checksum) {
            let error = StoreError::Corrupt {
                path: running.job.files.file(piece.file).path.clone(),
                offset: piece.offset,
                bytes: Bytes(piece.len as u64),
                extent: running.job.offset,
                wanted,
                got,
            };
            return self.fail(tag, error, feed);
        }
        let Some(slot) = piece.slot else { return self.close(tag, feed) };
        if let Memory::Staged(_, copy) = &mut running.job.memory {
            // SAFETY: as above, and nothing is in flight with the slot.
            let bytes = unsafe { window.bytes_mut() };
            return match copy.start(self.slots.number(slot), piece.at, bytes) {
                Ok(()) => self.copying.push_back(tag),
                Err(error) => self.fail(tag, StoreError::staged(error), feed),
            };
        }
        // SAFETY: the job holds its memory exclusively, and no other piece touches this part.
        let to = unsafe { running.window.part(piece.at as usize, piece.len).bytes_mut() };
        // SAFETY: the piece holds its slot, and nothing is in flight with it.
        to.copy_from_slice(unsafe { window.bytes() });
        self.close(tag, feed);
    }
}
