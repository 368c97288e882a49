//! Plans that are given: to be judged, or to take locks from.

use std::path::Path;

use lazy_model::{BoundaryIndex, CostChain, Locks, Placement, Schedule, read_text};
use serde_json::{Map, Value};

/// A plan somebody else made.
#[derive(Clone, Debug)]
pub(crate) struct GivenPlan {
    /// One entry a boundary.
    pub(crate) placement: Vec<Placement>,
    /// One letter a layer, where the plan says so.
    pub(crate) keep: Option<String>,
    /// The file it was, if it was a schedule.
    pub(crate) schedule: Option<Schedule>,
}

/// What a reference schedule fixes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reference {
    /// Saved boundaries, ascending.
    saved: Option<Vec<usize>>,
    /// Boundaries in HBM.
    hbm: Option<Vec<usize>>,
    /// The whole plan, where it names one.
    pub(crate) placement: Option<Vec<Placement>>,
}

enum Document {
    Schedule(Box<Schedule>),
    Object(Map<String, Value>),
    Letters(String),
}

/// A file of that name, else the text itself.
fn open(given: &str, flag: &str) -> Result<Document, String> {
    let path = Path::new(given);
    if !path.exists() {
        if letters(given).is_some() {
            return Ok(Document::Letters(given.to_owned()));
        }
        return Err(format!(
            "--{flag} {given}: there is no such file, and it is no placement: write one letter a boundary over G, C, N, -"
        ));
    }
    let text = read_text(path).map_err(|e| e.to_string())?;
    if !text.trim_start().starts_with('{') {
        return Ok(Document::Letters(text.trim().to_owned()));
    }
    let object: Map<String, Value> =
        serde_json::from_str(&text).map_err(|e| format!("{given} is not valid JSON: {e}"))?;
    if object.contains_key("version") {
        let schedule = Schedule::from_json(&text).map_err(|e| format!("{given}: {e}"))?;
        return Ok(Document::Schedule(Box::new(schedule)));
    }
    Ok(Document::Object(object))
}

fn letters(text: &str) -> Option<Vec<Placement>> {
    text.chars().map(Placement::from_letter).collect()
}

fn placement_of(text: &str, given: &str) -> Result<Vec<Placement>, String> {
    match text.chars().find(|c| Placement::from_letter(*c).is_none()) {
        Some(letter) => Err(format!(
            "{given}: a placement has no letter {letter:?}; they are G (HBM), C (host), N (NVMe), - (recomputed)"
        )),
        None => Ok(letters(text).unwrap_or_default()),
    }
}

/// The saved boundaries of a path that is given as its blocks, in any order; nothing where they are no path.
fn path(mut pairs: Vec<[usize; 2]>) -> Option<Vec<usize>> {
    pairs.sort_unstable();
    let joined = pairs.windows(2).all(|two| two[0][1] == two[1][0]);
    let forward = pairs.iter().all(|[from, to]| from < to);
    let first = pairs.first()?[0];
    (joined && forward).then(|| [first].into_iter().chain(pairs.iter().map(|pair| pair[1])).collect())
}

impl GivenPlan {
    /// Reads `--evaluate`.
    pub(crate) fn read(given: &str, keep: Option<&str>) -> Result<GivenPlan, String> {
        let (text, own_keep) = match open(given, "evaluate")? {
            Document::Schedule(schedule) => {
                if keep.is_some() {
                    return Err(format!(
                        "{given} is a schedule and says itself what is kept: leave out --keep"
                    ));
                }
                let letter = |kept: &bool| if *kept { 'K' } else { '-' };
                return Ok(GivenPlan {
                    placement: schedule.placement.clone(),
                    keep: schedule.keep.contains(&true).then(|| schedule.keep.iter().map(letter).collect()),
                    schedule: Some(*schedule),
                });
            }
            Document::Letters(text) => (text, None),
            Document::Object(object) => {
                let string = |key: &str| object.get(key).and_then(Value::as_str).map(str::to_owned);
                let text = string("placement").ok_or_else(|| {
                    format!("{given} is neither a schedule nor a plan's JSON with a `placement` of letters")
                })?;
                (text, string("keep"))
            }
        };
        let placement = placement_of(&text, given)?;
        Ok(GivenPlan { placement, keep: keep.map(str::to_owned).or(own_keep), schedule: None })
    }
}

