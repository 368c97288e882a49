//! The boundary map of a terminal.

use std::fmt::{Result, Write};

use lazy_model::Placement;
use lazy_model::keep::Keep;

const BOUNDARIES_A_LINE: usize = 64;

/// One letter a boundary, in index order; below each the letter of the layer above it, where internals are placed.
pub(super) fn write(
    out: &mut String,
    placement: &[Placement],
    keep: Option<&[Keep]>,
    colours: bool,
) -> Result {
    for (line, boundaries) in placement.chunks(BOUNDARIES_A_LINE).enumerate() {
        let first = line * BOUNDARIES_A_LINE;
        write!(out, "{first:>6}  ")?;
        for p in boundaries {
            letter(out, *p, colours)?;
        }
        writeln!(out)?;
        let layers = keep.unwrap_or_default().iter().skip(first).take(boundaries.len());
        let letters: String = layers.map(|k| k.letter()).collect();
        if !letters.is_empty() {
            writeln!(out, "{:>6}  {letters}", "keep")?;
        }
    }
    for (i, p) in [Placement::Hbm, Placement::Host, Placement::Nvme, Placement::Recompute].iter().enumerate()
    {
        write!(out, "{}", if i == 0 { "        " } else { "   " })?;
        letter(out, *p, colours)?;
        write!(out, " {p}")?;
    }
    writeln!(out, "{}", if keep.is_some() { "   K internals kept" } else { "" })
}

fn letter(out: &mut String, p: Placement, colours: bool) -> Result {
    if !colours {
        return write!(out, "{}", p.letter());
    }
    // Backgrounds: green, blue, magenta, grey.
    let colour = match p {
        Placement::Hbm => "30;42",
        Placement::Host => "97;44",
        Placement::Nvme => "97;45",
        Placement::Recompute => "90;47",
    };
    write!(out, "\x1b[{colour}m{}\x1b[0m", p.letter())
}
