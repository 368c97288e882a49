//! Curves: the loss, and the bytes in each tier over a step.

use crate::units::{Bytes, Seconds, Tier};

use super::map::bytes;
use super::svg::{Anchor, Frame, Scale, Svg, byte_unit, number, time_unit};
use super::{Curve, TierOccupancy};

/// Classes of further curves, in turn.
const CURVES: [&str; 3] = ["curve s-host", "curve s-nvme", "curve s-kept"];

/// Loss over steps with a moving mean, further curves and the reference line. Losses that are no numbers are left out.
pub(super) fn loss(points: &[(u64, f64)], curves: &[Curve], reference: Option<f64>, wide: bool) -> String {
    let (width, height) = if wide { (1000.0, 300.0) } else { (380.0, 250.0) };
    let points = finite(points);
    let further: Vec<Vec<(f64, f64)>> = curves.iter().map(|curve| finite(&curve.points)).collect();
    let all = || points.iter().chain(further.iter().flatten());
    let reference = reference.filter(|r| r.is_finite());
    let mut svg = Svg::new(width, "Loss over training steps");
    let (mut lo, mut hi) = range(all().map(|p| p.1).chain(reference));
    let room = ((hi - lo) * 0.06).max(1e-9);
    (lo, hi) = (lo - room, hi + room);
    let (first, last) = range(all().map(|p| p.0));
    let (left, right, top, bottom) = (48.0, width - 12.0, 28.0, height - 44.0);
    let x = Scale::new(first, last, left, right);
    let frame = Frame { x, y: Scale::new(lo, hi, bottom, top), left, right, top, bottom };
    frame.y_axis(&mut svg, 5, "loss, nats per token");
    frame.x_axis(&mut svg, true, "step");
    let place = |p: &(f64, f64)| (frame.x.at(p.0), frame.y.at(p.1));
    let raw: Vec<_> = points.iter().map(place).collect();
    let smooth: Vec<_> = moving_mean(&points).iter().map(place).collect();
    let few = points.len() <= 40;
    svg.path(if few { "curve" } else { "faint" }, &thin(&raw), None);
    if !few {
        svg.path("curve", &thin(&smooth), None);
    }
    for (class, points) in CURVES.iter().cycle().zip(&further) {
        let smooth = if points.len() > 40 { moving_mean(points) } else { points.clone() };
        let line: Vec<_> = smooth.iter().map(place).collect();
        svg.path(class, &thin(&line), None);
    }
    if let Some(reference) = reference {
        let y = frame.y.at(reference);
        svg.line("mark", [left, y, right, y]);
        // Above the chart, where no curve runs through it.
        let label = format!("- - unigram entropy {}", number(reference));
        svg.text("marked", [right, top - 10.0], Anchor::End, &label);
    }
    for (point, (x, y)) in points.iter().zip(&raw).step_by(points.len().div_ceil(200).max(1)) {
        let (class, r) = if few { ("dot", 3.0) } else { ("touch", 5.0) };
        svg.dot(class, [*x, *y, r], &format!("step {}: loss {}", point.0, number(point.1)));
    }
    svg.finish(if wide { "wide" } else { "narrow" }, height)
}

/// Dips narrower than this, in pixels, are not drawn.
const DIP: f64 = 1.5;

fn finite(points: &[(u64, f64)]) -> Vec<(f64, f64)> {
    points.iter().filter(|p| p.1.is_finite()).map(|&(step, loss)| (step as f64, loss)).collect()
}

/// Bytes held in each tier over one step: measured as an area, promised as a dotted line, the budget as a dashed one.
pub(super) fn occupancy(tiers: &[TierOccupancy], wide: bool) -> String {
    let (width, panel) = if wide { (1000.0, 96.0) } else { (380.0, 90.0) };
    let mut svg = Svg::new(width, "Bytes held in each tier over one step, promised and measured");
    let curves = || tiers.iter().flat_map(|t| t.promised.iter().chain(&t.measured));
    let longest = curves().map(|p| p.0.get()).filter(|t| t.is_finite()).fold(0.0, f64::max);
    let unit = time_unit(longest);
    let (left, right) = (48.0, width - 12.0);
    let x = Scale::new(0.0, longest / unit.divisor, left, right);
    let mut y = 0.0;
    for (i, tier) in tiers.iter().enumerate() {
        // A narrow screen needs a second line for the peaks.
        let top = y + if wide { 30.0 } else { 44.0 };
        let frame = tier_panel(&mut svg, tier, x, unit.divisor, [left, right, top, top + panel], wide);
        y = top + panel + 16.0;
        if i + 1 == tiers.len() {
            frame.x_axis(&mut svg, false, &format!("time in the step, {}", unit.name));
            y += 28.0;
        }
    }
    svg.finish(if wide { "wide" } else { "narrow" }, y)
}

