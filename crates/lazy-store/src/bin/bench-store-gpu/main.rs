//! `cargo xtask bench store-gpu`: the store's links beside a GPU, against the driver's plain copies, the drive alone, and
//! other programs that move GPU memory to files.
//!
//! Rows of one table are measured in turn, round by round. `--dir DIR` is a folder on a real file system; `--python PYTHON`
//! starts `peers.py` (beside this file) for KvikIO and torch.cuda.gds; `--rounds N`; `--cufile-request-mib 1,4,16` measures
//! cuFile with requests of each of these lengths.

mod links;
mod peers;
mod program;
#[path = "../bench-store/rows.rs"]
mod rows;
#[path = "../bench-store/stats.rs"]
#[allow(dead_code, reason = "shared with the other benchmark, which has goals of both kinds")]
mod stats;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use lazy_store::{BackendChoice, BoxError, Bytes, Checksum};
use serde_json::Value;

use crate::rows::{Figures, alone, compared};
use crate::stats::Goal;

struct Flags {
    dir: PathBuf,
    python: Option<PathBuf>,
    rounds: usize,
    /// Longest requests to cuFile, in MiB.
    cufile: Vec<u64>,
}

fn flags() -> Result<Flags, BoxError> {
    let mut flags = Flags { dir: PathBuf::from("."), python: None, rounds: 7, cufile: vec![4] };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let value = args.next().ok_or_else(|| format!("{arg} wants a value"))?;
        match arg.as_str() {
            "--dir" => flags.dir = value.into(),
            "--python" => flags.python = Some(value.into()),
            "--rounds" => flags.rounds = value.parse()?,
            "--cufile-request-mib" => {
                flags.cufile = value.split(',').map(str::parse).collect::<Result<_, _>>()?;
            }
            _ => {
                let flags = "--dir, --python, --rounds and --cufile-request-mib";
                return Err(format!("no flag {arg}: {flags} are").into());
            }
        }
    }
    Ok(flags)
}

fn main() -> ExitCode {
    match flags().and_then(|flags| measure(&flags)) {
        Ok(rows) => {
            let text = Value::from(rows).to_string();
            if writeln!(std::io::stdout(), "{text}").is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("bench-store-gpu: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(flags: &Flags) -> Result<Vec<Value>, BoxError> {
    let mut rows = Vec::new();
    pinned(flags, &mut rows)?;
    // io_uring's requests are of one length.
    let cufile = flags.cufile.iter().map(|&mib| (BackendChoice::Cufile, Bytes::from_mib(mib)));
    for (backend, request) in [(BackendChoice::Uring, Bytes::from_mib(1))].into_iter().chain(cufile) {
        let way = links::Way { backend, request, checksum: Checksum::Off };
        if let Err(error) = spilled(flags, way, &mut rows).and_then(|()| checksummed(flags, way, &mut rows)) {
            eprintln!("{backend:?}: {error}");
        }
    }
    Ok(rows)
}

/// The same with checksums, beside without.
fn checksummed(flags: &Flags, way: links::Way, rows: &mut Vec<Value>) -> Result<(), BoxError> {
    let without = links::Spilled::open(&flags.dir, way)?;
    let with = links::Spilled::open(&flags.dir, links::Way { checksum: Checksum::Crc32c, ..way })?;
    let (mut ours, mut theirs): ([Vec<f64>; 2], [Vec<f64>; 2]) = Default::default();
    for round in 0..=flags.rounds {
        // Who goes first changes: the drive is another one after much was written.
        let (with, without) = if round % 2 == 0 {
            let with = with.hbm()?;
            (with, without.hbm()?)
        } else {
            let without = without.hbm()?;
            (with.hbm()?, without)
        };
        for direction in (0..2).filter(|_| round > 0) {
            ours[direction].push(with[direction]);
            theirs[direction].push(without[direction]);
        }
    }
    for (direction, name) in ["HBM to NVMe", "NVMe to HBM"].into_iter().enumerate() {
        let name = format!("{name} with checksums, {}", way.name(&with.mode()));
        let theirs = Figures { label: "without", values: &theirs[direction] };
        rows.extend(compared(&name, "GB/s", &ours[direction], &theirs, Some(Goal::AtLeast(0.98))));
    }
    Ok(())
}

/// Copies between HBM and pinned RAM.
fn pinned(flags: &Flags, rows: &mut Vec<Value>) -> Result<(), BoxError> {
    let store = links::Pinned::open()?;
    let plain = links::Plain::open()?;
    type Measure<T> = fn(&T) -> Result<f64, BoxError>;
    let pairs: [(&str, Measure<links::Pinned>, Measure<links::Plain>); 3] = [
        ("pinned H2D", links::Pinned::h2d, links::Plain::h2d),
        ("pinned D2H", links::Pinned::d2h, links::Plain::d2h),
        ("pinned both ways at once", links::Pinned::both, links::Plain::both),
    ];
    for (name, ours, theirs) in pairs {
        let (mut mine, mut other) = (Vec::new(), Vec::new());
        for round in 0..=flags.rounds {
            let pair = (ours(&store)?, theirs(&plain)?);
            // The first round warms up.
            if round > 0 {
                mine.push(pair.0);
                other.push(pair.1);
            }
        }
        let theirs = Figures { label: "plain cuMemcpyAsync", values: &other };
        rows.extend(compared(name, "GB/s", &mine, &theirs, Some(Goal::AtLeast(0.97))));
    }
    Ok(())
}

/// HBM to NVMe and back, beside the drive alone (host RAM to NVMe and back) and the other programs.
fn spilled(flags: &Flags, way: links::Way, rows: &mut Vec<Value>) -> Result<(), BoxError> {
    let drive = links::Way { backend: BackendChoice::Uring, ..way };
    let alone_store = links::Spilled::open(&flags.dir, drive)?;
    let store = links::Spilled::open(&flags.dir, way)?;
    let mode = store.mode();
    eprintln!("{mode}");
    let mut others = match &flags.python {
        Some(python) => peers::start(python, &flags.dir, links::TOTAL)?,
        None => Vec::new(),
    };
    let mut figures: Vec<(String, [Vec<f64>; 2])> = vec![("drive alone".to_owned(), Default::default())];
    figures.extend(others.iter().map(|peer| (peer.name.clone(), Default::default())));
    let mut ours: [Vec<f64>; 2] = Default::default();
    for round in 0..=flags.rounds {
        let mut values = vec![alone_store.host()?, store.hbm()?];
        for peer in &mut others {
            values.push(peer.measure("go")?);
        }
        if round == 0 {
            continue;
        }
        let mut values = values.into_iter();
        let (Some(drive), Some(mine)) = (values.next(), values.next()) else { continue };
        for direction in 0..2 {
            ours[direction].push(mine[direction]);
            figures[0].1[direction].push(drive[direction]);
        }
        for (figure, value) in figures[1..].iter_mut().zip(values) {
            figure.1[0].push(value[0]);
            figure.1[1].push(value[1]);
        }
    }
    for (direction, name) in ["HBM to NVMe", "NVMe to HBM"].into_iter().enumerate() {
        let name = format!("{name}, {}", way.name(&mode));
        for (i, (label, values)) in figures.iter().enumerate() {
            let goal = Goal::AtLeast(if i == 0 { 0.92 } else { 1.0 });
            let theirs = Figures { label, values: &values[direction] };
            rows.extend(compared(&name, "GB/s", &ours[direction], &theirs, Some(goal)));
        }
        rows.extend(alone(&name, "GB/s", &ours[direction], None));
    }
    Ok(())
}
