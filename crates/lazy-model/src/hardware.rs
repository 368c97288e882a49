//! What a machine can hold, move and compute: the hardware profile and its JSON.
//!
//! ```json
//! {
//!   "version": 2,
//!   "name": "workstation",
//!   "tiers": { "hbm_bytes": {"value": 25769803776, "source": "assumed", "by": "data sheet"} },
//!   "links": {
//!     "d2h_bytes_per_s": {"value": 2.4e10, "source": "measured", "by": "probe", "when": "2026-11-29"},
//!     "h2d_bytes_per_s": {"value": 2.4e10, "source": "measured", "by": "probe", "when": "2026-11-29"},
//!     "d2h_both_bytes_per_s": {"value": 2.0e10, "source": "measured", "by": "probe", "when": "2026-11-29"},
//!     "h2d_both_bytes_per_s": {"value": 2.0e10, "source": "measured", "by": "probe", "when": "2026-11-29"}
//!   },
//!   "drives": {
//!     "striped": true,
//!     "list": [{
//!       "name": "nvme0n1",
//!       "write_bytes_per_s": {"value": 3e9, "source": "assumed", "by": "data sheet"},
//!       "read_bytes_per_s": {"value": 5e9, "source": "assumed", "by": "data sheet"}
//!     }]
//!   },
//!   "compute": {
//!     "matmul_flops_per_s": {"value": 1.65e14, "source": "assumed", "by": "data sheet"},
//!     "matmul_efficiency": {"value": 0.6, "source": "assumed", "by": "rule of thumb"},
//!     "hbm_bytes_per_s": {"value": 1e12, "source": "assumed", "by": "data sheet"}
//!   },
//!   "times": null,
//!   "optimizer_elements_per_s": null
//! }
//! ```
//!
//! Every value says whether it was measured (by what, when) or assumed (by whom). Rates of the links may not be absent; those of
//! NVMe follow from the drives where `links` leaves them out. Everything else may be absent. Version 1, which had neither drives nor
//! compute nor rates under load, is read too.

use serde::Serialize;
use serde_json::Value;

use crate::error::Error;
use crate::json::{Object, parse, whole};
use crate::timeline::{Contention, LinkRates, StepCosts};
use crate::units::{Bytes, BytesPerSecond, Seconds, Tier};

/// The profile format this version writes. It reads this one and the one before.
pub const PROFILE_VERSION: u64 = 2;

const DOCUMENT: &str = "hardware profile";

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// Observed on the machine.
    Measured,
    /// Taken from elsewhere.
    Assumed,
}

/// A value with its origin.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Marked<T> {
    /// The value, in the unit its key names.
    pub value: T,
    /// Measured or assumed.
    pub source: Source,
    /// The program or method that measured it, or where the assumption comes from.
    pub by: String,
    /// When it was measured, or when the assumption was made where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub when: Option<String>,
}

impl<T> Marked<T> {
    /// A value observed by `by` at `when`.
    pub fn measured(value: T, by: &str, when: &str) -> Self {
        Self { value, source: Source::Measured, by: by.into(), when: Some(when.into()) }
    }

    /// A value taken from `by`.
    pub fn assumed(value: T, by: &str) -> Self {
        Self { value, source: Source::Assumed, by: by.into(), when: None }
    }
}

/// Capacities, where they are known.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Tiers {
    /// The accelerator's memory.
    #[serde(rename = "hbm_bytes")]
    pub hbm: Option<Marked<Bytes>>,
    /// Host RAM that may be pinned.
    #[serde(rename = "host_bytes")]
    pub host: Option<Marked<Bytes>>,
    /// Room on the NVMe drives.
    #[serde(rename = "nvme_bytes")]
    pub nvme: Option<Marked<Bytes>>,
}

impl Tiers {
    /// The capacity of one tier, where it is known.
    pub fn get(&self, tier: Tier) -> Option<Bytes> {
        let entry = match tier {
            Tier::Hbm => &self.hbm,
            Tier::Host => &self.host,
            Tier::Nvme => &self.nvme,
        };
        entry.as_ref().map(|marked| marked.value)
    }
}

