//! Putting parameters together from several sources, by name and by where their elements lie in the whole parameter.

use std::ops::Range;

use crate::create::Contents;
use crate::layout::Layout;
use crate::moments::Moment;
use crate::ring::Sections;
use crate::runs::{Run, Runs, global_shape};
use crate::slot::BLOCK;
use crate::source::Source;
use crate::{Moments, OptimError, ParamSpec};

/// Sources, and where in them each parameter's elements are.
pub(crate) struct Gather {
    sources: Vec<Source>,
    wanted: Vec<Wanted>,
    /// A block's moments as float32, where they cannot be copied as they are.
    staging: [Vec<f32>; 2],
}

/// A parameter, or the shard of one, that is put together.
struct Wanted {
    runs: Runs,
    pieces: Vec<Piece>,
    /// The bytes of the moments are copied as they are.
    exact: bool,
    step_count: u64,
}

/// What one source has of it.
struct Piece {
    source: usize,
    param: usize,
    runs: Runs,
}

impl Gather {
    /// Finds every parameter of `params` in the sources. Refuses, by the first difference, what does not fit; and what would
    /// round moments, unless `lossy`.
    pub(crate) fn new(sources: Vec<Source>, params: &[ParamSpec], lossy: bool) -> Result<Self, OptimError> {
        for source in &sources[1.min(sources.len())..] {
            let [first, other] = [&sources[0], source].map(|s| (s.path().display(), s.sequence()));
            if first.1 != other.1 {
                let difference =
                    format!("{} was saved at step {}, {} at step {}", first.0, first.1, other.0, other.1);
                return Err(OptimError::Mismatch { difference });
            }
        }
        let wanted = params.iter().map(|param| find(&sources, param, lossy)).collect::<Result<_, _>>()?;
        Ok(Gather { sources, wanted, staging: [vec![0.0; BLOCK], vec![0.0; BLOCK]] })
    }

    /// Steps taken, by parameter.
    pub(crate) fn step_counts(&self) -> Vec<u64> {
        self.wanted.iter().map(|wanted| wanted.step_count).collect()
    }

    /// Steps committed when the sources were saved.
    pub(crate) fn sequence(&self) -> u64 {
        self.sources.first().map_or(0, Source::sequence)
    }

    /// The blob of the first source.
    pub(crate) fn blob(&self) -> &[u8] {
        self.sources.first().map_or(&[], Source::blob)
    }

    /// Puts elements of a parameter, from `first` on, into elements `range` of a block.
    pub(crate) fn fill(
        &mut self,
        param: usize,
        first: usize,
        moments: Moments,
        block: &mut [&mut [u8]; 3],
        range: Range<usize>,
    ) -> Result<(), OptimError> {
        let Gather { sources, wanted, staging } = self;
        let Wanted { runs, pieces, exact, .. } = &wanted[param];
        for Run { global, local, len } in runs.of(first..first + range.len()) {
            for Piece { source, param, runs } in pieces {
                for part in runs.within(global..global + len) {
                    let at = range.start + local - first + part.global - global;
                    sources[*source].read(*param, part.local..part.local + part.len, &mut |from| {
                        let at = at + from.first - part.local;
                        let to = at..at + from.range.len();
                        Moments::F32.copy(from.sections[0], from.range.clone(), block[0], at);
                        for (moment, section) in [(Moment::First, 1), (Moment::Second, 2)] {
                            if *exact {
                                moments.copy(from.sections[section], from.range.clone(), block[section], at);
                            } else {
                                let values = &mut staging[section - 1][to.clone()];
                                from.moments.decode(
                                    moment,
                                    from.sections[section],
                                    from.range.clone(),
                                    values,
                                );
                            }
                        }
                    })?;
                }
            }
        }
        if !exact {
            for (moment, section) in [(Moment::First, 1), (Moment::Second, 2)] {
                moments.encode(moment, &staging[section - 1][range.clone()], block[section], range.clone());
            }
        }
        Ok(())
    }
}

impl Contents for Gather {
    fn fill(
        &mut self,
        layout: &Layout,
        flat: Range<usize>,
        moments: Moments,
        [main, avg, sq]: Sections<'_>,
    ) -> Result<(), OptimError> {
        let bytes = moments.block_bytes();
        let blocks = main.chunks_mut(BLOCK * 4).zip(avg.chunks_mut(bytes)).zip(sq.chunks_mut(bytes));
        for (i, ((main, avg), sq)) in blocks.enumerate() {
            let start = flat.start + i * BLOCK;
            for part in layout.segments(start..(start + BLOCK).min(flat.end)) {
                self.fill(
                    part.param,
                    part.first,
                    moments,
                    &mut [&mut *main, &mut *avg, &mut *sq],
                    part.local,
                )?;
            }
        }
        Ok(())
    }
}

