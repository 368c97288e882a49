//! Every wait that a step depends on is needed: without it, some seed fails.

use lazy_model::{Lane, Tier};
use lazy_store::mutants::{Side, Source, Wait};

use crate::own::Own;
use crate::{CASES, Sweep};

/// Seeds tried on each case before a mutant counts as a survivor.
const SEEDS: u64 = 100;
const FEW: u64 = 5;

fn all_waits() -> Vec<Wait> {
    let sources = [Source::Write, Source::Reads, Source::Inherited];
    let mut waits = Vec::new();
    for lane in Lane::ALL {
        waits.push(Wait::Read(lane));
        waits.extend(sources.map(|source| Wait::Overwrite(source, lane)));
        waits.extend([Wait::After(lane), Wait::Completion(lane)]);
    }
    for tier in Tier::ALL {
        waits.extend(sources.map(|source| Wait::Release(source, tier)));
        waits.extend([Side::Before, Side::After].map(|side| Wait::Remainder(side, tier)));
    }
    waits
}

/// The case and the seed that fail without a wait, and how: a few seeds of every case first.
fn killed(wait: Wait) -> Option<(&'static str, u64, String)> {
    let mut own = Own::new();
    assert!(own.store().leave_out(Some(wait)));
    let mut sweeps: Vec<Option<Sweep<'_>>> = CASES.iter().map(|_| None).collect();
    for seeds in (0..SEEDS).step_by(FEW as usize).map(|first| first..first + FEW) {
        if let Some((seed, how)) = seeds.clone().find_map(|seed| Some((seed, own.step(seed).err()?))) {
            return Some(("parameters of the layers' own", seed, how));
        }
        for (case, sweep) in CASES.iter().zip(&mut sweeps) {
            let sweep = sweep.get_or_insert_with(|| {
                let sweep = Sweep::new(case);
                assert!(sweep.executor.store().leave_out(Some(wait)));
                sweep
            });
            if let Some((seed, how)) = seeds.clone().find_map(|seed| Some((seed, sweep.step(seed).err()?))) {
                return Some((case.name, seed, how));
            }
        }
    }
    None
}

/// Why a step cannot depend on a wait, where it does not.
fn needless(wait: Wait) -> Option<&'static str> {
    use Lane::{Compute, D2h, H2d, NvmeRead, NvmeWrite, Optimizer};
    Some(match wait {
        Wait::After(D2h | NvmeWrite) => "copies out name no events",
        Wait::After(H2d | NvmeRead) => {
            "copies in name events to be paced, and wait for data by their extents"
        }
        Wait::Read(Optimizer) | Wait::Overwrite(_, Optimizer) => {
            "a hook names the last task that adds to the gradient: it ends after all that uses gradient and weights"
        }
        Wait::Overwrite(Source::Reads, Compute) => {
            "arithmetic writes what is new, and adds to what nobody reads yet"
        }
        Wait::Overwrite(Source::Write | Source::Reads, H2d | NvmeRead) => "copies in write what is new",
        Wait::Overwrite(Source::Write, D2h | NvmeWrite) => {
            "copies out write what is new, and homes of gradients, which the same lane wrote last"
        }
        Wait::Overwrite(Source::Reads, D2h | NvmeWrite) => {
            "what goes to a home of gradients was made of what was read there"
        }
        Wait::Release(Source::Write, Tier::Host | Tier::Nvme) => {
            "a reader came after, and waited for the write"
        }
        Wait::Release(Source::Inherited, Tier::Hbm | Tier::Nvme) => "all that is reserved there is written",
        Wait::Remainder(_, Tier::Nvme) => {
            "one lane writes the drive: what takes the rest of a range comes after what took the first part and waited"
        }
        _ => return None,
    })
}

#[test]
fn mutants_without_a_wait_fail_on_some_seed() {
    let mut survivors = Vec::new();
    for wait in all_waits() {
        if let Some(reason) = needless(wait) {
            eprintln!("{:<32} matters to no step: {reason}", format!("{wait:?}"));
            continue;
        }
        match killed(wait) {
            Some((case, seed, how)) => {
                let how: String = how.chars().take(60).collect();
                eprintln!("{:<32} killed by {case}, seed {seed}: {how}", format!("{wait:?}"));
            }
            None => {
                eprintln!("{:<32} SURVIVES", format!("{wait:?}"));
                survivors.push(wait);
            }
        }
    }
    assert_eq!(survivors, [], "the sweep does not notice that these waits are missing");
}
