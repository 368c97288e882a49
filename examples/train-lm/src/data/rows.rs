//! Rows of a fixed length: documents cut into pieces, and examples laid side by side.

use std::collections::BTreeMap;

use crate::decoder::IGNORED;

/// Token ids and the target of each. A target is the token that follows in the same document, or [`IGNORED`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Pairs {
    pub(super) ids: Vec<u32>,
    pub(super) targets: Vec<u32>,
}

impl Pairs {
    /// The pairs of a document of which the tokens from `learned` on are to be predicted, as far as something precedes them.
    pub(super) fn of(ids: Vec<u32>, learned: usize) -> Pairs {
        let next = (1..=ids.len()).map(|i| if i < ids.len() && i >= learned { ids[i] } else { IGNORED });
        let targets = next.collect();
        Pairs { ids, targets }
    }

    fn truncate(&mut self, length: usize) {
        self.ids.truncate(length);
        self.targets.truncate(length);
    }

    fn append(&mut self, other: &Pairs) {
        self.ids.extend_from_slice(&other.ids);
        self.targets.extend_from_slice(&other.targets);
    }

    pub(super) fn counted(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORED).count()
    }
}

/// Rows of `seq` pairs each, one behind the other. What fills up a row is token 0, is not predicted, and has nothing behind it that is.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    pairs: Pairs,
    seq: usize,
    /// Examples that were cut because they are longer than a row.
    pub(super) cut: usize,
    /// Examples left out because none of their answer fits into a row behind the prompt.
    pub(super) left_out: usize,
}

