//! Transfers of durable files: a thread for each direction, with as many of them under way at once as its queue takes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use super::Opened;
use crate::buffer::AlignedBuf;
use crate::error::StoreError;
use crate::io::note::{Note, Watch};
use crate::io::slots::Slots;
use crate::io::transfer::{Engine, Feed, Job, Memory};
use crate::io::{Op, Queue, Window};

/// A transfer in flight, which owns its buffer. Dropping it waits for its end.
#[must_use = "a transfer's result is known only after `wait`"]
pub struct Pending {
    receiver: Option<Receiver<Finished>>,
}

/// What a worker reports: the buffer, the result, and when it began and ended.
type Finished = (AlignedBuf, Result<(), StoreError>, Instant, Instant);

struct Order {
    file: Arc<Opened>,
    offset: u64,
    buffer: AlignedBuf,
    done: SyncSender<Finished>,
}

/// The orders of one direction, as jobs.
struct Orders {
    op: Op,
    received: Receiver<Order>,
    /// The next one, where it has been received and cannot be started yet.
    held: Option<Order>,
    under_way: BTreeMap<u64, (Order, Instant)>,
    next: u64,
    last_end: Option<Instant>,
}

impl Orders {
    /// Waits for an order; `false` where none will ever come.
    fn wait(&mut self) -> bool {
        if self.held.is_none() {
            self.held = self.received.recv().ok();
        }
        self.held.is_some()
    }

    /// Whether an order has to wait for one that is under way: of two writes of the same bytes, the second one stays.
    fn waits(&self, order: &Order) -> bool {
        let overlaps = |other: &Order| {
            let end = |order: &Order| order.offset + order.buffer.len() as u64;
            other.offset < end(order) && order.offset < end(other)
        };
        let of = |other: &Order| other.file.inode == order.file.inode && overlaps(other);
        self.op == Op::Write && self.under_way.values().any(|(other, _)| of(other))
    }
}

impl<'a> Feed<'a> for Orders {
    fn next(&mut self) -> Option<(u64, Job<'a>)> {
        let mut order = self.held.take().or_else(|| self.received.try_recv().ok())?;
        if self.waits(&order) {
            self.held = Some(order);
            return None;
        }
        let memory = Memory::Place(Window::of_mut(order.buffer.as_mut_slice()));
        let files = Arc::clone(&order.file.files);
        let job = Job { files, offset: order.offset, memory, watch: Watch::default() };
        let key = self.next;
        self.next += 1;
        self.under_way.insert(key, (order, Instant::now()));
        Some((key, job))
    }

    fn ended(&mut self, key: u64, result: Result<Vec<Note>, StoreError>) {
        let Some((Order { buffer, done, .. }, started)) = self.under_way.remove(&key) else { return };
        // Times of transfers that were under way together add up to no more than the time that passed.
        let end = Instant::now();
        let start = self.last_end.map_or(started, |last| last.max(started));
        self.last_end = Some(end);
        // Nobody waits for an operation whose handle was leaked.
        let _ = done.send((buffer, result.map(|_| ()), start, end));
    }
}

/// A thread with a request queue of its own, for one direction.
pub(super) struct Worker {
    op: Op,
    jobs: Option<SyncSender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(super) fn start(op: Op, queue: Box<dyn Queue>, depth: usize) -> Result<Self, StoreError> {
        let (jobs, received) = sync_channel::<Order>(depth.max(1));
        let name = format!("lazy durable {}", op.name());
        let run = move || {
            let mut engine = Engine::new(queue, op, Slots::none());
            let mut orders =
                Orders { op, received, held: None, under_way: BTreeMap::new(), next: 0, last_end: None };
            while orders.wait() {
                engine.run(&mut orders);
            }
        };
        let thread = std::thread::Builder::new()
            .name(name.clone())
            .spawn(run)
            .map_err(|e| StoreError::Worker { name, reason: e.to_string() })?;
        Ok(Worker { op, jobs: Some(jobs), thread: Some(thread) })
    }

    /// Queues a job; waits while the queue is full.
    pub(super) fn submit(&self, file: &Arc<Opened>, offset: u64, buffer: AlignedBuf) -> Pending {
        let (done, receiver) = sync_channel(1);
        let order = Order { file: Arc::clone(file), offset, buffer, done };
        match self.jobs.as_ref().map(|jobs| jobs.send(order)) {
            Some(Ok(())) => Pending { receiver: Some(receiver) },
            Some(Err(refused)) => Pending::failed(refused.0.buffer, self.gone()),
            // Only while the folder is being dropped, and then nobody holds a file of it.
            None => Pending { receiver: None },
        }
    }

    fn gone(&self) -> StoreError {
        worker_gone(self.op.name())
    }
}

fn worker_gone(what: &str) -> StoreError {
    StoreError::Worker { name: format!("lazy durable {what}"), reason: "it ended early".to_owned() }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Pending {
    pub(super) fn failed(buffer: AlignedBuf, error: StoreError) -> Self {
        let (done, receiver) = sync_channel(1);
        // There is room for one, and the receiver is here.
        let now = Instant::now();
        let _ = done.send((buffer, Err(error), now, now));
        Pending { receiver: Some(receiver) }
    }

    /// Waits for the transfer's end; gives the buffer back with its result. After a failed read its bytes are arbitrary.
    ///
    /// # Errors
    ///
    /// [`StoreError::BadRange`], [`StoreError::Io`] or [`StoreError::Short`].
    pub fn wait(self) -> (AlignedBuf, Result<(), StoreError>) {
        let (buffer, result, ..) = self.wait_timed();
        (buffer, result)
    }

    /// As [`Pending::wait`], and says when the transfer began, or the one that ended before it in its direction did so, and when it ended: the
    /// times of transfers that were under way together add up.
    pub fn wait_timed(mut self) -> (AlignedBuf, Result<(), StoreError>, Instant, Instant) {
        match self.receiver.take().map(|receiver| receiver.recv()) {
            Some(Ok(done)) => done,
            _ => {
                let now = Instant::now();
                (AlignedBuf::none(), Err(worker_gone("worker")), now, now)
            }
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(receiver) = self.receiver.take() {
            let _ = receiver.recv();
        }
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("transfer in flight")
    }
}
