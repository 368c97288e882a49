//! The transfer loop over a queue that only pretends.

use std::path::PathBuf;
use std::sync::Arc;

use lazy_model::Bytes;

use super::*;
use crate::buffer::AlignedBuf;
use crate::io::note::Watch;
use crate::io::stripes::{OpenFile, Stripes, UNIT};

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
    Job { files: files(1, 512, 4096), offset, memory, watch: Watch::default() }
}

fn files(count: usize, granularity: usize, alignment: usize) -> Arc<Stripes> {
    let file = |_| OpenFile::new(tempfile::tempfile().unwrap(), PathBuf::from("spill"), granularity);
    Arc::new(Stripes::over((0..count).map(file).collect(), alignment).unwrap())
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

#[test]
fn t13_a_coarse_granularity_moves_buffers_whole_and_fails_memory_that_does_not_suit_it() {
    for granularity in [16384, 65536] {
        for op in [Op::Write, Op::Read] {
            let mut buffer = AlignedBuf::zeroed(Bytes(4 << 16)).unwrap();
            let job = |memory| {
                let files = files(1, granularity, granularity);
                Job { files, offset: 0, memory, watch: Watch::default() }
            };
            let memory_of = |window: Window| -> Memory<'static> { Memory::Place(window) };
            let whole = Window::of_mut(buffer.as_mut_slice());
            let (queue, mut engine) = engine(Pretend::default(), op);
            engine.one(job(memory_of(whole))).unwrap();
            assert_eq!(std::mem::take(&mut queue.lock().unwrap().requests), [(0, 4 << 16)]);
            // A page further on, and a page less: neither can be moved where it lies, and there is no slot.
            for window in [whole.part(4096, granularity), whole.part(0, granularity + 4096)] {
                let error = engine.one(job(memory_of(window))).unwrap_err();
                assert!(matches!(error, StoreError::NoSlot { offset: 0, .. }), "{error}");
            }
            // What comes after it in the same run is carried out.
            struct Two<'a>(Vec<Job<'a>>, Vec<bool>);
            impl<'a> Feed<'a> for Two<'a> {
                fn next(&mut self) -> Option<(u64, Job<'a>)> {
                    self.0.pop().map(|job| (0, job))
                }

                fn ended(&mut self, _key: u64, result: Result<Vec<Note>, StoreError>) {
                    self.1.push(result.is_ok());
                }
            }
            let mut two =
                Two(vec![job(memory_of(whole)), job(memory_of(whole.part(4096, granularity)))], vec![]);
            engine.run(&mut two);
            assert_eq!(two.1, [false, true]);
        }
    }
}

#[test]
fn t1_pieces_are_cut_alike_for_host_memory_device_memory_and_checksums() {
    let mut buffer = AlignedBuf::zeroed(Bytes(5 << 20)).unwrap();
    let all = Window::of_mut(buffer.as_mut_slice());
    let mut random = crate::random::Random::new(1);
    let mut lens = vec![1, 5, 511, 4095, 4096, 4097, 28_824_000 % (4 << 20), 1 << 20, (1 << 20) + 1, 4 << 20];
    lens.extend((0..40).map(|_| 1 + random.below(4 << 20) as usize));
    for drives in 1..=3 {
        let files = files(drives, 512, 4096);
        for &len in &lens {
            for offset in [0, 4096, (1 << 20) - 4096, (7 << 20) + 8192] {
                let cut = |memory| {
                    let job = Job { files: Arc::clone(&files), offset, memory, watch: Watch::default() };
                    let mut running = Running::new(0, job);
                    let mut lens = Vec::new();
                    while running.next < len as u64 {
                        let piece = running.piece(0);
                        running.next += piece.len as u64;
                        lens.push(piece.len);
                    }
                    lens
                };
                let wanted: Vec<usize> = files.pieces(offset, len as u64).collect();
                assert_eq!(wanted.iter().sum::<usize>(), len);
                assert_eq!(
                    cut(Memory::Place(all.part(0, len))),
                    wanted,
                    "{drives} drives, {len} at {offset}"
                );
                // Not where a direct request could move it.
                assert_eq!(cut(Memory::Place(all.part(64, len))), wanted);
                let memory = all.part(64, len);
                assert_eq!(cut(Memory::Device { memory, longest: UNIT }), wanted);
                // Longer ones lie in one file too, and end where the shorter ones do.
                let longer = cut(Memory::Device { memory, longest: 3 * UNIT });
                let mut short = wanted.iter();
                for &piece in &longer {
                    let mut sum = 0;
                    while sum < piece {
                        sum += short.next().unwrap();
                    }
                    assert_eq!(sum, piece, "{drives} drives, {len} at {offset}: {longer:?}");
                }
                let whole = len - len % 4096;
                let least = whole.div_ceil(3 << 20) + usize::from(whole < len);
                assert_eq!(longer.len(), if drives == 1 { least } else { wanted.len() });
            }
        }
    }
}
