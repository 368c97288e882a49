//! The store's links, and the same copies without the store.

use std::path::Path;
use std::time::Instant;

use cudarc::driver::sys;
use lazy_store::cuda::Gpu;
use lazy_store::{
    BackendChoice, BoxError, Bytes, Checksum, DeviceChoice, DirectChoice, Event, Extent, Lane, NvmeMode,
    NvmeOptions, Store, StoreError, StoreOptions, Submission, Tier,
};

/// Bytes of one copy: an activation of a large model.
const EXTENT: u64 = 64 << 20;
/// Copies of a measurement.
const COPIES: usize = 16;
/// Bytes of a measurement.
pub(crate) const TOTAL: u64 = EXTENT * COPIES as u64;
const STAGING: Bytes = Bytes(64 << 20);

fn rate(start: Instant, bytes: u64) -> f64 {
    bytes as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// Extents of HBM and of pinned RAM.
pub(crate) struct Pinned {
    store: Store,
    hbm: Vec<Extent>,
    host: Vec<Extent>,
}

impl Pinned {
    pub(crate) fn open() -> Result<Self, BoxError> {
        let store = Store::open(StoreOptions {
            device: DeviceChoice::Cuda { ordinal: 0 },
            hbm: Bytes(2 * TOTAL),
            host: Bytes(2 * TOTAL),
            ..StoreOptions::default()
        })?;
        let reserve = |tier| (0..2 * COPIES).map(|_| store.reserve(tier, Bytes(EXTENT))).collect();
        let (hbm, host): (Result<Vec<_>, _>, Result<Vec<_>, _>) = (reserve(Tier::Hbm), reserve(Tier::Host));
        let (hbm, host) = (hbm?, host?);
        for extent in &host {
            fill(&store, extent)?;
        }
        for (from, to) in host.iter().zip(&hbm) {
            store.copy("first", from, to, &[])?;
        }
        store.synchronize()?;
        Ok(Pinned { store, hbm, host })
    }

    fn down(&self) -> Result<(), StoreError> {
        for (from, to) in self.hbm.iter().zip(&self.host).take(COPIES) {
            self.store.copy("d2h", from, to, &[])?;
        }
        Ok(())
    }

    fn up(&self) -> Result<(), StoreError> {
        for (from, to) in self.host.iter().zip(&self.hbm).skip(COPIES) {
            self.store.copy("h2d", from, to, &[])?;
        }
        Ok(())
    }

    pub(crate) fn d2h(&self) -> Result<f64, BoxError> {
        let start = Instant::now();
        self.down()?;
        self.store.synchronize()?;
        Ok(rate(start, TOTAL))
    }

    pub(crate) fn h2d(&self) -> Result<f64, BoxError> {
        let start = Instant::now();
        self.up()?;
        self.store.synchronize()?;
        Ok(rate(start, TOTAL))
    }

    pub(crate) fn both(&self) -> Result<f64, BoxError> {
        let start = Instant::now();
        self.down()?;
        self.up()?;
        self.store.synchronize()?;
        Ok(rate(start, 2 * TOTAL))
    }
}

/// The same copies put on two streams by hand.
pub(crate) struct Plain {
    gpu: Gpu,
    hbm: u64,
    host: *mut u8,
    streams: [sys::CUstream; 2],
}

fn called(result: sys::CUresult) -> Result<(), BoxError> {
    if result == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(format!("{result:?}").into()) }
}

impl Plain {
    pub(crate) fn open() -> Result<Self, BoxError> {
        let gpu = Gpu::open(0)?;
        gpu.bind()?;
        let (mut hbm, mut host) = (0, std::ptr::null_mut());
        let mut streams = [std::ptr::null_mut(); 2];
        let bytes = 2 * TOTAL as usize;
        // SAFETY: the driver fills what it is given; memory and streams live as long as the process.
        unsafe {
            called(sys::cuMemAlloc_v2(&raw mut hbm, bytes))?;
            called(sys::cuMemHostAlloc(&raw mut host, bytes, sys::CU_MEMHOSTALLOC_PORTABLE))?;
            std::ptr::write_bytes(host.cast::<u8>(), 1, bytes);
            for stream in &mut streams {
                let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
                called(sys::cuStreamCreate(stream, flags))?;
            }
        }
        Ok(Plain { gpu, hbm, host: host.cast(), streams })
    }

    /// Puts the copies of one direction on its stream: the first half of the memory goes down, the second up.
    fn put(&self, up: bool) -> Result<(), BoxError> {
        self.gpu.bind()?;
        for i in 0..COPIES {
            let at = (i + if up { COPIES } else { 0 }) * EXTENT as usize;
            let (host, hbm, len) = (self.host.wrapping_add(at), self.hbm + at as u64, EXTENT as usize);
            // SAFETY: both ranges lie within the memory allocated in `open`.
            let put = unsafe {
                if up {
                    sys::cuMemcpyHtoDAsync_v2(hbm, host.cast(), len, self.streams[1])
                } else {
                    sys::cuMemcpyDtoHAsync_v2(host.cast(), hbm, len, self.streams[0])
                }
            };
            called(put)?;
        }
        Ok(())
    }

