//! Which boundaries to put on NVMe, when as few as possible must relieve host RAM and drives are slow.

use crate::place::Filler;
use crate::search::MOST_LAYERS;

/// Partial sets looked at.
const MOST_NODES: usize = 300_000;

/// As few boundaries on NVMe as relieve host RAM.
pub(crate) struct Fewest {
    /// Their weight and what the drive's pools expose is at least this (ms), whatever is placed where.
    pub(crate) at_least: f64,
    /// The set that costs this, if one was found.
    pub(crate) set: Option<Vec<usize>>,
}

/// The cheapest set of boundaries on NVMe that leaves host RAM no more than it holds, HBM and host RAM filled to the byte; `None` where
/// there is none.
pub(crate) fn fewest(filler: &Filler) -> Option<Fewest> {
    let lacking = filler.lacking();
    let first = filler.largest_on_nvme(lacking)?.len();
    let may: Vec<usize> =
        (0..filler.sizes.len()).filter(|&i| !filler.skip[i] && filler.allowed[i].nvme).collect();
    let mut best = f64::INFINITY;
    let mut set = None;
    for count in first..=may.len() {
        let weight = filler.tiebreak * count as f64;
        // One boundary follows another on the stack, and sums grow with the square.
        if may.len() > MOST_LAYERS {
            return Some(Fewest { at_least: best.min(weight), set });
        }
        if weight >= best {
            break;
        }
        let most = count - first;
        let mut search = Search::new(filler, &may, count, lacking, best - weight);
        let complete = most <= 2 && search.extend(may.len(), Part::default());
        if let Some(found) = search.best {
            best = weight + search.limit;
            set = Some(found);
        }
        if !complete {
            return Some(Fewest { at_least: best.min(weight), set });
        }
    }
    best.is_finite().then_some(Fewest { at_least: best, set })
}

/// A partial set: what of its windows' suffixes is asked beyond their room, for each pool of the drive.
#[derive(Clone, Copy, Default)]
struct Part {
    count: usize,
    bytes: u64,
    over: [f64; 2],
}

struct Search<'a> {
    filler: &'a Filler,
    may: &'a [usize],
    count: usize,
    lacking: u64,
    /// `largest[i][r]`: bytes of the largest `r` of the first `i`.
    largest: Vec<Vec<u64>>,
    nodes: usize,
    chosen: Vec<usize>,
    /// Sets that expose less are wanted (ms).
    limit: f64,
    best: Option<Vec<usize>>,
}

impl<'a> Search<'a> {
    fn new(filler: &'a Filler, may: &'a [usize], count: usize, lacking: u64, limit: f64) -> Search<'a> {
        let mut sorted: Vec<u64> = vec![];
        let mut largest = vec![vec![0; count + 1]];
        for &i in may {
            let size = filler.sizes[i];
            sorted.insert(sorted.partition_point(|other| *other > size), size);
            let mut sums = vec![0; count + 1];
            for r in 1..=count {
                sums[r] = sums[r - 1] + sorted.get(r - 1).copied().unwrap_or(0);
            }
            largest.push(sums);
        }
        Search { filler, may, count, lacking, largest, nodes: 0, chosen: vec![], limit, best: None }
    }

    /// Completes a set with boundaries among the first `below`, from the top down; false where there are too many ways, or too little time.
    fn extend(&mut self, below: usize, part: Part) -> bool {
        self.nodes += 1;
        if self.nodes > MOST_NODES || self.nodes.is_multiple_of(4096) && self.filler.is_late() {
            return false;
        }
        let exposed: f64 = part.over.iter().sum();
        let left = self.count - part.count;
        let reachable = left <= below && part.bytes + self.largest[below][left] >= self.lacking;
        // What exposes nothing is not beaten.
        if exposed >= self.limit || !reachable {
            return true;
        }
        if left == 0 {
            self.limit = exposed;
            self.best = Some(self.chosen.clone());
            return true;
        }
        let i = self.may[below - 1];
        let mut with = Part { count: part.count + 1, ..part };
        with.bytes += self.filler.sizes[i];
        for (over, pool) in with.over.iter_mut().zip(self.filler.drive()) {
            *over = over.max(with.bytes as f64 * pool.ms_a_byte - pool.room[pool.first[i]]);
        }
        // Without the boundary first: lower ones have longer windows.
        if !self.extend(below - 1, part) {
            return false;
        }
        self.chosen.push(i);
        let complete = self.limit <= 0.0 || self.extend(below - 1, with);
        self.chosen.pop();
        complete
    }
}