/// Rates of the links: each alone, and what they come to together where that was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Links {
    /// Device to host.
    #[serde(rename = "d2h_bytes_per_s")]
    pub d2h: Marked<BytesPerSecond>,
    /// Host to device.
    #[serde(rename = "h2d_bytes_per_s")]
    pub h2d: Marked<BytesPerSecond>,
    /// Writes to NVMe, all drives together.
    #[serde(rename = "nvme_write_bytes_per_s")]
    pub nvme_write: Marked<BytesPerSecond>,
    /// Reads from NVMe, all drives together.
    #[serde(rename = "nvme_read_bytes_per_s")]
    pub nvme_read: Marked<BytesPerSecond>,
    /// Device to host while the other direction is busy; absent: as alone.
    #[serde(rename = "d2h_both_bytes_per_s", skip_serializing_if = "Option::is_none")]
    pub d2h_both: Option<Marked<BytesPerSecond>>,
    /// Host to device while the other direction is busy; absent: as alone.
    #[serde(rename = "h2d_both_bytes_per_s", skip_serializing_if = "Option::is_none")]
    pub h2d_both: Option<Marked<BytesPerSecond>>,
    /// What the root complex carries in all, both directions and all devices below it, drives included; absent: never the limit.
    #[serde(rename = "shared_bytes_per_s", skip_serializing_if = "Option::is_none")]
    pub shared: Option<Marked<BytesPerSecond>>,
    /// Between accelerators, each direction of one of them (NVLink); absent: there is no such link.
    #[serde(rename = "peer_bytes_per_s", skip_serializing_if = "Option::is_none")]
    pub peer: Option<Marked<BytesPerSecond>>,
}

impl Links {
    /// Links known only alone.
    pub fn alone(
        d2h: Marked<BytesPerSecond>,
        h2d: Marked<BytesPerSecond>,
        nvme_write: Marked<BytesPerSecond>,
        nvme_read: Marked<BytesPerSecond>,
    ) -> Self {
        Links { d2h, h2d, nvme_write, nvme_read, d2h_both: None, h2d_both: None, shared: None, peer: None }
    }

    /// The plain rates.
    pub fn rates(&self) -> LinkRates {
        let value = |marked: &Option<Marked<BytesPerSecond>>| marked.as_ref().map(|m| m.value);
        LinkRates {
            d2h: self.d2h.value,
            h2d: self.h2d.value,
            nvme_write: self.nvme_write.value,
            nvme_read: self.nvme_read.value,
            contention: Contention {
                d2h_both: value(&self.d2h_both),
                h2d_both: value(&self.h2d_both),
                shared: value(&self.shared),
            },
        }
    }
}

/// The NVMe drives that hold spilled bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Drives {
    /// Bytes are spread over all of them; otherwise the first takes everything.
    pub striped: bool,
    /// The drives.
    #[serde(rename = "list")]
    pub each: Vec<Drive>,
}

/// One NVMe drive.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Drive {
    /// A name for people.
    pub name: String,
    /// Sequential writes.
    #[serde(rename = "write_bytes_per_s")]
    pub write: Marked<BytesPerSecond>,
    /// Sequential reads.
    #[serde(rename = "read_bytes_per_s")]
    pub read: Marked<BytesPerSecond>,
}

impl Drives {
    /// Writes and reads of all drives in use: equal stripes end with the slowest drive, so `n` drives move `n` times its rate.
    fn together(&self) -> Option<[Marked<BytesPerSecond>; 2]> {
        let used = if self.striped { &self.each[..] } else { self.each.get(..1)? };
        let slowest = |rate: fn(&Drive) -> &Marked<BytesPerSecond>| {
            let slowest = used.iter().map(rate).min_by(|a, b| a.value.get().total_cmp(&b.value.get()))?;
            let value = BytesPerSecond(slowest.value.get() * used.len() as f64);
            Some(Marked { value, by: format!("{} drive(s): {}", used.len(), slowest.by), ..slowest.clone() })
        };
        Some([slowest(|d| &d.write)?, slowest(|d| &d.read)?])
    }
}

