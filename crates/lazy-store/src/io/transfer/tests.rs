//! The transfer loop over a queue that only pretends.

use std::path::PathBuf;

use super::*;
use crate::buffer::AlignedBuf;

/// Completes requests, last first, without moving anything; at a given one, fails as a whole.
#[derive(Default)]
struct Pretend {
    in_flight: Vec<Done>,
    requests: Vec<(u64, usize)>,
    breaks_at: Option<usize>,
}

impl Queue for Arc<std::sync::Mutex<Pretend>> {
    fn depth(&self) -> usize {
        8
    }

    unsafe fn start(&mut self, request: Request<'_>) -> io::Result<()> {
        let mut this = self.lock().unwrap();
        this.requests.push((request.offset, request.memory.len));
        this.in_flight.push(Done { tag: request.tag, result: Ok(request.memory.len) });
        assert!(this.in_flight.len() <= 8);
        Ok(())
    }

    fn poll(&mut self, _done: &mut Vec<Done>) -> io::Result<()> {
        Ok(())
    }

    fn wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        let mut this = self.lock().unwrap();
        if this.breaks_at.is_some_and(|at| this.requests.len() >= at) {
            this.in_flight.clear();
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        done.extend(this.in_flight.pop());
        Ok(())
    }
}

fn job(memory: Memory<'_>, offset: u64) -> Job<'_> {
    let file = OpenFile::new(tempfile::tempfile().unwrap(), PathBuf::from("spill"), 512);
    Job { files: Arc::new(Stripes::one(file, 4096)), offset, memory, watch: Watch::default() }
}

fn engine(pretend: Pretend, op: Op) -> (Arc<std::sync::Mutex<Pretend>>, Engine) {
    let queue = Arc::new(std::sync::Mutex::new(pretend));
    (Arc::clone(&queue), Engine::new(Box::new(queue), op, Slots::none()))
}

#[test]
fn t2_more_than_one_request_can_hold_is_cut_and_moved_whole() {
    // 200 million elements of 12 bytes: more than the 0x7ffff000 bytes that Linux moves in one call. No page of it is
    // touched.
    const LEN: u64 = 2_400_000_000 / 4096 * 4096;
    let mut buffer = AlignedBuf::zeroed(Bytes(LEN)).unwrap();
    let (queue, mut engine) = engine(Pretend::default(), Op::Read);
    engine.one(job(Memory::Read(buffer.as_mut_slice()), 4096)).unwrap();
    let mut requests = std::mem::take(&mut queue.lock().unwrap().requests);
    requests.sort();
    let mut next = 4096;
    for (offset, len) in requests {
        assert_eq!(offset, next);
        assert!(len <= 1 << 20);
        next += len as u64;
    }
    assert_eq!(next, 4096 + LEN);
}

#[test]
fn t5_a_queue_that_breaks_ends_the_transfer_with_nothing_in_flight() {
    let bytes = AlignedBuf::zeroed(Bytes(20 << 20)).unwrap();
    let (queue, mut engine) = engine(Pretend { breaks_at: Some(12), ..Pretend::default() }, Op::Write);
    let error = engine.one(job(Memory::Write(bytes.as_slice()), 0)).unwrap_err();
    assert!(matches!(error, StoreError::Io { op: "write", .. }), "{error}");
    assert!(queue.lock().unwrap().in_flight.is_empty());
}
