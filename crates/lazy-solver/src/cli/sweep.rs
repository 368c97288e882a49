//! One plan for each value of a flag.

use std::str::FromStr;

use super::args::Args;

/// The flags that can be swept, with the way to set them.
const SWEEPABLE: [(&str, Setter); 20] = [
    ("hbm-gib", |a, v| real(&mut a.budgets.hbm_gib, &mut a.budgets.hbm_mib, v)),
    ("hbm-mib", |a, v| real(&mut a.budgets.hbm_mib, &mut a.budgets.hbm_gib, v)),
    ("host-gib", |a, v| real(&mut a.budgets.host_gib, &mut a.budgets.host_mib, v)),
    ("host-mib", |a, v| real(&mut a.budgets.host_mib, &mut a.budgets.host_gib, v)),
    ("nvme-gib", |a, v| real(&mut a.budgets.nvme_gib, &mut a.budgets.nvme_mib, v)),
    ("nvme-mib", |a, v| real(&mut a.budgets.nvme_mib, &mut a.budgets.nvme_gib, v)),
    ("hbm-activation-gib", |a, v| one(&mut a.reference.hbm_activation_gib, v)),
    ("host-activation-gib", |a, v| one(&mut a.reference.host_activation_gib, v)),
    ("nvme-activation-gib", |a, v| one(&mut a.reference.nvme_activation_gib, v)),
    ("peak-cap-gib", |a, v| one(&mut a.reference.peak_cap_gib, v)),
    ("h2d-gbps", |a, v| one(&mut a.reference.h2d_gbps, v)),
    ("d2h-gbps", |a, v| one(&mut a.reference.d2h_gbps, v)),
    ("nvme-read-gbps", |a, v| one(&mut a.reference.nvme_read_gbps, v)),
    ("nvme-write-gbps", |a, v| one(&mut a.reference.nvme_write_gbps, v)),
    ("window-scale", |a, v| one(&mut a.reference.window_scale, v)),
    ("max-segment", |a, v| whole(&mut a.max_segment, v)),
    ("ranks", |a, v| whole(&mut a.training.ranks, v)),
    ("batch", |a, v| whole(&mut a.batch, v)),
    ("seq", |a, v| whole(&mut a.seq, v)),
    ("layers", |a, v| whole(&mut a.layers, v)),
];

/// More are refused: each is a plan of its own.
const MOST_VALUES: usize = 10_000;

type Setter = fn(&mut Args, f64) -> Result<(), String>;

fn one(flag: &mut Option<f64>, value: f64) -> Result<(), String> {
    *flag = Some(value);
    Ok(())
}

/// The same size in the other unit gives way.
fn real(flag: &mut Option<f64>, other: &mut Option<f64>, value: f64) -> Result<(), String> {
    *other = None;
    one(flag, value)
}

fn whole(flag: &mut Option<usize>, value: f64) -> Result<(), String> {
    if value.fract() != 0.0 || !(1.0..1e9).contains(&value) {
        return Err(format!("{value} is not a whole number of 1 or more"));
    }
    *flag = Some(value as usize);
    Ok(())
}

/// A flag and the values it takes, in the order given.
#[derive(Clone, Debug)]
pub(crate) struct Sweep {
    /// The flag, without dashes.
    pub(crate) flag: &'static str,
    set: Setter,
    pub(crate) values: Vec<f64>,
}

fn number(text: &str) -> Result<f64, String> {
    text.trim().parse().ok().filter(|v: &f64| v.is_finite()).ok_or(format!("`{text}` is no number"))
}

/// One value, or `a..b`: every whole number from a to b, both included.
fn span(text: &str) -> Result<Vec<f64>, String> {
    let Some((from, to)) = text.split_once("..") else { return Ok(vec![number(text)?]) };
    let whole = |v: &f64| v.fract() == 0.0 && (0.0..1e15).contains(v);
    match (number(from)?, number(to.trim_start_matches('='))?) {
        (from, to) if whole(&from) && whole(&to) && from <= to => {
            // One more than is allowed is enough to be refused.
            Ok((from as u64..=to as u64).take(MOST_VALUES + 1).map(|v| v as f64).collect())
        }
        _ => Err(format!("`{text}` is no range: write whole numbers, the smaller one first, like 1..8")),
    }
}

impl FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> Result<Sweep, String> {
        let (name, values) = text
            .split_once('=')
            .ok_or("write the flag, =, and values separated by commas, like host-activation-gib=8,10")?;
        let name = name.trim().trim_start_matches('-');
        let (flag, set) = SWEEPABLE.iter().find(|(flag, _)| *flag == name).ok_or_else(|| {
            let known: Vec<&str> = SWEEPABLE.iter().map(|(flag, _)| *flag).collect();
            format!("`{name}` cannot be swept; these can: {}", known.join(", "))
        })?;
        let mut list = Vec::new();
        for part in values.split(',') {
            list.extend(span(part)?);
            if list.len() > MOST_VALUES {
                return Err(format!("more than {MOST_VALUES} values"));
            }
        }
        let values = list;
        Ok(Sweep { flag, set: *set, values })
    }
}

impl Sweep {
    /// The arguments with the flag set to each value.
    pub(crate) fn each(&self, args: &Args) -> Result<Vec<(f64, Args)>, String> {
        if args.chain.is_some() && ["batch", "seq", "layers"].contains(&self.flag) {
            return Err(format!(
                "--sweep {}: a chain is made for one model, batch and sequence; give --model",
                self.flag
            ));
        }
        let with = |&value: &f64| {
            let mut args = args.clone();
            args.search.sweep = None;
            (self.set)(&mut args, value).map_err(|e| format!("--sweep {}: {e}", self.flag))?;
            Ok((value, args))
        };
        self.values.iter().map(with).collect()
    }
}