impl Rows {
    pub(super) fn new(seq: usize) -> Rows {
        Rows { pairs: Pairs::default(), seq, cut: 0, left_out: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.pairs.ids.len() / self.seq
    }

    pub(super) fn get(&self, row: usize) -> (&[u32], &[u32]) {
        let range = row * self.seq..(row + 1) * self.seq;
        (&self.pairs.ids[range.clone()], &self.pairs.targets[range])
    }

    pub(super) fn ids(&self) -> &[u32] {
        &self.pairs.ids
    }

    pub(super) fn targets(&self) -> impl Iterator<Item = u32> {
        self.pairs.targets.iter().copied().filter(|&target| target != IGNORED)
    }

    fn fill_up(&mut self) {
        let length = self.pairs.ids.len().next_multiple_of(self.seq);
        self.pairs.ids.resize(length, 0);
        self.pairs.targets.resize(length, IGNORED);
    }

    /// Adds documents, one behind the other, cut wherever a row ends.
    pub(super) fn add_pieces(&mut self, documents: impl IntoIterator<Item = Pairs>) {
        documents.into_iter().for_each(|document| self.pairs.append(&document));
        self.fill_up();
    }

    /// Adds examples, none of them across the end of a row: the longest first, each into the row where it leaves the least room.
    pub(super) fn add_packed(&mut self, mut examples: Vec<Pairs>) {
        for example in &mut examples {
            self.cut += usize::from(example.ids.len() > self.seq);
            example.truncate(self.seq);
        }
        let all = examples.len();
        examples.retain(|example| example.counted() > 0);
        self.left_out += all - examples.len();
        examples.sort_by_key(|example| std::cmp::Reverse(example.ids.len()));
        let mut rows: Vec<Vec<usize>> = Vec::new();
        // Rows by the room left in them.
        let mut open: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (number, example) in examples.iter().enumerate() {
            let length = example.ids.len();
            let found = open.range_mut(length..).next().map(|(&room, rows)| (room, rows.pop()));
            let (room, row) = match found {
                Some((room, Some(row))) => (room, row),
                _ => {
                    rows.push(Vec::new());
                    (self.seq, rows.len() - 1)
                }
            };
            if open.get(&room).is_some_and(Vec::is_empty) {
                open.remove(&room);
            }
            rows[row].push(number);
            if room > length {
                open.entry(room - length).or_default().push(row);
            }
        }
        for row in rows {
            row.into_iter().for_each(|number| self.pairs.append(&examples[number]));
            self.fill_up();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const X: u32 = IGNORED;

    #[test]
    fn documents_are_cut_into_rows_and_no_target_lies_in_another_document() {
        let mut rows = Rows::new(4);
        rows.add_pieces([Pairs::of(vec![1, 2, 3, 4, 5], 0), Pairs::of(vec![6, 7], 0)]);
        assert_eq!(rows.len(), 2);
        assert_eq!(rows.get(0), (&[1, 2, 3, 4][..], &[2, 3, 4, 5][..]));
        assert_eq!(rows.get(1), (&[5, 6, 7, 0][..], &[X, 7, X, X][..]));
        assert_eq!(rows.targets().collect::<Vec<_>>(), [2, 3, 4, 5, 7]);
    }

    #[test]
    fn answers_alone_are_predicted() {
        // Two tokens of prompt, three of answer.
        let pairs = Pairs::of(vec![1, 2, 3, 4, 5], 2);
        assert_eq!(pairs.targets, [X, 3, 4, 5, X]);
        // Nothing precedes the first token.
        assert_eq!(Pairs::of(vec![1, 2], 0).targets, [2, X]);
        assert_eq!(Pairs::of(vec![1, 2], 2).counted(), 0);
    }

    #[test]
    fn examples_are_packed_whole_and_tightly() {
        let example = |first: u32, length: u32| Pairs::of((first..first + length).collect(), 1);
        let mut rows = Rows::new(10);
        rows.add_packed(vec![example(10, 3), example(20, 7), example(30, 5), example(40, 5), example(50, 9)]);
        assert_eq!(rows.len(), 3);
        let found: Vec<_> = (0..3).map(|row| rows.get(row).0.to_vec()).collect();
        assert_eq!(found[0], [50, 51, 52, 53, 54, 55, 56, 57, 58, 0]);
        assert_eq!(found[1], [20, 21, 22, 23, 24, 25, 26, 10, 11, 12]);
        assert_eq!(found[2], [30, 31, 32, 33, 34, 40, 41, 42, 43, 44]);
        assert_eq!(rows.get(1).1, [21, 22, 23, 24, 25, 26, X, 11, 12, X]);
        assert_eq!((rows.cut, rows.left_out), (0, 0));
    }

    #[test]
    fn examples_that_are_too_long_are_cut_or_left_out_and_counted() {
        let mut rows = Rows::new(4);
        // The last target of what is cut is still known.
        rows.add_packed(vec![Pairs::of(vec![1, 2, 3, 4, 5, 6], 2), Pairs::of(vec![7, 8, 9, 10, 11, 12], 5)]);
        assert_eq!((rows.cut, rows.left_out, rows.len()), (2, 1, 1));
        assert_eq!(rows.get(0), (&[1, 2, 3, 4][..], &[X, 3, 4, 5][..]));
    }

    #[test]
    fn every_example_is_in_one_row_whatever_their_lengths() {
        let lengths: Vec<usize> = (0..500).map(|i| 2 + i * i % 37).collect();
        let examples = lengths.iter().enumerate().map(|(n, &l)| Pairs::of(vec![n as u32; l], 1)).collect();
        let mut rows = Rows::new(40);
        rows.add_packed(examples);
        let mut found: Vec<u32> = rows.targets().collect();
        found.sort_unstable();
        let expected: Vec<u32> =
            lengths.iter().enumerate().flat_map(|(n, &l)| std::iter::repeat_n(n as u32, l - 1)).collect();
        assert_eq!(found, expected);
        // Within 5% of rows without a gap.
        let least = lengths.iter().sum::<usize>().div_ceil(40);
        assert!(rows.len() * 20 <= least * 21, "{} rows, {least} at the least", rows.len());
    }
}
