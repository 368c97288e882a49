//! Steps beside a simulated GPU while backward still runs there: gradients that become final in its memory one by one.

use crate::common::{cut, init, state};
use crate::simulated_steps::{Grads, Rooms, Where, beside_gpu, specs};
use crate::{
    AdamOptions, DeviceSlice, Gradient, Gradients, GroupOptions, NvmeAdam, OptimError, StepInput,
    StepOutcome, UpdateOn, WeightsOut,
};

/// Of bfloat16.
const NAN: u16 = 0x7fc0;

const GROUPS: [GroupOptions; 1] = [GroupOptions {
    lr: 0.01,
    betas: (0.9, 0.999),
    eps: 1e-8,
    weight_decay: 0.01,
    decoupled: true,
    maximize: false,
}];

fn input() -> StepInput<'static> {
    StepInput { groups: &GROUPS, scale: 2.0, ..StepInput::default() }
}

/// A step whose gradients in device memory are NaN until they are asked for; with `bad`, that one's stays so in one element.
fn awaited(
    adam: &mut NvmeAdam,
    step: usize,
    place: Where,
    rooms: &mut Rooms,
    bad: Option<usize>,
) -> Result<(StepOutcome, Vec<usize>), OptimError> {
    let mut finals = Grads::new(step);
    if let Some(param) = bad {
        (finals.wide[param][300], finals.narrow[param][300]) = (f32::NAN, NAN);
    }
    let mut there = Grads::new(step);
    there.wide.iter_mut().for_each(|grads| grads.fill(f32::NAN));
    there.narrow.iter_mut().for_each(|grads| grads.fill(NAN));
    let on_device = there.all(step, Where::Device);
    let mut wait = |param: usize| {
        let (wide, narrow) = (&finals.wide[param], &finals.narrow[param]);
        Ok(match on_device[param] {
            Some(Gradient::Device(slice)) if place == Where::Device || param < 3 => {
                // SAFETY: the memory is the parameter's, and nobody reads it before this has returned.
                unsafe { slice.fill(wide, narrow) };
                Some(Gradient::Device(slice))
            }
            Some(_) if param.is_multiple_of(2) => Some(Gradient::F32(wide)),
            Some(_) => Some(Gradient::Bf16(narrow)),
            None => None,
        })
    };
    let mut ready = Vec::new();
    let mut give = |param, _: WeightsOut<'_>| ready.push(param);
    let outcome = adam.step_into(Gradients::Awaited(&mut wait), &input(), rooms.all(place), &mut give)?;
    Ok((outcome, ready))
}

impl DeviceSlice {
    /// Puts values of the format it has there, which is RAM.
    unsafe fn fill(self, wide: &[f32], narrow: &[u16]) {
        let address = self.address() as usize;
        // SAFETY: there is room for as many.
        unsafe {
            if self.is_bf16() {
                std::ptr::with_exposed_provenance_mut::<u16>(address)
                    .copy_from(narrow.as_ptr(), narrow.len());
            } else {
                std::ptr::with_exposed_provenance_mut::<f32>(address).copy_from(wide.as_ptr(), wide.len());
            }
        }
    }
}

/// The same with gradients that are there from the start.
fn final_ones(adam: &mut NvmeAdam, step: usize, rooms: &mut Rooms) -> (StepOutcome, Vec<usize>) {
    let mut grads = Grads::new(step);
    let mut ready = Vec::new();
    let mut give = |param, _: WeightsOut<'_>| ready.push(param);
    let grads = grads.all(step, Where::Ram);
    let outcome = adam.step_into(&grads, &input(), rooms.all(Where::Ram), &mut give).unwrap();
    (outcome, ready)
}

#[test]
fn awaited_gradients_in_device_memory_give_the_bits_of_final_ones() {
    let dir = tempfile::tempdir().unwrap();
    let mut there = NvmeAdam::create(dir.path(), &specs(), &cut(40_000, 64, 3), init).unwrap();
    let mut wanted = Vec::new();
    let mut wanted_rooms = Rooms::new();
    for t in 1..=3 {
        let (outcome, mut ready) = final_ones(&mut there, t, &mut wanted_rooms);
        ready.sort_unstable();
        wanted.push((outcome.grad_norm.to_bits(), ready, wanted_rooms.clone(), state(&mut there, &specs())));
    }
    let mut seed = 300;
    for update in [UpdateOn::Cpu, UpdateOn::Cuda] {
        for place in [Where::Device, Where::Mixed] {
            for depth in [1, 3] {
                seed += 1;
                let dir = tempfile::tempdir().unwrap();
                let options = AdamOptions { depth, ..beside_gpu(seed, update, [0, 0]) };
                let mut adam = NvmeAdam::create(dir.path(), &specs(), &options, init).unwrap();
                let mut rooms = Rooms::new();
                for (t, wanted) in (1..).zip(&wanted) {
                    let (outcome, mut ready) = awaited(&mut adam, t, place, &mut rooms, None).unwrap();
                    ready.sort_unstable();
                    let found =
                        (outcome.grad_norm.to_bits(), ready, rooms.clone(), state(&mut adam, &specs()));
                    assert!(found == *wanted, "{update:?}, {place:?}, step {t}");
                }
                assert_eq!(adam.step_counts(), there.step_counts());
            }
        }
    }
}

#[test]
fn a_late_nan_in_device_memory_commits_nothing_and_takes_weights_back() {
    for (seed, (update, place)) in (400..).zip([
        (UpdateOn::Cuda, Where::Device),
        (UpdateOn::Cuda, Where::Mixed),
        (UpdateOn::Cpu, Where::Device),
    ]) {
        // The first parameter is asked for last, and the last one first.
        for bad in [0, 1, 5] {
            let dir = tempfile::tempdir().unwrap();
            let options = beside_gpu(seed, update, [0, 0]);
            let mut adam = NvmeAdam::create(dir.path(), &specs(), &options, init).unwrap();
            let mut rooms = Rooms::new();
            awaited(&mut adam, 1, place, &mut rooms, None).unwrap();
            adam.read_weights_into(rooms.all(place)).unwrap();
            let (before, weights) = (state(&mut adam, &specs()), rooms.clone());
            let (outcome, ready) = awaited(&mut adam, 2, place, &mut rooms, Some(bad)).unwrap();
            assert!(outcome.skipped && outcome.grad_norm.is_nan() && ready.is_empty());
            assert_eq!(adam.step_counts(), [1, 1, 1, 0, 1, 1]);
            assert!(rooms == weights, "{update:?}, {place:?}, bad {bad}: weights are not taken back");
            assert!(state(&mut adam, &specs()) == before, "{update:?}, {place:?}, bad {bad}");
            // The step is taken as if nothing had been.
            awaited(&mut adam, 2, place, &mut rooms, None).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let mut straight = NvmeAdam::create(dir.path(), &specs(), &cut(40_000, 64, 3), init).unwrap();
            (1..=2).for_each(|t| drop(final_ones(&mut straight, t, &mut Rooms::new())));
            assert!(state(&mut adam, &specs()) == state(&mut straight, &specs()), "{update:?}, {place:?}");
        }
    }
}
