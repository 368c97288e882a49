//! The peer: fio with io_uring and `O_DIRECT`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::Outcome;
use crate::side::{Sample, Side, Transfer};

/// What fio's logs begin with.
const LOG: &str = "peer-log";

/// How the peer cuts a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    pub(crate) block: u64,
    pub(crate) depth: u32,
    /// Where both directions run at once: two jobs of that depth, or one that draws the direction of each request.
    pub(crate) two_jobs: bool,
    /// With buffers in huge pages, files and buffers registered. fio's own defaults are neither.
    pub(crate) tuned: bool,
    /// Bytes of buffers that are used in turn, where there are more than one for each request in flight. fio knows no such thing.
    pub(crate) memory: Option<u64>,
}

impl Setting {
    pub(crate) fn label(self, transfer: Transfer) -> String {
        let block = if self.block >= 1 << 20 {
            format!("{} MiB", self.block >> 20)
        } else {
            format!("{} KiB", self.block >> 10)
        };
        let jobs = if transfer == Transfer::Both && self.two_jobs { "2 x " } else { "" };
        let tuned = if self.tuned { ", tuned" } else { "" };
        let memory =
            self.memory.map_or_else(String::new, |bytes| format!(", {} MiB of buffers", bytes >> 20));
        format!("{jobs}{block} x {}{tuned}{memory}", self.depth)
    }
}

/// fio on a file that is there already, all of it written.
pub(crate) struct Fio {
    pub(crate) file: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) setting: Setting,
}

/// fio's version, if it can be started.
pub(crate) fn version() -> Option<String> {
    let output = Command::new("fio").arg("--version").stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}

impl Side for Fio {
    fn label(&self, transfer: Transfer) -> String {
        format!("fio, {}", self.setting.label(transfer))
    }

