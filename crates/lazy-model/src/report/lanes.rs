//! One step as lanes of spans.

use std::sync::Arc;

use crate::perfetto::title_of;
use crate::span::{Lane, Span};
use crate::units::{Bytes, Seconds};

use super::map::bytes;
use super::svg::{Anchor, Frame, Scale, Svg, number, time_unit};

/// Spans narrower than this, in pixels, are drawn together with their neighbours: so the picture's size is bounded.
const THIN: f64 = 4.0;
/// A gap narrower than this, in pixels, is not marked.
const VISIBLE_GAP: f64 = 1.5;
const HEIGHT: f64 = 24.0;

/// The lanes of one step.
pub(super) fn draw(spans: &[Span], wide: bool) -> String {
    let (width, left) = if wide { (1000.0, 185.0) } else { (380.0, 5.0) };
    let drawable = |s: &&Span| s.start.get().is_finite() && s.end.get().is_finite() && s.end >= s.start;
    let spans: Vec<&Span> = spans.iter().filter(drawable).collect();
    let total = spans.iter().map(|s| s.end.get()).fold(0.0, f64::max);
    let unit = time_unit(total);
    let right = width - 12.0;
    let x = Scale::new(0.0, total / unit.divisor, left, right);
    let mut svg = Svg::new(width, "One step: what ran on each lane, and when");
    let mut y = 4.0;
    for lane in Lane::ALL {
        let mut of_lane: Vec<&Span> = spans.iter().copied().filter(|s| s.lane == lane).collect();
        if lane == Lane::Optimizer && of_lane.is_empty() {
            // A plan's step ends where the optimizer begins.
            continue;
        }
        of_lane.sort_by(|a, b| a.start.get().total_cmp(&b.start.get()));
        let facts = summary(&of_lane, total);
        if wide {
            svg.text("strong", [0.0, y + 11.0], Anchor::Start, title_of(lane));
            svg.text("minor", [0.0, y + 25.0], Anchor::Start, &facts);
        } else {
            svg.text("strong", [0.0, y + 10.0], Anchor::Start, title_of(lane));
            svg.text("minor", [right, y + 10.0], Anchor::End, &facts);
            y += 15.0;
        }
        svg.rect("track", [left, y + 2.0, right - left, HEIGHT], None);
        for group in grouped(&of_lane, |t| x.at(t.get() / unit.divisor)) {
            let from = x.at(group.start.get() / unit.divisor);
            let to = x.at(group.end.get() / unit.divisor);
            let place = [from, y + 2.0, (to - from).max(0.6), HEIGHT];
            svg.rect(class(lane, &group.name), place, Some(&group.title()));
        }
        if lane == Lane::Compute {
            for (from, to) in gaps(&of_lane) {
                let (left, right) = (x.at(from / unit.divisor), x.at(to / unit.divisor));
                if right - left >= VISIBLE_GAP {
                    let title = format!("standing still: {} at {}", time(to - from), time(from));
                    svg.rect("wait", [left, y + 2.0, right - left, HEIGHT], Some(&title));
                }
            }
        }
        y += HEIGHT + if wide { 12.0 } else { 10.0 };
    }
    let frame = Frame { x, y: Scale::new(0.0, 1.0, y, 0.0), left, right, top: 0.0, bottom: y };
    frame.x_axis(&mut svg, false, &format!("time in the step, {}", unit.name));
    svg.finish(if wide { "wide" } else { "narrow" }, y + 42.0)
}

/// The class a span is coloured by: arithmetic by its phase, transfers by the tier at their far end.
fn class(lane: Lane, name: &str) -> &'static str {
    match lane {
        Lane::Compute if name.contains("backward") => "backward",
        Lane::Compute if name.starts_with("recompute") => "recompute",
        Lane::Compute if name.starts_with("epilogue") => "loss",
        Lane::Compute => "forward",
        Lane::D2h | Lane::H2d => "host",
        Lane::NvmeWrite | Lane::NvmeRead => "nvme",
        Lane::Optimizer => "optimizer",
    }
}

fn summary(spans: &[&Span], total: f64) -> String {
    if spans.is_empty() {
        return "idle".into();
    }
    // Spans of one lane may overlap (several requests in flight): the time in which at least one ran counts.
    let (mut busy, mut until) = (0.0, 0.0f64);
    for span in spans {
        let from = span.start.get().max(until);
        busy += (span.end.get() - from).max(0.0);
        until = until.max(span.end.get());
    }
    let moved = moved(spans);
    let busy = if total > 0.0 { format!("busy {:.0}%", 100.0 * busy / total) } else { "busy".into() };
    if moved == Bytes::ZERO { busy } else { format!("{busy} · {}", bytes(moved)) }
}

/// Stretches, in seconds, between the first and the last span in which none ran.
fn gaps(sorted: &[&Span]) -> Vec<(f64, f64)> {
    let mut out = Vec::new();
    let mut until = f64::INFINITY;
    for span in sorted {
        if span.start.get() > until {
            out.push((until, span.start.get()));
        }
        until = if until.is_finite() { until.max(span.end.get()) } else { span.end.get() };
    }
    out
}

fn moved(spans: &[&Span]) -> Bytes {
    Bytes(spans.iter().fold(0, |sum, span| span.bytes.get().saturating_add(sum)))
}

/// One rectangle: a span, or several thin ones.
struct Group {
    /// Name of the longest span; it decides the colour.
    name: Arc<str>,
    longest: Seconds,
    count: usize,
    start: Seconds,
    end: Seconds,
    bytes: Bytes,
}

impl Group {
    fn of(span: &Span) -> Self {
        let (name, longest) = (Arc::clone(&span.name), span.duration());
        Self { name, longest, count: 1, start: span.start, end: span.end, bytes: span.bytes }
    }

    fn add(&mut self, span: &Span) {
        self.count += 1;
        self.bytes = Bytes(self.bytes.get().saturating_add(span.bytes.get()));
        if span.end > self.end {
            self.end = span.end;
        }
        if span.duration() > self.longest {
            (self.name, self.longest) = (Arc::clone(&span.name), span.duration());
        }
    }

    fn title(&self) -> String {
        let others = if self.count == 1 { String::new() } else { format!(" and {} more", self.count - 1) };
        let took = time((self.end - self.start).get());
        let moved =
            if self.bytes == Bytes::ZERO { String::new() } else { format!(", {}", bytes(self.bytes)) };
        format!("{}{others}: {took} at {}{moved}", self.name, time(self.start.get()))
    }
}

/// Seconds with the unit they read best in.
fn time(seconds: f64) -> String {
    let unit = time_unit(seconds);
    format!("{} {}", number(seconds / unit.divisor), unit.name)
}

/// The rectangles of one lane, left to right: at most one for every [`THIN`] pixels, and those wider than that.
fn grouped(sorted: &[&Span], x: impl Fn(Seconds) -> f64) -> Vec<Group> {
    let mut out: Vec<Group> = Vec::new();
    // Pixel at which the group of thin spans that is being filled began.
    let mut open: Option<f64> = None;
    for span in sorted {
        let (from, to) = (x(span.start), x(span.end));
        let thin = to - from < THIN;
        match (open, out.last_mut()) {
            (Some(began), Some(last)) if thin && to - began < THIN => last.add(span),
            _ => {
                open = thin.then_some(from);
                out.push(Group::of(span));
            }
        }
    }
    out
}