impl Reference {
    /// Reads `--reference-schedule`.
    pub(crate) fn read(given: &str) -> Result<Reference, String> {
        match open(given, "reference-schedule")? {
            Document::Schedule(schedule) => Ok(Reference::of(schedule.placement)),
            Document::Letters(text) => Ok(Reference::of(placement_of(&text, given)?)),
            Document::Object(object) => match object.get("placement").and_then(Value::as_str) {
                Some(text) => Ok(Reference::of(placement_of(text, given)?)),
                None => Reference::of_lists(&object, given),
            },
        }
    }

    fn of(placement: Vec<Placement>) -> Reference {
        let all = |wanted: fn(Placement) -> bool| {
            Some((0..placement.len()).filter(|&i| wanted(placement[i])).collect())
        };
        Reference {
            saved: all(|p| p != Placement::Recompute),
            hbm: all(|p| p == Placement::Hbm),
            placement: Some(placement),
        }
    }

    /// The minimal form: `edges` as pairs of saved boundaries, `hbm` (or `gpu`) as a list of boundaries.
    fn of_lists(object: &Map<String, Value>, given: &str) -> Result<Reference, String> {
        let wrong = |key: &str, wanted: &str| format!("{given}: `{key}` must be {wanted}");
        let index = |value: &Value| value.as_u64().and_then(|i| usize::try_from(i).ok());
        if object.contains_key("hbm") && object.contains_key("gpu") {
            return Err(format!("{given}: `hbm` and `gpu` are two names of one list: leave one out"));
        }
        let saved = object.get("edges").map(|value| {
            let ends = |pair: &Value| match pair.as_array().map(Vec::as_slice) {
                Some([from, to]) => Some([index(from)?, index(to)?]),
                _ => None,
            };
            let pairs: Option<Vec<[usize; 2]>> = value.as_array().and_then(|a| a.iter().map(ends).collect());
            let pairs = pairs.ok_or_else(|| wrong("edges", "a list of pairs of boundaries"))?;
            path(pairs).ok_or_else(|| {
                wrong(
                    "edges",
                    "the blocks of one path, each pair beginning where another ends, like [[0, 4], [4, 6]]",
                )
            })
        });
        let hbm = object.get("hbm").or(object.get("gpu")).map(|value| {
            let list: Option<Vec<usize>> = value.as_array().and_then(|a| a.iter().map(index).collect());
            list.ok_or_else(|| wrong("hbm", "a list of boundaries"))
        });
        let reference = Reference { saved: saved.transpose()?, hbm: hbm.transpose()?, placement: None };
        if reference.saved.is_none() && reference.hbm.is_none() {
            return Err(format!(
                "{given} has none of `placement`, `edges`, `hbm`: it is no reference schedule"
            ));
        }
        Ok(reference)
    }

    /// Adds the locks that were asked for to the chain's.
    pub(crate) fn lock(&self, chain: &mut CostChain, edges: bool, hbm: bool) -> Result<(), String> {
        if let Some(placement) = &self.placement
            && placement.len() != chain.boundaries()
        {
            return Err(format!(
                "the reference schedule has {} boundaries, the problem {}: it was made for another model",
                placement.len(),
                chain.boundaries()
            ));
        }
        let mut locks: Locks = chain.locks.clone().unwrap_or_default();
        if edges {
            let saved = self.saved.as_ref().ok_or("--lock-edges: the reference schedule has no `edges`")?;
            let pairs = saved.windows(2).map(|pair| (BoundaryIndex(pair[0]), BoundaryIndex(pair[1])));
            locks.edges = Some(pairs.collect());
        }
        if hbm {
            let set = self.hbm.as_ref().ok_or("--lock-hbm: the reference schedule has no `hbm`")?;
            locks.gpu = Some(set.iter().copied().map(BoundaryIndex).collect());
        }
        chain.locks = (!locks.is_empty()).then_some(locks);
        Ok(())
    }
}
