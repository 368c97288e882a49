//! A machine of fixed speed: so plans are the same however busy the one is that runs the tests.

use serde_json::{Value, json};

/// The profile of one whose every layer takes so many milliseconds, forward and backward; links move 1 GB/s.
pub(crate) fn profile(layers: usize, [forward_ms, backward_ms]: [f64; 2]) -> String {
    let value = |value: Value| json!({"value": value, "source": "assumed", "by": "test"});
    let each = |ms: f64| value(json!(vec![ms; layers]));
    let link = || value(json!(1e9));
    let times = json!({
        "workload": "test", "forward_ms": each(forward_ms), "saving_forward_ms": each(forward_ms), "backward_ms": each(backward_ms),
        "prologue_ms": value(json!(0.1)), "prologue_backward_ms": value(json!(0.1)), "epilogue_ms": value(json!(5.0)),
    });
    let links = json!({
        "d2h_bytes_per_s": link(), "h2d_bytes_per_s": link(), "nvme_write_bytes_per_s": link(), "nvme_read_bytes_per_s": link(),
    });
    json!({"version": 2, "name": "test", "links": links, "times": times}).to_string()
}
