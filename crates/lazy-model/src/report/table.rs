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
    for (column, heading) in table.head.iter().enumerate() {
        let of_sentences = table.rows.iter().any(|row| is_sentence(column, row.get(column)));
        let class = if of_sentences { " class=\"words\"" } else { "" };
        let _ = write!(out, "<th{class}>{}</th>", escape(heading));
    }
    out.push_str("</tr></thead><tbody>\n");
    for row in &table.rows {
        out.push_str("<tr>");
        for (column, cell) in row.iter().enumerate() {
            let class = if is_sentence(column, Some(cell)) { " class=\"words\"" } else { "" };
            let _ = write!(out, "<td{class}>{}</td>", escape(cell));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
    out
}

fn is_sentence(column: usize, cell: Option<&String>) -> bool {
    column > 0 && cell.is_some_and(|cell| cell.len() > SENTENCE)
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
        // What begins small is a part of the row above.
        let class = if row.label.starts_with(char::is_lowercase) { " class=\"part\"" } else { "" };
        let _ = writeln!(
            out,
            "<tr{class}><td>{}</td>{}{}{late}<td>{shown}</td><td class=\"bar\">{}</td></tr>",
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