fn tier_panel(
    svg: &mut Svg,
    tier: &TierOccupancy,
    x: Scale,
    divisor: f64,
    [left, right, top, bottom]: [f64; 4],
    wide: bool,
) -> Frame {
    let peak = |curve: &[(Seconds, Bytes)]| curve.iter().map(|p| p.1.get()).max();
    let (promised, measured) = (peak(&tier.promised), peak(&tier.measured));
    let highest = promised.max(measured).unwrap_or(0) as f64;
    let budget = tier.budget.map(|b| b.get() as f64);
    // A budget far above the curves would press them flat; then it is only named.
    let shown = budget.filter(|&b| b <= 4.0 * highest || highest == 0.0);
    let top_value = highest.max(shown.unwrap_or(0.0));
    let unit = byte_unit(top_value);
    let y = Scale::new(0.0, top_value / unit.divisor * 1.06, bottom, top);
    let frame = Frame { x, y, left, right, top, bottom };
    frame.y_axis(svg, 4, "");
    svg.line("base", [left, bottom, right, bottom]);
    // Of a plan that nobody ran there is one curve, and it needs no adjective.
    let planned = if tier.measured.is_empty() { "" } else { "promised" };
    let peaks = [("measured", measured), (planned, promised)];
    let peaks = peaks
        .into_iter()
        .filter_map(|(what, b)| Some(format!("{what} {}", bytes(Bytes(b?))).trim().to_owned()));
    let peaks = peaks.collect::<Vec<_>>().join(" · ");
    let peaks = if peaks.is_empty() { "nothing recorded".to_owned() } else { format!("peak {peaks}") };
    let limit = tier.budget.map_or(String::new(), |b| {
        let note = if shown.is_none() { " (above the scale)" } else { "" };
        format!("room {}{note}", bytes(b))
    });
    let name = format!("{}, {}", title(tier.tier), unit.name);
    if wide {
        svg.text("strong", [0.0, top - 12.0], Anchor::Start, &name);
        let facts = if limit.is_empty() { peaks } else { format!("{peaks} · {limit}") };
        svg.text("minor", [right, top - 12.0], Anchor::End, &facts);
    } else {
        svg.text("strong", [0.0, top - 27.0], Anchor::Start, &name);
        svg.text("minor", [right, top - 27.0], Anchor::End, &limit);
        svg.text("minor", [0.0, top - 11.0], Anchor::Start, &peaks);
    }
    let class = tier.tier.name();
    let drawn = if tier.measured.is_empty() { &tier.promised } else { &tier.measured };
    let measured = stairs(drawn, &frame, divisor, unit.divisor);
    svg.path(&format!("area {class}"), &measured, Some(bottom));
    svg.path(&format!("measured s-{class}"), &measured, None);
    if !tier.measured.is_empty() {
        svg.path("promised", &stairs(&tier.promised, &frame, divisor, unit.divisor), None);
    }
    if let Some(budget) = shown {
        let y = frame.y.at(budget / unit.divisor);
        svg.line("mark", [left, y, right, y]);
    }
    frame
}

pub(super) const fn title(tier: Tier) -> &'static str {
    match tier {
        Tier::Hbm => "HBM",
        Tier::Host => "Host RAM",
        Tier::Nvme => "NVMe",
    }
}

/// A step curve in pixels: each value holds until the next. Steps within a pixel keep only their extremes.
fn stairs(curve: &[(Seconds, Bytes)], frame: &Frame, time: f64, size: f64) -> Vec<(f64, f64)> {
    let mut out: Vec<(f64, f64)> = Vec::new();
    let sound: Vec<&(Seconds, Bytes)> = curve.iter().filter(|p| p.0.get().is_finite()).collect();
    for (i, (at, bytes)) in sound.iter().enumerate() {
        let (x, y) = (frame.x.at(at.get() / time), frame.y.at(bytes.get() as f64 / size));
        // Between two tasks little is held for a moment: a dip that no eye sees is no line through the picture.
        let around = i.checked_sub(1).and_then(|before| Some((sound[before].1, sound.get(i + 1)?)));
        if around.is_some_and(|(before, after)| {
            *bytes < before && *bytes < after.1 && frame.x.at(after.0.get() / time) - x < DIP
        }) {
            continue;
        }
        if let Some(&(_, before)) = out.last() {
            out.push((x, before));
        }
        out.push((x, y));
    }
    thin(&out)
}

/// Drops points that no eye tells apart: of those in one pixel the first, lowest, highest and last stay.
fn thin(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut out = Vec::new();
    let same = |a: &(f64, f64), b: &(f64, f64)| a.0.floor() == b.0.floor();
    for run in points.chunk_by(same) {
        if run.len() <= 4 {
            out.extend_from_slice(run);
            continue;
        }
        let by_y = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let picks = [run.first(), run.iter().min_by(by_y), run.iter().max_by(by_y), run.last()];
        out.extend(picks.into_iter().flatten());
    }
    out
}

/// Mean over a window of a twentieth of the points (at least five) around each one.
fn moving_mean(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let half = (points.len() / 40).max(2);
    let mean = |(i, point): (usize, &(f64, f64))| {
        let around = &points[i.saturating_sub(half)..(i + half + 1).min(points.len())];
        (point.0, around.iter().map(|p| p.1).sum::<f64>() / around.len() as f64)
    };
    // Later pixels than these are not told apart, and a long run has many points.
    let stride = (points.len() / 2000).max(1);
    points.iter().enumerate().step_by(stride).map(mean).collect()
}

/// Smallest and largest; zero and one where there is nothing.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (lo, hi) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(lo, hi), v| (lo.min(v), hi.max(v)));
    if lo <= hi { (lo, hi) } else { (0.0, 1.0) }
}
