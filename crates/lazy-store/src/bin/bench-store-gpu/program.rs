//! Other programs to compare with: each a process that measures when it is told to.
//!
//! It prints `ready` and its name, or why it cannot, and then a line of numbers for every line that it reads.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use lazy_store::BoxError;

/// A program waiting to measure.
pub(crate) struct Program {
    pub(crate) name: String,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// Starts it; what it calls itself is its name from then on.
    pub(crate) fn start(command: &mut Command) -> Result<Program, BoxError> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("its streams are gone".into());
        };
        let mut program = Program { name: String::new(), child, input, output: BufReader::new(output) };
        let said = program.line()?;
        program.name = said.strip_prefix("ready").ok_or(&*said)?.trim().to_owned();
        Ok(program)
    }

    fn line(&mut self) -> Result<String, BoxError> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        if line.is_empty() { Err("it ended".into()) } else { Ok(line.trim().to_owned()) }
    }

    /// What it measures when told to.
    pub(crate) fn measure<const N: usize>(&mut self, told: &str) -> Result<[f64; N], BoxError> {
        writeln!(self.input, "{told}")?;
        let said = self.line()?;
        let numbers: Result<Vec<f64>, _> = said.split_whitespace().map(str::parse).collect();
        let numbers = numbers.ok().and_then(|numbers| numbers.try_into().ok());
        numbers.ok_or_else(|| format!("{}: {said}", self.name).into())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
