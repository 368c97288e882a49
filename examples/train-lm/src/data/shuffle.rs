//! An order of any number of things that is computed for each place by itself, so that nothing of it has to be kept.

use crate::random::Stream;

/// Each round lets half of the places change with their partners; this many mix numbers of any practical size.
const ROUNDS: u64 = 96;

/// Which of `count` things is at place `index` of the order that belongs to `key`. Every thing has one place. A swap-or-not shuffle (Hoang,
/// Morris and Rogaway, "An enciphering scheme based on a card shuffle", 2012): in each round places are paired by their sum, and a coin says
/// for each pair whether the two change.
pub(super) fn shuffled(key: &[u64], count: u64, index: u64) -> u64 {
    debug_assert!(index < count);
    let stream = Stream::keyed(key);
    let mut place = index;
    for round in 0..ROUNDS {
        // The high half of the product maps a word evenly to the places.
        let sum = ((u128::from(stream.word(round)) * u128::from(count)) >> 64) as u64;
        let partner = if sum >= place { sum - place } else { sum + (count - place) };
        let pair = place.max(partner);
        let coin = stream.word(pair.wrapping_add(1).wrapping_mul(ROUNDS).wrapping_add(round));
        place = if coin >> 63 == 1 { partner } else { place };
    }
    place
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thing_has_one_place() {
        for count in [1, 2, 3, 4, 5, 16, 17, 100, 255, 256, 257, 1000] {
            let mut order: Vec<u64> = (0..count).map(|i| shuffled(&[7, count], count, i)).collect();
            order.sort_unstable();
            assert_eq!(order, (0..count).collect::<Vec<_>>(), "{count}");
        }
        let most = u64::MAX;
        assert!(shuffled(&[1], most, most - 1) < most);
    }

    #[test]
    fn keys_give_orders_that_are_independent() {
        let order = |key: u64| (0..4096).map(|i| shuffled(&[key], 4096, i)).collect::<Vec<_>>();
        let (first, other) = (order(1), order(2));
        assert_eq!(first, order(1));
        // Things at the same place in two orders: one expected.
        let same = |a: &[u64], b: &[u64]| a.iter().zip(b).filter(|(a, b)| a == b).count();
        assert!(same(&first, &other) < 8 && same(&first, &(0..4096).collect::<Vec<_>>()) < 8);
        // Neighbours land anywhere: the mean distance of two random places is a third of all.
        let distance: f64 = first.windows(2).map(|w| w[0].abs_diff(w[1]) as f64).sum::<f64>() / 4095.0;
        assert!((distance / 4096.0 - 1.0 / 3.0).abs() < 0.02, "{distance}");
    }

    #[test]
    fn each_thing_comes_to_each_place_equally_often() {
        let mut counts = [[0u32; 6]; 6];
        for key in 0..6000 {
            for (place, row) in counts.iter_mut().enumerate() {
                row[shuffled(&[key, 3], 6, place as u64) as usize] += 1;
            }
        }
        // 1000 expected, with a standard deviation of 29.
        assert!(counts.iter().flatten().all(|&c| (860..1140).contains(&c)), "{counts:?}");
    }
}
