//! The ordered queues as a state machine: what is queued, what may run next, what has completed, and the spans of it.
//!
//! Nothing here knows who runs the tasks: threads (one a lane), or one thread in an order drawn from a seed (`drive.rs`).
//!
//! A task is of one of two kinds. A host task does its work while it is called, so it starts when all it waits for has
//! completed, and completes when it returns. A stream task only puts work on the stream that a device has for its lane: it is
//! issued as soon as what it waits for is issued (the stream does the waiting) and completes when the stream gets there.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use lazy_model::{Bytes, Lane, Seconds, Span};
use smallvec::SmallVec;

use crate::clock::{Clock, LANES, Token, slot};
use crate::device::Mark;
use crate::error::StoreError;
use crate::spill::Transfer;
use crate::work::{Job, Kept};

/// Spans kept for those who take them; the oldest go first.
const MOST_RECORDS: usize = 1 << 20;

/// Where the work of a task is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// In the call.
    Host,
    /// On the device's stream for its lane, some time after the call.
    Stream,
}

/// A task in its queue.
struct Queued {
    kind: Kind,
    name: Arc<str>,
    bytes: Bytes,
    /// What has to be done on other lanes before it runs.
    waits: Clock,
    /// The last task of its own lane that uses the same bytes.
    own: u64,
    /// The task of another lane whose completion it waited for last, while it was next in its own lane.
    blocked_on: Option<Token>,
    /// Number of the record that becomes its span.
    record: Option<u64>,
    job: Job,
}

/// Ends of tasks of other streams, one a lane at most.
pub(crate) type Marks = SmallVec<[Arc<Mark>; LANES]>;

/// A task taken out of its queue to be run.
pub(crate) struct Started {
    pub(crate) kind: Kind,
    pub(crate) token: Token,
    /// What its stream has to wait for: the tasks of other streams that were issued and have not completed.
    pub(crate) marks: Marks,
    /// Room for the marks of its own begin and end, where there is any; the begin is marked for its time only.
    pub(crate) spare: [Option<Arc<Mark>>; 2],
    pub(crate) name: Arc<str>,
    pub(crate) bytes: Bytes,
    /// Dropped without running where an earlier failure is latched.
    pub(crate) job: Job,
    pub(crate) skip: bool,
    /// Its place among the spans.
    pub(crate) ticket: Ticket,
}

/// What ties a running task to its span.
#[derive(Clone, Copy)]
pub(crate) struct Ticket {
    record: Option<u64>,
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

/// A stream task whose work is on its stream.
pub(crate) struct Issued {
    pub(crate) token: Token,
    pub(crate) name: Arc<str>,
    /// Where its work begins and ends on the stream; nothing where it was skipped or could not be issued.
    pub(crate) begin: Option<Arc<Mark>>,
    pub(crate) end: Option<Arc<Mark>>,
    pub(crate) at: Instant,
    pub(crate) result: Result<(), StoreError>,
    pub(crate) skipped: bool,
    pub(crate) ticket: Ticket,
    pub(crate) kept: Kept,
}

/// Begin and end of a task on its stream, where it has them.
type Places = (Option<Arc<Mark>>, Option<Arc<Mark>>);

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Queued>,
    submitted: u64,
    running: bool,
    /// Transfers that were started and have not completed.
    transfers: u64,
    /// Stream tasks that were issued and have not completed, oldest first.
    in_flight: VecDeque<Issued>,
    /// The first task of this lane that failed or was skipped since the failure was latched.
    void_from: Option<u64>,
}

struct Record {
    token: Token,
    name: Arc<str>,
    bytes: Bytes,
    /// What a stream task waited for; which of it was last is known only when all have run.
    waits: Option<Clock>,
    blocked_on: Option<Token>,
    /// Start and end, once it completed.
    ran: Option<(Instant, Instant)>,
    /// Whether somebody has its span. It goes when all before it are taken.
    taken: bool,
}

