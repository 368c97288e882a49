//! Memory of a device that requests move where it lies, with checksums that the device makes.

use std::sync::Arc;

use lazy_model::{Bytes, Lane};

use super::{Spill, lock};
use crate::device::Device;
use crate::error::StoreError;
use crate::io::stripes::UNIT;
use crate::io::transfer::Memory;
use crate::io::{Op, Window};
use crate::options::{Backend, Checksum};

/// A device makes checksums of pieces of a multiple of this many bytes.
const CHECKSUM_UNIT: usize = 16;

/// The longest request to cuFile that can be asked for.
const LONGEST: u64 = 1 << 30;

impl Spill {
    /// Lets cuFile, where it is the back end, move a device's arena where it lies. The device and its arena outlive the
    /// spill files.
    pub(crate) fn use_device(&mut self, device: Arc<dyn Device>, arena: Window) {
        #[cfg(target_os = "linux")]
        if let Some(cufile) = &self.cufile {
            let registered = cufile.use_device(Arc::clone(&device), arena);
            self.mode.registered_buffers = registered.is_ok();
            self.mode.fallbacks.extend(registered.err());
            if self.options.checksum == Checksum::Crc32c {
                match device.prepare_checksums() {
                    Ok(()) => {
                        let streams = [Lane::NvmeWrite, Lane::NvmeRead].map(|lane| device.stream(lane));
                        self.sums = Some((device, streams));
                    }
                    Err(why) => self.mode.fallbacks.push(format!(
                        "HBM passes through staging, where the CPU makes the checksums: {why}"
                    )),
                }
            }
            if self.options.debug_boundaries {
                let why = "HBM passes through staging, where the records of boundaries are made";
                self.mode.fallbacks.push(why.to_owned());
            }
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (device, arena);
    }

    /// Whether [`Spill::write_device`] and [`Spill::read_device`] work here, once a device is named.
    pub(crate) fn moves_device_memory(&self) -> bool {
        let sealed = self.options.checksum == Checksum::Off || self.sums.is_some();
        let cufile = matches!(self.mode.backend, Backend::CufileDirect | Backend::CufileCompat);
        cufile && sealed && !self.options.debug_boundaries
    }

    /// Whether the device makes checksums of its memory on the way.
    pub(crate) fn seals_device_memory(&self) -> bool {
        self.sums.is_some()
    }

    /// A part of the device's arena, as the memory of a job.
    pub(super) fn in_device<'a>(&self, memory: Window) -> Memory<'a> {
        Memory::Device { memory, longest: self.options.cufile_request.get().clamp(UNIT, LONGEST) }
    }

    /// Writes a part of the device's arena from where it lies.
    ///
    /// # Safety
    ///
    /// Until this returns, nobody changes it.
    pub(crate) unsafe fn write_device(&self, offset: u64, memory: Window) -> Result<(), StoreError> {
        // SAFETY: by this function's contract.
        let sums = unsafe { self.sums_of(Op::Write, offset, memory) }?;
        self.transfer(Op::Write, offset, memory.len as u64, self.in_device(memory))?;
        if let Some(sums) = sums {
            lock(&self.seals).seal(offset, memory.len as u64, sums.into());
        }
        Ok(())
    }

    /// Reads into a part of the device's arena, where it lies.
    ///
    /// # Safety
    ///
    /// Until this returns, nobody else touches it.
    pub(crate) unsafe fn read_device(&self, offset: u64, memory: Window) -> Result<(), StoreError> {
        let wanted = lock(&self.seals).wanted(offset, memory.len as u64);
        self.transfer(Op::Read, offset, memory.len as u64, self.in_device(memory))?;
        // SAFETY: by this function's contract.
        let Some((wanted, got)) = wanted.zip(unsafe { self.sums_of(Op::Read, offset, memory) }?) else {
            return Ok(());
        };
        // Never of different lengths, and if they were, the bytes would not be the ones that were sealed.
        let Some(index) = (0..wanted.len().max(got.len())).find(|&i| wanted.get(i) != got.get(i)) else {
            return Ok(());
        };
        let pieces: Vec<usize> = self.files.pieces(offset, memory.len as u64).take(index + 1).collect();
        let before: usize = pieces[..index.min(pieces.len())].iter().sum();
        let place = self.files.locate(offset + before as u64);
        Err(StoreError::Corrupt {
            path: self.files.file(place.file).path.clone(),
            offset: place.offset,
            bytes: Bytes(pieces.get(index).map_or(0, |&len| len as u64)),
            extent: offset,
            wanted: wanted.get(index).copied().unwrap_or_default(),
            got: got.get(index).copied().unwrap_or_default(),
        })
    }

    /// The checksums of a part of the device's arena, of each piece that requests move it in; nothing where there are to be
    /// none.
    ///
    /// # Safety
    ///
    /// Until this returns, nobody changes it.
    unsafe fn sums_of(&self, op: Op, offset: u64, memory: Window) -> Result<Option<Vec<u32>>, StoreError> {
        let Some((device, streams)) = &self.sums else { return Ok(None) };
        let stream = streams[usize::from(op == Op::Read)];
        let mut all = Vec::new();
        for Run { start, len, piece } in equal_runs(self.files.pieces(offset, memory.len as u64)) {
            let start = memory.start.wrapping_add(start);
            // SAFETY: by this function's contract; extents begin at multiples of 64 bytes, and pieces but the last one end
            // at multiples of the files' alignment.
            let sums = unsafe { device.checksums(stream, start, len, piece.next_multiple_of(CHECKSUM_UNIT)) };
            all.extend(sums.map_err(StoreError::of_device)?);
        }
        Ok(Some(all))
    }
}

/// Pieces of one length, the last one maybe shorter.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) piece: usize,
}

/// Pieces in as few runs as they are in that order.
pub(super) fn equal_runs(pieces: impl Iterator<Item = usize>) -> Vec<Run> {
    let (mut runs, mut start): (Vec<Run>, usize) = (Vec::new(), 0);
    for len in pieces {
        match runs.last_mut() {
            Some(run) if run.len.is_multiple_of(run.piece) && len <= run.piece => run.len += len,
            _ => runs.push(Run { start, len, piece: len }),
        }
        start += len;
    }
    runs
}
