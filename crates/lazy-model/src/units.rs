//! Units as types: a byte count cannot be added to a time, a boundary index cannot stand for a layer index.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul, Sub};

use serde::{Deserialize, Serialize};

/// A number of bytes. Sums and products stop at the largest count, which no budget holds, so that absurd sizes are refused as too
/// large and never wrap around to small ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Bytes = Bytes(0);

    /// `mib` binary megabytes (2^20 bytes).
    pub const fn from_mib(mib: u64) -> Self {
        Bytes(mib.saturating_mul(1 << 20))
    }

    /// `gib` binary gigabytes (2^30 bytes), rounded down to a whole byte. Negative values and NaN give zero.
    pub fn from_gib(gib: f64) -> Self {
        Bytes((gib * (1u64 << 30) as f64) as u64)
    }

    /// The plain count.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The count in units of 2^30 bytes.
    pub fn as_gib(self) -> f64 {
        self.0 as f64 / (1u64 << 30) as f64
    }

    /// The count in units of 2^20 bytes.
    pub fn as_mib(self) -> f64 {
        self.0 as f64 / (1u64 << 20) as f64
    }

    /// The count in units of 2^20 bytes, rounded up to three digits: a budget of that size holds these bytes.
    pub fn mib_rounded_up(self) -> f64 {
        const STEPS: u128 = 1000;
        (u128::from(self.0) * STEPS).div_ceil(1 << 20) as f64 / STEPS as f64
    }

    /// `self - other`, or zero where that would be negative.
    pub const fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// The next multiple of `alignment` (which must not be zero); the largest count where there is none.
    pub const fn align_up(self, alignment: u64) -> Bytes {
        Bytes(self.0.div_ceil(alignment).saturating_mul(alignment))
    }

    /// The larger of the two.
    pub fn max(self, other: Bytes) -> Bytes {
        Ord::max(self, other)
    }
}

impl fmt::Display for Bytes {
    /// Capacities print in binary units: GiB from one GiB on, MiB and KiB below.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.0 as f64;
        if self.0 >= 1 << 30 {
            write!(f, "{:.3} GiB", n / (1u64 << 30) as f64)
        } else if self.0 >= 1 << 20 {
            write!(f, "{:.2} MiB", n / (1u64 << 20) as f64)
        } else if self.0 >= 1 << 10 {
            write!(f, "{:.1} KiB", n / 1024.0)
        } else {
            write!(f, "{} B", self.0)
        }
    }
}

impl Add for Bytes {
    type Output = Bytes;
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Bytes) {
        *self = *self + other;
    }
}

impl Sub for Bytes {
    type Output = Bytes;
    fn sub(self, other: Bytes) -> Bytes {
        Bytes(self.0 - other.0)
    }
}

impl Mul<u64> for Bytes {
    type Output = Bytes;
    fn mul(self, factor: u64) -> Bytes {
        Bytes(self.0.saturating_mul(factor))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(iter: I) -> Bytes {
        iter.fold(Bytes::ZERO, Add::add)
    }
}

/// A duration in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Seconds(pub f64);

impl Seconds {
    /// No time.
    pub const ZERO: Seconds = Seconds(0.0);

    /// From milliseconds.
    pub fn from_ms(ms: f64) -> Self {
        Seconds(ms / 1e3)
    }

    /// In milliseconds.
    pub fn as_ms(self) -> f64 {
        self.0 * 1e3
    }

