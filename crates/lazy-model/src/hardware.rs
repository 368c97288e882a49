//! What a machine can hold, move and compute: the hardware profile and its JSON.
//!
//! ```json
//! {
//!   "version": 1,
//!   "name": "workstation",
//!   "tiers": { "hbm_bytes": {"value": 25769803776, "source": "assumed", "by": "data sheet"} },
//!   "links": {
//!     "d2h_bytes_per_s": {"value": 2.4e10, "source": "measured", "by": "probe", "when": "2026-11-29"},
//!     "h2d_bytes_per_s": {"value": 2.4e10, "source": "measured", "by": "probe", "when": "2026-11-29"},
//!     "nvme_write_bytes_per_s": {"value": 3e9, "source": "assumed", "by": "data sheet"},
//!     "nvme_read_bytes_per_s": {"value": 5e9, "source": "assumed", "by": "data sheet"}
//!   },
//!   "times": null,
//!   "optimizer_elements_per_s": null
//! }
//! ```
//!
//! Every value says whether it was measured (by what, when) or assumed (by whom). Capacities, times and the optimizer's
//! rate may be absent; rates of the links may not.

use serde::Serialize;
use serde_json::Value;

use crate::error::Error;
use crate::json::Object;
use crate::timeline::{LinkRates, StepCosts};
use crate::units::{Bytes, BytesPerSecond, Seconds, Tier};

/// The profile format this version reads and writes.
pub const PROFILE_VERSION: u64 = 1;

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

/// Rates of the links, each alone.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Links {
    /// Device to host.
    #[serde(rename = "d2h_bytes_per_s")]
    pub d2h: Marked<BytesPerSecond>,
    /// Host to device.
    #[serde(rename = "h2d_bytes_per_s")]
    pub h2d: Marked<BytesPerSecond>,
    /// Writes to NVMe.
    #[serde(rename = "nvme_write_bytes_per_s")]
    pub nvme_write: Marked<BytesPerSecond>,
    /// Reads from NVMe.
    #[serde(rename = "nvme_read_bytes_per_s")]
    pub nvme_read: Marked<BytesPerSecond>,
}

impl Links {
    /// The plain rates.
    pub fn rates(&self) -> LinkRates {
        LinkRates {
            d2h: self.d2h.value,
            h2d: self.h2d.value,
            nvme_write: self.nvme_write.value,
            nvme_read: self.nvme_read.value,
        }
    }
}

/// Times of one micro-batch of one model and workload, in milliseconds; the lists have an entry a layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepTimes {
    /// The model and workload they hold for, in words.
    pub workload: String,
    /// Each layer forward, without saving.
    pub forward_ms: Marked<Vec<f64>>,
    /// Each layer forward, saving its internals.
    pub saving_forward_ms: Marked<Vec<f64>>,
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
    /// Times of the layers, where they were taken.
    pub times: Option<StepTimes>,
    /// Parameters the optimizer updates a second, state streamed, where known.
    pub optimizer_elements_per_s: Option<Marked<f64>>,
}

impl HardwareProfile {
    /// The names [`preset`](Self::preset) knows.
    pub const PRESETS: [&str; 2] = ["reference", "h200"];

    /// A profile that ships with the crate.
    ///
    /// - `reference`: the machine of the published placement runs: 12 GB/s each way between HBM and host, NVMe 2.83
    ///   read and 3.35 write, a cap of 70 GiB.
    /// - `h200`: one H200 on PCIe Gen5 x16 in a virtual machine with a virtio disk.
    pub fn preset(name: &str) -> Option<Self> {
        let profile = |by: &str, hbm: Bytes, host: Option<Bytes>, [h2d, d2h, write, read]: [f64; 4]| {
            let link = |gb| Marked::assumed(BytesPerSecond::from_gb(gb), by);
            let room = |bytes| Marked::assumed(bytes, by);
            Self {
                name: name.into(),
                tiers: Tiers { hbm: Some(room(hbm)), host: host.map(room), nvme: None },
                links: Links {
                    d2h: link(d2h),
                    h2d: link(h2d),
                    nvme_write: link(write),
                    nvme_read: link(read),
                },
                times: None,
                optimizer_elements_per_s: None,
            }
        };
        match name {
            "reference" => Some(profile(
                "published reference run",
                Bytes::from_gib(70.0),
                None,
                [12.0, 12.0, 3.35, 2.83],
            )),
            "h200" => Some(profile(
                "one H200 virtual machine",
                Bytes::from_gib(139.0),
                Some(Bytes::from_gib(125.0)),
                [51.0, 55.0, 1.9, 1.1],
            )),
            _ => None,
        }
    }

