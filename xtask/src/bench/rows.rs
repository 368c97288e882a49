//! The rows of a benchmark: their rules, and the table for people.

use serde_json::Value;

use crate::Outcome;

/// Checks the rules in the parent module's page; the error names the row.
pub(super) fn validate(rows: &Value) -> Outcome<()> {
    let list = rows.as_array().ok_or("a benchmark prints a JSON array of rows")?;
    if list.is_empty() {
        return Err("the benchmark measured nothing".into());
    }
    for (index, row) in list.iter().enumerate() {
        let name = row["row"].as_str().filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| format!("row {index} of the benchmark has no `row` name"))?;
        broken_rule(row).map_or(Ok(()), |rule| Err(format!("row `{name}` of the benchmark: {rule}")))?;
    }
    Ok(())
}

fn broken_rule(row: &Value) -> Option<&'static str> {
    const KEYS: [&str; 8] = ["row", "value", "unit", "against", "against_value", "ratio", "target", "met"];
    let is_null = |key: &&str| row[*key].is_null();
    if KEYS.iter().any(|key| row.get(key).is_none()) {
        return Some("a key of row, value, unit, against, against_value, ratio, target, met is absent");
    }
    if !row["value"].is_number() || !row["unit"].is_string() {
        return Some("`value` is a number and `unit` a string");
    }
    let peer = ["against", "against_value", "ratio"];
    if peer.iter().any(is_null) != peer.iter().all(is_null) {
        return Some("`against`, `against_value` and `ratio` come together");
    }
    if let (Some(value), Some(other), Some(ratio)) =
        (row["value"].as_f64(), row["against_value"].as_f64(), row["ratio"].as_f64())
    {
        let wrong = match interval(row, "ratio_interval") {
            Some((low, high)) if !(low..=high).contains(&ratio) => Some("`ratio` lies in `ratio_interval`"),
            None if (value / other - ratio).abs() > 0.01 * ratio.abs() => {
                Some("`ratio` is `value / against_value`")
            }
            _ => None,
        };
        if wrong.is_some() {
            return wrong;
        }
    }
    if row["target"].is_null() != row["met"].is_null() || !(is_null(&"met") || row["met"].is_boolean()) {
        return Some("`met` is true or false exactly where there is a `target`");
    }
    None
}

fn interval(row: &Value, key: &str) -> Option<(f64, f64)> {
    Some((row[key][0].as_f64()?, row[key][1].as_f64()?))
}

const HEADING: [&str; 11] = [
    "row",
    "value",
    "spread",
    "unit",
    "against",
    "its value",
    "its spread",
    "ratio",
    "interval",
    "target",
    "met",
];

/// The rows as aligned text, one a line. Columns that no row fills are left out.
pub(super) fn table(rows: &Value) -> String {
    let mut lines: Vec<Vec<String>> = vec![HEADING.map(str::to_owned).to_vec()];
    lines.extend(rows.as_array().into_iter().flatten().map(|row| cells(row).to_vec()));
    for column in (0..HEADING.len()).rev() {
        if lines.iter().skip(1).all(|line| line[column] == EMPTY) {
            lines.iter_mut().for_each(|line| drop(line.remove(column)));
        }
    }
    let mut widths = vec![0; lines[0].len()];
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for line in &lines {
        let padded: Vec<_> =
            line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        text += padded.join("  ").trim_end();
        text += "\n";
    }
    text
}

/// What a cell without a figure says.
const EMPTY: &str = "-";

fn cells(row: &Value) -> [String; HEADING.len()] {
    let range = |key: &str| {
        let found = interval(row, key);
        found.map_or_else(|| EMPTY.to_owned(), |(low, high)| format!("{}..{}", number(low), number(high)))
    };
    let met = match row["met"].as_bool() {
        Some(true) => "yes",
        Some(false) => "NO",
        None => EMPTY,
    };
    let cell = |key: &str| match &row[key] {
        Value::Null => EMPTY.to_owned(),
        Value::String(text) => text.clone(),
        other => other.as_f64().map_or_else(|| other.to_string(), number),
    };
    let target = match row["at_most"].as_bool() {
        Some(true) => format!("<= {}", cell("target")),
        Some(false) => format!(">= {}", cell("target")),
        None => cell("target"),
    };
    [
        cell("row"),
        cell("value"),
        range("spread"),
        cell("unit"),
        cell("against"),
        cell("against_value"),
        range("against_spread"),
        cell("ratio"),
        range("ratio_interval"),
        target,
        met.to_owned(),
    ]
}

/// Four significant digits.
fn number(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let digits_before = value.abs().log10().floor() + 1.0;
    let decimals = (4.0 - digits_before).clamp(0.0, 9.0) as usize;
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row() -> Value {
        json!({"row": "write 4 MiB", "value": 1.9, "unit": "GB/s", "against": "fio", "against_value": 2.0,
            "ratio": 0.95, "target": 0.95, "met": true, "spread": [1.8, 1.96]})
    }

    #[test]
    fn good_rows_pass() {
        assert_eq!(validate(&json!([row()])), Ok(()));
        let alone = json!({"row": "a", "value": 1, "unit": "s", "against": null, "against_value": null,
            "ratio": null, "target": null, "met": null});
        assert_eq!(validate(&json!([alone])), Ok(()));
    }

    #[test]
    fn a_ratio_of_pairs_lies_in_its_interval() {
        let mut row = row();
        row["ratio"] = json!(0.98);
        row["ratio_interval"] = json!([0.96, 1.01]);
        assert_eq!(validate(&json!([row])), Ok(()));
        row["ratio_interval"] = json!([0.99, 1.01]);
        assert!(validate(&json!([row])).unwrap_err().contains("ratio_interval"));
    }

    #[test]
    fn each_broken_rule_is_named() {
        let broken = [
            ("value", json!("fast"), "number"),
            ("against", json!(null), "together"),
            ("ratio", json!(1.05), "against_value"),
            ("met", json!(null), "exactly where"),
            ("row", json!(""), "no `row` name"),
        ];
        for (key, value, word) in broken {
            let mut row = row();
            row[key] = value;
            let error = validate(&json!([row])).unwrap_err();
            assert!(error.contains(word), "{key}: {error}");
        }
        assert!(validate(&json!([])).is_err());
        assert!(validate(&json!({})).is_err());
    }

    #[test]
    fn the_table_is_aligned() {
        assert_eq!(
            table(&json!([row()])),
            "row          value  spread        unit  against  its value  ratio   target  met\n\
             write 4 MiB  1.900  1.800..1.960  GB/s  fio      2.000      0.9500  0.9500  yes\n"
        );
    }

    #[test]
    fn the_table_shows_which_way_a_goal_goes_and_how_far_a_ratio_can_be_trusted() {
        let mut row = row();
        (row["at_most"], row["met"]) = (json!(false), json!(false));
        (row["spread"], row["against_spread"]) = (json!(null), json!([1.9, 2.1]));
        row["ratio_interval"] = json!([0.91, 0.96]);
        let text = table(&json!([row]));
        assert!(!text.contains("  spread"), "{text}");
        assert!(text.contains("1.900..2.100  0.9500  0.9100..0.9600  >= 0.9500  NO"), "{text}");
    }
}
