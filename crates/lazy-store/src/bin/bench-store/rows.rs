//! The rows printed: `xtask/src/bench/mod.rs` states their keys.

use serde_json::{Value, json};

use crate::stats::{Goal, Median, spread};

/// The figures of one side, one a round.
pub(crate) struct Figures<'a> {
    pub(crate) label: &'a str,
    pub(crate) values: &'a [f64],
}

/// One figure beside another's, measured in turn: the goal is one for the ratio, whose median is that of the pairs' ratios.
pub(crate) fn compared(
    name: &str,
    unit: &str,
    ours: &[f64],
    theirs: &Figures<'_>,
    goal: Option<Goal>,
) -> Option<Value> {
    let ratios: Vec<f64> = ours.iter().zip(theirs.values).map(|(ours, theirs)| ours / theirs).collect();
    let ratio = Median::of(&ratios)?;
    let mut row = alone(name, unit, ours, None)?;
    row["against"] = json!(theirs.label);
    row["against_value"] = json!(Median::of(theirs.values)?.value);
    row["against_spread"] = json!(spread(theirs.values)?);
    row["ratio"] = json!(ratio.value);
    row["ratio_interval"] = json!([ratio.low, ratio.high]);
    judge(&mut row, ratio, goal);
    Some(row)
}

/// A figure without a peer: the goal is one for the figure.
pub(crate) fn alone(name: &str, unit: &str, values: &[f64], goal: Option<Goal>) -> Option<Value> {
    let median = Median::of(values)?;
    let mut row = json!({
        "row": name, "value": median.value, "unit": unit, "spread": spread(values)?, "rounds": values.len(),
        "against": null, "against_value": null, "ratio": null, "target": null, "met": null,
    });
    judge(&mut row, median, goal);
    Some(row)
}

fn judge(row: &mut Value, median: Median, goal: Option<Goal>) {
    let Some(goal) = goal else { return };
    row["target"] = json!(goal.value());
    row["met"] = json!(goal.met(median));
    row["at_most"] = json!(matches!(goal, Goal::AtMost(_)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_the_median_of_the_pairs_not_the_ratio_of_the_medians() {
        // A drive that slows down halfway: every pair is even, though the medians of noisier sides would not be.
        let (ours, theirs) = ([4.0, 4.0, 2.0, 1.0], [4.0, 4.0, 2.0, 2.0]);
        let figures = Figures { label: "fio", values: &theirs };
        let row = compared("write", "GB/s", &ours, &figures, Some(Goal::AtLeast(0.95))).unwrap();
        assert_eq!(row["ratio"], 1.0);
        assert_eq!(row["ratio_interval"], json!([0.5, 1.0]));
        assert_eq!((&row["value"], &row["against_value"]), (&json!(3.0), &json!(3.0)));
        assert_eq!((&row["met"], &row["at_most"]), (&json!(true), &json!(false)));
    }

    #[test]
    fn a_figure_without_a_peer_is_held_against_its_goal_itself() {
        let row = alone("reserve", "us", &[2.5, 2.1, 2.2], Some(Goal::AtMost(2.0))).unwrap();
        assert_eq!((&row["value"], &row["met"], &row["ratio"]), (&json!(2.2), &json!(false), &json!(null)));
        let row = alone("reserve", "us", &[2.5, 1.9, 2.2], None).unwrap();
        assert_eq!((&row["spread"], &row["met"]), (&json!([1.9, 2.5]), &json!(null)));
    }
}
