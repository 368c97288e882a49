//! Copies between neighbouring tiers, and the measured rates of the links.

use std::time::Instant;

use lazy_model::{Bytes, BytesPerSecond, Lane, Tier};

use crate::device::DeviceCopy;
use crate::error::StoreError;
use crate::io::Op;
use crate::lanes::Kind;
use crate::spill::HostCopy;
use crate::store::{Event, Extent, Store, Submission};

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
        name: impl Into<String>,
        src: &Extent,
        dst: &Extent,
        after: &[Event],
    ) -> Result<Event, StoreError> {
        let (name, from, to) = (name.into(), src.tier(), dst.tier());
        let Some(lane) = link(from, to) else { return Err(StoreError::NoLink { task: name, from, to }) };
        if src.bytes() != dst.bytes() {
            return Err(StoreError::CopyLength { task: name, from: src.bytes(), to: dst.bytes() });
        }
        let (reads, writes) = ([src], [dst]);
        let task = Submission { reads: &reads, writes: &writes, after, bytes: src.bytes(), lane, name };
        let spill = self.inner().spill.clone();
        let in_place =
            self.inner().device.is_some() && spill.as_ref().is_some_and(|spill| spill.moves_device_memory());
        if [from, to].contains(&Tier::Hbm)
            && !in_place
            && spill.as_ref().is_some_and(|s| [from, to].contains(&Tier::Nvme) && s.staging() == Bytes::ZERO)
        {
            return Err(StoreError::NoStaging);
        }
        match (lane, spill) {
            (Lane::NvmeWrite, Some(spill)) if from == Tier::Hbm && in_place => {
                let offset = dst.offset();
                self.enqueue(task, Kind::Host, move |views| {
                    // SAFETY: the extent is held by this task, and what it waited for has completed.
                    Ok(unsafe { spill.write_device(offset, views.reads[0].window()) }?)
                })
            }
            (Lane::NvmeRead, Some(spill)) if to == Tier::Hbm && in_place => {
                let offset = src.offset();
                self.enqueue(task, Kind::Host, move |views| {
                    // SAFETY: as above.
                    Ok(unsafe { spill.read_device(offset, views.writes[0].window()) }?)
                })
            }
            (Lane::NvmeWrite, Some(spill)) if from == Tier::Hbm => {
                let (offset, len) = (dst.offset(), dst.bytes().get());
                match self.inner().device.clone() {
                    None => self.enqueue_access(task, move |access| {
                        Ok(spill.write_staged(offset, len, &mut HostCopy::Out(access.read(0)))?)
                    }),
                    Some(device) => self.enqueue(task, Kind::Host, move |views| {
                        let stream = device.stream(lane);
                        let mut copy = DeviceCopy::new(device, stream, views.reads[0], true);
                        Ok(spill.write_staged(offset, len, &mut copy)?)
                    }),
                }
            }
            (Lane::NvmeRead, Some(spill)) if to == Tier::Hbm => {
                let (offset, len) = (src.offset(), src.bytes().get());
                match self.inner().device.clone() {
                    None => self.enqueue_access(task, move |access| {
                        Ok(spill.read_staged(offset, len, &mut HostCopy::In(access.write(0)))?)
                    }),
                    Some(device) => self.enqueue(task, Kind::Host, move |views| {
                        let stream = device.stream(lane);
                        let mut copy = DeviceCopy::new(device, stream, views.writes[0], false);
                        Ok(spill.read_staged(offset, len, &mut copy)?)
                    }),
                }
            }
            (Lane::NvmeWrite, Some(spill)) => self.enqueue_transfer(task, Op::Write, dst.offset(), spill),
            (Lane::NvmeRead, Some(spill)) => self.enqueue_transfer(task, Op::Read, src.offset(), spill),
            _ => match self.inner().device.clone() {
                None => self.submit(task, |access| {
                    let (reads, mut writes) = access.split();
                    writes[0].copy_from_slice(reads[0]);
                    Ok(())
                }),
                Some(device) => self.enqueue(task, Kind::Stream, move |views| {
                    let (from, to) = (views.reads[0], views.writes[0]);
                    // SAFETY: both lie in the store's pinned arenas, and the waits derived from the hazards order the
                    // streams.
                    unsafe { device.copy(device.stream(lane), from.start(), to.start(), to.len()) }
                }),
            },
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
