//! Writes spans as a Chrome trace: the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.
//!
//! One track a lane, named and sorted as in [`Lane::ALL`]. Each span is a complete event (`"ph": "X"`) with times in
//! microseconds; its bytes are in `args.bytes`, so the sum over a track is the lane's traffic. The writer streams: a
//! trace of any length needs no memory.

use std::io::{self, Write};

use serde_json::json;

use crate::span::{Lane, Span};
use crate::units::Seconds;

/// All lanes belong to one process.
const PROCESS: u32 = 1;

/// A trace that is being written to `W`.
#[derive(Debug)]
pub struct TraceWriter<W: Write> {
    out: W,
}

impl<W: Write> TraceWriter<W> {
    /// Starts a trace and names its tracks; `title` names the process.
    ///
    /// # Errors
    /// What the writer gives back.
    pub fn new(mut out: W, title: &str) -> io::Result<Self> {
        writeln!(out, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        let process = json!({"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": title}});
        write!(out, "{process}")?;
        for lane in Lane::ALL {
            let tid = track(lane);
            let name = json!({
                "ph": "M", "pid": PROCESS, "tid": tid, "name": "thread_name", "args": {"name": title_of(lane)},
            });
            let order = json!({
                "ph": "M", "pid": PROCESS, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid},
            });
            write!(out, ",\n{name},\n{order}")?;
        }
        Ok(Self { out })
    }

    /// Appends the spans of one step that began `offset` after the trace did.
    ///
    /// # Errors
    /// What the writer gives back.
    pub fn step(&mut self, step: u64, offset: Seconds, spans: &[Span]) -> io::Result<()> {
        for span in spans {
            let event = json!({
                "ph": "X",
                "pid": PROCESS,
                "tid": track(span.lane),
                "cat": span.lane.name(),
                "name": span.name,
                "ts": (offset + span.start).get() * 1e6,
                "dur": span.duration().get().max(0.0) * 1e6,
                "args": {"bytes": span.bytes.get(), "step": step},
            });
            write!(self.out, ",\n{event}")?;
        }
        Ok(())
    }

    /// Ends the trace and hands the writer back, flushed.
    ///
    /// # Errors
    /// What the writer gives back.
    pub fn finish(mut self) -> io::Result<W> {
        writeln!(self.out, "\n]}}")?;
        self.out.flush()?;
        Ok(self.out)
    }
}

fn track(lane: Lane) -> u32 {
    lane as u32 + 1
}

/// The lane's name for people.
pub(crate) const fn title_of(lane: Lane) -> &'static str {
    match lane {
        Lane::Compute => "Compute",
        Lane::D2h => "Device to host (D2H)",
        Lane::H2d => "Host to device (H2D)",
        Lane::NvmeWrite => "NVMe write",
        Lane::NvmeRead => "NVMe read",
        Lane::Optimizer => "Optimizer",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::units::Bytes;

    fn span(name: &str, lane: Lane, start: f64, end: f64, bytes: u64) -> Span {
        Span {
            name: name.into(),
            lane,
            start: Seconds(start),
            end: Seconds(end),
            bytes: Bytes(bytes),
            blocked_on: None,
        }
    }

    fn trace(title: &str, steps: &[(Seconds, Vec<Span>)]) -> Value {
        let mut writer = TraceWriter::new(Vec::new(), title).unwrap();
        for (step, (offset, spans)) in steps.iter().enumerate() {
            writer.step(step as u64, *offset, spans).unwrap();
        }
        serde_json::from_slice(&writer.finish().unwrap()).unwrap()
    }

    fn events<'a>(trace: &'a Value, phase: &str) -> Vec<&'a Value> {
        trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == phase).collect()
    }

    #[test]
    fn bytes_of_each_lane_survive_and_steps_are_shifted() {
        let spans = vec![
            span("boundary 0", Lane::D2h, 0.001, 0.002, 1 << 40),
            span("boundary 1", Lane::D2h, 0.002, 0.003, 3),
            span("boundary 1", Lane::NvmeWrite, 0.0, 0.5, 7),
        ];
        let trace = trace("run", &[(Seconds::ZERO, spans.clone()), (Seconds(2.0), spans)]);
        let events = events(&trace, "X");
        assert_eq!(events.len(), 6);
        let moved = |lane: &str| -> u64 {
            let of_lane = events.iter().filter(|e| e["cat"] == lane);
            of_lane.map(|e| e["args"]["bytes"].as_u64().unwrap()).sum()
        };
        assert_eq!(moved("d2h"), 2 * ((1 << 40) + 3));
        assert_eq!(moved("nvme_write"), 14);
        assert_eq!(events[3]["ts"], 2_001_000.0);
        assert_eq!(events[3]["args"]["step"], 1);
        assert!((events[3]["dur"].as_f64().unwrap() - 1000.0).abs() < 1e-6);
    }

    #[test]
    fn every_lane_has_a_named_track_of_its_own() {
        let trace = trace("run", &[]);
        let names: Vec<_> = events(&trace, "M").into_iter().filter(|e| e["name"] == "thread_name").collect();
        assert_eq!(names.len(), Lane::ALL.len());
        let mut tracks: Vec<_> = names.iter().map(|e| e["tid"].as_u64().unwrap()).collect();
        tracks.dedup();
        assert_eq!(tracks.len(), Lane::ALL.len());
    }

    #[test]
    fn names_are_escaped() {
        let hostile = "a\"b\\c\nd\u{1}</script>é";
        let trace = trace(hostile, &[(Seconds::ZERO, vec![span(hostile, Lane::Compute, 0.0, 1.0, 0)])]);
        assert_eq!(events(&trace, "X")[0]["name"], hostile);
        assert_eq!(events(&trace, "M")[0]["args"]["name"], hostile);
    }
}
