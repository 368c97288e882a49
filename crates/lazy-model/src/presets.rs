//! Machines that ship with the crate.

use crate::hardware::{Compute, Drive, Drives, HardwareProfile, Links, Marked, Tiers};
use crate::units::{Bytes, BytesPerSecond};

/// The plain figures of a machine; rates in GB/s, arithmetic in TFLOP/s.
struct Figures {
    /// Where they come from.
    by: &'static str,
    /// When they were measured; `None`: assumed.
    when: Option<&'static str>,
    hbm_gib: f64,
    host_gib: Option<f64>,
    nvme_gib: Option<f64>,
    /// Device to host and host to device, alone.
    alone: [f64; 2],
    /// The same at once.
    both: Option<[f64; 2]>,
    /// Root complex.
    shared: Option<f64>,
    /// NVLink.
    peer: Option<f64>,
    /// NVMe write and read, and whether they are of one drive.
    nvme: [f64; 2],
    /// Dense bf16 products, the share a layer reaches, HBM bandwidth.
    compute: Option<[f64; 3]>,
}

const REFERENCE: Figures = Figures {
    by: "published reference run",
    when: None,
    hbm_gib: 70.0,
    host_gib: None,
    nvme_gib: None,
    alone: [12.0, 12.0],
    both: None,
    shared: None,
    peer: None,
    nvme: [3.35, 2.83],
    compute: None,
};

const H200: Figures = Figures {
    by: "one H200 virtual machine, PCIe Gen5 x16, virtio disk",
    when: Some("2026-11-29"),
    hbm_gib: 139.0,
    host_gib: Some(125.0),
    nvme_gib: None,
    alone: [55.0, 51.0],
    both: Some([44.0, 44.0]),
    shared: None,
    peer: None,
    nvme: [1.9, 1.1],
    // 0.64 of 806 TFLOP/s and 3.4 TB/s give the 7.9 and 14 ms that a Qwen3-4B layer takes there (batch 16 x 1024 tokens).
    compute: Some([806.0, 0.64, 3400.0]),
};

const H100: Figures = Figures {
    by: "data sheets: H100 SXM, eight to a host, one drive each",
    when: None,
    hbm_gib: 79.0,
    host_gib: Some(1024.0),
    nvme_gib: Some(3500.0),
    alone: [50.0, 50.0],
    both: Some([42.0, 42.0]),
    // Two sockets, four accelerators each, eight channels of DDR5-4800 a socket, two thirds of that reached.
    shared: Some(200.0),
    peer: Some(450.0),
    nvme: [5.0, 6.5],
    compute: Some([989.0, 0.55, 2800.0]),
};

const RTX4090: Figures = Figures {
    by: "data sheets: RTX 4090 on PCIe Gen4 x16, one Gen4 drive",
    when: None,
    hbm_gib: 23.5,
    host_gib: Some(96.0),
    nvme_gib: Some(1800.0),
    alone: [25.0, 25.0],
    both: Some([21.0, 21.0]),
    shared: None,
    peer: None,
    nvme: [5.0, 6.5],
    compute: Some([165.0, 0.65, 900.0]),
};

impl Figures {
    fn mark<T>(&self, value: T) -> Marked<T> {
        match self.when {
            Some(when) => Marked::measured(value, self.by, when),
            None => Marked::assumed(value, self.by),
        }
    }

    fn profile(&self, name: &str) -> HardwareProfile {
        let link = |gb| self.mark(BytesPerSecond::from_gb(gb));
        let room = |gib| self.mark(Bytes::from_gib(gib));
        let [d2h, h2d] = self.alone;
        let [write, read] = self.nvme;
        let drive = Drive { name: "nvme0".into(), write: link(write), read: link(read) };
        HardwareProfile {
            name: name.into(),
            tiers: Tiers {
                hbm: Some(room(self.hbm_gib)),
                host: self.host_gib.map(room),
                nvme: self.nvme_gib.map(room),
            },
            links: Links {
                d2h_both: self.both.map(|b| link(b[0])),
                h2d_both: self.both.map(|b| link(b[1])),
                shared: self.shared.map(link),
                peer: self.peer.map(link),
                ..Links::alone(link(d2h), link(h2d), link(write), link(read))
            },
            drives: Some(Drives { striped: false, each: vec![drive] }),
            compute: self.compute.map(|[tflops, efficiency, hbm]| Compute {
                matmul_flops_per_s: self.mark(tflops * 1e12),
                matmul_efficiency: self.mark(efficiency),
                hbm: link(hbm),
            }),
            times: None,
            optimizer_elements_per_s: None,
            optimizer_commit_share: None,
        }
    }
}

impl HardwareProfile {
    /// The names [`preset`](Self::preset) knows.
    pub const PRESETS: [&str; 4] = ["reference", "h200", "h100", "rtx4090"];

    /// A profile that ships with the crate.
    ///
    /// - `reference`: the machine of the published placement runs: 12 GB/s each way between HBM and host, NVMe 2.83
    ///   read and 3.35 write, a cap of 70 GiB; assumed.
    /// - `h200`: one H200 on PCIe Gen5 x16 in a virtual machine with a virtio disk; measured there.
    /// - `h100`, `rtx4090`: from data sheets, with usual efficiencies; assumed.
    pub fn preset(name: &str) -> Option<Self> {
        let figures = match name {
            "reference" => REFERENCE,
            "h200" => H200,
            "h100" => H100,
            "rtx4090" => RTX4090,
            _ => return None,
        };
        Some(figures.profile(name))
    }
}
