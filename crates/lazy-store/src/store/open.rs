//! How a store begins and ends: its device, its arenas, its threads.

use std::sync::{Arc, Mutex, TryLockError};

use lazy_model::{Bytes, Lane, Tier};
use slab::Slab;

use super::{Handle, Inner, MEMORY_ALIGNMENT, State, Store};
use crate::arena::Arena;
use crate::cuda::Cuda;
use crate::device::Device;
use crate::drive::{self, Signals, Sleepers, Target};
use crate::error::StoreError;
use crate::lanes::Lanes;
use crate::memory::{Hbm, Mapping, View};
use crate::mutants::Mutant;
use crate::options::{DeviceChoice, LinkLimits, QueueOrder, StoreOptions};
use crate::random::Random;
use crate::spill::Spill;

impl Store {
    /// Maps the arenas, makes the spill file and starts the queues.
    ///
    /// # Errors
    ///
    /// [`StoreError::NoSpace`] where the disk cannot hold the spill file, [`StoreError::BackendRefused`] and
    /// [`StoreError::DirectRefused`] where an explicit choice cannot be had, and what the system refuses besides.
    pub fn open(options: StoreOptions) -> Result<Store, StoreError> {
        let spill = options.nvme.as_ref().map(Spill::open).transpose()?;
        let device = Opened::new(&options)?;
        Store::with(options, spill, device)
    }

    /// [`Store::open`], with the spill file's transfers going through a fault double.
    ///
    /// # Errors
    ///
    /// As for [`Store::open`].
    #[cfg(any(test, feature = "test-util"))]
    pub fn open_with_faults(
        options: StoreOptions,
        faults: &crate::fault::Faults,
    ) -> Result<Store, StoreError> {
        let spill =
            options.nvme.as_ref().map(|nvme| Spill::open_with(nvme, |queue| faults.wrap(queue, false)));
        let device = Opened::new(&options)?;
        Store::with(options, spill.transpose()?, device)
    }

    /// [`Store::open_with_faults`], beside a simulated device with streams: tasks of [`Store::compute`] and copies are
    /// operations of its streams, and copies to and from NVMe pass through the staging ring, as beside a GPU. In an order
    /// drawn from a seed only.
    ///
    /// # Errors
    ///
    /// As for [`Store::open`].
    #[cfg(any(test, feature = "test-util"))]
    pub fn open_simulated(options: StoreOptions, faults: &crate::fault::Faults) -> Result<Store, StoreError> {
        let QueueOrder::Seeded(seed) = options.order else {
            let (device, what) = ("the simulated device", "be used by threads");
            return Err(StoreError::Device { device, what, instead: "draw the order from a seed" });
        };
        let spill =
            options.nvme.as_ref().map(|nvme| Spill::open_with(nvme, |queue| faults.wrap(queue, false)));
        let simulated = Arc::new(crate::simulated::Simulated::new(options.hbm, seed)?);
        let device = Opened {
            device: Some(Arc::clone(&simulated) as Arc<dyn Device>),
            cuda: None,
            simulated: Some(simulated),
        };
        Store::with(options, spill.transpose()?, device)
    }

