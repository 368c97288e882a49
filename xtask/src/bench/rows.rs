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
        && (value / other - ratio).abs() > 0.01 * ratio.abs()
    {
        return Some("`ratio` is `value / against_value`");
    }
    if row["target"].is_null() != row["met"].is_null() || !(is_null(&"met") || row["met"].is_boolean()) {
        return Some("`met` is true or false exactly where there is a `target`");
    }
    None
}

/// The rows as aligned text, one a line.
pub(super) fn table(rows: &Value) -> String {
    let heading = ["row", "value", "spread", "unit", "against", "its value", "ratio", "target", "met"];
    let mut lines = vec![heading.map(str::to_owned)];
    lines.extend(rows.as_array().into_iter().flatten().map(cells));
    let mut widths = [0; 9];
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for line in &lines {
        let padded: Vec<_> = line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        text += padded.join("  ").trim_end();
        text += "\n";
    }
    text
}

fn cells(row: &Value) -> [String; 9] {
    let spread = match (row["spread"][0].as_f64(), row["spread"][1].as_f64()) {
        (Some(low), Some(high)) => format!("{}..{}", number(low), number(high)),
        _ => "-".to_owned(),
    };
    let met = match row["met"].as_bool() {
        Some(true) => "yes",
        Some(false) => "NO",
        None => "-",
    };
    let cell = |key: &str| match &row[key] {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.as_f64().map_or_else(|| other.to_string(), number),
    };
    [
        cell("row"),
        cell("value"),
        spread,
        cell("unit"),
        cell("against"),
        cell("against_value"),
        cell("ratio"),
        cell("target"),
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
}
