//! Other programs that move GPU memory to files: a Python process for each, which measures when it is told to.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use lazy_store::BoxError;

/// A program waiting to measure.
pub(crate) struct Peer {
    pub(crate) name: String,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// Starts those that are there.
pub(crate) fn start(python: &Path, dir: &Path, bytes: u64) -> Result<Vec<Peer>, BoxError> {
    let script = dir.join("peers.py");
    std::fs::write(&script, include_str!("peers.py"))?;
    let mut peers = Vec::new();
    for name in ["kvikio", "torch.cuda.gds"] {
        let mut child = Command::new(python)
            .arg(&script)
            .args([name, &bytes.to_string()])
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = (input, output) else { continue };
        let mut peer = Peer { name: name.to_owned(), child, input, output: BufReader::new(output) };
        match peer.line() {
            Ok(said) if said.starts_with("ready") => {
                peer.name = said.trim_start_matches("ready").trim().to_owned();
                peers.push(peer);
            }
            Ok(said) => eprintln!("{name}: {said}"),
            Err(error) => eprintln!("{name}: {error}"),
        }
    }
    Ok(peers)
}

impl Peer {
    fn line(&mut self) -> Result<String, BoxError> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        if line.is_empty() { Err("it ended".into()) } else { Ok(line.trim().to_owned()) }
    }

    /// Write and read rates in GB/s.
    pub(crate) fn measure(&mut self) -> Result<[f64; 2], BoxError> {
        writeln!(self.input, "go")?;
        let said = self.line()?;
        let mut numbers = said.split_whitespace().map(str::parse::<f64>);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(write)), Some(Ok(read))) => Ok([write, read]),
            _ => Err(format!("{}: {said}", self.name).into()),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