    fn with(options: StoreOptions, mut spill: Option<Spill>, opened: Opened) -> Result<Store, StoreError> {
        let staging = spill.as_ref().map_or(Bytes::ZERO, Spill::staging);
        if staging > options.host {
            return Err(StoreError::StagingOverBudget { staging, budget: options.host });
        }
        let in_memory = |tier, budget| Arena::new(tier, budget, MEMORY_ALIGNMENT, 1);
        let nvme = options.nvme.as_ref().zip(spill.as_ref()).map(|(options, spill)| {
            let alignment = spill.mode().alignment as u64;
            Arena::new(Tier::Nvme, options.bytes, alignment, alignment)
        });
        let state = State {
            lanes: Lanes::default(),
            closing: false,
            sleepers: Sleepers::default(),
            hbm: in_memory(Tier::Hbm, options.hbm),
            host: in_memory(Tier::Host, options.host.saturating_sub(staging)),
            nvme,
            extents: Slab::new(),
            mutant: Mutant::default(),
        };
        let mut host = Mapping::new("the host arena", options.host.saturating_sub(staging))?;
        let mut staging_pin = None;
        let hbm = match &opened.device {
            None => Hbm::Host(Mapping::new("the hbm arena", options.hbm)?),
            Some(device) => {
                device.bind().map_err(StoreError::of_device)?;
                host.pin("the host arena", device)?;
                if let Some((start, len)) = spill.as_ref().map(Spill::staging_region).filter(|r| r.1 > 0) {
                    // SAFETY: the region is mapped as long as the spill file is open, and the pin goes before that does.
                    let pin = unsafe { Arc::clone(device).pin(start, len) };
                    staging_pin = Some(pin.map_err(StoreError::of_device)?);
                }
                let len = usize::try_from(options.hbm.get()).unwrap_or(usize::MAX);
                Hbm::Device(View::new(device.hbm(), len))
            }
        };
        if let Some(spill) = &mut spill {
            // SAFETY: the mapping lives as long as `Inner`, and only tasks, run from within it, read and write spill files.
            unsafe { spill.register_memory(host.window(), opened.device.is_some()) };
            if let (Some(device), Hbm::Device(arena)) = (&opened.device, &hbm) {
                spill.use_device(Arc::clone(device), arena.window());
            }
        }
        let inner = Arc::new(Inner {
            state: Mutex::new(state),
            signals: Signals::default(),
            hbm,
            host,
            _staging_pin: staging_pin,
            spill: spill.map(Arc::new),
            device: opened.device,
            cuda: opened.cuda,
            #[cfg(any(test, feature = "test-util"))]
            simulated: opened.simulated,
            limits: options.limits,
            poison: options.poison,
            seeded: match options.order {
                QueueOrder::Threads => None,
                QueueOrder::Seeded(seed) => Some(Mutex::new(Random::new(seed))),
            },
        });
        // The handle comes first: if a thread cannot be started, its end joins the others.
        let mut handle = Handle { inner, threads: Vec::new() };
        if options.order == QueueOrder::Threads {
            for lane in Lane::ALL {
                handle.threads.push(drive::spawn(&handle.inner, lane)?);
                if let Some(device) = handle.inner.device.clone() {
                    handle.threads.push(drive::spawn_completer(&handle.inner, device, lane)?);
                }
            }
        }
        Ok(Store { handle: Arc::new(handle) })
    }
}

/// The device of a store that is being opened.
struct Opened {
    device: Option<Arc<dyn Device>>,
    cuda: Option<Arc<Cuda>>,
    #[cfg(any(test, feature = "test-util"))]
    simulated: Option<Arc<crate::simulated::Simulated>>,
}

impl Opened {
    fn new(options: &StoreOptions) -> Result<Self, StoreError> {
        let cuda = match options.device {
            DeviceChoice::Host => None,
            DeviceChoice::Cuda { ordinal } => {
                refuse_on_cuda(options)?;
                Some(Arc::new(Cuda::open(ordinal, options.hbm)?))
            }
        };
        Ok(Opened {
            device: cuda.clone().map(|cuda| cuda as Arc<dyn Device>),
            cuda,
            #[cfg(any(test, feature = "test-util"))]
            simulated: None,
        })
    }
}

/// What makes no sense beside a GPU is refused, not ignored.
fn refuse_on_cuda(options: &StoreOptions) -> Result<(), StoreError> {
    let refused = |what, instead| Err(StoreError::Device { device: "the CUDA device", what, instead });
    if options.limits != LinkLimits::default() {
        return refused("slow its links down", "leave the limits away, or use the host device");
    }
    if options.order != QueueOrder::Threads {
        return refused("run in an order drawn from a seed", "use threads, or the host device");
    }
    Ok(())
}

impl Drop for Handle {
    /// Waits for everything in flight, ends the threads, and removes the spill file.
    fn drop(&mut self) {
        let this = std::thread::current().id();
        let on_worker = self.threads.iter().any(|t| t.thread().id() == this);
        // In the seeded order, somebody who waits is running the tasks, maybe the one that drops this.
        let driven =
            self.inner.seeded.as_ref().is_some_and(|s| matches!(s.try_lock(), Err(TryLockError::WouldBlock)));
        // A task that owned the last clone drops it on its own lane, which cannot wait for itself: the threads finish what
        // is queued and the last one out removes the file.
        if !on_worker && !driven {
            drop(drive::wait_until(&self.inner, Target::Idle));
        }
        let mut state = self.inner.lock();
        state.closing = true;
        drive::announce(&self.inner, state);
        if on_worker {
            return;
        }
        for thread in self.threads.drain(..) {
            // A worker catches the panics of its tasks, so there is nothing to report here.
            let _ = thread.join();
        }
        if let Some(spill) = &self.inner.spill {
            spill.remove();
        }
    }
}
