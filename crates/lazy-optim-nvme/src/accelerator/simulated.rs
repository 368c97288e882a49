//! A GPU for tests: the store's simulated device, whose streams run in an order drawn from a seed, and the processor's arithmetic as
//! its kernels.

use std::cell::Cell;

use lazy_store::fault::Faults;
use lazy_store::{DeviceChoice, Event, QueueOrder, Store, StoreError, StoreOptions, Submission};

use super::{GradAt, Part, staged_at};
use crate::adam::{BlockMut, Gradient, WeightsOut, update_block};
use crate::device::DeviceSlice;
use crate::moments::pieces;
use crate::norm::{blocks, sum_of_squares};
use crate::slot::BLOCK;
use crate::{Moments, OptimError};

thread_local! {
    /// Updates until one fails. Whoever waits runs the tasks, so this is the thread that steps.
    pub(crate) static UNTIL_FAILURE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Ordinals from here on are seeds of simulated devices.
const FIRST: usize = 1 << 32;

/// The simulated device of a seed.
pub(crate) fn device(seed: u64) -> DeviceChoice {
    DeviceChoice::Cuda { ordinal: FIRST + seed as usize }
}

/// Opens a store on a simulated device, where that is asked for.
pub(super) fn open(options: &StoreOptions) -> Result<Option<Store>, OptimError> {
    let DeviceChoice::Cuda { ordinal } = options.device else { return Ok(None) };
    let Some(seed) = ordinal.checked_sub(FIRST) else { return Ok(None) };
    let order = QueueOrder::Seeded(seed as u64);
    let options = StoreOptions { device: DeviceChoice::Host, order, poison: true, ..options.clone() };
    Ok(Some(Store::open_simulated(options, &Faults::new(seed as u64))?))
}

fn pointer<T>(address: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// The numbers at an address of the device, which is one of RAM.
unsafe fn numbers<'a>(slice: DeviceSlice) -> Gradient<'a> {
    let (address, n) = (slice.address(), slice.len());
    if slice.is_bf16() {
        // SAFETY: by the contract of `DeviceSlice`.
        Gradient::Bf16(unsafe { std::slice::from_raw_parts(pointer(address), n) })
    } else {
        // SAFETY: as above.
        Gradient::F32(unsafe { std::slice::from_raw_parts(pointer(address), n) })
    }
}

unsafe fn room<'a>(slice: DeviceSlice) -> WeightsOut<'a> {
    let (address, n) = (slice.address(), slice.len());
    if slice.is_bf16() {
        // SAFETY: by the contract of `DeviceSlice`.
        WeightsOut::Bf16(unsafe { std::slice::from_raw_parts_mut(pointer(address), n) })
    } else {
        // SAFETY: as above.
        WeightsOut::F32(unsafe { std::slice::from_raw_parts_mut(pointer(address), n) })
    }
}

pub(super) fn update(
    store: &Store,
    task: Submission<'_>,
    moments: Moments,
    first: usize,
    parts: Vec<Part>,
) -> Result<Event, StoreError> {
    let staged = task.reads.len() > 3;
    store.compute(task, move |access| {
        if UNTIL_FAILURE.replace(UNTIL_FAILURE.get().and_then(|n| n.checked_sub(1))) == Some(0) {
            return Err("this update was to fail".into());
        }
        let (mut reads, writes) = access.split();
        let staged = reads.nth(3).filter(|_| staged).unwrap_or_default();
        let [main, avg, sq] = writes.collect::<Vec<_>>().try_into().map_err(|_| "three sections")?;
        for Part { rule, local, grad, weights } in parts {
            let grad = match grad {
                // SAFETY: it is where `DeviceSlice` says.
                GradAt::Device(slice) => unsafe { numbers(slice) },
                GradAt::Staged { bf16: false } => {
                    Gradient::F32(&bytemuck::cast_slice(&staged[staged_at(local.start)..])[..local.len()])
                }
                GradAt::Staged { bf16: true } => {
                    let bytes = &staged[staged_at(local.start)..][..2 * local.len()];
                    Gradient::Bf16(bytemuck::cast_slice(bytes))
                }
            };
            // SAFETY: as above.
            let mut weights = weights.map(|slice| unsafe { room(slice) });
            let at = first + local.start;
            for piece in pieces(at..at + local.len(), BLOCK) {
                let (block, bytes) = (piece.start / BLOCK, moments.block_bytes());
                let end = |len: usize, block_len: usize| ((block + 1) * block_len).min(len);
                let (main_end, end) = (end(main.len(), BLOCK * 4), end(avg.len(), bytes));
                let block_mut = BlockMut {
                    moments,
                    main: bytemuck::cast_slice_mut(&mut main[block * BLOCK * 4..main_end]),
                    avg: &mut avg[block * bytes..end],
                    sq: &mut sq[block * bytes..end],
                };
                let grad = grad.slice(piece.start - at..piece.end - at);
                let weights = weights.as_mut().map(|weights| weights.split_off(piece.len()));
                let range = piece.start - block * BLOCK..piece.end - block * BLOCK;
                update_block(&rule, block_mut, range, grad, weights);
            }
        }
        Ok(())
    })
}

pub(super) fn sums(
    store: &Store,
    task: Submission<'_>,
    grads: Vec<(usize, DeviceSlice, usize)>,
    scale: f64,
) -> Result<Event, StoreError> {
    store.compute(task, move |access| {
        let sums = access.write(0).as_chunks_mut::<8>().0;
        let found = grads.iter().flat_map(|(_, grad, first)| {
            // SAFETY: it is where `DeviceSlice` says.
            let all = unsafe { numbers(*grad) };
            blocks(*first, grad.len()).map(move |range| {
                sum_of_squares(all.slice(range.start - first..range.end - first), crate::adam::unscale(scale))
            })
        });
        sums.iter_mut().zip(found).for_each(|(sum, found)| *sum = found.to_le_bytes());
        Ok(())
    })
}
