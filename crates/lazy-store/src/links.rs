//! Copies between neighbouring tiers, and the measured rates of the links.

use std::sync::Arc;
use std::time::Instant;

use lazy_model::{Bytes, BytesPerSecond, Lane, Tier};

use crate::error::StoreError;
use crate::io::Op;
use crate::lanes::Kind;
use crate::spill::Spill;
use crate::store::{Event, Extent, Store, Submission};
use crate::work::{Way, Work};

/// Copies timed for each link; the median of them is reported.
const PROBE_COPIES: usize = 5;

/// Measured rates of the links that a store has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredRates {
    /// Host to device.
    pub h2d: BytesPerSecond,
    /// Device to host.
    pub d2h: BytesPerSecond,
    /// Writes to NVMe, where the store has it.
    pub nvme_write: Option<BytesPerSecond>,
    /// Reads from NVMe, where the store has it.
    pub nvme_read: Option<BytesPerSecond>,
}

/// The lane that copies from one tier to another.
fn link(from: Tier, to: Tier) -> Option<Lane> {
    match (from, to) {
        (Tier::Hbm, Tier::Host) => Some(Lane::D2h),
        (Tier::Host, Tier::Hbm) => Some(Lane::H2d),
        (Tier::Host, Tier::Nvme) => Some(Lane::NvmeWrite),
        (Tier::Nvme, Tier::Host) => Some(Lane::NvmeRead),
        // Through the staging ring, where the store has one.
        (Tier::Hbm, Tier::Nvme) => Some(Lane::NvmeWrite),
        (Tier::Nvme, Tier::Hbm) => Some(Lane::NvmeRead),
        _ => None,
    }
}

impl Store {
    /// Queues a copy of all of `src` to `dst`, two equally long extents of different tiers, on the lane of that link. Copies
    /// between HBM and NVMe pass through the staging ring ([`NvmeOptions::staging`](crate::NvmeOptions::staging)).
    ///
    /// # Errors
    ///
    /// [`StoreError::NoLink`], [`StoreError::NoStaging`], [`StoreError::CopyLength`], and those of [`Store::submit`].
    pub fn copy(
        &self,
        name: impl Into<Arc<str>>,
        src: &Extent,
        dst: &Extent,
        after: &[Event],
    ) -> Result<Event, StoreError> {
        let (name, from, to) = (name.into(), src.tier(), dst.tier());
        let Some(lane) = link(from, to) else {
            return Err(StoreError::NoLink { task: name.to_string(), from, to });
        };
        if src.bytes() != dst.bytes() {
            let (from, to) = (src.bytes(), dst.bytes());
            return Err(StoreError::CopyLength { task: name.to_string(), from, to });
        }
        let (reads, writes) = ([src], [dst]);
        let task = Submission { reads: &reads, writes: &writes, after, bytes: src.bytes(), lane, name };
        match (lane, &self.inner().spill) {
            (Lane::NvmeWrite | Lane::NvmeRead, Some(spill)) => {
                let way = self.way(from, to, spill)?;
                let (op, offset) = match lane {
                    Lane::NvmeWrite => (Op::Write, dst.offset()),
                    _ => (Op::Read, src.offset()),
                };
                self.enqueue(task, Kind::Host, Work::Spill { op, offset, way })
            }
            _ => {
                let kind = if self.inner().device.is_some() { Kind::Stream } else { Kind::Host };
                self.enqueue(task, kind, Work::Copy)
            }
        }
    }

    /// How bytes move between memory and the spill files.
    fn way(&self, from: Tier, to: Tier, spill: &Spill) -> Result<Way, StoreError> {
        if ![from, to].contains(&Tier::Hbm) {
            Ok(Way::Host)
        } else if self.inner().device.is_some() && spill.moves_device_memory() {
            Ok(Way::Device { sealed: spill.seals_device_memory() })
        } else if spill.staging() > Bytes::ZERO {
            Ok(Way::Staged)
        } else {
            Err(StoreError::NoStaging)
        }
    }

    /// Measures every link with copies of `bytes` over the store's own queues: the median rate of a few, one at a time.
    /// Needs that much free room in every tier, and belongs outside a step. Where the spill file is buffered, reads come
    /// from the page cache, and the rate is that of memory.
    ///
    /// # Errors
    ///
    /// [`StoreError::OutOfBudget`] where a tier has no room, and whatever a copy reports.
    pub fn probe_links(&self, bytes: Bytes) -> Result<MeasuredRates, StoreError> {
        let hbm = self.reserve(Tier::Hbm, bytes)?;
        let host = self.reserve(Tier::Host, bytes)?;
        let fill =
            Submission { writes: &[&host], ..Submission::new(Lane::Compute, "fill for the link probe") };
        self.submit(fill, |access| {
            // Not zeros: some drives store those without writing them.
            access.write(0).iter_mut().enumerate().for_each(|(i, byte)| *byte = (i % 251) as u8);
            Ok(())
        })?;
        // The first copy touches the pages, and is not timed.
        self.copy("link probe", &host, &hbm, &[])?.wait();
        let d2h = self.rate(&hbm, &host)?;
        let h2d = self.rate(&host, &hbm)?;
        let (mut nvme_write, mut nvme_read) = (None, None);
        if self.nvme_mode().is_some() {
            let nvme = self.reserve(Tier::Nvme, bytes)?;
            nvme_write = Some(self.rate(&host, &nvme)?);
            nvme_read = Some(self.rate(&nvme, &host)?);
        }
        Ok(MeasuredRates { h2d, d2h, nvme_write, nvme_read })
    }

    fn rate(&self, src: &Extent, dst: &Extent) -> Result<BytesPerSecond, StoreError> {
        let mut times = Vec::with_capacity(PROBE_COPIES);
        for _ in 0..PROBE_COPIES {
            let start = Instant::now();
            self.copy("link probe", src, dst, &[])?.wait();
            times.push(start.elapsed().as_secs_f64());
        }
        self.synchronize()?;
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        Ok(BytesPerSecond(src.bytes().get() as f64 / median.max(f64::MIN_POSITIVE)))
    }
}
