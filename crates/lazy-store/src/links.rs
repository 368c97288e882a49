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

/// Times that each link is measured; the median is reported.
const PROBE_ROUNDS: usize = 5;
/// Copies in a row to and from NVMe: a drive gives less to many of them than to one.
const PROBE_ROW: usize = 8;
/// Copies in each direction at once.
const PROBE_BOTH: usize = 4;

/// Measured rates of the links that a store has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredRates {
    /// Host to device.
    pub h2d: BytesPerSecond,
    /// Device to host.
    pub d2h: BytesPerSecond,
    /// Host to device while the other direction is busy.
    pub h2d_both: BytesPerSecond,
    /// Device to host while the other direction is busy.
    pub d2h_both: BytesPerSecond,
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

    /// Measures every link with copies of `bytes` over the store's own queues: between HBM and host RAM one at a time, then in both
    /// directions at once; to NVMe and back eight in a row, as steps have them. Medians of a few rounds.
    /// Needs free room for two such copies in HBM and in host RAM, with NVMe for eight there, rounded up to its alignment, and in host RAM. Begins a step
    /// ([`Store::start_step`]), so it belongs outside one. Where the spill file is buffered, reads come from the page cache, and the rate is
    /// that of memory.
    ///
    /// # Errors
    ///
    /// [`StoreError::OutOfBudget`] where a tier has no room, and whatever a copy reports.
    pub fn probe_links(&self, bytes: Bytes) -> Result<MeasuredRates, StoreError> {
        let reserve = |tier, n: usize| -> Result<Vec<Extent>, StoreError> {
            (0..n).map(|_| self.reserve(tier, bytes)).collect()
        };
        let drive = self.nvme_mode().is_some();
        let hbm = reserve(Tier::Hbm, 2)?;
        let host = reserve(Tier::Host, if drive { PROBE_ROW } else { 2 })?;
        for extent in &host {
            let fill =
                Submission { writes: &[extent], ..Submission::new(Lane::Compute, "fill for the link probe") };
            self.submit(fill, |access| {
                // Not zeros: some drives store those without writing them.
                access.write(0).iter_mut().enumerate().for_each(|(i, byte)| *byte = (i % 251) as u8);
                Ok(())
            })?;
        }
        // The first copies touch the pages, and are not timed.
        for (src, dst) in host.iter().zip(&hbm) {
            self.copy("link probe", src, dst, &[])?.wait();
        }
        let d2h = self.rate(&hbm[..1], &host[..1])?;
        let h2d = self.rate(&host[..1], &hbm[..1])?;
        let (d2h_both, h2d_both) = self.rates_both((&hbm[0], &host[0]), (&host[1], &hbm[1]), (d2h, h2d))?;
        let (mut nvme_write, mut nvme_read) = (None, None);
        if drive {
            let nvme = reserve(Tier::Nvme, PROBE_ROW)?;
            nvme_write = Some(self.rate(&host, &nvme)?);
            nvme_read = Some(self.rate(&nvme, &host)?);
        }
        Ok(MeasuredRates { h2d, d2h, h2d_both, d2h_both, nvme_write, nvme_read })
    }

    /// The rate of copies from each of `src` to its mate in `dst`, all queued at once.
    fn rate(&self, src: &[Extent], dst: &[Extent]) -> Result<BytesPerSecond, StoreError> {
        let mut times = Vec::with_capacity(PROBE_ROUNDS);
        for _ in 0..PROBE_ROUNDS {
            let start = Instant::now();
            for (src, dst) in src.iter().zip(dst) {
                self.copy("link probe", src, dst, &[])?;
            }
            self.synchronize()?;
            times.push(start.elapsed().as_secs_f64());
        }
        let bytes: Bytes = src.iter().map(Extent::bytes).sum();
        Ok(BytesPerSecond(bytes.get() as f64 / median(times).max(f64::MIN_POSITIVE)))
    }

    /// The rates out and in while both are busy, of a pair of extents each, where `alone` are those of one direction.
    fn rates_both(
        &self,
        out: (&Extent, &Extent),
        back: (&Extent, &Extent),
        alone: (BytesPerSecond, BytesPerSecond),
    ) -> Result<(BytesPerSecond, BytesPerSecond), StoreError> {
        let (mut outs, mut backs) = (Vec::new(), Vec::new());
        for _ in 0..PROBE_ROUNDS {
            self.start_step();
            for _ in 0..PROBE_BOTH {
                self.copy("link probe", out.0, out.1, &[])?;
                self.copy("link probe", back.0, back.1, &[])?;
            }
            self.synchronize()?;
            let spans = self.take_spans();
            let ends = |lane| {
                let of = || spans.iter().filter(|span| span.lane == lane);
                let first = of().map(|span| span.start.get()).fold(f64::INFINITY, f64::min);
                (first, of().map(|span| span.end.get()).fold(0.0, f64::max))
            };
            let (d2h, h2d) = (ends(Lane::D2h), ends(Lane::H2d));
            // What is left once the other direction has ended goes at the rate alone.
            let until = d2h.1.min(h2d.1);
            let bytes = (out.0.bytes().get() * PROBE_BOTH as u64) as f64;
            let rate = |(start, end): (f64, f64), alone: f64| {
                let together = (bytes - alone * (end - until)) / (until - start).max(f64::MIN_POSITIVE);
                together.clamp(alone / 16.0, alone)
            };
            outs.push(rate(d2h, alone.0.get()));
            backs.push(rate(h2d, alone.1.get()));
        }
        Ok((BytesPerSecond(median(outs)), BytesPerSecond(median(backs))))
    }
}

/// The middle of an odd number of samples.
fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}
