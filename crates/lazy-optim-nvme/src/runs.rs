//! Where the elements of a shard lie in the whole parameter.

use std::ops::Range;

use crate::layout::elements;
use crate::options::{Part, Shard};
use crate::quant::QUANT_BLOCK;
use crate::{OptimError, ParamSpec};

/// A shard as runs of equal length in the flattened parameter: one for a range and for all of it, one a row for a box.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Runs {
    /// The dimensions before the last one that is cut, outermost first.
    outer: Vec<Dimension>,
    /// Elements of the whole parameter under one index of those.
    row: usize,
    /// Where the run begins in them.
    first: usize,
    len: usize,
    /// Elements of the whole parameter.
    total: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Dimension {
    whole: usize,
    offset: usize,
    held: usize,
}

/// Elements that lie side by side both in the shard and in the whole parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// First element, counted in the whole parameter.
    pub(crate) global: usize,
    /// First element, counted in the shard.
    pub(crate) local: usize,
    pub(crate) len: usize,
}

impl Runs {
    /// Of a parameter that a layout has.
    pub(crate) fn new(param: &ParamSpec) -> Result<Runs, OptimError> {
        let too_large = || OptimError::Option {
            what: format!("the shape of {} overflows the element count", param.name),
        };
        let count = |shape: &[usize]| elements(shape).ok_or_else(too_large);
        let held = count(&param.shape)?;
        let total = count(global_shape(param))?;
        Ok(match &param.shard {
            None => Runs { outer: Vec::new(), row: total, first: 0, len: held, total },
            Some(Shard { part: Part::Range { first }, .. }) => {
                Runs { outer: Vec::new(), row: total, first: *first, len: held, total }
            }
            Some(Shard { global_shape, part: Part::Box { offsets } }) => {
                let dimensions = global_shape.iter().zip(offsets).zip(&param.shape);
                let mut outer: Vec<_> = dimensions
                    .map(|((whole, offset), held)| Dimension { whole: *whole, offset: *offset, held: *held })
                    .collect();
                // Dimensions held whole, from the innermost on, and the one before them make a run.
                let mut inner = 1;
                while let Some(Dimension { whole, .. }) = outer.pop_if(|d| d.held == d.whole) {
                    inner *= whole;
                }
                match outer.pop() {
                    Some(Dimension { whole, offset, held }) => {
                        let (row, first, len) = (whole * inner, offset * inner, held * inner);
                        Runs { outer, row, first, len, total }
                    }
                    None => Runs { outer, row: total, first: 0, len: held, total },
                }
            }
        })
    }

    /// Elements held.
    pub(crate) fn held(&self) -> usize {
        self.len * self.outer.iter().map(|d| d.held).product::<usize>()
    }

    /// Elements of the whole parameter.
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    /// The runs that make up elements `local` of the shard, in order.
    pub(crate) fn of(&self, local: Range<usize>) -> impl Iterator<Item = Run> {
        let none = local.is_empty();
        let rows = if none { 0..0 } else { local.start / self.len..local.end.div_ceil(self.len) };
        rows.map(move |row| {
            let start = local.start.max(row * self.len);
            let end = local.end.min((row + 1) * self.len);
            Run { global: self.start(row) + start - row * self.len, local: start, len: end - start }
        })
    }

    /// What the shard holds of elements `global` of the whole parameter, in order.
    pub(crate) fn within(&self, global: Range<usize>) -> impl Iterator<Item = Run> {
        let none = global.is_empty();
        let rows = if none { 0..0 } else { global.start / self.row..global.end.div_ceil(self.row) };
        rows.filter_map(move |row| {
            let from = row * self.row + self.first;
            let (start, end) = (from.max(global.start), (from + self.len).min(global.end));
            if start >= end {
                return None;
            }
            let local = self.index(row)? * self.len + start - from;
            Some(Run { global: start, local, len: end - start })
        })
    }

    /// Where run number `index` begins in the whole parameter.
    fn start(&self, index: usize) -> usize {
        let (mut rest, mut row, mut stride) = (index, 0, 1);
        for dimension in self.outer.iter().rev() {
            row += (dimension.offset + rest % dimension.held) * stride;
            rest /= dimension.held;
            stride *= dimension.whole;
        }
        row * self.row + self.first
    }

    /// Which run lies in a row of the whole parameter.
    fn index(&self, row: usize) -> Option<usize> {
        let (mut rest, mut index, mut stride) = (row, 0, 1);
        for dimension in self.outer.iter().rev() {
            let held = (rest % dimension.whole).checked_sub(dimension.offset);
            index += held.filter(|i| *i < dimension.held)? * stride;
            rest /= dimension.whole;
            stride *= dimension.held;
        }
        Some(index)
    }

