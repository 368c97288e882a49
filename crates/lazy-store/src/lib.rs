//! A tensor store over three tiers: HBM, pinned host RAM and NVMe.
//!
//! A training step that does not fit in GPU memory moves activations and weights between tiers while it computes. This
//! crate holds the bytes and keeps the order: budgets that are never exceeded, queues that run side by side, and waits
//! that are derived, in one place, from what each task says it reads and writes. It decides nothing: which bytes go where
//! is the caller's schedule. Nothing moves to another tier unless asked.
//!
//! | concept | what it is |
//! | --- | --- |
//! | [`Store`] | the tiers, their budgets and the queues; dropping the last clone waits for everything in flight |
//! | [`Extent`] | a range of one tier; dropping it gives the range back, also while tasks still use it |
//! | [`Store::put`], [`get`](Store::get), [`prefetch`](Store::prefetch), [`copy`](Store::copy) | bytes in, out, and from tier to tier |
//! | [`Lane`] | an ordered queue: compute, the two copy directions, the two NVMe directions, optimizer; beside a GPU, a stream |
//! | [`Submission`] | one task: its lane, its name, and the extents it reads and writes |
//! | [`Store::submit`], [`launch`](Store::launch) | queue work for the CPU, or work that goes on a lane's stream |
//! | [`Routine`] | work that is submitted again and again, either way, and takes no memory for it |
//! | [`Event`] | the completion of a task |
//! | [`DeviceChoice`] | whose memory the HBM tier is: the host's, or a GPU's |
//! | [`cuda`] | the GPU, a caller's own device memory, kernels compiled at run time |
//! | [`NvmeOptions`] | the NVMe tier: its folders (one a drive), back end, checksums, staging |
//! | [`NvmeMode`] | how the spill files are read and written: what was asked for, what was obtained, and why |
//! | [`DriveReport`] | what each drive did: bytes, rates, whether it is slow, the share of its endurance used |
//! | [`durable`] | files that outlive the run: preallocated, flushed, linked, renamed |
//! | [`scratch`] | folders of a run's spill files, and the sweep of those that dead runs left |
//!
//! # Order
//!
//! Tasks of one lane run in the order of submission. A task that reads an extent waits for the last task that writes it;
//! a task that writes one waits for the last write and all reads since. A range that is released carries the tasks still
//! using it over to its next owner, whose first write waits for them: so a caller may reserve, submit and release a whole
//! step at once, far ahead of its execution. Reading what nothing was submitted to write is an error.
//!
//! If a task fails, later ones complete without running until [`Store::synchronize`] reports the failure; after that the
//! store goes on, and what was not written counts as never written.
//!
//! # Devices
//!
//! On a GPU ([`DeviceChoice::Cuda`]) HBM is its memory, the host tier is pinned, and each lane is a stream in the primary
//! context, which frameworks share. A launched task is put on its stream as soon as what it waits for is on its own; the
//! streams wait for each other, and the CPU for none of them. The driver and the compiler are loaded when they are first
//! needed: without them, opening a GPU is an error that says what is missing, and the rest works.
//!
//! On the host device HBM is an arena in RAM, the host tier is another one and not pinned, links can be slowed down to
//! given rates ([`LinkLimits`]), and the queues can be run by one thread in an order drawn from a seed ([`QueueOrder`]),
//! which replays the same interleaving every time. On either device, ranges can be poisoned for each new owner.
//!
//! # Example
//!
//! A boundary goes to host RAM and comes back, while its place in HBM is used for something else:
//!
//! ```
//! use lazy_store::{Bytes, Lane, Store, StoreOptions, Submission, Tier};
//!
//! # fn main() -> Result<(), lazy_store::StoreError> {
//! let bytes = Bytes(4096);
//! let store = Store::open(StoreOptions { hbm: bytes, host: bytes, ..StoreOptions::default() })?;
//! let x = store.reserve(Tier::Hbm, bytes)?;
//! let forward = Submission { writes: &[&x], ..Submission::new(Lane::Compute, "forward 0") };
//! store.submit(forward, |access| {
//!     access.write_f32(0).fill(1.5);
//!     Ok(())
//! })?;
//! let saved = store.reserve(Tier::Host, bytes)?;
//! store.copy("boundary 1 out", &x, &saved, &[])?;
//! store.release(x); // the copy may still be running
//!
//! let y = store.reserve(Tier::Hbm, bytes)?; // the same range; its first write waits for the copy
//! store.copy("boundary 1 in", &saved, &y, &[])?;
//! let backward = Submission { reads: &[&y], ..Submission::new(Lane::Compute, "backward 0") };
//! store.submit(backward, |access| {
//!     assert!(access.read_f32(0).iter().all(|&v| v == 1.5));
//!     Ok(())
//! })?;
//! store.synchronize()
//! # }
//! ```
//!
//! A tensor of the caller's own, here a `CudaSlice` as cudarc and candle have it, is spilled to host RAM, its GPU memory
//! freed, and brought back into another one. Nothing waits on the CPU: the slice's stream waits for the copies.
//!
//! ```no_run
//! use cudarc::driver::CudaContext;
//! use lazy_store::{Bytes, DeviceChoice, Store, StoreOptions, Tier};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = DeviceChoice::Cuda { ordinal: 0 };
//! let store = Store::open(StoreOptions { device, host: Bytes(1 << 30), ..StoreOptions::default() })?;
//! let stream = CudaContext::new(0)?.new_stream()?; // the trainer's own stream
//!
//! let activation = stream.alloc_zeros::<f32>(1 << 20)?; // what the trainer computed there
//! let saved = store.reserve(Tier::Host, Bytes(4 << 20))?;
//! store.put_slice("activation 3 out", activation, &saved)?;
//! // ... the GPU memory is free again for other work on that stream ...
//!
//! let room = stream.alloc_zeros::<f32>(1 << 20)?;
//! let activation = store.get_slice("activation 3 in", &saved, room)?.ordered()?;
//! // What the stream does with it from here on comes after the copy.
//! # drop(activation);
//! store.synchronize()?;
//! # Ok(())
//! # }
//! ```

mod arena;
mod batch;
mod buffer;
mod clock;
mod contents;
pub mod cuda;
mod device;
mod drive;
pub mod durable;
mod error;
#[cfg(feature = "gpu-test")]
#[doc(hidden)]
pub mod gpu_test;
mod io;
mod lanes;
mod links;
mod memory;
#[cfg(any(test, feature = "test-util"))]
pub mod mutants;
#[cfg(not(any(test, feature = "test-util")))]
mod mutants;
mod options;
mod random;
pub mod scratch;
#[cfg(any(test, feature = "test-util"))]
mod simulated;
mod spill;
mod store;
mod work;

pub use device::Stream;
pub use error::{BoxError, StoreError};
#[cfg(any(test, feature = "test-util"))]
pub use io::fault;
pub use io::fs::is_tmpfs;
pub use lazy_model::{
    BoundaryIndex, Bytes, BytesPerSecond, Lane, LayerIndex, Placement, Seconds, Span, Tier,
};
pub use links::MeasuredRates;
pub use memory::{Access, DeviceRange, StreamAccess};
pub use options::{
    Backend, BackendChoice, BoundaryRecord, BoundarySide, Checksum, DeviceChoice, DirectChoice, DriveReport,
    LinkLimits, NvmeMode, NvmeOptions, QueueOrder, StoreOptions, Traffic, ValueStats,
};
pub use store::{Event, Extent, MEMORY_ALIGNMENT, Store, Submission};
pub use work::Routine;