/// What the accelerator computes: from it the times of layers that were never measured follow.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compute {
    /// Dense matrix products in the element type of the activations, at their best, operations a second.
    pub matmul_flops_per_s: Marked<f64>,
    /// The share of that which a layer's own products reach, above zero and at most one.
    pub matmul_efficiency: Marked<f64>,
    /// Memory bandwidth that element-wise kernels reach.
    #[serde(rename = "hbm_bytes_per_s")]
    pub hbm: Marked<BytesPerSecond>,
}

/// Times of one micro-batch of one model and workload, in milliseconds; the lists have an entry a layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepTimes {
    /// The model and workload they hold for, in words.
    pub workload: String,
    /// Each layer forward, without saving.
    pub forward_ms: Marked<Vec<f64>>,
    /// Each layer forward that keeps its internals: for them and for its output.
    pub saving_forward_ms: Marked<Vec<f64>>,
    /// Each layer forward once more before its backward, for its internals alone. Where a profile does not say: as the one before.
    pub internals_forward_ms: Marked<Vec<f64>>,
    /// Each layer backward alone, its internals at hand.
    pub backward_ms: Marked<Vec<f64>>,
    /// Making boundary 0.
    pub prologue_ms: Marked<f64>,
    /// Backward of that.
    pub prologue_backward_ms: Marked<f64>,
    /// Final norm, head and loss, forward and backward.
    pub epilogue_ms: Marked<f64>,
}

/// A machine, and where wanted the times of one model on it.
#[derive(Clone, Debug, PartialEq)]
pub struct HardwareProfile {
    /// A name for people.
    pub name: String,
    /// Capacities.
    pub tiers: Tiers,
    /// Transfer rates.
    pub links: Links,
    /// NVMe drives, where they are listed.
    pub drives: Option<Drives>,
    /// Speed of arithmetic, where it is known.
    pub compute: Option<Compute>,
    /// Times of the layers, where they were taken.
    pub times: Option<StepTimes>,
    /// Parameters the optimizer updates a second, state streamed, where known.
    pub optimizer_elements_per_s: Option<Marked<f64>>,
    /// The part of that time which its commit takes, where known.
    pub optimizer_commit_share: Option<Marked<f64>>,
}

impl HardwareProfile {
    /// Costs of the layers and links for a planner; `None` where the profile has no times.
    pub fn costs(&self) -> Option<StepCosts> {
        let times = self.times.as_ref()?;
        let list = |marked: &Marked<Vec<f64>>| marked.value.iter().map(|&ms| Seconds::from_ms(ms)).collect();
        Some(StepCosts {
            prologue: Seconds::from_ms(times.prologue_ms.value),
            forward: list(&times.forward_ms),
            saving_forward: list(&times.saving_forward_ms),
            internals_forward: list(&times.internals_forward_ms),
            backward: list(&times.backward_ms),
            epilogue: Seconds::from_ms(times.epilogue_ms.value),
            prologue_backward: Seconds::from_ms(times.prologue_backward_ms.value),
            links: self.links.rates(),
        })
    }

    /// The profile as JSON text, in the form [`from_json`](Self::from_json) reads.
    pub fn to_json(&self) -> String {
        let value = serde_json::json!({
            "version": PROFILE_VERSION,
            "name": self.name,
            "tiers": self.tiers,
            "links": self.links,
            "drives": self.drives,
            "compute": self.compute,
            "times": self.times,
            "optimizer_elements_per_s": self.optimizer_elements_per_s,
            "optimizer_commit_share": self.optimizer_commit_share,
        });
        format!("{value:#}\n")
    }