    /// Costs of the layers and links for a planner; `None` where the profile has no times.
    pub fn costs(&self) -> Option<StepCosts> {
        let times = self.times.as_ref()?;
        let list = |marked: &Marked<Vec<f64>>| marked.value.iter().map(|&ms| Seconds::from_ms(ms)).collect();
        Some(StepCosts {
            prologue: Seconds::from_ms(times.prologue_ms.value),
            forward: list(&times.forward_ms),
            saving_forward: list(&times.saving_forward_ms),
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
            "times": self.times,
            "optimizer_elements_per_s": self.optimizer_elements_per_s,
        });
        format!("{value:#}\n")
    }

    /// Reads a profile.
    ///
    /// # Errors
    /// Where the text is not JSON, has another version, a key nobody knows, or a value that is absent, of the wrong
    /// kind, negative, or without its origin; the message names the key path.
    pub fn from_json(text: &str) -> Result<Self, Error> {
        let value: Value =
            serde_json::from_str(text).map_err(|source| Error::Json { document: DOCUMENT, source })?;
        let root = Object::root(DOCUMENT, &value)?;
        match need(&root, "version", root.get("version"))?.as_u64() {
            Some(PROFILE_VERSION) => {}
            _ => {
                let problem = format!("must be {PROFILE_VERSION}, the format this version reads");
                return Err(root.error("version", problem));
            }
        }
        root.only(&["version", "name", "tiers", "links", "times", "optimizer_elements_per_s"])?;
        Ok(Self {
            name: need(&root, "name", root.string("name")?)?.to_owned(),
            tiers: root.object("tiers")?.map_or(Ok(Tiers::default()), |o| tiers(&o))?,
            links: links(&need(&root, "links", root.object("links")?)?)?,
            times: root.object("times")?.map(|o| times(&o)).transpose()?,
            optimizer_elements_per_s: marked(&root, "optimizer_elements_per_s", rate)?,
        })
    }
}

fn need<T>(object: &Object<'_>, key: &str, value: Option<T>) -> Result<T, Error> {
    value.ok_or_else(|| object.absent(key))
}

fn tiers(object: &Object<'_>) -> Result<Tiers, Error> {
    object.only(&["hbm_bytes", "host_bytes", "nvme_bytes"])?;
    let bytes = |value: &Value| value.as_u64().map(Bytes).ok_or("a whole number of bytes");
    Ok(Tiers {
        hbm: marked(object, "hbm_bytes", bytes)?,
        host: marked(object, "host_bytes", bytes)?,
        nvme: marked(object, "nvme_bytes", bytes)?,
    })
}

fn links(object: &Object<'_>) -> Result<Links, Error> {
    const KEYS: [&str; 4] =
        ["d2h_bytes_per_s", "h2d_bytes_per_s", "nvme_write_bytes_per_s", "nvme_read_bytes_per_s"];
    object.only(&KEYS)?;
    let link = |key| need(object, key, marked(object, key, |v| rate(v).map(BytesPerSecond))?);
    Ok(Links {
        d2h: link(KEYS[0])?,
        h2d: link(KEYS[1])?,
        nvme_write: link(KEYS[2])?,
        nvme_read: link(KEYS[3])?,
    })
}

fn times(object: &Object<'_>) -> Result<StepTimes, Error> {
    object.only(&[
        "workload",
        "forward_ms",
        "saving_forward_ms",
        "backward_ms",
        "prologue_ms",
        "prologue_backward_ms",
        "epilogue_ms",
    ])?;
    let one = |key| need(object, key, marked(object, key, rate)?);
    let list = |key| {
        let read = |value: &Value| {
            let entries = value.as_array().ok_or("a list of times")?;
            entries.iter().map(rate).collect::<Result<Vec<f64>, _>>()
        };
        need(object, key, marked(object, key, read)?)
    };
    let forward_ms = list("forward_ms")?;
    let same_length = |key, marked: Marked<Vec<f64>>| {
        let (found, wanted) = (marked.value.len(), forward_ms.value.len());
        if found == wanted {
            Ok(marked)
        } else {
            Err(object.error(key, format!("has {found} layers, but forward_ms has {wanted}")))
        }
    };
    Ok(StepTimes {
        workload: need(object, "workload", object.string("workload")?)?.to_owned(),
        saving_forward_ms: same_length("saving_forward_ms", list("saving_forward_ms")?)?,
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
