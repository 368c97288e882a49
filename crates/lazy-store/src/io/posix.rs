//! Positioned reads and writes, one at a time. Works everywhere, also where io_uring is refused.

use std::io;

use super::{Done, Op, Queue, Request};

/// Carries out each request as it is started.
#[derive(Default)]
pub(crate) struct Posix {
    done: Vec<Done>,
}

impl Queue for Posix {
    fn depth(&self) -> usize {
        1
    }

    unsafe fn start(&mut self, request: Request<'_>) -> io::Result<()> {
        let Request { tag, file, op, start, len, offset } = request;
        let result = match op {
            Op::Read => {
                // SAFETY: the caller promises that the memory is mapped and touched by nobody else; the borrow ends with
                // this call.
                let bytes = unsafe { std::slice::from_raw_parts_mut(start, len) };
                rustix::io::pread(file, bytes, offset)
            }
            Op::Write => {
                // SAFETY: as above, and nobody changes the memory.
                let bytes = unsafe { std::slice::from_raw_parts(start.cast_const(), len) };
                rustix::io::pwrite(file, bytes, offset)
            }
        };
        self.done.push(Done { tag, result });
        Ok(())
    }

    fn wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        done.append(&mut self.done);
        Ok(())
    }
}
