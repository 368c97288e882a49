//! Medians, how far they can be trusted, and whether a goal is met.

/// Least confidence of an interval.
const CONFIDENCE: f64 = 0.95;

/// A median, and the interval that holds the true one with a confidence of 95 %, or as much as so few values give.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Median {
    pub(crate) value: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

/// What a figure should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

impl Median {
    /// Of at least one value.
    pub(crate) fn of(values: &[f64]) -> Option<Median> {
        let sorted = sorted(values);
        let n = sorted.len();
        let value = (sorted.get(n.checked_sub(1)? / 2)? + sorted.get(n / 2)?) / 2.0;
        let cut = cut(n);
        Some(Median { value, low: sorted[cut], high: sorted[n - 1 - cut] })
    }
}

impl Goal {
    pub(crate) fn value(self) -> f64 {
        match self {
            Goal::AtLeast(value) | Goal::AtMost(value) => value,
        }
    }

    /// Whether noise alone can be what keeps the median from the goal: the interval reaches it.
    pub(crate) fn met(self, median: Median) -> bool {
        match self {
            Goal::AtLeast(goal) => median.high >= goal,
            Goal::AtMost(goal) => median.low <= goal,
        }
    }
}

/// Smallest and largest.
pub(crate) fn spread(values: &[f64]) -> Option<(f64, f64)> {
    let sorted = sorted(values);
    Some((*sorted.first()?, *sorted.last()?))
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// How many of `n` sorted values an interval may leave out at each end. That assumes nothing of how the values are
/// distributed: each lies below the true median with probability one half, so the number that does is binomial, and the
/// interval misses where at most `cut` lie on one side of the median.
fn cut(n: usize) -> usize {
    let mut term = 0.5_f64.powi(n as i32);
    let mut tail = 0.0;
    for cut in 0..n {
        tail += term;
        if 1.0 - 2.0 * tail < CONFIDENCE {
            return cut.saturating_sub(1);
        }
        term *= (n - cut) as f64 / (cut + 1) as f64;
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_the_mean_of_the_two_in_the_middle() {
        assert_eq!(Median::of(&[3.0, 1.0, 2.0]).unwrap().value, 2.0);
        assert_eq!(Median::of(&[4.0, 1.0, 2.0, 3.0]).unwrap().value, 2.5);
        assert_eq!(Median::of(&[7.0]), Some(Median { value: 7.0, low: 7.0, high: 7.0 }));
        assert_eq!(Median::of(&[]), None);
    }

    #[test]
    fn intervals_have_the_ranks_of_the_published_table() {
        // Ranks (from 1) of the 95 % interval of a median, as textbooks on nonparametric statistics tabulate them; below
        // six values the whole range is all there is.
        let table = [
            (1, 1, 1),
            (5, 1, 5),
            (6, 1, 6),
            (7, 1, 7),
            (8, 1, 8),
            (9, 2, 8),
            (10, 2, 9),
            (12, 3, 10),
            (15, 4, 12),
            (20, 6, 15),
            (25, 8, 18),
        ];
        for (n, low, high) in table {
            let values: Vec<f64> = (1..=n).rev().map(f64::from).collect();
            let found = Median::of(&values).unwrap();
            assert_eq!((found.low, found.high), (f64::from(low), f64::from(high)), "{n} values");
        }
    }

    #[test]
    fn a_goal_is_met_where_the_interval_reaches_it() {
        let median = Median { value: 0.9, low: 0.85, high: 0.95 };
        assert!(Goal::AtLeast(0.95).met(median));
        assert!(!Goal::AtLeast(0.951).met(median));
        assert!(Goal::AtMost(0.85).met(median));
        assert!(!Goal::AtMost(0.849).met(median));
        let nothing = Median { value: f64::NAN, low: f64::NAN, high: f64::NAN };
        assert!(!Goal::AtLeast(0.0).met(nothing) && !Goal::AtMost(9.0).met(nothing));
    }

    #[test]
    fn the_spread_is_the_smallest_and_the_largest() {
        assert_eq!(spread(&[2.0, 9.0, 4.0]), Some((2.0, 9.0)));
        assert_eq!(spread(&[]), None);
    }
}
