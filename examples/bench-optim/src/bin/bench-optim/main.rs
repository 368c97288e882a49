//! `cargo xtask bench optim`: the optimizer's arithmetic beside what memory allows and beside PyTorch.
//!
//! Rows of one table are measured in turn, round by round. `--pairs N` says how often (7, and no less); `--python PYTHON` starts
//! `torch.py` (beside this file) for PyTorch's fused AdamW. `--dir FOLDER` is where whole steps are measured, beside fio: it takes 6 GB
//! there for some minutes. `--only
//! TABLE` measures one of `cpu`, `steps`, `overlap` and `memory`.

mod cpu;
#[path = "../../../../../crates/lazy-store/src/bin/bench-store/fio.rs"]
mod fio;
mod flags;
mod memory;
mod overlap;
#[path = "../../../../../crates/lazy-store/src/bin/bench-store-gpu/program.rs"]
mod program;
#[path = "../../../../../crates/lazy-store/src/bin/bench-store/rows.rs"]
mod rows;
#[path = "../../../../../crates/lazy-store/src/bin/bench-store/side.rs"]
#[allow(dead_code, reason = "shared with benchmarks that compare more")]
mod side;
#[path = "../../../../../crates/lazy-store/src/bin/bench-store/stats.rs"]
#[allow(dead_code, reason = "shared with benchmarks that have goals of both kinds")]
mod stats;
mod stream;

use std::io::Write as _;
use std::process::ExitCode;

use lazy_store::BoxError;
use serde_json::Value;

use crate::flags::Flags;
use crate::stream::Folder;

/// What the parts shared with other benchmarks fail with.
type Outcome<T> = Result<T, String>;

fn measure() -> Result<(), BoxError> {
    let flags = Flags::parse(std::env::args().skip(1))?;
    let wants = |table: &str| flags.only.as_ref().is_none_or(|only| only == table);
    let folder = Folder::make(&flags.dir)?;
    let mut rows = Vec::new();
    // First: what others have freed would count as memory of its.
    let mut memory = if wants("memory") { memory::rows(flags.pairs, &folder)? } else { Vec::new() };
    if wants("cpu") {
        rows.extend(cpu::rows(flags.pairs, flags.python.as_deref())?);
    }
    if wants("steps") {
        rows.extend(stream::rows(flags.pairs, &folder)?);
    }
    if wants("overlap") {
        rows.extend(overlap::rows(flags.pairs, &folder)?);
    }
    rows.append(&mut memory);
    Ok(writeln!(std::io::stdout(), "{:#}", Value::from(rows))?)
}

fn main() -> ExitCode {
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench optim: {error}");
            ExitCode::FAILURE
        }
    }
}