/// Where a parameter's elements are, found to be all there and once.
fn find(sources: &[Source], asked: &ParamSpec, lossy: bool) -> Result<Wanted, OptimError> {
    let name = &asked.name;
    let refused = |difference| Err(OptimError::Mismatch { difference });
    let runs = Runs::new(asked)?;
    let mut pieces = Vec::new();
    let mut inexact = None;
    let mut same = false;
    let mut step_count: Option<(u64, usize)> = None;
    for (index, source) in sources.iter().enumerate() {
        let Some(param) = source.params().iter().position(|param| param.name == *name) else { continue };
        let (held, path) = (&source.params()[param], source.path().display());
        let [found, wanted] = [held, asked].map(global_shape);
        if found != wanted {
            return refused(format!("parameter {name} has shape {found:?} in {path}, {wanted:?} asked for"));
        }
        let count = source.step_counts()[param];
        let (first, of) = *step_count.get_or_insert((count, index));
        if first != count {
            let of = sources[of].path().display();
            return refused(format!("parameter {name} has taken {first} steps in {of}, {count} in {path}"));
        }
        let piece = Piece { source: index, param, runs: Runs::new(held)? };
        if held.moments != asked.moments {
            let (found, wanted) = (held.moments, asked.moments);
            inexact = Some(format!("the moments of {name} are {found:?} in {path}, {wanted:?} asked for"));
        } else if held.moments == Moments::Int8 && !piece.runs.keeps_quant_blocks() {
            inexact.get_or_insert(format!(
                "{path} holds a part of {name} that is cut inside a block of 256 quantised elements"
            ));
        }
        same |= held.moments == asked.moments && (&held.shape, &held.shard) == (&asked.shape, &asked.shard);
        pieces.push(piece);
    }
    let Some((step_count, _)) = step_count else {
        let paths: Vec<_> = sources.iter().map(|source| source.path().display().to_string()).collect();
        return refused(format!("parameter {name} is not in {}", paths.join(" nor in ")));
    };
    check_cover(sources, name, &runs, &pieces)?;
    if asked.moments == Moments::Int8 && !runs.keeps_quant_blocks() {
        inexact.get_or_insert(format!(
            "the part of {name} asked for is cut inside a block of 256 quantised elements"
        ));
    }
    match inexact.filter(|_| !same) {
        Some(what) if !lossy => Err(OptimError::Lossy { what }),
        inexact => Ok(Wanted { runs, pieces, exact: inexact.is_none(), step_count }),
    }
}

/// Refuses pieces that overlap, or leave out something of what is `asked` for.
fn check_cover(sources: &[Source], name: &str, asked: &Runs, pieces: &[Piece]) -> Result<(), OptimError> {
    let path = |piece: &Piece| sources[piece.source].path().display();
    for (i, one) in pieces.iter().enumerate() {
        for other in &pieces[i + 1..] {
            let twice = one
                .runs
                .of(0..one.runs.held())
                .find_map(|run| other.runs.within(run.global..run.global + run.len).next());
            if let Some(Run { global, len, .. }) = twice {
                let (end, one, other) = (global + len, path(one), path(other));
                let difference =
                    format!("elements {global}..{end} of parameter {name} are both in {one} and in {other}");
                return Err(OptimError::Mismatch { difference });
            }
        }
    }
    // No two overlap, so as many elements as the parameter has are all of them.
    let total = pieces.first().map_or(0, |piece| piece.runs.total());
    if pieces.iter().map(|piece| piece.runs.held()).sum::<usize>() == total {
        return Ok(());
    }
    let Some(missing) = asked.of(0..asked.held()).find_map(|run| first_gap(pieces, run)) else {
        return Ok(());
    };
    let paths: Vec<_> = pieces.iter().map(|piece| path(piece).to_string()).collect();
    let difference = format!(
        "elements {}..{} of parameter {name} are missing: it is in {} alone",
        missing.start,
        missing.end,
        paths.join(", ")
    );
    Err(OptimError::Mismatch { difference })
}

/// The first elements of a run that no piece has.
fn first_gap(pieces: &[Piece], run: Run) -> Option<Range<usize>> {
    let (mut at, end) = (run.global, run.global + run.len);
    while at < end {
        let next =
            pieces.iter().filter_map(|piece| piece.runs.within(at..end).next()).min_by_key(|run| run.global);
        match next {
            Some(run) if run.global == at => at += run.len,
            next => return Some(at..next.map_or(end, |run| run.global)),
        }
    }
    None
}
