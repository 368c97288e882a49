//! Other programs that move GPU memory to files.

use std::path::Path;
use std::process::Command;

use lazy_store::BoxError;

use crate::program::Program;

/// Starts those that are there. They give write and read rates in GB/s.
pub(crate) fn start(python: &Path, dir: &Path, bytes: u64) -> Result<Vec<Program>, BoxError> {
    let script = dir.join("peers.py");
    std::fs::write(&script, include_str!("peers.py"))?;
    let mut peers = Vec::new();
    for name in ["kvikio", "torch.cuda.gds"] {
        match Program::start(Command::new(python).arg(&script).args([name, &bytes.to_string()]).arg(dir)) {
            Ok(peer) => peers.push(peer),
            Err(error) => eprintln!("{name}: {error}"),
        }
    }
    Ok(peers)
}
