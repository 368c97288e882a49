//! Adam and AdamW whose float32 main weights and moments live on NVMe.
//!
//! The twelve bytes a parameter of optimizer state are cut into buckets, kept in files, and streamed through a small
//! ring of buffers: while one chunk is updated, the next is read and the one before is written. Memory is
//! [`NvmeAdam::memory_bytes`], whatever the model. The arithmetic is that of `torch.optim.AdamW` and `torch.optim.Adam`.
//!
//! **Old or new, never a mix.** Each bucket has two slot files. A step reads one and writes the other, flushes them,
//! and then commits with a single checksummed record. Whatever cuts a step short, [`NvmeAdam::open`] finds the state
//! before it or the state after it, with the step counts and the caller's blob of that same instant, and refuses
//! damaged, swapped or stale files by name. The price is twice the space of the state.
//!
//! **Checkpoints.** [`NvmeAdam::save`] gives the committed slots a second name in a folder of their own, a [`Generation`]; no
//! data is copied, and steps may be taken meanwhile. [`generations`] lists them, [`NvmeAdam::load`] makes a store of one, or
//! of those of several ranks, in whatever cut; [`export`] writes them as one safetensors file. After any crash each
//! generation is whole or absent.
//!
//! **The same bits, however it is cut.** Neither bucket, chunk, ring depth nor thread count changes a result.
//!
//! ```
//! use lazy_optim_nvme::{AdamOptions, Gradient, GroupOptions, LoadOptions, NvmeAdam, ParamSpec, StepInput};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let scratch = tempfile::tempdir()?;
//! # let dir = scratch.path().join("optimizer");
//! // Fit y = w x to y = 3 x, with w on disk.
//! let params = [ParamSpec::new("w", &[1])];
//! let options = AdamOptions::default();
//! let groups = [GroupOptions { lr: 0.1, weight_decay: 0.0, ..GroupOptions::default() }];
//! let mut w = [0.0f32];
//! let mut adam = NvmeAdam::create(&dir, &params, &options, |_param, _first, values| values.fill(0.0))?;
//! for step in 1u64..=200 {
//!     let grad = [2.0 * (w[0] - 3.0)];
//!     let blob = step.to_le_bytes();
//!     let input = StepInput { groups: &groups, max_norm: Some(1.0), blob: &blob, ..StepInput::default() };
//!     adam.step(&[Some(Gradient::F32(&grad))], &input, &mut |_param, first, values| {
//!         w[first..first + values.len()].copy_from_slice(values);
//!     })?;
//! }
//! drop(adam);
//!
//! // Another process goes on from the last committed step.
//! let mut adam = NvmeAdam::open(&dir, &params, &options)?;
//! let saving = adam.save("step-200")?;
//! assert_eq!(adam.blob(), 200u64.to_le_bytes());
//! let mut resumed = [0.0f32];
//! adam.read_weights(&mut |_param, first, values| {
//!     resumed[first..first + values.len()].copy_from_slice(values);
//! })?;
//! assert_eq!(resumed, w);
//! assert!((w[0] - 3.0).abs() < 0.1);
//! saving.wait()?;
//!
//! // Two ranks go on from what one has saved.
//! let saved = &lazy_optim_nvme::generations(&dir)?[0];
//! assert_eq!((saved.name.as_str(), saved.sequence), ("step-200", 200));
//! for rank in [0, 1] {
//!     let dir = dir.join(format!("rank-{rank}"));
//!     let params = [params[0].clone().range(rank, 1 - rank)];
//!     let adam = NvmeAdam::load(&[&saved.path], &dir, &params, &options, LoadOptions::default())?;
//!     assert_eq!(adam.step_counts(), [200]);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! **Where state is.** With [`Durability::Checkpoint`] a step updates the state in place and commits nothing: half the space,
//! fewer flushes, and what was saved last survives. Buckets may then live in RAM ([`AdamOptions::host`]), and in the memory of a GPU
//! ([`AdamOptions::hbm`]): the first ones there, the next ones in RAM, the others on NVMe. Moments take four bytes
//! each, two, or one ([`Moments`], by parameter). None of that changes a bit of what the others compute.
//!
//! **Beside a GPU** ([`AdamOptions::device`]) gradients are read and weights are written in its memory, where the caller has them
//! ([`DeviceSlice`]). Chunks of state go there to be updated, or gradients come here, whichever takes less time ([`UpdateOn`],
//! [`NvmeAdam::update_on`]). A step waits for the stream it is told of, and has done everything when it returns.
//!
//! ```no_run
//! use cudarc::driver::{CudaContext, DevicePtr, DevicePtrMut};
//! use lazy_optim_nvme::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! const N: usize = 1 << 20;
//! let stream = CudaContext::new(0)?.new_stream()?; // the trainer's own
//! let (grad, mut weights) = (stream.alloc_zeros::<f32>(N)?, stream.alloc_zeros::<u16>(N)?);
//! let options = AdamOptions { device: DeviceChoice::Cuda { ordinal: 0 }, ..AdamOptions::default() };
//! let init = |_: usize, _: usize, values: &mut [f32]| values.fill(0.1);
//! let mut adam = NvmeAdam::create("optimizer".as_ref(), &[ParamSpec::new("w", &[N])], &options, init)?;
//! eprintln!("{:?}, {:?} of the GPU", adam.update_on(), NvmeAdam::device_bytes(&[], &options)?);
//! // SAFETY: the stream lives as long as the steps.
//! let ordered = unsafe { Stream::from_raw(stream.cu_stream().cast()) };
//! for _step in 0..100 {
//!     // Forward and backward are put on the stream, and fill `grad`.
//!     let (grad, _read) = grad.device_ptr(&stream);
//!     let (room, _written) = weights.device_ptr_mut(&stream);
//!     // SAFETY: both slices outlive the step, and nothing but what is on the stream already uses them until it returns.
//!     let (grad, room) = unsafe { (DeviceSlice::f32(grad, N), DeviceSlice::bf16(room, N)) };
//!     let groups = [GroupOptions::default()];
//!     let input = StepInput { groups: &groups, max_norm: Some(1.0), stream: Some(ordered), ..StepInput::default() };
//!     adam.step_into(&[Some(Gradient::Device(grad))], &input, vec![Some(WeightsOut::Device(room))], &mut |_, _| {})?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! **Beside backward and forward.** Without a clipped norm a step may begin while backward still runs, and update the buckets whose
//! gradients are final ([`Gradients::Awaited`]); it commits at its end, as ever. [`NvmeAdam::step_into`] gives the room of a parameter
//! back once its new weights are there, so that the next forward can begin before the step has ended; [`NvmeAdam::read_weights_into`]
//! fills such room when a run starts.
//!
//! Memory besides the ring: twelve bytes of checksums for every 16,384 elements, and the caller's gradients. Each bucket
//! keeps two files open. The formats are in `docs/formats.md`.