    /// Reads a profile.
    ///
    /// # Errors
    /// Where the text is not JSON, has another version, a key nobody knows, or a value that is absent, of the wrong
    /// kind, negative, or without its origin; the message names the key path.
    pub fn from_json(text: &str) -> Result<Self, Error> {
        let value = parse(text).map_err(|source| Error::Json { document: DOCUMENT, source })?;
        let root = Object::root(DOCUMENT, &value)?;
        match need(&root, "version", root.get("version"))?.as_u64() {
            Some(1 | PROFILE_VERSION) => {}
            _ => {
                let problem = format!(
                    "must be 1 or {PROFILE_VERSION}, the formats this version reads: make it again with `probe`"
                );
                return Err(root.error("version", problem));
            }
        }
        root.only(&[
            "version",
            "name",
            "tiers",
            "links",
            "drives",
            "compute",
            "times",
            "optimizer_elements_per_s",
            "optimizer_commit_share",
        ])?;
        let above_zero = |v: &Value| v.as_f64().filter(|&v| v > 0.0).ok_or("a number above 0");
        let share = |v: &Value| v.as_f64().filter(|v| (0.0..=1.0).contains(v)).ok_or("a share from 0 to 1");
        let drives = root.object("drives")?.map(|o| drives(&o)).transpose()?;
        Ok(Self {
            name: need(&root, "name", root.string("name")?)?.to_owned(),
            tiers: root.object("tiers")?.map_or(Ok(Tiers::default()), |o| tiers(&o))?,
            links: links(&need(&root, "links", root.object("links")?)?, drives.as_ref())?,
            drives,
            compute: root.object("compute")?.map(|o| compute(&o)).transpose()?,
            times: root.object("times")?.map(|o| times(&o)).transpose()?,
            optimizer_elements_per_s: marked(&root, "optimizer_elements_per_s", above_zero)?,
            optimizer_commit_share: marked(&root, "optimizer_commit_share", share)?,
        })
    }
}

fn need<T>(object: &Object<'_>, key: &str, value: Option<T>) -> Result<T, Error> {
    value.ok_or_else(|| object.absent(key))
}

fn tiers(object: &Object<'_>) -> Result<Tiers, Error> {
    object.only(&["hbm_bytes", "host_bytes", "nvme_bytes"])?;
    let bytes = |value: &Value| whole(value).map(Bytes).ok_or("a whole number of bytes");
    Ok(Tiers {
        hbm: marked(object, "hbm_bytes", bytes)?,
        host: marked(object, "host_bytes", bytes)?,
        nvme: marked(object, "nvme_bytes", bytes)?,
    })
}

fn links(object: &Object<'_>, drives: Option<&Drives>) -> Result<Links, Error> {
    const KEYS: [&str; 8] = [
        "d2h_bytes_per_s",
        "h2d_bytes_per_s",
        "nvme_write_bytes_per_s",
        "nvme_read_bytes_per_s",
        "d2h_both_bytes_per_s",
        "h2d_both_bytes_per_s",
        "shared_bytes_per_s",
        "peer_bytes_per_s",
    ];
    object.only(&KEYS)?;
    let known = |key| marked(object, key, |v| rate(v).map(BytesPerSecond));
    let link = |key| need(object, key, known(key)?);
    let [write, read] = drives.and_then(Drives::together).map_or([None, None], |both| both.map(Some));
    let nvme =
        |key, from_drives: Option<Marked<BytesPerSecond>>| need(object, key, known(key)?.or(from_drives));
    Ok(Links {
        d2h: link(KEYS[0])?,
        h2d: link(KEYS[1])?,
        nvme_write: nvme(KEYS[2], write)?,
        nvme_read: nvme(KEYS[3], read)?,
        d2h_both: known(KEYS[4])?,
        h2d_both: known(KEYS[5])?,
        shared: known(KEYS[6])?,
        peer: known(KEYS[7])?,
    })
}

fn drives(object: &Object<'_>) -> Result<Drives, Error> {
    object.only(&["striped", "list"])?;
    let striped = need(object, "striped", object.bool("striped")?)?;
    let list = need(object, "list", object.list("list")?)?;
    if list.is_empty() {
        return Err(object.error("list", "is empty: list a drive, or leave `drives` out"));
    }
    let each =
        (0..list.len()).map(|i| drive(&object.entry("list", i, &list[i])?)).collect::<Result<_, _>>()?;
    Ok(Drives { striped, each })
}

fn drive(object: &Object<'_>) -> Result<Drive, Error> {
    object.only(&["name", "write_bytes_per_s", "read_bytes_per_s"])?;
    let link = |key| need(object, key, marked(object, key, |v| rate(v).map(BytesPerSecond))?);
    Ok(Drive {
        name: need(object, "name", object.string("name")?)?.to_owned(),
        write: link("write_bytes_per_s")?,
        read: link("read_bytes_per_s")?,
    })
}

