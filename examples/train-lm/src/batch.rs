//! A micro-batch: token ids, and what is to be predicted after each.

use crate::decoder::{IGNORED, shifted_targets};

/// What the calls of a micro-batch find in [`lazy_runtime::Context::inputs`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Token ids, row by row.
    pub ids: Vec<u32>,
    /// For each of them the token that follows, or [`IGNORED`].
    pub targets: Vec<u32>,
    /// What the loss is divided by: the targets that count in all micro-batches of the step, so that their losses and gradients
    /// simply add up. At least 1.
    pub tokens: usize,
}

impl Batch {
    /// The micro-batches of a step, from the ids and targets of each.
    pub fn step(parts: impl IntoIterator<Item = (Vec<u32>, Vec<u32>)>) -> Vec<Batch> {
        let parts = parts.into_iter().map(|(ids, targets)| Batch { ids, targets, tokens: 0 });
        let mut batches: Vec<Batch> = parts.collect();
        let tokens = batches.iter().map(Batch::counted).sum::<usize>().max(1);
        batches.iter_mut().for_each(|batch| batch.tokens = tokens);
        batches
    }

    /// The micro-batches of a step in which every token is predicted but the first of each row of `seq`.
    pub fn next_token(micro_batches: impl IntoIterator<Item = Vec<u32>>, seq: usize) -> Vec<Batch> {
        Self::step(micro_batches.into_iter().map(|ids| {
            let targets = shifted_targets(&ids, seq);
            (ids, targets)
        }))
    }

    /// Targets that count in this micro-batch.
    pub fn counted(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORED).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loss_is_a_mean_over_the_tokens_that_count_in_all_micro_batches() {
        let parts = [(vec![1, 2, 3], vec![2, 3, IGNORED]), (vec![4, 5, 6], vec![IGNORED, 6, IGNORED])];
        let batches = Batch::step(parts);
        assert_eq!(batches.iter().map(|b| (b.counted(), b.tokens)).collect::<Vec<_>>(), [(2, 3), (1, 3)]);
        assert_eq!(Batch::step([(vec![1], vec![IGNORED])])[0].tokens, 1);
    }

    #[test]
    fn next_tokens_stay_within_their_rows() {
        let batches = Batch::next_token([vec![1, 2, 3, 4, 5, 6]], 3);
        assert_eq!(batches[0].targets, [2, 3, IGNORED, 5, 6, IGNORED]);
        assert_eq!(batches[0].tokens, 4);
    }
}
