//! The ordered queues as a state machine: what is queued, what may run next, what has completed, and the spans of it.
//!
//! Nothing here knows who runs the tasks. Threads do (one a lane), or one thread in an order drawn from a seed
//! (`drive.rs`); streams of an accelerator would, too.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Instant;

use lazy_model::{Bytes, Lane, Seconds, Span};

use crate::clock::{Clock, LANES, Token, slot};
use crate::error::{BoxError, StoreError};

/// What a task does when it runs.
pub(crate) type Work = Box<dyn FnOnce() -> Result<(), BoxError> + Send>;

/// A task in its queue.
struct Queued {
    name: String,
    bytes: Bytes,
    /// What has to be done before it runs.
    waits: Clock,
    /// The task of another lane whose completion it waited for last, while it was next in its own lane.
    blocked_on: Option<Token>,
    record: u64,
    work: Work,
}

/// A task taken out of its queue to be run.
pub(crate) struct Started {
    pub(crate) token: Token,
    pub(crate) name: String,
    pub(crate) bytes: Bytes,
    /// Dropped without running where an earlier failure is latched.
    pub(crate) work: Work,
    pub(crate) skip: bool,
    /// Its place among the spans.
    pub(crate) ticket: Ticket,
}

/// What ties a running task to its span.
#[derive(Clone, Copy)]
pub(crate) struct Ticket {
    record: u64,
    blocked_on: Option<Token>,
}

/// What is left of a task once it ran.
pub(crate) struct Finished {
    pub(crate) token: Token,
    pub(crate) start: Instant,
    pub(crate) end: Instant,
    pub(crate) result: Result<(), StoreError>,
    pub(crate) skipped: bool,
    pub(crate) ticket: Ticket,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Queued>,
    submitted: u64,
    running: bool,
    /// The first task of this lane that failed or was skipped since the failure was latched.
    void_from: Option<u64>,
}

struct Record {
    token: Token,
    name: String,
    bytes: Bytes,
    blocked_on: Option<Token>,
    /// Start and end, once it completed.
    ran: Option<(Instant, Instant)>,
}

/// The queues of all lanes.
#[derive(Default)]
pub(crate) struct Lanes {
    queues: [Queue; LANES],
    completed: Clock,
    failure: Option<StoreError>,
    /// Time origin of the spans; nothing is recorded before the first step.
    origin: Option<Instant>,
    /// By number of submission.
    records: BTreeMap<u64, Record>,
    next_record: u64,
}

/// The tasks that did not run because of a failure: on each lane, all from the first on.
pub(crate) struct Voided([Option<u64>; LANES]);

impl Voided {
    pub(crate) fn contains(&self, token: Token) -> bool {
        self.0[slot(token.lane)].is_some_and(|first| token.seq >= first)
    }
}

impl Lanes {
    pub(crate) fn completed(&self) -> &Clock {
        &self.completed
    }

    pub(crate) fn is_done(&self, token: Token) -> bool {
        token.seq <= self.completed.get(token.lane)
    }

    pub(crate) fn idle(&self) -> bool {
        Lane::ALL.iter().all(|&lane| self.lane_idle(lane))
    }

    pub(crate) fn lane_idle(&self, lane: Lane) -> bool {
        self.queues[slot(lane)].submitted == self.completed.get(lane)
    }

    /// The token that the next task on `lane` will have.
    pub(crate) fn next(&self, lane: Lane) -> Token {
        Token { lane, seq: self.queues[slot(lane)].submitted + 1 }
    }

    pub(crate) fn push(
        &mut self,
        lane: Lane,
        name: String,
        bytes: Bytes,
        mut waits: Clock,
        work: Work,
    ) -> Token {
        let token = self.next(lane);
        // A lane runs in order: what came before on the same one needs no wait.
        waits.set(lane, 0);
        let record = self.next_record;
        self.next_record += 1;
        if self.origin.is_some() {
            let name = name.clone();
            self.records.insert(record, Record { token, name, bytes, blocked_on: None, ran: None });
        }
        let queue = &mut self.queues[slot(lane)];
        queue.submitted = token.seq;
        queue.tasks.push_back(Queued { name, bytes, waits, blocked_on: None, record, work });
        token
    }

    /// Whether the next task of `lane` can run now.
    pub(crate) fn ready(&self, lane: Lane) -> bool {
        let queue = &self.queues[slot(lane)];
        !queue.running && queue.tasks.front().is_some_and(|task| task.waits.reached_by(&self.completed))
    }

    /// Takes the next task of `lane` if it can run now.
    pub(crate) fn start(&mut self, lane: Lane) -> Option<Started> {
        if !self.ready(lane) {
            return None;
        }
        let queue = &mut self.queues[slot(lane)];
        let Queued { name, bytes, blocked_on, record, work, .. } = queue.tasks.pop_front()?;
        queue.running = true;
        let token = Token { lane, seq: self.completed.get(lane) + 1 };
        let ticket = Ticket { record, blocked_on };
        Some(Started { token, name, bytes, work, skip: self.failure.is_some(), ticket })
    }

    pub(crate) fn finish(&mut self, finished: Finished) {
        let token = finished.token;
        let queue = &mut self.queues[slot(token.lane)];
        queue.running = false;
        if finished.skipped || finished.result.is_err() {
            queue.void_from.get_or_insert(token.seq);
        }
        self.completed.set(token.lane, token.seq);
        if let Err(error) = finished.result {
            self.failure.get_or_insert(error);
        }
        if let Some(record) = self.records.get_mut(&finished.ticket.record) {
            record.ran = Some((finished.start, finished.end));
            record.blocked_on = finished.ticket.blocked_on;
        }
        // Completions arrive here one after the other, so the last to write is the one waited for last.
        for queue in self.queues.iter_mut().filter(|q| !q.running) {
            if let Some(head) = queue.tasks.front_mut()
                && head.waits.get(token.lane) == token.seq
            {
                head.blocked_on = Some(token);
            }
        }
    }

    /// Once idle: the latched failure, and which tasks did not run because of it.
    pub(crate) fn take_failure(&mut self) -> Option<(StoreError, Voided)> {
        let failure = self.failure.take()?;
        let mut voided = Voided([None; LANES]);
        for (queue, first) in self.queues.iter_mut().zip(&mut voided.0) {
            *first = queue.void_from.take();
        }
        Some((failure, voided))
    }

    pub(crate) fn start_step(&mut self) {
        self.origin = Some(Instant::now());
        self.records.clear();
    }

    /// Takes the spans of all completed tasks, in submission order.
    pub(crate) fn take_spans(&mut self) -> Vec<Span> {
        let Some(origin) = self.origin else { return Vec::new() };
        let (done, pending): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut self.records).into_iter().partition(|(_, r)| r.ran.is_some());
        self.records = pending;
        let done: Vec<Record> = done.into_values().collect();
        let places: HashMap<Token, usize> = done.iter().enumerate().map(|(i, r)| (r.token, i)).collect();
        let since = |at: Instant| Seconds(at.saturating_duration_since(origin).as_secs_f64());
        done.into_iter()
            .filter_map(|r| {
                let (start, end) = r.ran?;
                Some(Span {
                    name: r.name,
                    lane: r.token.lane,
                    start: since(start),
                    end: since(end),
                    bytes: r.bytes,
                    blocked_on: r.blocked_on.and_then(|token| places.get(&token).copied()),
                })
            })
            .collect()
    }
}