    /// The plain value.
    pub const fn get(self) -> f64 {
        self.0
    }
}

impl Add for Seconds {
    type Output = Seconds;
    fn add(self, other: Seconds) -> Seconds {
        Seconds(self.0 + other.0)
    }
}

impl AddAssign for Seconds {
    fn add_assign(&mut self, other: Seconds) {
        self.0 += other.0;
    }
}

impl Sub for Seconds {
    type Output = Seconds;
    fn sub(self, other: Seconds) -> Seconds {
        Seconds(self.0 - other.0)
    }
}

impl Sum for Seconds {
    fn sum<I: Iterator<Item = Seconds>>(iter: I) -> Seconds {
        Seconds(iter.map(|s| s.0).sum())
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.abs() >= 1.0 { write!(f, "{:.3} s", self.0) } else { write!(f, "{:.2} ms", self.0 * 1e3) }
    }
}

/// A transfer rate in bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BytesPerSecond(pub f64);

impl BytesPerSecond {
    /// From decimal gigabytes (10^9 bytes) per second.
    pub fn from_gb(gb: f64) -> Self {
        BytesPerSecond(gb * 1e9)
    }

    /// In decimal gigabytes (10^9 bytes) per second.
    pub fn as_gb(self) -> f64 {
        self.0 / 1e9
    }

    /// The plain value.
    pub const fn get(self) -> f64 {
        self.0
    }

    /// Time to move `bytes` at this rate; infinite at rate zero unless there is nothing to move.
    pub fn time(self, bytes: Bytes) -> Seconds {
        if bytes == Bytes::ZERO { Seconds::ZERO } else { Seconds(bytes.0 as f64 / self.0) }
    }
}

impl fmt::Display for BytesPerSecond {
    /// Rates print in decimal GB/s.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} GB/s", self.as_gb())
    }
}

/// A place where bytes can live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The accelerator's own memory.
    Hbm,
    /// Pinned host RAM.
    Host,
    /// Files on NVMe drives.
    Nvme,
}

impl Tier {
    /// All tiers, fastest first.
    pub const ALL: [Tier; 3] = [Tier::Hbm, Tier::Host, Tier::Nvme];

    /// The name used in JSON, flags and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Tier::Hbm => "hbm",
            Tier::Host => "host",
            Tier::Nvme => "nvme",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What happens to the activation at a layer boundary between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Stays in HBM.
    Hbm,
    /// Goes to pinned host RAM and comes back.
    Host,
    /// Goes to NVMe and comes back.
    Nvme,
    /// Is dropped and recomputed from the nearest saved boundary below.
    Recompute,
}

impl Placement {
    /// Letter of the placement strings: `G` HBM, `C` host, `N` NVMe, `-` recompute.
    pub const fn letter(self) -> char {
        match self {
            Placement::Hbm => 'G',
            Placement::Host => 'C',
            Placement::Nvme => 'N',
            Placement::Recompute => '-',
        }
    }

    /// The inverse of [`Placement::letter`].
    pub const fn from_letter(letter: char) -> Option<Placement> {
        match letter {
            'G' => Some(Placement::Hbm),
            'C' => Some(Placement::Host),
            'N' => Some(Placement::Nvme),
            '-' => Some(Placement::Recompute),
            _ => None,
        }
    }

    /// The tier that holds the boundary between forward and backward, if any does.
    pub const fn tier(self) -> Option<Tier> {
        match self {
            Placement::Hbm => Some(Tier::Hbm),
            Placement::Host => Some(Tier::Host),
            Placement::Nvme => Some(Tier::Nvme),
            Placement::Recompute => None,
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.tier().map_or("recompute", Tier::name))
    }
}

macro_rules! index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub usize);

        impl $name {
            /// Position in a slice that is indexed by this kind.
            pub const fn get(self) -> usize {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

index! {
    /// A layer, `0..N`. Layer `l` reads boundary `l` and writes boundary `l + 1`.
    LayerIndex
}
index! {
    /// A boundary between layers, `0..=N`.
    BoundaryIndex
}

impl LayerIndex {
    /// The boundary this layer reads.
    pub const fn input(self) -> BoundaryIndex {
        BoundaryIndex(self.0)
    }

    /// The boundary this layer writes.
    pub const fn output(self) -> BoundaryIndex {
        BoundaryIndex(self.0 + 1)
    }
}