/// The queues of all lanes.
#[derive(Default)]
pub(crate) struct Lanes {
    queues: [Queue; LANES],
    /// Tasks issued; of host tasks, those completed.
    issued: Clock,
    completed: Clock,
    failure: Option<StoreError>,
    /// Tests see whether they notice that streams do not wait for each other.
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) without_stream_waits: bool,
    /// Time origin of the spans; nothing is recorded before the first step.
    origin: Option<Instant>,
    base: Option<(Arc<Mark>, Instant)>,
    /// Marks of completed tasks, whose memory the next ones take.
    spare: Vec<Arc<Mark>>,
    /// In the order of submission. No gaps, so a number says where its record is.
    records: VecDeque<Record>,
    /// The number of the first of `records`, and of the next one where there is none.
    first_record: u64,
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

    pub(crate) fn is_issued(&self, token: Token) -> bool {
        token.seq <= self.issued.get(token.lane)
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
        task: (Lane, Kind),
        name: Arc<str>,
        bytes: Bytes,
        mut waits: Clock,
        job: Job,
    ) -> Token {
        let (lane, kind) = task;
        let token = self.next(lane);
        // A lane runs in order: what came before on the same one needs no wait, but for transfers that overtake each other.
        let own = waits.get(lane);
        waits.set(lane, 0);
        let record = self.origin.is_some().then(|| {
            let name = Arc::clone(&name);
            let waits = (kind == Kind::Stream).then_some(waits);
            if self.records.len() >= MOST_RECORDS {
                self.records.pop_front();
                self.first_record += 1;
            }
            let record = Record { token, name, bytes, waits, blocked_on: None, ran: None, taken: false };
            self.records.push_back(record);
            self.first_record + self.records.len() as u64 - 1
        });
        let queue = &mut self.queues[slot(lane)];
        queue.submitted = token.seq;
        queue.tasks.push_back(Queued { kind, name, bytes, waits, own, blocked_on: None, record, job });
        token
    }

    /// Whether the next task of `lane` can be started now.
    pub(crate) fn ready(&self, lane: Lane) -> bool {
        let queue = &self.queues[slot(lane)];
        !queue.running
            && queue.transfers == 0
            && queue.tasks.front().is_some_and(|task| match task.kind {
                Kind::Host => {
                    task.waits.reached_by(&self.completed)
                        && self.completed.get(lane) == self.issued.get(lane)
                }
                Kind::Stream => task.waits.reached_by(&self.issued),
            })
    }

    /// Takes the next task of `lane` if it can be started now.
    pub(crate) fn start(&mut self, lane: Lane) -> Option<Started> {
        if !self.ready(lane) {
            return None;
        }
        let token = Token { lane, seq: self.issued.get(lane) + 1 };
        let queue = &mut self.queues[slot(lane)];
        let Queued { kind, name, bytes, waits, blocked_on, record, job, .. } = queue.tasks.pop_front()?;
        queue.running = true;
        #[cfg(any(test, feature = "test-util"))]
        let waits = if self.without_stream_waits { Clock::default() } else { waits };
        let marks = match kind {
            Kind::Host => Marks::new(),
            Kind::Stream => Lane::ALL.into_iter().filter_map(|l| self.mark(l, waits.get(l))).collect(),
        };
        let spare = match kind {
            Kind::Host => [None, None],
            Kind::Stream => [self.base.as_ref().and_then(|_| self.spare.pop()), self.spare.pop()],
        };
        let ticket = Ticket { record, blocked_on };
        Some(Started { kind, token, marks, spare, name, bytes, job, skip: self.failure.is_some(), ticket })
    }

    /// Whether the next task of `lane` is a transfer.
    pub(crate) fn transfer_is_next(&self, lane: Lane) -> bool {
        self.queues[slot(lane)].tasks.front().is_some_and(|task| task.job.transfer().is_some())
    }

    /// Takes the next task of `lane` if it is a transfer and can be started now, also while earlier transfers are under
    /// way. Its place is its number; transfers are to be finished in their order.
    pub(crate) fn start_transfer(&mut self, lane: Lane) -> Option<(Started, Transfer)> {
        let queue = &mut self.queues[slot(lane)];
        if queue.running || !queue.in_flight.is_empty() {
            return None;
        }
        let task = queue.tasks.pop_front_if(|task| {
            task.job.transfer().is_some()
                && task.kind == Kind::Host
                && task.waits.reached_by(&self.completed)
                && task.own <= self.completed.get(lane)
        })?;
        let Queued { kind, name, bytes, blocked_on, record, job, .. } = task;
        let transfer = job.transfer()?;
        queue.transfers += 1;
        let token = Token { lane, seq: self.completed.get(lane) + queue.transfers };
        let ticket = Ticket { record, blocked_on };
        let skip = self.failure.is_some();
        let (marks, spare) = (Marks::new(), [None, None]);
        Some((Started { kind, token, marks, spare, name, bytes, job, skip, ticket }, transfer))
    }

    /// The end of the `seq`-th task of `lane`, or of the last one before it that has any, while it is in flight.
    pub(crate) fn mark(&self, lane: Lane, seq: u64) -> Option<Arc<Mark>> {
        let in_flight = self.queues[slot(lane)].in_flight.iter().rev();
        in_flight.filter(|task| task.token.seq <= seq).find_map(|task| task.end.clone())
    }

    /// Notes that a stream task is on its stream.
    pub(crate) fn issue(&mut self, mut issued: Issued) {
        let lane = issued.token.lane;
        self.issued.set(lane, issued.token.seq);
        // What waits for this task may be issued next, so its failure is known from now on.
        if let Err(error) = std::mem::replace(&mut issued.result, Ok(())) {
            issued.skipped = true;
            self.failure.get_or_insert(error);
        }
        let queue = &mut self.queues[slot(lane)];
        queue.running = false;
        if issued.skipped {
            queue.void_from.get_or_insert(issued.token.seq);
        }
        queue.in_flight.push_back(issued);
    }

    /// Whether `lane` has issued a task that has not completed, and the begin and the end of the oldest.
    pub(crate) fn oldest_in_flight(&self, lane: Lane) -> Option<Places> {
        self.queues[slot(lane)].in_flight.front().map(|task| (task.begin.clone(), task.end.clone()))
    }

    pub(crate) fn has_in_flight(&self, lane: Lane) -> bool {
        !self.queues[slot(lane)].in_flight.is_empty()
    }

    /// Takes the oldest task in flight, to be finished.
    pub(crate) fn take_in_flight(&mut self, lane: Lane) -> Option<Issued> {
        let mut issued = self.queues[slot(lane)].in_flight.pop_front()?;
        self.spare.extend(issued.begin.take().into_iter().chain(issued.end.take()));
        Some(issued)
    }

    pub(crate) fn finish(&mut self, finished: Finished) {
        let token = finished.token;
        let queue = &mut self.queues[slot(token.lane)];
        if finished.skipped || finished.result.is_err() {
            queue.void_from.get_or_insert(token.seq);
        }
        if token.seq > self.issued.get(token.lane) {
            queue.running = false;
            queue.transfers = queue.transfers.saturating_sub(1);
            self.issued.set(token.lane, token.seq);
        }
        self.completed.set(token.lane, token.seq);
        if let Err(error) = finished.result {
            self.failure.get_or_insert(error);
        }
        let record = finished.ticket.record.and_then(|number| number.checked_sub(self.first_record));
        if let Some(record) = record.and_then(|place| self.records.get_mut(place as usize)) {
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

    pub(crate) fn has_failed(&self) -> bool {
        self.failure.is_some()
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

    pub(crate) fn start_step(&mut self, base: Option<Mark>) {
        let now = Instant::now();
        self.origin = Some(now);
        self.base = base.map(|mark| (Arc::new(mark), now));
        self.first_record += self.records.len() as u64;
        self.records.clear();
    }

    /// A time by the device's clock, and the same time by ours, where spans of its streams are wanted.
    pub(crate) fn base(&self) -> Option<(Arc<Mark>, Instant)> {
        self.base.clone()
    }

    /// Takes the spans of all completed tasks, in submission order.
    pub(crate) fn take_spans(&mut self) -> Vec<Span> {
        let Some(origin) = self.origin else { return Vec::new() };
        let since = |at: Instant| Seconds(at.saturating_duration_since(origin).as_secs_f64());
        let done = || self.records.iter().filter(|record| record.ran.is_some() && !record.taken);
        let mut places = HashMap::with_capacity(self.records.len());
        places.extend(done().enumerate().map(|(place, record)| (record.token, (place, record))));
        let mut spans = Vec::with_capacity(places.len());
        spans.extend(done().filter_map(|record| {
            let (start, end) = record.ran?;
            Some(Span {
                name: Arc::clone(&record.name),
                lane: record.token.lane,
                start: since(start),
                end: since(end),
                bytes: record.bytes,
                blocked_on: blocked_on(record, &places),
            })
        }));
        self.records.iter_mut().for_each(|record| record.taken = record.ran.is_some());
        while self.records.pop_front_if(|record| record.taken).is_some() {
            self.first_record += 1;
        }
        spans
    }
}

/// The place of the task that `record` waited for last, where that ended after its own lane was free.
fn blocked_on(record: &Record, done: &HashMap<Token, (usize, &Record)>) -> Option<usize> {
    let Some(waits) = record.waits else {
        return Some(done.get(&record.blocked_on?)?.0);
    };
    let end = |token: Token| {
        let (place, record) = done.get(&token)?;
        Some((record.ran?.1, *place))
    };
    let waited = Lane::ALL.into_iter().filter_map(|lane| end(Token { lane, seq: waits.get(lane) }));
    let (last, place) = waited.max()?;
    let own = end(Token { seq: record.token.seq - 1, ..record.token });
    own.is_none_or(|(own, _)| last > own).then_some(place)
}
