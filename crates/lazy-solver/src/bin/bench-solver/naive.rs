//! The placement program as one would first write it: a binary a block and a tier, a transfer variable a boundary, pool and window.
//! Written as an LP file, which CBC, HiGHS and SCIP all read.

use std::fmt::Write;

use lazy_model::CostChain;

const MIB: f64 = 1_048_576.0;

/// The program in LP format. Chains with locks or links without bandwidth are not written.
pub(crate) fn lp(chain: &CostChain) -> Option<String> {
    let n = chain.layers;
    let pcie = chain.pcie_window_scale * chain.pcie_capacity_fraction;
    let drive = chain.nvme_window_scale * chain.nvme_capacity_fraction;
    let (down, up) = (chain.d2h_first_window_offset, chain.h2d_first_window_offset);
    let pools = [
        ("d", chain.d2h_bytes_per_s.get(), down, pcie, Some(&chain.grad_d2h_bytes), true),
        ("h", chain.h2d_bytes_per_s.get(), up, pcie, Some(&chain.param_h2d_bytes), true),
        ("w", chain.nvme_write_bytes_per_s.get(), down, drive, None, false),
        ("r", chain.nvme_read_bytes_per_s.get(), up, drive, None, false),
    ];
    if chain.locks.is_some() || pools.iter().any(|pool| pool.1 == 0.0) {
        return None;
    }
    let (mut cost, mut rows) = (String::new(), String::new());
    let mut binaries = Vec::new();
    for i in 0..=n {
        let penalty = chain.checkpoint_penalty;
        let _ = write!(cost, " + {penalty} g{i} + {penalty} c{i} + {} v{i}", penalty + chain.nvme_tiebreak);
        binaries.extend([format!("g{i}"), format!("c{i}"), format!("v{i}")]);
        let saved = format!("g{i} + c{i} + v{i}");
        let _ = match i == 0 || i == n {
            true => writeln!(rows, " {saved} = 1"),
            false => writeln!(rows, " {saved} <= 1"),
        };
        let minus = format!("- g{i} - c{i} - v{i}");
        if i < n {
            let next: Vec<String> =
                (i + 1..=n.min(i + chain.max_segment_layers)).map(|t| format!("b{i}_{t}")).collect();
            let _ = writeln!(rows, " {} {minus} = 0", next.join(" + "));
            for (t, name) in (i + 1..).zip(&next) {
                let recompute: f64 = chain.layer_recompute_ms[i..t - 1].iter().sum();
                let _ = write!(cost, " + {recompute} {name}");
            }
            binaries.extend(next);
        }
        if i > 0 {
            let from: Vec<String> =
                (i.saturating_sub(chain.max_segment_layers)..i).map(|s| format!("b{s}_{i}")).collect();
            let _ = writeln!(rows, " {} {minus} = 0", from.join(" + "));
        }
    }
    let budgets =
        [("g", chain.gpu_budget_bytes), ("c", chain.cpu_budget_bytes), ("v", chain.nvme_budget_bytes)];
    for (tier, budget) in budgets {
        let sum = (0..=n).map(|i| format!("{} {tier}{i}", chain.boundary_bytes[i].get() as f64 / MIB));
        let sum: Vec<String> = sum.collect();
        let _ = writeln!(rows, " {} <= {}", sum.join(" + "), budget.get() as f64 / MIB);
    }
    let mut constant = 0.0;
    for (pool, rate, offset, factor, mandatory, host) in pools {
        let ms = |bytes: u64| bytes as f64 * 1000.0 / rate;
        let first = |i: usize| (i + offset).min(n);
        for i in 0..=n {
            let windows: Vec<String> = (first(i)..=n).map(|w| format!("x{pool}{i}_{w}")).collect();
            let size = ms(chain.boundary_bytes[i].get());
            let from_host = if host { format!(" - {size} c{i}") } else { String::new() };
            let _ = writeln!(rows, " {} - {size} v{i}{from_host} = 0", windows.join(" + "));
        }
        for w in 0..=n {
            let spare = match chain.layer_window_ms.get(w) {
                Some(window) => window * factor - mandatory.map_or(0.0, |m| ms(m[w].get())),
                None => 0.0,
            };
            constant += f64::max(-spare, 0.0);
            let _ = write!(cost, " + late{pool}{w}");
            let inside: Vec<String> =
                (0..=n).filter(|&i| first(i) <= w).map(|i| format!("x{pool}{i}_{w}")).collect();
            // A window before every transfer carries none.
            if !inside.is_empty() {
                let _ = writeln!(rows, " {} - late{pool}{w} <= {}", inside.join(" + "), spare.max(0.0));
            }
        }
    }
    Some(format!(
        "Minimize\n obj:{} + {constant} one\nSubject To\n{}\nBounds\n one = 1\nBinaries\n {}\nEnd\n",
        wrapped(&cost),
        wrapped(&rows),
        binaries.join("\n ")
    ))
}

/// Readers limit the length of a line.
fn wrapped(text: &str) -> String {
    text.replace(" + ", "\n + ")
}
