//! Small helpers to write SVG and HTML text: escaping, numbers, ticks, axes.

use std::fmt::Write as _;

/// Text made safe for element content and quoted attributes. Control characters, which no HTML document may hold, are
/// shown as replacement characters.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(' '),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// A number with four significant digits and separated thousands; a dash where there is no number.
pub(super) fn number(value: f64) -> String {
    if !value.is_finite() {
        return "–".into();
    }
    if value == 0.0 {
        return "0".into();
    }
    let magnitude = value.abs().log10().floor();
    if !(-4.0..15.0).contains(&magnitude) {
        return format!("{value:.3e}");
    }
    let decimals = (3.0 - magnitude).clamp(0.0, 8.0) as usize;
    let text = format!("{value:.decimals$}");
    let (whole, fraction) = text.split_once('.').map_or((text.as_str(), None), |(w, f)| (w, Some(f)));
    let (sign, digits) = whole.strip_prefix('-').map_or(("", whole), |d| ("-", d));
    let mut out = String::from(sign);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    if let Some(fraction) = fraction {
        let _ = write!(out, ".{fraction}");
    }
    out
}

/// A coordinate: one decimal is a tenth of a pixel.
pub(super) fn px(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// A unit for an axis: values divided by `divisor` are in `name`.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    pub(super) divisor: f64,
    pub(super) name: &'static str,
}