    /// Whether no run begins or ends inside a quantisation block of the whole parameter, nor of the shard.
    pub(crate) fn keeps_quant_blocks(&self) -> bool {
        let whole = |n: usize| n.is_multiple_of(QUANT_BLOCK);
        let local = |run: &Run| self.outer.is_empty() || whole(run.local);
        self.of(0..self.held()).all(|run| {
            let end = run.global + run.len;
            whole(run.global) && local(&run) && (whole(end) || end == self.total)
        })
    }
}

/// The shape of the whole parameter.
pub(crate) fn global_shape(param: &ParamSpec) -> &[usize] {
    param.shard.as_ref().map_or(&param.shape, |shard| &shard.global_shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For every element of a shard its place in the whole parameter, by hand.
    fn places(param: &ParamSpec) -> Vec<usize> {
        let held: usize = param.shape.iter().product();
        match &param.shard {
            None => (0..held).collect(),
            Some(Shard { part: Part::Range { first }, .. }) => (*first..first + held).collect(),
            Some(Shard { global_shape, part: Part::Box { offsets } }) => (0..held)
                .map(|mut i| {
                    let mut at = 0;
                    let mut stride = 1;
                    for d in (0..offsets.len()).rev() {
                        at += (i % param.shape[d] + offsets[d]) * stride;
                        i /= param.shape[d];
                        stride *= global_shape[d];
                    }
                    at
                })
                .collect(),
        }
    }

    fn shards() -> Vec<ParamSpec> {
        let whole = |shape: &[usize]| ParamSpec::new("p", shape);
        let mut shards = vec![
            whole(&[]),
            whole(&[3, 0]),
            whole(&[60]),
            whole(&[3, 4, 5]).range(0, 60),
            whole(&[3, 4, 5]).range(13, 0),
            whole(&[3, 4, 5]).range(13, 29),
        ];
        for a in 0..3 {
            for (b, c) in [(0, 0), (1, 2), (3, 4), (2, 0)] {
                for (x, y, z) in [(1, 1, 1), (3, 4, 5), (2, 4, 5), (1, 2, 5), (3, 1, 2), (2, 2, 3), (0, 1, 1)]
                {
                    if a + x <= 3 && b + y <= 4 && c + z <= 5 {
                        shards.push(whole(&[3, 4, 5]).boxed(&[a, b, c], &[x, y, z]));
                    }
                }
            }
        }
        shards
    }

    #[test]
    fn runs_of_every_stretch_lie_where_the_elements_do() {
        for param in shards() {
            let (runs, places) = (Runs::new(&param).unwrap(), places(&param));
            assert_eq!(runs.held(), places.len(), "{param:?}");
            for start in 0..=places.len() {
                for end in start..=places.len() {
                    let mut at = start;
                    for run in runs.of(start..end) {
                        assert!(run.local == at && run.len > 0, "{param:?} {start}..{end}");
                        assert_eq!(
                            &places[at..at + run.len],
                            (run.global..run.global + run.len).collect::<Vec<_>>()
                        );
                        at += run.len;
                    }
                    assert_eq!(at, end, "{param:?}");
                }
            }
        }
    }

    #[test]
    fn what_is_within_a_stretch_of_the_whole_is_found_once_and_in_order() {
        for param in shards() {
            let (runs, places) = (Runs::new(&param).unwrap(), places(&param));
            for start in 0..=runs.total() {
                for end in start..=runs.total() {
                    let found = runs.within(start..end);
                    let found: Vec<_> =
                        found.flat_map(|r| (0..r.len).map(move |i| (r.global + i, r.local + i))).collect();
                    let wanted = places.iter().enumerate().filter(|(_, at)| (start..end).contains(at));
                    assert_eq!(
                        found,
                        wanted.map(|(i, at)| (*at, i)).collect::<Vec<_>>(),
                        "{param:?} {start}..{end}"
                    );
                }
            }
        }
    }

    #[test]
    fn cuts_inside_a_quantisation_block_are_told_from_others() {
        let whole = |shape: &[usize]| ParamSpec::new("p", shape);
        let keeps = |param: ParamSpec| Runs::new(&param).unwrap().keeps_quant_blocks();
        assert!(keeps(whole(&[1000])));
        assert!(keeps(whole(&[1000]).range(512, 488)) && keeps(whole(&[1000]).range(512, 256)));
        assert!(!keeps(whole(&[1000]).range(512, 100)) && !keeps(whole(&[1000]).range(500, 500)));
        assert!(
            keeps(whole(&[4, 256]).boxed(&[1, 0], &[2, 256]))
                && keeps(whole(&[4, 512]).boxed(&[0, 256], &[4, 256]))
        );
        assert!(
            !keeps(whole(&[4, 256]).boxed(&[0, 0], &[4, 128]))
                && !keeps(whole(&[4, 100]).boxed(&[1, 0], &[2, 100]))
        );
        // Aligned in the whole parameter, but the second row is not in the shard.
        assert!(!keeps(whole(&[2, 1000]).boxed(&[0, 0], &[2, 100])));
    }
}
