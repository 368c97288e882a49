//! The report of a run: one self-contained HTML page with inline pictures, readable on screens of any width, in light
//! and dark, and on paper. It refers to nothing outside itself.

mod charts;
mod lanes;
mod map;
mod parts;
mod svg;
mod table;

use std::fmt::Write as _;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use crate::span::{Lane, Span};
use crate::units::{Bytes, Placement, Seconds, Tier};

use svg::{Svg, escape, number};

/// A label and what it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// For example `Device`.
    pub label: String,
    /// For example `host, 2 threads`.
    pub value: String,
}

/// A number large enough to be read across a room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Headline {
    /// What it is, for example `Tokens a second`.
    pub label: String,
    /// The number with its unit, as it is to be shown.
    pub value: String,
    /// A smaller line below, for example `promised 1,310`; may be empty.
    pub note: String,
}

/// Bytes in one tier over one step. Each curve is a list of `(from, bytes)`: a value holds until the next.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TierOccupancy {
    /// Which tier.
    pub tier: Tier,
    /// Its limit.
    pub budget: Option<Bytes>,
    /// What the plan said; may be empty.
    pub promised: Vec<(Seconds, Bytes)>,
    /// What happened; may be empty.
    pub measured: Vec<(Seconds, Bytes)>,
}

/// A promised value beside the measured one, both in `unit`.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    /// What it is.
    pub label: String,
    /// The unit; values in `bytes` are shown in binary units.
    pub unit: String,
    /// What the plan said.
    pub promised: Option<f64>,
    /// What happened, as a mean.
    pub measured: Option<f64>,
    /// What happened of late, where that is told apart.
    pub recent: Option<f64>,
}

/// A part of a step's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Forward and backward, nothing run twice.
    Arithmetic,
    /// Forwards that were run again.
    Recompute,
    /// The compute lane waited for a link.
    Wait,
    /// Gradient norm, update of the weights, gradients set to zero.
    Optimizer,
    /// Everything else.
    Other,
}

/// How the time of a step divides.
#[derive(Clone, Debug, PartialEq)]
pub struct StepParts {
    /// Whose, for example `Promised`.
    pub label: String,
    /// The parts; those that are absent took no time.
    pub parts: Vec<(Part, Seconds)>,
}

/// A further curve in the picture of the loss.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// What it is.
    pub label: String,
    /// `(step, loss)`.
    pub points: Vec<(u64, f64)>,
}

impl Compared {
    /// `100 (measured / promised - 1)`; none where a value is missing, is no finite number, or zero was promised.
    pub fn difference_percent(&self) -> Option<f64> {
        let difference = 100.0 * (self.measured? / self.promised? - 1.0);
        difference.is_finite().then_some(difference)
    }
}

/// Rows of text under a heading each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// The section's title.
    pub title: String,
    /// A sentence under it.
    pub intro: String,
    /// Headings of the columns.
    pub head: Vec<String>,
    /// As many cells a row as there are headings.
    pub rows: Vec<Vec<String>>,
}

/// What the page is about: it decides the wording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Picture {
    /// A run, with what was measured.
    #[default]
    Run,
    /// A plan that nobody has run yet.
    Plan,
}

/// All that the page shows. Empty lists leave their section out, or say that there is nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunReport {
    /// The page's title.
    pub title: String,
    /// Whether it shows a run or a plan.
    pub of: Picture,
    /// What there is to know, in a few sentences under a word each; they come first.
    pub answers: Vec<Fact>,
    /// Facts: of a plan under the title, of a run at the end.
    pub facts: Vec<Fact>,
    /// The numbers at the top.
    pub headlines: Vec<Headline>,
    /// `(step, loss)` in nats per token, in the order of the steps.
    pub loss: Vec<(u64, f64)>,
    /// What that curve is, where there are others; empty: the training loss.
    pub loss_label: String,
    /// Further curves beside it.
    pub curves: Vec<Curve>,
    /// Entropy of the text's unigram distribution, in nats per token: what a model without context reaches.
    pub unigram_entropy: Option<f64>,
    /// Placement of boundaries `0..=N`.
    pub placement: Vec<Placement>,
    /// Size of each boundary; may be empty.
    pub boundary_bytes: Vec<Bytes>,
    /// Whether layers `0..N` keep their internals.
    pub keep: Vec<bool>,
    /// Bytes in each tier over one step.
    pub occupancy: Vec<TierOccupancy>,
    /// The spans of one step: measured of a run, simulated of a plan.
    pub spans: Vec<Span>,
    /// How a step's time divides, a bar each.
    pub parts: Vec<StepParts>,
    /// Promised against measured.
    pub comparison: Vec<Compared>,
    /// What the means of [`comparison`](Self::comparison) are over, in a sentence.
    pub compared_over: String,
    /// What arithmetic waited for.
    pub waits: Option<Table>,
    /// Further tables, at the end.
    pub tables: Vec<Table>,
}