/// The binary unit in which the largest of some byte counts reads best.
pub(super) fn byte_unit(largest: f64) -> Unit {
    let units = [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    let found = units.into_iter().find(|&(divisor, _)| largest >= divisor as f64);
    found.map_or(Unit { divisor: 1.0, name: "bytes" }, |(d, name)| Unit { divisor: d as f64, name })
}

/// The unit in which the largest of some times in seconds reads best.
pub(super) fn time_unit(largest: f64) -> Unit {
    match largest {
        t if t >= 2.0 => Unit { divisor: 1.0, name: "s" },
        t if t >= 2e-3 => Unit { divisor: 1e-3, name: "ms" },
        _ => Unit { divisor: 1e-6, name: "µs" },
    }
}

/// A linear scale from values to pixels; a range without extent is widened so that nothing divides by zero.
#[derive(Clone, Copy)]
pub(super) struct Scale {
    lo: f64,
    hi: f64,
    from: f64,
    to: f64,
}

impl Scale {
    pub(super) fn new(lo: f64, hi: f64, from: f64, to: f64) -> Self {
        let hi = if hi > lo { hi } else { lo + lo.abs().max(1.0) };
        Self { lo, hi, from, to }
    }

    pub(super) fn at(&self, value: f64) -> f64 {
        self.from + (value - self.lo) / (self.hi - self.lo) * (self.to - self.from)
    }

    /// Round values inside the range, about `wanted` of them, with their labels. `whole` keeps to whole numbers.
    pub(super) fn ticks(&self, wanted: usize, whole: bool) -> Vec<(f64, String)> {
        let raw = (self.hi - self.lo) / wanted.max(1) as f64;
        let base = 10f64.powf(raw.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|f| f * base).into_iter().find(|&s| s >= raw * 0.999);
        let step = step.unwrap_or(raw).max(if whole { 1.0 } else { 0.0 });
        let decimals = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
        let (first, last) = ((self.lo / step - 1e-9).ceil() as i64, (self.hi / step + 1e-9).floor() as i64);
        (first..=last)
            .map(|i| i as f64 * step)
            .map(|v| (v, format!("{:.decimals$}", if v == 0.0 { 0.0 } else { v })))
            .collect()
    }
}

/// Where text is fixed to its point.
#[derive(Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// An SVG picture under construction. Colours come from the page's style sheet by class.
pub(super) struct Svg {
    width: f64,
    label: String,
    body: String,
}

impl Svg {
    /// `label` describes the picture to those who do not see it.
    pub(super) fn new(width: f64, label: &str) -> Self {
        Self { width, label: escape(label), body: String::new() }
    }

    pub(super) fn rect(&mut self, class: &str, [x, y, width, height]: [f64; 4], title: Option<&str>) {
        let (x, y, width, height) = (px(x), px(y), px(width.max(0.1)), px(height));
        let _ =
            write!(self.body, r#"<rect class="{class}" x="{x}" y="{y}" width="{width}" height="{height}""#);
        match title {
            Some(title) => {
                let _ = write!(self.body, "><title>{}</title></rect>", escape(title));
            }
            None => self.body.push_str("/>"),
        }
    }

    pub(super) fn line(&mut self, class: &str, [x1, y1, x2, y2]: [f64; 4]) {
        let (x1, y1, x2, y2) = (px(x1), px(y1), px(x2), px(y2));
        let _ = write!(self.body, r#"<line class="{class}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>"#);
    }

    /// A point that carries a tooltip.
    pub(super) fn dot(&mut self, class: &str, [x, y, r]: [f64; 3], title: &str) {
        let (x, y, r, title) = (px(x), px(y), px(r), escape(title));
        let _ = write!(
            self.body,
            r#"<circle class="{class}" cx="{x}" cy="{y}" r="{r}"><title>{title}</title></circle>"#
        );
    }

    pub(super) fn text(&mut self, class: &str, [x, y]: [f64; 2], anchor: Anchor, content: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let (x, y, content) = (px(x), px(y), escape(content));
        let _ = write!(
            self.body,
            r#"<text class="{class}" x="{x}" y="{y}" text-anchor="{anchor}">{content}</text>"#
        );
    }

    /// Straight lines through `points`, closed down to `floor` where one is given.
    pub(super) fn path(&mut self, class: &str, points: &[(f64, f64)], floor: Option<f64>) {
        let (Some(first), Some(last)) = (points.first(), points.last()) else { return };
        let mut d = String::new();
        for (i, (x, y)) in points.iter().enumerate() {
            let _ = write!(d, "{}{} {}", if i == 0 { 'M' } else { 'L' }, px(*x), px(*y));
        }
        if let Some(floor) = floor {
            let _ = write!(d, "L{} {floor}L{} {floor}Z", px(last.0), px(first.0), floor = px(floor));
        }
        let _ = write!(self.body, r#"<path class="{class}" d="{d}"/>"#);
    }

    /// The picture, `height` high, shown only on screens of the kind `class` says.
    pub(super) fn finish(self, class: &str, height: f64) -> String {
        let (width, height) = (px(self.width), px(height));
        format!(
            "<svg class=\"{class}\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">{}</svg>\n",
            self.label, self.body
        )
    }
}

/// The plot area of a chart with its two axes.
pub(super) struct Frame {
    pub(super) x: Scale,
    pub(super) y: Scale,
    pub(super) left: f64,
    pub(super) right: f64,
    pub(super) top: f64,
    pub(super) bottom: f64,
}

impl Frame {
    /// Lines and labels of the vertical axis; its title stands above, where it needs no turned head.
    pub(super) fn y_axis(&self, svg: &mut Svg, wanted: usize, title: &str) {
        for (value, label) in self.y.ticks(wanted, false) {
            let y = self.y.at(value);
            svg.line("grid", [self.left, y, self.right, y]);
            svg.text("tick", [self.left - 6.0, y + 4.0], Anchor::End, &label);
        }
        if !title.is_empty() {
            svg.text("axis", [0.0, self.top - 10.0], Anchor::Start, title);
        }
    }

    /// Ticks and labels of the horizontal axis, its title below.
    pub(super) fn x_axis(&self, svg: &mut Svg, whole: bool, title: &str) {
        svg.line("base", [self.left, self.bottom, self.right, self.bottom]);
        let wanted = ((self.right - self.left) / 75.0) as usize;
        for (value, label) in self.x.ticks(wanted, whole) {
            let x = self.x.at(value);
            svg.line("base", [x, self.bottom, x, self.bottom + 4.0]);
            svg.text("tick", [x, self.bottom + 17.0], Anchor::Middle, &label);
        }
        let middle = (self.left + self.right) / 2.0;
        svg.text("axis", [middle, self.bottom + 35.0], Anchor::Middle, title);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        let cases = [
            (0.0, "0"),
            (1.0, "1.000"),
            (-12.345, "-12.35"),
            (18_995.4, "18,995"),
            (1_234_567.0, "1,234,567"),
            (0.00123456, "0.001235"),
            (3e-7, "3.000e-7"),
            (f64::NAN, "–"),
            (f64::INFINITY, "–"),
        ];
        for (value, wanted) in cases {
            assert_eq!(number(value), wanted);
        }
    }

    #[test]
    fn ticks_are_round_and_inside() {
        let labels = |lo, hi, n, whole| -> Vec<String> {
            Scale::new(lo, hi, 0.0, 1.0).ticks(n, whole).into_iter().map(|t| t.1).collect()
        };
        assert_eq!(labels(0.0, 10.0, 5, false), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(labels(2.13, 2.87, 4, false), ["2.2", "2.4", "2.6", "2.8"]);
        assert_eq!(labels(0.0, 3.0, 10, true), ["0", "1", "2", "3"]);
        assert_eq!(labels(7.0, 7.0, 2, true), ["10"]);
    }

    #[test]
    fn scales_without_extent_stay_finite() {
        for value in [0.0, 5.0, -5.0] {
            assert!(Scale::new(value, value, 10.0, 90.0).at(value).is_finite());
        }
    }
}
