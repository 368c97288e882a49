//! What is compared: sides that make the same transfer, one after the other, and how a transfer is timed.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::Outcome;

/// A transfer of all bytes of a side's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    Write,
    Read,
    /// One half is written while the other one is read.
    Both,
}

impl Transfer {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Transfer::Write => "write",
            Transfer::Read => "read",
            Transfer::Both => "write and read at once",
        }
    }

    /// How many of `bytes` are read.
    fn read(self, bytes: u64) -> u64 {
        match self {
            Transfer::Write => 0,
            Transfer::Read => bytes,
            Transfer::Both => bytes / 2,
        }
    }
}

/// One transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
    /// CPU time of the process that made it, its threads and the kernel's work for it included.
    pub(crate) cpu_seconds: f64,
}

impl Sample {
    /// Decimal gigabytes a second.
    pub(crate) fn rate(&self) -> f64 {
        self.bytes as f64 / 1e9 / self.seconds
    }

    /// CPU seconds a decimal gigabyte.
    pub(crate) fn cpu_per_gb(&self) -> f64 {
        self.cpu_seconds / (self.bytes as f64 / 1e9)
    }

    /// Times what this process does.
    pub(crate) fn of(bytes: u64, work: impl FnOnce() -> Outcome<()>) -> Outcome<Sample> {
        let (cpu, start) = (cpu_time(), Instant::now());
        work()?;
        let (seconds, cpu_seconds) = (start.elapsed().as_secs_f64(), (cpu_time() - cpu).as_secs_f64());
        Ok(Sample { bytes, seconds, cpu_seconds })
    }
}

/// CPU time of all threads of this process, ended ones and the kernel's workers for its requests included.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

pub(crate) trait Side {
    /// What the table calls it, for this transfer.
    fn label(&self, transfer: Transfer) -> String;

    fn run(&mut self, transfer: Transfer) -> Outcome<Sample>;
}

/// Samples of two sides that took turns.
pub(crate) struct Pairs {
    pub(crate) ours: Vec<Sample>,
    pub(crate) theirs: Vec<Sample>,
}

/// How much of what was read came from the drive: the least share of any read so far, for each side; `None` where the
/// kernel does not count.
#[derive(Default)]
pub(crate) struct FromDrive {
    pub(crate) ours: Vec<f64>,
    pub(crate) theirs: Vec<f64>,
}

/// Runs both sides in turn.
pub(crate) fn pairs(
    transfer: Transfer,
    count: usize,
    ours: &mut dyn Side,
    theirs: &mut dyn Side,
    from_drive: &mut FromDrive,
) -> Outcome<Pairs> {
    let mut pairs = Pairs { ours: Vec::with_capacity(count), theirs: Vec::with_capacity(count) };
    for _ in 0..count {
        pairs.ours.push(watched(transfer, ours, &mut from_drive.ours)?);
        pairs.theirs.push(watched(transfer, theirs, &mut from_drive.theirs)?);
    }
    Ok(pairs)
}

/// Runs one side, and notes which share of what it read the kernel fetched from the drive.
fn watched(transfer: Transfer, side: &mut dyn Side, shares: &mut Vec<f64>) -> Outcome<Sample> {
    let before = fetched();
    let sample = side.run(transfer)?;
    let read = transfer.read(sample.bytes);
    if let (Some(before), Some(after), true) = (before, fetched(), read > 0) {
        // A program that starts is read from the drive too, if it was not in memory.
        shares.push(((after - before) as f64 / read as f64).min(1.0));
    }
    Ok(sample)
}

/// Bytes that the kernel fetched from drives for this process and the programs it waited for. What the page cache answers
/// is not among them.
fn fetched() -> Option<u64> {
    read_bytes(&std::fs::read_to_string("/proc/self/io").ok()?)
}

fn read_bytes(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("read_bytes:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_decimal() {
        let sample = Sample { bytes: 3_000_000_000, seconds: 1.5, cpu_seconds: 0.6 };
        assert_eq!(sample.rate(), 2.0);
        assert!((sample.cpu_per_gb() - 0.2).abs() < 1e-12);
    }

    #[test]
    fn bytes_fetched_are_told_from_bytes_copied() {
        let text = "rchar: 6976\nwchar: 0\nsyscr: 10\nsyscw: 0\nread_bytes: 4096\nwrite_bytes: 7\ncancelled_write_bytes: 0\n";
        assert_eq!(read_bytes(text), Some(4096));
        assert_eq!(read_bytes("rchar: 1\n"), None);
    }

    #[test]
    fn cpu_time_is_that_of_the_work() {
        let sample = Sample::of(1, || {
            let start = cpu_time();
            while cpu_time() - start < Duration::from_millis(5) {}
            Ok(())
        })
        .unwrap();
        assert!(sample.cpu_seconds >= 0.005);
    }

    /// Says in which order it ran.
    struct Turn<'a>(&'a std::cell::RefCell<String>, char);

    impl Side for Turn<'_> {
        fn label(&self, _transfer: Transfer) -> String {
            self.1.to_string()
        }

        fn run(&mut self, _transfer: Transfer) -> Outcome<Sample> {
            self.0.borrow_mut().push(self.1);
            Ok(Sample { bytes: 0, seconds: 1.0, cpu_seconds: 0.0 })
        }
    }

    #[test]
    fn the_sides_take_turns() {
        let order = std::cell::RefCell::new(String::new());
        let (mut a, mut b) = (Turn(&order, 'a'), Turn(&order, 'b'));
        let found = pairs(Transfer::Write, 3, &mut a, &mut b, &mut FromDrive::default()).unwrap();
        assert_eq!((found.ours.len(), found.theirs.len()), (3, 3));
        assert_eq!(*order.borrow(), "ababab");
    }
}