    fn run(&mut self, transfer: Transfer) -> Outcome<Sample> {
        let dir = self.file.parent().unwrap_or(Path::new("."));
        let log = dir.join(format!("{LOG}_lat.log"));
        // fio appends to it.
        let _ = std::fs::remove_file(&log);
        let mut command = Command::new("fio");
        if self.setting.tuned {
            // The C library's way to ask for huge pages; no other needs pages set aside beforehand.
            command.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
        }
        let output = command
            .args(arguments(&self.file, self.bytes, self.setting, transfer))
            // Nothing of fio's own is left in the folder that the bench was started from.
            .current_dir(dir)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("cannot start fio: {error}"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(format!("fio ended with {}: {}", output.status, said.trim()));
        }
        let sample = sample(&String::from_utf8_lossy(&output.stdout), self.bytes)?;
        if !logs(self.setting, transfer) {
            return Ok(sample);
        }
        let text = std::fs::read_to_string(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        Ok(Sample { seconds: span(&text, self.bytes)?, ..sample })
    }
}

/// Whether the jobs' own times do not say how long all of it took: of two jobs one starts later, by the time that it fills its
/// buffers, and each counts from its own start.
fn logs(setting: Setting, transfer: Transfer) -> bool {
    transfer == Transfer::Both && setting.two_jobs
}

/// Seconds from the start of the first request to the end of the last one, by fio's log: a line a request, which says when it
/// ended (ms), how long it took (ns), its direction and its length.
fn span(log: &str, bytes: u64) -> Outcome<f64> {
    let (mut first, mut last, mut moved) = (f64::INFINITY, 0.0, 0);
    for line in log.lines() {
        let numbers: Vec<f64> = line.split(',').map_while(|field| field.trim().parse().ok()).collect();
        let [end, took, _, length, ..] = numbers[..] else {
            return Err(format!("fio's log has a line `{line}`"));
        };
        (first, last, moved) =
            (f64::min(first, end - took / 1e6), f64::max(last, end), moved + length as u64);
    }
    if moved != bytes || last <= first {
        return Err(format!("fio's log has {moved} bytes of {bytes} in {} ms", last - first));
    }
    Ok((last - first) / 1e3)
}

fn arguments(file: &Path, bytes: u64, setting: Setting, transfer: Transfer) -> Vec<String> {
    let mut arguments: Vec<String> =
        ["--output-format=json", "--ioengine=io_uring", "--direct=1"].map(str::to_owned).into();
    // The file is there, at its full length; what is in the page cache of it is dropped (`invalidate`, fio's default).
    arguments.extend(["--fallocate=none", "--allow_file_create=0"].map(str::to_owned));
    arguments.push(format!("--filename={}", file.display()));
    arguments.push(format!("--bs={}", setting.block));
    arguments.push(format!("--iodepth={}", setting.depth));
    if setting.tuned {
        arguments.extend(
            ["--registerfiles=1", "--fixedbufs=1", "--mem=malloc", "--iomem_align=2m"].map(str::to_owned),
        );
    }
    if logs(setting, transfer) {
        arguments.push(format!("--write_lat_log={LOG}"));
        arguments.extend(["--log_unix_epoch=1", "--per_job_logs=0"].map(str::to_owned));
    }
    let mut job = |name: &str, offset: u64, size: u64| {
        arguments.push(format!("--name={name}"));
        arguments.push(format!("--rw={name}"));
        arguments.push(format!("--offset={offset}"));
        arguments.push(format!("--size={size}"));
    };
    match transfer {
        Transfer::Write => job("write", 0, bytes),
        Transfer::Read => job("read", 0, bytes),
        Transfer::Both if setting.two_jobs => {
            job("write", 0, bytes / 2);
            job("read", bytes / 2, bytes / 2);
        }
        Transfer::Both => job("rw", 0, bytes),
    }
    arguments
}

/// What fio's report says: the time until the last direction of the longest job was done, and the jobs' CPU time. That leaves
/// out fio's own start, in its favour, as the store's is left out.
fn sample(report: &str, bytes: u64) -> Outcome<Sample> {
    // Notes may stand before the JSON.
    let json = report.find('{').map_or("", |at| &report[at..]);
    let report: Value =
        serde_json::from_str(json).map_err(|error| format!("fio printed no JSON: {error}"))?;
    let (mut moved, mut milliseconds, mut cpu_seconds) = (0, 0.0, 0.0);
    for job in report["jobs"].as_array().into_iter().flatten() {
        if job["error"].as_i64() != Some(0) {
            return Err(format!("fio's job ended with error {}", job["error"]));
        }
        let mut longest = 0.0;
        for direction in [&job["read"], &job["write"]] {
            moved += direction["io_bytes"].as_u64().unwrap_or(0);
            longest = f64::max(longest, direction["runtime"].as_f64().unwrap_or(0.0));
        }
        milliseconds = f64::max(milliseconds, longest);
        let percent = ["usr_cpu", "sys_cpu"].map(|key| job[key].as_f64().unwrap_or(0.0));
        cpu_seconds += percent.iter().sum::<f64>() / 100.0 * longest / 1e3;
    }
    if moved != bytes || milliseconds <= 0.0 {
        return Err(format!("fio moved {moved} bytes of {bytes} in {milliseconds} ms"));
    }
    Ok(Sample { bytes, seconds: milliseconds / 1e3, cpu_seconds })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTING: Setting =
        Setting { block: 1 << 20, depth: 16, two_jobs: true, tuned: false, memory: None };

    #[test]
    fn two_jobs_last_as_long_as_the_longer_one() {
        let job = |name: &str, ms: u64, percent: f64| {
            let (read, write) = if name == "read" { (ms, 0) } else { (0, ms) };
            let bytes = |ms: u64| if ms > 0 { 500 } else { 0 };
            format!(
                r#"{{"jobname": "{name}", "error": 0, "usr_cpu": {percent}, "sys_cpu": 1.5,
                "read": {{"io_bytes": {}, "runtime": {read}}}, "write": {{"io_bytes": {}, "runtime": {write}}}}}"#,
                bytes(read),
                bytes(write)
            )
        };
        let report =
            format!("fio: a note\n{{\"jobs\": [{}, {}]}}", job("write", 2000, 0.5), job("read", 1000, 2.5));
        let sample = sample(&report, 1000).unwrap();
        assert_eq!(sample.seconds, 2.0);
        // 2 % of 2 s and 4 % of 1 s.
        assert!((sample.cpu_seconds - 0.08).abs() < 1e-12);
    }

    #[test]
    fn two_jobs_last_from_the_first_request_to_the_last() {
        // 30 ms of reading that began at 980, and 40 ms of writing that began when that was half done.
        let log = "1000, 20000000, 0, 300, 0\n1010, 15000000, 0, 300, 300\n1035, 40000000, 1, 400, 600\n";
        assert!((span(log, 1000).unwrap() - 0.055).abs() < 1e-9);
        assert!(span(log, 1001).unwrap_err().contains("1000 bytes of 1001"));
        assert!(span("1000, x", 0).unwrap_err().contains("1000, x"));
        assert!(span("", 0).is_err());
        assert!(!logs(SETTING, Transfer::Read) && logs(SETTING, Transfer::Both));
    }

    #[test]
    fn a_report_of_less_than_was_asked_is_refused() {
        let report = r#"{"jobs": [{"error": 0, "read": {"io_bytes": 4, "runtime": 9}, "write": {}}]}"#;
        assert!(sample(report, 8).unwrap_err().contains("4 bytes of 8"));
        let report = r#"{"jobs": [{"error": 28, "read": {"io_bytes": 8, "runtime": 9}, "write": {}}]}"#;
        assert!(sample(report, 8).unwrap_err().contains("error 28"));
        assert!(sample("fio: bad option", 8).is_err());
    }

    #[test]
    fn both_directions_share_the_file() {
        let found = arguments(Path::new("f"), 1000, SETTING, Transfer::Both);
        let tail = found[found.len() - 8..].join(" ");
        assert_eq!(
            tail,
            "--name=write --rw=write --offset=0 --size=500 --name=read --rw=read --offset=500 --size=500"
        );
        assert_eq!(SETTING.label(Transfer::Both), "2 x 1 MiB x 16");
        assert_eq!(Setting { block: 65536, ..SETTING }.label(Transfer::Read), "64 KiB x 16");
    }
}
