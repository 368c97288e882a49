//! The table of promised and measured values.

use std::fmt::Write as _;

use crate::units::Bytes;

use super::map::bytes;
use super::svg::{Svg, escape, number};
use super::{Compared, Table};

/// A difference of this many percent fills the bar.
const FULL_BAR: f64 = 25.0;

/// Longer cells hold sentences and may be broken.
const SENTENCE: usize = 18;

/// Plain rows; the first column names them.
pub(super) fn plain(table: &Table) -> String {
    let mut out = String::from("<div class=\"scroll\"><table><thead><tr>");
    for heading in &table.head {
        let _ = write!(out, "<th>{}</th>", escape(heading));
    }
    out.push_str("</tr></thead><tbody>\n");
    for row in &table.rows {
        out.push_str("<tr>");
        for (column, cell) in row.iter().enumerate() {
            let class = if column > 0 && cell.len() > SENTENCE { " class=\"words\"" } else { "" };
            let _ = write!(out, "<td{class}>{}</td>", escape(cell));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
    out
}

/// The rows as a table. Exact values are in `data-value`.
pub(super) fn draw(rows: &[Compared]) -> String {
    let recent = rows.iter().any(|row| row.recent.is_some());
    let mut out = String::from("<table><thead><tr><th>Quantity</th><th>Promised</th><th>Measured</th>");
    if recent {
        out.push_str("<th>Of late</th>");
    }
    out.push_str("<th>Difference</th><th class=\"bar\">−25% to +25%</th></tr></thead><tbody>\n");
    for row in rows {
        let difference = row.difference_percent();
        let shown = difference
            .map_or("–".to_owned(), |d| if d.abs() < 0.05 { "0.0%".into() } else { format!("{d:+.1}%") });
        let late = if recent { cell(row.recent, &row.unit) } else { String::new() };
        let _ = writeln!(
            out,
            "<tr><td>{}</td>{}{}{late}<td>{shown}</td><td class=\"bar\">{}</td></tr>",
            escape(&row.label),
            cell(row.promised, &row.unit),
            cell(row.measured, &row.unit),
            difference.map(bar).unwrap_or_default()
        );
    }
    out.push_str("</tbody></table>\n");
    out
}

fn cell(value: Option<f64>, unit: &str) -> String {
    let Some(value) = value.filter(|v| v.is_finite()) else { return "<td>–</td>".into() };
    if unit == "bytes" {
        return format!(
            "<td data-value=\"{value}\" title=\"{value} bytes\">{}</td>",
            bytes(Bytes(value as u64))
        );
    }
    format!("<td data-value=\"{value}\">{} {}</td>", number(value), escape(unit))
}

/// The difference as a bar to the left (less) or right (more) of the middle.
fn bar(percent: f64) -> String {
    let mut svg = Svg::new(180.0, &format!("{percent:+.1} percent"));
    let length = (percent.abs() / FULL_BAR).min(1.0) * 86.0;
    svg.rect("track", [0.0, 3.0, 180.0, 8.0], None);
    let from = if percent < 0.0 { 90.0 - length } else { 90.0 };
    svg.rect("hbm", [from, 3.0, length, 8.0], None);
    svg.line("base", [90.0, 0.0, 90.0, 14.0]);
    svg.finish("difference", 14.0)
}