    fn finish(&self) -> Result<(), BoxError> {
        // SAFETY: the streams live.
        self.streams.iter().try_for_each(|&stream| called(unsafe { sys::cuStreamSynchronize(stream) }))
    }

    pub(crate) fn d2h(&self) -> Result<f64, BoxError> {
        let start = Instant::now();
        self.put(false)?;
        self.finish()?;
        Ok(rate(start, TOTAL))
    }

    pub(crate) fn h2d(&self) -> Result<f64, BoxError> {
        let start = Instant::now();
        self.put(true)?;
        self.finish()?;
        Ok(rate(start, TOTAL))
    }

    pub(crate) fn both(&self) -> Result<f64, BoxError> {
        let start = Instant::now();
        self.put(false)?;
        self.put(true)?;
        self.finish()?;
        Ok(rate(start, 2 * TOTAL))
    }
}

/// How a store with NVMe is opened.
#[derive(Clone, Copy)]
pub(crate) struct Way {
    pub(crate) backend: BackendChoice,
    /// Longest request to cuFile.
    pub(crate) request: Bytes,
    pub(crate) checksum: Checksum,
}

impl Way {
    /// What the rows call it.
    pub(crate) fn name(&self, mode: &NvmeMode) -> String {
        match self.backend {
            BackendChoice::Cufile => format!("{}, requests of {}", mode.backend, self.request),
            _ => mode.backend.to_string(),
        }
    }
}

/// Extents of HBM, of host RAM and of NVMe.
pub(crate) struct Spilled {
    store: Store,
    hbm: Vec<Extent>,
    host: Vec<Extent>,
    nvme: Vec<Extent>,
}

impl Spilled {
    pub(crate) fn open(dir: &Path, way: Way) -> Result<Self, BoxError> {
        let nvme = NvmeOptions {
            backend: way.backend,
            checksum: way.checksum,
            cufile_request: way.request,
            direct: DirectChoice::Required,
            staging: STAGING,
            ..NvmeOptions::new(dir, Bytes(TOTAL))
        };
        let store = Store::open(StoreOptions {
            device: DeviceChoice::Cuda { ordinal: 0 },
            hbm: Bytes(TOTAL),
            host: Bytes(TOTAL + STAGING.get()),
            nvme: Some(nvme),
            ..StoreOptions::default()
        })?;
        let reserve = |tier| (0..COPIES).map(|_| store.reserve(tier, Bytes(EXTENT))).collect();
        let extents: [Result<Vec<_>, StoreError>; 3] = Tier::ALL.map(reserve);
        let [hbm, host, nvme] = extents;
        let (hbm, host, nvme) = (hbm?, host?, nvme?);
        for (from, to) in host.iter().zip(&hbm) {
            fill(&store, from)?;
            store.copy("first", from, to, &[])?;
        }
        store.synchronize()?;
        Ok(Spilled { store, hbm, host, nvme })
    }

    pub(crate) fn mode(&self) -> NvmeMode {
        self.store.nvme_mode().cloned().unwrap_or_else(|| unreachable!("opened with NVMe"))
    }

    fn there_and_back(&self, memory: &[Extent]) -> Result<[f64; 2], BoxError> {
        let start = Instant::now();
        let copy = |from: &Extent, to: &Extent| -> Result<Event, StoreError> {
            self.store.copy("copy", from, to, &[])
        };
        for (from, to) in memory.iter().zip(&self.nvme) {
            copy(from, to)?;
        }
        self.store.synchronize()?;
        let write = rate(start, TOTAL);
        let start = Instant::now();
        for (from, to) in self.nvme.iter().zip(memory) {
            copy(from, to)?;
        }
        self.store.synchronize()?;
        Ok([write, rate(start, TOTAL)])
    }

    /// Write and read rates between HBM and NVMe.
    pub(crate) fn hbm(&self) -> Result<[f64; 2], BoxError> {
        self.there_and_back(&self.hbm)
    }

    /// Write and read rates between host RAM and NVMe: the drive alone.
    pub(crate) fn host(&self) -> Result<[f64; 2], BoxError> {
        self.there_and_back(&self.host)
    }
}

/// Fills an extent of host RAM: not with zeros, which some drives do not write.
fn fill(store: &Store, extent: &Extent) -> Result<Event, StoreError> {
    let task = Submission { writes: &[extent], ..Submission::new(Lane::Compute, "fill") };
    store.submit(task, |access| {
        let mut x = 1_u64;
        for out in access.write(0).chunks_exact_mut(8) {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            out.copy_from_slice(&x.to_le_bytes());
        }
        Ok(())
    })
}
