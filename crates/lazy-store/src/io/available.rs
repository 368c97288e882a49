//! How much memory can be taken without driving somebody out.

use std::path::Path;

use lazy_model::Bytes;

/// What the system says is available, and what the control group of this process leaves; `None` where neither says.
pub(crate) fn memory() -> Option<Bytes> {
    let system = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| available(&text));
    [system, group()].into_iter().flatten().min()
}

fn available(meminfo: &str) -> Option<Bytes> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kib.saturating_mul(1024)))
}

/// Of the group that the process sees as its root, as in a container.
fn group() -> Option<Bytes> {
    let read = |name: &str| std::fs::read_to_string(Path::new("/sys/fs/cgroup").join(name)).ok();
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    Some(Bytes(limit.saturating_sub(used)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_available_memory_is_read_in_kib() {
        let text = "MemTotal:       24668868 kB\nMemFree:         1 kB\nMemAvailable:   23085056 kB\n";
        assert_eq!(available(text), Some(Bytes(23_085_056 * 1024)));
        assert_eq!(available("MemTotal: 5 kB"), None);
        assert!(memory().is_some_and(|bytes| bytes > Bytes::ZERO));
    }
}
