//! When the transfers of a step start and end, in positions of the step.

use serde::{Deserialize, Serialize};

use crate::schedule::Schedule;
use crate::span::Lane;
use crate::step::{StepError, StepPlan, StepSizes, Work};
use crate::timeline::{StepCosts, Timeline};
use crate::units::{BoundaryIndex, Bytes, BytesPerSecond, Placement, Seconds};

/// When a boundary leaves HBM and comes back.
///
/// A step of `N` layers has positions `0..=2 N`: the forward of layer `l` is position `l`, the loss `N`, the backward of layer `l`
/// (with the recomputation of its block, where `l` is the last of it) `2 N - l`. A transfer is submitted at the start of a position:
/// reads not before the arithmetic of the position before has ended. A buffer is held to the end of a position: what comes after waits
/// until the transfer is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transfer {
    /// Position at whose start the copy out of HBM is submitted, and for NVMe the write behind it.
    pub out: usize,
    /// Last position to which the buffer in HBM is held.
    pub gone: usize,
    /// NVMe: last position to which the staging buffer is held; host: `gone`.
    pub stored: usize,
    /// NVMe: position at whose start the read from the drive is submitted; host: `back`.
    pub read: usize,
    /// Position at whose start the copy into HBM is submitted.
    pub back: usize,
}

/// Blocks in backward order: `(source, end)` with the source saved and everything between to be recomputed.
pub(super) fn blocks(schedule: &Schedule) -> Vec<(usize, usize)> {
    let mut blocks = Vec::new();
    let mut end = schedule.layers;
    for i in (0..schedule.layers).rev() {
        if schedule.placement[i] != Placement::Recompute {
            blocks.push((i, end));
            end = i;
        }
    }
    blocks
}

/// The positions that [`Execution`](crate::schedule::Execution) asks for: writes held for a number of later writes, reads a number
/// of blocks ahead.
pub(super) fn by_distance(schedule: &Schedule) -> Vec<Option<Transfer>> {
    let n = schedule.layers;
    let execution = schedule.execution;
    let off = |i: &usize| matches!(schedule.placement[*i], Placement::Host | Placement::Nvme);
    let leaving: Vec<usize> = (0..n).filter(off).collect();
    let staged: Vec<usize> =
        leaving.iter().copied().filter(|&i| schedule.placement[i] == Placement::Nvme).collect();
    let later = |list: &[usize], i: usize, count: usize| {
        let at = list.partition_point(|&j| j < i);
        list.get(at.saturating_add(count)).copied().unwrap_or(n - 1)
    };
    let blocks = blocks(schedule);
    let mut transfers = vec![None; n];
    for (number, &(i, _)) in blocks.iter().enumerate() {
        if !off(&i) {
            continue;
        }
        let ahead = number.checked_sub(execution.prefetch).map(|b| 2 * n + 1 - blocks[b].1);
        let back = ahead.unwrap_or(n);
        let gone = later(&leaving, i, execution.writes_in_flight);
        let stored = match schedule.placement[i] {
            Placement::Nvme => later(&staged, i, execution.staging_buffers.saturating_sub(1)),
            _ => gone,
        };
        transfers[i] = Some(Transfer { out: i, gone, stored, read: back, back });
    }
    transfers
}

/// Refuses transfers that the operations of a step cannot follow.
pub(super) fn check(schedule: &Schedule, transfers: &[Option<Transfer>]) -> Result<(), StepError> {
    let n = schedule.layers;
    if transfers.len() != n {
        return Err(StepError::Sizes { found: transfers.len(), layers: n });
    }
    let mut end_of_block = vec![0; n];
    for (source, end) in blocks(schedule) {
        end_of_block[source] = end;
    }
    for (i, transfer) in transfers.iter().enumerate() {
        let refuse = |problem| Err(StepError::Transfer { boundary: BoundaryIndex(i), problem });
        let placement = schedule.placement[i];
        let t = match (transfer, placement) {
            (None, Placement::Hbm | Placement::Recompute) => continue,
            (None, _) => return refuse("is not given"),
            (Some(_), Placement::Hbm | Placement::Recompute) => {
                return refuse("is given, but it stays where it is");
            }
            (Some(t), _) => t,
        };
        if t.out < i || t.out > 2 * n {
            return refuse("starts before the boundary exists, or never");
        }
        if t.gone < t.out || t.stored < t.out || t.gone > 2 * n || t.stored > 2 * n {
            return refuse("ends before it starts, or never");
        }
        if t.read < t.out || t.back < t.read || t.back > 2 * n + 1 - end_of_block[i] {
            return refuse("comes back before it has left, or too late for its block");
        }
        if placement == Placement::Host && t.read != t.back {
            return refuse("has a read from NVMe, but is in host RAM");
        }
    }
    Ok(())
}

