//! Where the time of a step went: a bar for what was promised, and one for what was measured, on one scale.

use super::svg::{Anchor, Scale, Svg, number, time_unit};
use super::{Part, StepParts};

const HEIGHT: f64 = 30.0;
/// Pixels that a character of a label takes.
const CHARACTER: f64 = 7.8;

impl Part {
    /// All parts, in drawing order.
    pub(super) const ALL: [Part; 5] =
        [Part::Arithmetic, Part::Recompute, Part::Wait, Part::Optimizer, Part::Other];

    pub(super) const fn class(self) -> &'static str {
        match self {
            Part::Arithmetic => "forward",
            Part::Recompute => "recompute",
            Part::Wait => "wait",
            Part::Optimizer => "optimizer",
            Part::Other => "other",
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Part::Arithmetic => "forward and backward",
            Part::Recompute => "run again",
            Part::Wait => "standing still",
            Part::Optimizer => "optimizer",
            Part::Other => "the rest",
        }
    }
}

/// The bars, each with its own total.
pub(super) fn draw(bars: &[StepParts], wide: bool) -> String {
    let (width, left) = if wide { (1000.0, 150.0) } else { (380.0, 0.0) };
    let total = |bar: &StepParts| bar.parts.iter().map(|part| sound(part.1.get())).sum::<f64>();
    let longest = bars.iter().map(total).fold(0.0, f64::max);
    let unit = time_unit(longest);
    let x = Scale::new(0.0, longest, left, width - 2.0);
    let mut svg = Svg::new(width, "Parts of a step, promised and measured");
    let mut y = 2.0;
    for bar in bars {
        let all = format!("{} {}", number(total(bar) / unit.divisor), unit.name);
        if wide {
            svg.text("strong", [0.0, y + 13.0], Anchor::Start, &bar.label);
            svg.text("minor", [0.0, y + 27.0], Anchor::Start, &all);
        } else {
            svg.text("strong", [0.0, y + 11.0], Anchor::Start, &bar.label);
            svg.text("minor", [width - 2.0, y + 11.0], Anchor::End, &all);
            y += 17.0;
        }
        let mut from = 0.0;
        for part in Part::ALL {
            let seconds: f64 = bar.parts.iter().filter(|p| p.0 == part).map(|p| sound(p.1.get())).sum();
            let (start, end) = (x.at(from), x.at(from + seconds));
            from += seconds;
            if seconds <= 0.0 {
                continue;
            }
            let text = format!("{} {}", number(seconds / unit.divisor), unit.name);
            let title = format!("{}: {text}", part.name());
            svg.rect(part.class(), [start, y, end - start, HEIGHT], Some(&title));
            if end - start > CHARACTER * text.len() as f64 {
                svg.text("inside", [(start + end) / 2.0, y + 19.5], Anchor::Middle, &text);
            }
        }
        y += HEIGHT + 12.0;
    }
    svg.finish(if wide { "wide" } else { "narrow" }, y)
}

fn sound(seconds: f64) -> f64 {
    if seconds.is_finite() { seconds.max(0.0) } else { 0.0 }
}