impl RunReport {
    /// Writes the page.
    ///
    /// # Errors
    /// What the writer gives back.
    pub fn write_html(&self, mut out: impl Write) -> io::Result<()> {
        out.write_all(self.to_html().as_bytes())?;
        out.flush()
    }

    /// The page as text.
    pub fn to_html(&self) -> String {
        let title = escape(&self.title);
        let mut page = format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
             <style>\n{}</style>\n</head>\n<body>\n<header>\n<h1>{title}</h1>\n",
            include_str!("style.css")
        );
        self.push_head(&mut page);
        page.push_str("</header>\n<main>\n");
        self.push_parts(&mut page);
        self.push_comparison(&mut page);
        if let Some(table) = &self.waits {
            section(&mut page, &table.title, &table.intro, &table::plain(table));
        }
        self.push_map(&mut page);
        self.push_lanes(&mut page);
        self.push_occupancy(&mut page);
        if self.of == Picture::Run && !(self.loss.is_empty() && self.curves.is_empty()) {
            self.push_loss(&mut page);
        }
        for table in &self.tables {
            section(&mut page, &table.title, &table.intro, &table::plain(table));
        }
        if self.of == Picture::Run {
            // Who comes for the answers finds them first.
            self.push_facts(&mut page);
        }
        page.push_str("</main>\n</body>\n</html>\n");
        page
    }

    fn push_head(&self, page: &mut String) {
        if !self.answers.is_empty() {
            page.push_str("<dl class=\"answers\">");
            for answer in &self.answers {
                let (label, value) = (escape(&answer.label), escape(&answer.value));
                let _ = write!(page, "<dt>{label}</dt><dd>{value}</dd>");
            }
            page.push_str("</dl>\n");
        }
        self.push_tiles(page);
        if self.of == Picture::Plan {
            self.push_facts(page);
        }
    }

    fn push_facts(&self, page: &mut String) {
        if self.facts.is_empty() {
            return;
        }
        page.push_str("<dl class=\"facts\">");
        for fact in &self.facts {
            let (label, value) = (escape(&fact.label), escape(&fact.value));
            let _ = write!(page, "<div><dt>{label}</dt><dd>{value}</dd></div>");
        }
        page.push_str("</dl>\n");
    }

    fn push_tiles(&self, page: &mut String) {
        if !self.headlines.is_empty() {
            page.push_str("<div class=\"tiles\">");
            for tile in &self.headlines {
                let (label, value, note) = (escape(&tile.label), escape(&tile.value), escape(&tile.note));
                let _ = write!(
                    page,
                    "<div class=\"tile\"><span class=\"label\">{label}</span><span class=\"value\">{value}</span>\
                     <span class=\"note\">{note}</span></div>"
                );
            }
            page.push_str("</div>\n");
        }
    }

    fn push_parts(&self, page: &mut String) {
        if self.parts.is_empty() {
            return;
        }
        let shown = Part::ALL.into_iter().filter(|part| {
            let of_part = |parts: &StepParts| parts.parts.iter().any(|p| p.0 == *part && p.1.get() > 0.0);
            self.parts.iter().any(of_part)
        });
        let entries: Vec<_> = shown.map(|part| (part.class(), part.name())).collect();
        let body = legend(&entries) + &parts::draw(&self.parts, true) + &parts::draw(&self.parts, false);
        let intro = "A bar is one step, all on one scale; what was measured is a mean.";
        section(page, "Where a step's time goes", intro, &body);
    }

    fn push_comparison(&self, page: &mut String) {
        if self.comparison.is_empty() {
            return;
        }
        let mut intro = "What the plan said before the first step, and what the run did.".to_owned();
        if !self.compared_over.is_empty() {
            intro = format!("{intro} {}", self.compared_over);
        }
        section(page, "Promised and measured", &intro, &table::draw(&self.comparison));
    }

    fn push_map(&self, page: &mut String) {
        if self.placement.is_empty() {
            return;
        }
        let intro = "The activation between two layers, from its forward to its backward. A column is a boundary; its \
                     coloured cell says where it waits.";
        let draw = |wide| map::draw(&self.placement, &self.boundary_bytes, &self.keep, wide);
        let title = match self.of {
            Picture::Run => "Where each boundary went",
            Picture::Plan => "Where each boundary goes",
        };
        section(page, title, intro, &(draw(true) + &draw(false)));
    }

    fn push_loss(&self, page: &mut String) {
        let finite: Vec<f64> = self.loss.iter().map(|p| p.1).filter(|loss| loss.is_finite()).collect();
        let mut intro = match (finite.first(), finite.last()) {
            (Some(first), Some(last)) if finite.len() > 1 => {
                format!("From {} to {} in {} steps.", number(*first), number(*last), self.loss.len())
            }
            (Some(only), _) => format!("One step with loss {}.", number(*only)),
            _ => "No step with a finite loss was recorded.".into(),
        };
        if self.unigram_entropy.is_some_and(f64::is_finite) {
            intro.push_str(" The dashed line is what knowing only how often each token occurs would give.");
        }
        let missing = self.loss.len() - finite.len();
        if missing > 0 && !finite.is_empty() {
            let _ = write!(intro, " Steps without a finite loss, not drawn: {missing}.");
        }
        let draw = |wide| charts::loss(&self.loss, &self.curves, self.unigram_entropy, wide);
        let own = if self.loss_label.is_empty() { "training" } else { &self.loss_label };
        let mut entries = vec![("hbm", own)];
        let classes = ["host", "nvme", "kept"].into_iter().cycle();
        entries.extend(classes.zip(&self.curves).map(|(class, curve)| (class, curve.label.as_str())));
        let legend = if self.curves.is_empty() { String::new() } else { legend(&entries) };
        let body = if finite.is_empty() { String::new() } else { legend + &draw(true) + &draw(false) };
        section(page, "Loss", &intro, &body);
    }

    fn push_occupancy(&self, page: &mut String) {
        if self.occupancy.is_empty() {
            return;
        }
        let run = [("area recompute", "measured"), ("promised", "promised")];
        let plan = [("area recompute", "simulated")];
        let mut entries = if self.of == Picture::Run { run.to_vec() } else { plan.to_vec() };
        entries.push(("mark", "room, a hard limit"));
        let legend = legend(&entries);
        let draw = |wide| charts::occupancy(&self.occupancy, wide);
        let intro = "Boundaries, their gradients, kept internals and staging in each tier while one step runs, and the room that a \
                     tier's budget leaves them beside what is there throughout.";
        section(page, "Activations in memory over one step", intro, &(legend + &draw(true) + &draw(false)));
    }

    fn push_lanes(&self, page: &mut String) {
        if self.spans.is_empty() {
            return;
        }
        let mut entries = vec![
            ("forward", "forward"),
            ("loss", "head and loss"),
            ("recompute", "recompute"),
            ("backward", "backward"),
            ("wait", "standing still"),
            ("host", "to and from host RAM"),
            ("nvme", "to and from NVMe"),
        ];
        if self.spans.iter().any(|span| span.lane == Lane::Optimizer) {
            entries.push(("optimizer", "optimizer"));
        }
        let legend = legend(&entries);
        let draw = |wide| lanes::draw(&self.spans, wide);
        let intro = match self.of {
            Picture::Run => "One measured step. ",
            Picture::Plan => "One simulated step. ",
        };
        let intro = intro.to_owned() + "Red on the compute lane is time in which the device stood still.";
        section(page, "What ran when", &intro, &(legend + &draw(true) + &draw(false)));
    }
}

/// `title` and `intro` are text, `body` is HTML.
fn section(page: &mut String, title: &str, intro: &str, body: &str) {
    let (title, intro) = (escape(title), escape(intro));
    let _ = writeln!(page, "<section>\n<h2>{title}</h2>\n<p>{intro}</p>\n{body}</section>");
}

/// Swatches with their meaning.
fn legend(entries: &[(&str, &str)]) -> String {
    let mut out = String::from("<ul class=\"legend\">");
    for (class, meaning) in entries {
        let mut swatch = Svg::new(22.0, meaning);
        match *class {
            "promised" => swatch.path(class, &[(0.0, 6.0), (22.0, 6.0)], None),
            "mark" => swatch.line(class, [0.0, 6.0, 22.0, 6.0]),
            _ => swatch.rect(class, [0.0, 0.0, 22.0, 12.0], None),
        }
        let _ = write!(out, "<li>{}{}</li>", swatch.finish("swatch", 12.0), escape(meaning));
    }
    out.push_str("</ul>\n");
    out
}