/// Chooses the positions of transfers from the times that layers and links take: copies out as soon as there is something to copy,
/// buffers held to the position in which the copy ends; reads as late as they still arrive before their block starts, one after the
/// other on each link.
#[derive(Clone, Debug)]
pub struct TransferPlanner<'a> {
    sizes: &'a StepSizes<'a>,
    costs: &'a StepCosts,
    /// Whether writes may go on during loss and backward, their buffers held; otherwise the loss waits for them.
    pub writes_run_on: bool,
    /// Whether reads may start before the loss has ended.
    pub reads_beside_loss: bool,
    /// Whether no more staging buffers are held than [`Execution`](crate::schedule::Execution) names: copies out are submitted early enough
    /// to use them one after the other, and wait for them. Only where writes do not run on.
    pub staging_in_turn: bool,
    /// Whether copies in wait for the block before theirs, so that no boundary is in HBM before its block needs it.
    pub copies_in_turn: bool,
    /// When transfers can be submitted at each position.
    issue: Vec<f64>,
    /// When each position's arithmetic starts.
    start: Vec<f64>,
}

impl<'a> TransferPlanner<'a> {
    /// For a step whose arithmetic never waits.
    pub fn new(schedule: &Schedule, sizes: &'a StepSizes<'a>, costs: &'a StepCosts) -> Self {
        let n = schedule.layers;
        let mut at = costs.prologue.get();
        let mut start = Vec::with_capacity(2 * n + 2);
        for l in 0..n {
            start.push(at);
            at += if schedule.keep[l] { costs.saving_forward[l] } else { costs.forward[l] }.get();
        }
        start.push(at);
        at += costs.epilogue.get();
        for (source, end) in blocks(schedule) {
            for l in (source..end).rev() {
                start.push(at);
                if l + 1 == end {
                    at += costs.forward[source..l].iter().copied().sum::<Seconds>().get();
                }
                at += costs.backward[l].get();
                at += if schedule.keep[l] { 0.0 } else { costs.internals_forward[l].get() };
            }
        }
        start.push(at);
        let issue = start.clone();
        Self {
            sizes,
            costs,
            writes_run_on: false,
            reads_beside_loss: false,
            staging_in_turn: false,
            copies_in_turn: false,
            issue,
            start,
        }
    }

    /// Takes the times of positions from a simulated pass instead: where a link makes arithmetic wait, later reads may start later.
    pub fn follow(&mut self, plan: &StepPlan, timeline: &Timeline) {
        let (mut end, mut position) = (0.0, 0);
        let mut fresh = true;
        for (task, span) in plan.tasks().zip(&timeline.spans) {
            if task.lane != Lane::Compute {
                continue;
            }
            if task.work != Work::Prologue && fresh && position < self.start.len() {
                self.issue[position] = end;
                self.start[position] = span.start.get();
            }
            end = span.end.get();
            fresh = !matches!(task.work, Work::Recompute { .. });
            if fresh && task.work != Work::Prologue {
                position += 1;
            }
        }
    }

    /// The positions of all transfers of `schedule`.
    pub fn plan(&self, schedule: &Schedule) -> Vec<Option<Transfer>> {
        let mut transfers = vec![None; schedule.layers];
        self.plan_out(schedule, &mut transfers);
        self.plan_in(schedule, &mut transfers);
        transfers
    }

    /// The position during which `time` lies.
    fn position(&self, time: f64) -> usize {
        let last = self.issue.len() - 2;
        self.issue.partition_point(|&t| t <= time).saturating_sub(1).min(last)
    }

