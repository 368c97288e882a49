//! Bytes of the caller's into an extent, out of one, and from tier to tier.

use std::sync::Arc;
use std::sync::mpsc;

use lazy_model::{Bytes, Lane, Tier};

use crate::device::DeviceCopy;
use crate::error::StoreError;
use crate::lanes::Kind;
use crate::spill::StagedCopy as _;
use crate::store::{Event, Extent, Store, Submission};
use crate::work::{Kept, Views, Work};

impl Store {
    /// Reserves an extent of `tier` and queues the copying of `bytes` into it. For what is made on the CPU now and then;
    /// into HBM it is slower than a copy from an extent of host RAM, which is pinned.
    ///
    /// # Errors
    ///
    /// [`StoreError::OutOfBudget`], and those of [`Store::submit`].
    pub fn put(&self, name: impl Into<Arc<str>>, tier: Tier, bytes: Vec<u8>) -> Result<Extent, StoreError> {
        let extent = self.reserve(tier, Bytes(bytes.len() as u64))?;
        self.overwrite(name, &extent, bytes)?;
        Ok(extent)
    }

    /// Queues the copying of `bytes` into an extent of as many, as [`Store::put`] does.
    ///
    /// # Errors
    ///
    /// [`StoreError::CopyLength`] for another number of bytes, and those of [`Store::submit`].
    pub fn overwrite(
        &self,
        name: impl Into<Arc<str>>,
        extent: &Extent,
        bytes: Vec<u8>,
    ) -> Result<Event, StoreError> {
        let (tier, name) = (extent.tier(), name.into());
        let (from, to) = (Bytes(bytes.len() as u64), extent.bytes());
        if from != to {
            return Err(StoreError::CopyLength { task: name.to_string(), from, to });
        }
        let (writes, spill) = ([extent], self.inner().spill.clone());
        let lane = match tier {
            Tier::Hbm => Lane::H2d,
            Tier::Host => Lane::Compute,
            Tier::Nvme => Lane::NvmeWrite,
        };
        let task = Submission { writes: &writes, bytes: extent.bytes(), ..Submission::new(lane, name) };
        let offset = extent.offset();
        match (tier, spill, self.inner().device.clone()) {
            (Tier::Hbm, _, Some(device)) => {
                let fill = move |views: &Views| {
                    let mut copy =
                        DeviceCopy::new(Arc::clone(&device), device.stream(lane), views.writes[0], false);
                    let mut bytes = bytes;
                    copy.start(0, 0, &mut bytes)?;
                    copy.wait(0)?;
                    Ok(Kept::Nothing)
                };
                self.enqueue(task, Kind::Host, Work::once(fill))
            }
            (Tier::Nvme, Some(spill), _) => {
                self.enqueue_access(task, move |_| Ok(spill.write(offset, &bytes)?))
            }
            _ => self.submit(task, move |access| {
                access.write(0).copy_from_slice(&bytes);
                Ok(())
            }),
        }
    }

    /// Queues a task on `lane` that sets every byte of an extent in HBM or host RAM.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotInMemory`] for an NVMe extent, [`StoreError::Foreign`].
    pub fn fill(
        &self,
        name: impl Into<Arc<str>>,
        lane: Lane,
        extent: &Extent,
        value: u8,
    ) -> Result<Event, StoreError> {
        let name = name.into();
        if extent.tier() == Tier::Nvme {
            return Err(StoreError::NotInMemory { task: name.to_string(), tier: Tier::Nvme });
        }
        let on_stream = extent.tier() == Tier::Hbm && self.inner().device.is_some();
        let kind = if on_stream { Kind::Stream } else { Kind::Host };
        let task = Submission { writes: &[extent], ..Submission::new(lane, name) };
        self.enqueue(task, kind, Work::Fill { value, on_stream })
    }

    /// Waits for what writes an extent, and gives a copy of its bytes.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotWritten`], and whatever failed before: as [`Store::synchronize`] reports it, or
    /// [`StoreError::Skipped`] if somebody else was told of that meanwhile.
    pub fn get(&self, extent: &Extent) -> Result<Vec<u8>, StoreError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let (reads, spill) = ([extent], self.inner().spill.clone());
        let lane = match extent.tier() {
            Tier::Hbm => Lane::D2h,
            Tier::Host => Lane::Compute,
            Tier::Nvme => Lane::NvmeRead,
        };
        let task = Submission { reads: &reads, bytes: extent.bytes(), ..Submission::new(lane, "get") };
        let (offset, len) = (extent.offset(), extent.bytes().get() as usize);
        let event = match (extent.tier(), spill, self.inner().device.clone()) {
            (Tier::Hbm, _, Some(device)) => {
                let take = move |views: &Views| {
                    let mut bytes = zeroed(len)?;
                    let mut copy =
                        DeviceCopy::new(Arc::clone(&device), device.stream(lane), views.reads[0], true);
                    copy.start(0, 0, &mut bytes)?;
                    copy.wait(0)?;
                    sender.send(bytes)?;
                    Ok(Kept::Nothing)
                };
                self.enqueue(task, Kind::Host, Work::once(take))
            }
            (Tier::Nvme, Some(spill), _) => self.enqueue_access(task, move |_| {
                let mut bytes = zeroed(len)?;
                spill.read(offset, &mut bytes)?;
                Ok(sender.send(bytes)?)
            }),
            _ => self.submit(task, move |access| Ok(sender.send(access.read(0).to_vec())?)),
        }?;
        event.wait();
        receiver.try_recv().or_else(|_| {
            self.synchronize()?;
            Err(StoreError::Skipped { task: "get".to_owned() })
        })
    }

    /// Reserves an extent of `tier` and queues a copy of another one to it: the next task that reads the new one waits for
    /// the copy.
    ///
    /// # Errors
    ///
    /// [`StoreError::OutOfBudget`], and those of [`Store::copy`].
    pub fn prefetch(
        &self,
        name: impl Into<Arc<str>>,
        extent: &Extent,
        tier: Tier,
    ) -> Result<Extent, StoreError> {
        let copy = self.reserve(tier, extent.bytes())?;
        self.copy(name, extent, &copy, &[])?;
        Ok(copy)
    }
}

fn zeroed(len: usize) -> Result<Vec<u8>, StoreError> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| StoreError::Memory {
        what: "a copy of an extent",
        bytes: Bytes(len as u64),
        source: std::io::ErrorKind::OutOfMemory.into(),
    })?;
    bytes.resize(len, 0);
    Ok(bytes)
}
