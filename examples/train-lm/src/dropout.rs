//! Dropout whose mask is a function of where and when it is applied, so that a recomputed layer drops what its
//! first forward dropped.

use crate::random::Stream;

/// Which execution of the model a mask belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DropoutKey {
    /// Seed of the run.
    pub seed: u64,
    /// Optimizer step.
    pub step: u64,
    /// Micro-batch within the step.
    pub micro_batch: u64,
}

/// One mask: element `i` of a tensor is dropped with the probability given, else scaled by `1 / (1 - probability)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mask {
    stream: Stream,
    threshold: u64,
    scale: f32,
}

impl Mask {
    /// The mask of `site` in `layer`; none for a probability of zero. The probability lies in `0.0..1.0`.
    pub(crate) fn new(probability: f32, key: DropoutKey, layer: usize, site: u64) -> Option<Mask> {
        let stream = Stream::keyed(&[key.seed, key.step, key.micro_batch, layer as u64, site]);
        let threshold = (f64::from(probability) * (1u64 << 32) as f64).round() as u64;
        (probability > 0.0).then_some(Mask { stream, threshold, scale: 1.0 / (1.0 - probability) })
    }

    /// State of the stream, threshold and scale, for a kernel that makes the same mask.
    pub(crate) fn parts(&self) -> (u64, u64, f32) {
        (self.stream.state(), self.threshold, self.scale)
    }

    /// Multiplies `values`, which are the elements from `first` on, by the mask. `first` is even.
    pub(crate) fn apply(&self, first: usize, values: &mut [f32]) {
        debug_assert!(first.is_multiple_of(2), "two elements share a word");
        // Each element is decided by half a word.
        for (pair, word) in values.chunks_mut(2).zip(first as u64 / 2..) {
            let word = self.stream.word(word);
            for (value, half) in pair.iter_mut().zip([word & 0xffff_ffff, word >> 32]) {
                *value *= if half < self.threshold { 0.0 } else { self.scale };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(key: DropoutKey, layer: usize, site: u64) -> Vec<f32> {
        let mut values = vec![1.0; 20_000];
        Mask::new(0.25, key, layer, site).unwrap().apply(0, &mut values);
        values
    }

    #[test]
    fn drops_the_share_asked_for_and_keeps_the_mean() {
        let values = mask(DropoutKey { seed: 1, step: 2, micro_batch: 3 }, 4, 0);
        let dropped = values.iter().filter(|v| **v == 0.0).count();
        // Five standard errors of 20,000 draws.
        assert!((dropped as f64 / 20_000.0 - 0.25).abs() < 0.0154, "{dropped} of 20000 dropped");
        assert!(values.iter().all(|v| *v == 0.0 || *v == 1.0 / 0.75));
    }

    #[test]
    fn a_part_gets_its_part_of_the_mask() {
        let key = DropoutKey::default();
        let mut part = vec![1.0; 101];
        Mask::new(0.25, key, 0, 1).unwrap().apply(500, &mut part);
        assert_eq!(part, mask(key, 0, 1)[500..601]);
    }

    #[test]
    fn the_mask_depends_on_the_whole_key_and_on_nothing_else() {
        let key = DropoutKey { seed: 1, step: 2, micro_batch: 3 };
        let first = mask(key, 4, 0);
        assert_eq!(first, mask(key, 4, 0));
        let others = [
            mask(DropoutKey { seed: 9, ..key }, 4, 0),
            mask(DropoutKey { step: 9, ..key }, 4, 0),
            mask(DropoutKey { micro_batch: 9, ..key }, 4, 0),
            mask(key, 9, 0),
            mask(key, 4, 1),
        ];
        for other in others {
            // Independent masks at 1/4 agree on 10/16 of the elements.
            let same = first.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!((same as f64 / 20_000.0 - 0.625).abs() < 0.02, "{same} of 20000 agree");
        }
    }

    #[test]
    fn no_probability_no_mask() {
        assert!(Mask::new(0.0, DropoutKey::default(), 0, 0).is_none());
    }
}
