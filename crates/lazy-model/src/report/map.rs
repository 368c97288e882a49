//! The boundary map: which boundary went where, and which layers keep their internals.

use crate::units::{Bytes, Placement};

use super::svg::{Anchor, Scale, Svg, byte_unit, number};

const ROWS: [(Placement, &str, &str); 4] = [
    (Placement::Hbm, "hbm", "stay in HBM"),
    (Placement::Host, "host", "to host RAM"),
    (Placement::Nvme, "nvme", "to NVMe"),
    (Placement::Recompute, "recompute", "recomputed"),
];
const ROW: f64 = 24.0;

/// Bytes with a unit, short.
pub(super) fn bytes(bytes: Bytes) -> String {
    let unit = byte_unit(bytes.get() as f64);
    if unit.divisor == 1.0 {
        format!("{} B", bytes.get())
    } else {
        in_unit(bytes.get() as f64, unit.divisor, unit.name)
    }
}

fn in_unit(value: f64, divisor: f64, name: &str) -> String {
    format!("{} {name}", number(value / divisor))
}

/// The map for `placement[i]` and `boundary_bytes[i]` (absent sizes are left out), `keep[l]`; without the
/// latter nothing is said of internals.
pub(super) fn draw(placement: &[Placement], sizes: &[Bytes], keep: &[bool], wide: bool) -> String {
    let (width, left) = if wide { (1000.0, 245.0) } else { (380.0, 0.0) };
    // On narrow screens a row's name stands above its cells.
    let name_height = if wide { 0.0 } else { 19.0 };
    let mut svg =
        Svg::new(width, "Boundaries by tier, from the first layer on the left to the last on the right");
    let count = placement.len().max(1) as f64;
    let cell = ((width - left - 2.0) / count).min(30.0);
    let gap = (cell * 0.14).min(2.0);
    let mut y = 4.0;
    for (kind, class, name) in ROWS {
        let here = placement.iter().filter(|&&p| p == kind).count();
        let total: Bytes = placement.iter().zip(sizes).filter(|(p, _)| **p == kind).map(|(_, b)| *b).sum();
        let amount = match kind {
            // Nothing is held for these.
            Placement::Recompute => String::new(),
            _ if sizes.is_empty() => String::new(),
            _ => bytes(total),
        };
        name_row(&mut svg, class, [&format!("{here} {name}"), &amount], y, left);
        y += name_height;
        for (i, at) in placement.iter().enumerate() {
            let place = [left + i as f64 * cell + gap / 2.0, y, cell - gap, ROW - 4.0];
            if *at == kind {
                let size = sizes.get(i).map(|&b| format!(", {}", bytes(b))).unwrap_or_default();
                svg.rect(class, place, Some(&format!("boundary {i}: {at}{size}")));
            } else {
                svg.rect("track", place, None);
            }
        }
        y += ROW;
    }
    y += 4.0;
    index_axis(&mut svg, placement.len(), left, cell, y);
    y += 42.0;
    if keep.is_empty() {
        return svg.finish(if wide { "wide" } else { "narrow" }, y);
    }
    let kept = keep.iter().filter(|&&k| k).count();
    name_row(
        &mut svg,
        "kept",
        [&format!("{kept} internals kept"), &format!("of {} layers", keep.len())],
        y,
        left,
    );
    y += name_height;
    for (l, &kept) in keep.iter().enumerate() {
        // Layer l lies between boundaries l and l + 1.
        let place = [left + (l as f64 + 0.5) * cell + gap / 2.0, y, cell - gap, ROW - 10.0];
        let what = if kept { "keeps its internals" } else { "runs again before its backward" };
        svg.rect(if kept { "kept" } else { "track" }, place, Some(&format!("layer {l} {what}")));
    }
    svg.finish(if wide { "wide" } else { "narrow" }, y + ROW)
}

fn name_row(svg: &mut Svg, class: &str, [name, amount]: [&str; 2], y: f64, left: f64) {
    svg.rect(class, [0.0, y + 4.0, 12.0, 12.0], None);
    svg.text("strong", [18.0, y + 14.5], Anchor::Start, name);
    if left > 0.0 {
        svg.text("minor", [left - 10.0, y + 14.5], Anchor::End, amount);
    } else {
        svg.text("minor", [378.0, y + 14.5], Anchor::End, amount);
    }
}

fn index_axis(svg: &mut Svg, boundaries: usize, left: f64, cell: f64, y: f64) {
    let span = cell * boundaries as f64;
    let scale =
        Scale::new(0.0, boundaries.saturating_sub(1) as f64, left + cell / 2.0, left + span - cell / 2.0);
    for (value, label) in scale.ticks((span / 45.0) as usize, true) {
        if value < boundaries as f64 {
            svg.text("tick", [scale.at(value).max(4.0), y + 10.0], Anchor::Middle, &label);
        }
    }
    let last = boundaries.saturating_sub(1);
    let title = format!("boundary: 0 leaves the embedding, {last} enters the head");
    svg.text("axis", [left, y + 27.0], Anchor::Start, &title);
}