fn compute(object: &Object<'_>) -> Result<Compute, Error> {
    object.only(&["matmul_flops_per_s", "matmul_efficiency", "hbm_bytes_per_s"])?;
    let positive = |v: &Value| v.as_f64().filter(|&v| v > 0.0).ok_or("a number above zero");
    let share = |v: &Value| v.as_f64().filter(|&v| v > 0.0 && v <= 1.0).ok_or("above zero and at most one");
    let value = |key| need(object, key, marked(object, key, positive)?);
    let hbm = value("hbm_bytes_per_s")?;
    let efficiency = "matmul_efficiency";
    Ok(Compute {
        matmul_flops_per_s: value("matmul_flops_per_s")?,
        matmul_efficiency: need(object, efficiency, marked(object, efficiency, share)?)?,
        hbm: Marked { value: BytesPerSecond(hbm.value), source: hbm.source, by: hbm.by, when: hbm.when },
    })
}

fn times(object: &Object<'_>) -> Result<StepTimes, Error> {
    object.only(&[
        "workload",
        "forward_ms",
        "saving_forward_ms",
        "internals_forward_ms",
        "backward_ms",
        "prologue_ms",
        "prologue_backward_ms",
        "epilogue_ms",
    ])?;
    let one = |key| need(object, key, marked(object, key, rate)?);
    let known = |key| {
        let read = |value: &Value| {
            let entries = value.as_array().ok_or("a list of times")?;
            entries.iter().map(rate).collect::<Result<Vec<f64>, _>>()
        };
        marked(object, key, read)
    };
    let list = |key| need(object, key, known(key)?);
    let forward_ms = list("forward_ms")?;
    let same_length = |key, marked: Marked<Vec<f64>>| {
        let (found, wanted) = (marked.value.len(), forward_ms.value.len());
        if found == wanted {
            Ok(marked)
        } else {
            Err(object.error(key, format!("has {found} layers, but forward_ms has {wanted}")))
        }
    };
    let saving_forward_ms = same_length("saving_forward_ms", list("saving_forward_ms")?)?;
    let internals = "internals_forward_ms";
    let internals_forward_ms =
        known(internals)?.map_or_else(|| Ok(saving_forward_ms.clone()), |own| same_length(internals, own))?;
    Ok(StepTimes {
        workload: need(object, "workload", object.string("workload")?)?.to_owned(),
        saving_forward_ms,
        internals_forward_ms,
        backward_ms: same_length("backward_ms", list("backward_ms")?)?,
        prologue_ms: one("prologue_ms")?,
        prologue_backward_ms: one("prologue_backward_ms")?,
        epilogue_ms: one("epilogue_ms")?,
        forward_ms,
    })
}

/// A number that is not negative. JSON has no other numbers than finite ones.
fn rate(value: &Value) -> Result<f64, &'static str> {
    value.as_f64().filter(|&v| v >= 0.0).ok_or("a number that is not negative")
}

/// The value under `key` with its origin, where there is one; `read` says what it wanted where it fails.
fn marked<T>(
    object: &Object<'_>,
    key: &str,
    read: impl Fn(&Value) -> Result<T, &'static str>,
) -> Result<Option<Marked<T>>, Error> {
    let Some(entry) = object.object(key)? else { return Ok(None) };
    entry.only(&["value", "source", "by", "when"])?;
    let value = need(&entry, "value", entry.get("value"))?;
    let value = read(value).map_err(|wanted| entry.error("value", format!("must be {wanted}")))?;
    let source = match need(&entry, "source", entry.string("source")?)? {
        "measured" => Source::Measured,
        "assumed" => Source::Assumed,
        other => {
            return Err(entry.error("source", format!("is {other:?}; write \"measured\" or \"assumed\"")));
        }
    };
    let by = need(&entry, "by", entry.string("by")?)?.to_owned();
    let when = entry.string("when")?.map(str::to_owned);
    if source == Source::Measured && when.is_none() {
        return Err(entry.error("when", "is absent: a measured value says when it was taken"));
    }
    Ok(Some(Marked { value, source, by, when }))
}