    fn plan_out(&self, schedule: &Schedule, transfers: &mut [Option<Transfer>]) {
        let n = schedule.layers;
        let links = &self.costs.links;
        let rate = match links.contention.d2h_both {
            Some(both) if !self.sizes.streamed.weights.is_empty() => both,
            _ => links.d2h,
        };
        let last = if self.writes_run_on { 2 * n } else { n - 1 };
        let (mut link_free, mut drive_free) = (0.0f64, 0.0f64);
        // When the staging buffers are free again.
        let buffers = schedule.execution.staging_buffers.max(1);
        let mut staging = vec![0.0f64; buffers];
        let in_turn = self.staging_in_turn && !self.writes_run_on;
        let to_drive = |i: usize| schedule.placement[i] == Placement::Nvme;
        let mut waiting: Vec<usize> =
            (0..n).filter(|&i| matches!(schedule.placement[i], Placement::Host | Placement::Nvme)).collect();
        let all_staged = waiting.iter().filter(|&&i| to_drive(i)).count();
        let mut staged: Vec<usize> = Vec::new();
        let mut needed = vec![2 * n; n];
        for (source, end) in blocks(schedule) {
            needed[source] = 2 * n + 1 - end;
        }
        while !waiting.is_empty() {
            let free = staging.iter().copied().fold(f64::INFINITY, f64::min);
            // Whose buffer is taken over, and how many positions the boundaries after this one need.
            let before = staged.len().checked_sub(buffers).map(|k| staged[k]);
            let after = before.and_then(|i| transfers[i]).map_or(0, |t| t.out + 1);
            let left = (all_staged - staged.len()).saturating_sub(1) / buffers;
            let earliest = |i: usize| match schedule.placement[i] {
                Placement::Nvme if in_turn => self.position(free).max(after).min(last - left).max(i),
                // A boundary that has to wait for staging starts with the position after, so that it holds up no other before.
                Placement::Nvme if free > self.issue[i] => {
                    (self.position(free) + 1).min(last).min(needed[i]).max(i)
                }
                _ => i,
            };
            let Some(at) = (0..waiting.len()).min_by_key(|&k| earliest(waiting[k])) else { break };
            let i = waiting.remove(at);
            let out = earliest(i);
            let bytes = self.sizes.boundary[i];
            let mut start = self.issue[out].max(link_free);
            if in_turn && to_drive(i) {
                start = start.max(free);
            }
            let end = start + rate.time(bytes).get();
            link_free = end;
            let gone = self.position(end).clamp(out, last.max(out));
            let mut stored = gone;
            if to_drive(i) {
                drive_free = drive_free.max(end) + links.nvme_write.time(bytes).get();
                if let Some(slot) = staging.iter_mut().min_by(|a, b| a.total_cmp(b)) {
                    *slot = drive_free;
                }
                stored = self.position(drive_free).max(out);
                if in_turn {
                    stored = stored.min(self.first_read(n) - 1);
                    if let Some(t) = before.and_then(|i| transfers[i].as_mut()) {
                        t.stored = t.stored.min(out.saturating_sub(1));
                    }
                }
                staged.push(i);
            }
            transfers[i] = Some(Transfer { out, gone, stored, read: 2 * n, back: 2 * n });
        }
    }

    /// The position from which on reads may be submitted.
    fn first_read(&self, layers: usize) -> usize {
        if self.reads_beside_loss { layers } else { layers + 1 }
    }

    fn plan_in(&self, schedule: &Schedule, transfers: &mut [Option<Transfer>]) {
        let n = schedule.layers;
        let rate = self.read_rate();
        let drive = self.costs.links.nvme_read;
        let first = self.first_read(n);
        let staging = schedule.execution.staging_buffers.max(1);
        let (mut link_from, mut drive_from) = (f64::INFINITY, f64::INFINITY);
        // Starts of reads from drives, the last one first.
        let mut reads: Vec<f64> = Vec::new();
        for (i, end_of_block) in blocks(schedule).into_iter().rev() {
            let Some(t) = transfers.get_mut(i).and_then(Option::as_mut) else { continue };
            let needed = 2 * n + 1 - end_of_block;
            let bytes = self.sizes.boundary[i];
            let mut end = self.start[needed].min(link_from);
            let nvme = schedule.placement[i] == Placement::Nvme;
            if nvme && let Some(&reused) = reads.len().checked_sub(staging).and_then(|k| reads.get(k)) {
                end = end.min(reused);
            }
            link_from = end - rate.time(bytes).get();
            // A turn later than `first` may be the block's own start.
            let back = self.position(link_from).clamp(first.min(needed), needed).max(t.out).min(needed);
            t.back = back;
            t.read = back;
            if nvme {
                drive_from = drive_from.min(link_from) - drive.time(bytes).get();
                reads.push(drive_from);
                t.read = self.position(drive_from).clamp(first.min(back), back).max(t.out).min(back);
            }
            if self.copies_in_turn {
                t.back = needed.max(t.out);
                t.read = if nvme { t.read } else { t.back };
            }
        }
        if self.staging_in_turn {
            // A buffer is free again once its boundary's copy in has been submitted.
            let mut backs: Vec<usize> = Vec::new();
            for (i, _) in blocks(schedule) {
                if schedule.placement[i] != Placement::Nvme {
                    continue;
                }
                let Some(t) = transfers[i].as_mut() else { continue };
                let free = backs.len().checked_sub(staging).map_or(0, |k| backs[k]);
                t.read = t.read.max(free).min(t.back);
                backs.push(t.back);
            }
        }
    }

    /// What is left of the way in beside streamed weights and sums of gradients, as an average over the backward pass.
    fn read_rate(&self) -> BytesPerSecond {
        let links = &self.costs.links;
        let streamed = self.sizes.streamed;
        let rate = match links.contention.h2d_both {
            Some(both) if !streamed.gradients.is_empty() => both,
            _ => links.h2d,
        };
        let sums: &[Bytes] = if self.sizes.accumulate { &streamed.gradients } else { &[] };
        let bytes: Bytes = streamed.weights.iter().chain(sums).copied().sum();
        if bytes == Bytes::ZERO {
            return rate;
        }
        let n = self.start.len() / 2 - 1;
        let backward = self.start[2 * n + 1] - self.start[n];
        BytesPerSecond(rate.get() * (1.0 - rate.time(bytes).get() / backward).max(0.05))
    }
}