mod accelerator;
mod adam;
mod ahead;
mod bf16;
mod create;
mod cuda;
mod device;
mod error;
mod export;
mod files;
mod gather;
mod gradients;
mod home;
mod import;
mod layout;
mod load;
mod manifest;
mod measure;
mod moments;
mod norm;
mod open;
mod options;
mod out;
mod quant;
#[cfg(any(feature = "bench", feature = "gpu-test"))]
#[doc(hidden)]
pub mod raw;
mod record;
mod refill;
mod reload;
mod retire;
mod ring;
mod runs;
mod save;
mod seal;
mod simd;
mod slot;
mod source;
mod state;
mod step;
mod transaction;
mod update;
mod wire;

#[cfg(test)]
mod mutated;

#[cfg(test)]
extern crate self as lazy_optim_nvme;

#[cfg(test)]
mod crash;

#[cfg(test)]
mod crash_save;

#[cfg(test)]
mod simulated_awaited;
#[cfg(test)]
mod simulated_steps;

#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod common;

#[cfg(target_endian = "big")]
compile_error!("slot files are little-endian images of memory; a big-endian build would need to swap bytes");

pub use adam::{Gradient, WeightsOut};
pub use device::DeviceSlice;
pub use error::OptimError;
pub use export::export;
pub use gradients::{Awaited, Gradients};
pub use lazy_store::durable::IoOptions;
pub use lazy_store::{Bytes, DeviceChoice, NvmeMode, Seconds, Span, Stream};
pub use load::LoadOptions;
pub use moments::Moments;
pub use norm::{NormPart, combine_norm};
pub use options::{
    AdamOptions, Durability, GroupOptions, ParamSpec, Part, Shard, StatePart, StepInput, StepOutcome,
    StepSeconds, UpdateChoice, UpdateCosts, UpdateOn,
};
pub use save::{Generation, Saving, generations};
pub use state::NvmeAdam;

/// Largest blob a step may commit, in bytes.
pub const MAX_BLOB_BYTES: usize = 1 << 20;
