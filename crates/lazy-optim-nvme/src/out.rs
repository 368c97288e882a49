//! Where updated weights go.

use std::iter::Enumerate;
use std::ops::Range;
use std::slice::IterMut;

use crate::adam::WeightsOut;
use crate::device::DeviceSlice;
use crate::layout::Segment;
use crate::update::{Away, Left};
use crate::{NvmeAdam, OptimError};

/// Where updated weights go.
pub(crate) enum Out<'a, 'w> {
    /// To the caller, chunk by chunk.
    Each(&'a mut (dyn FnMut(usize, usize, &[f32]) + 'a)),
    /// Into each parameter's room, which the caller gets back.
    Into(Vec<Option<WeightsOut<'w>>>, &'a mut (dyn FnMut(usize, WeightsOut<'w>) + 'a)),
}

impl Out<'_, '_> {
    /// Whether the weights of a parameter are wanted in RAM.
    pub(crate) fn needs_ram(&self, param: usize) -> bool {
        match self {
            Out::Each(_) => true,
            Out::Into(rooms, _) => !matches!(rooms[param], None | Some(WeightsOut::Device(_))),
        }
    }

    /// The room for elements of a parameter, where it is in device memory.
    pub(crate) fn on_device(&self, param: usize, range: Range<usize>) -> Option<DeviceSlice> {
        match self {
            Out::Into(rooms, _) => match rooms[param] {
                Some(WeightsOut::Device(room)) => Some(room.slice(range)),
                _ => None,
            },
            Out::Each(_) => None,
        }
    }

    /// The rooms in RAM of parts of parameters, which are in the parameters' order.
    pub(crate) fn rooms(&mut self, parts: impl Iterator<Item = Segment>) -> Rooms<'_> {
        let Out::Into(rooms, _) = self else { return Rooms::default() };
        let mut rooms: Enumerate<IterMut<'_, _>> = rooms.iter_mut().enumerate();
        let room = |Segment { param, first, local }: Segment| {
            let (_, room) = rooms.find(|(index, _)| *index == param)?;
            let room = room.as_mut().filter(|room| !matches!(room, WeightsOut::Device(_)))?;
            Some((param, room.part(first..first + local.len())))
        };
        Rooms { rooms: parts.filter_map(room).collect(), at: 0 }
    }

    /// Gives the caller its room back.
    pub(crate) fn give_back(&mut self, param: usize) {
        if let Out::Into(rooms, ready) = self
            && let Some(room) = rooms[param].take()
        {
            ready(param, room);
        }
    }
}

/// Rooms in RAM, in the parameters' order, from which pieces are taken in order.
#[derive(Default)]
pub(crate) struct Rooms<'r> {
    rooms: Vec<(usize, WeightsOut<'r>)>,
    at: usize,
}

impl<'r> Rooms<'r> {
    /// The room of the next `n` elements of a parameter, if it has any.
    pub(crate) fn take(&mut self, param: usize, n: usize) -> Option<WeightsOut<'r>> {
        self.at += self.rooms[self.at..].iter().take_while(|(before, _)| *before < param).count();
        let (found, room) = self.rooms.get_mut(self.at)?;
        (*found == param).then(|| room.split_off(n))
    }
}

impl NvmeAdam {
    /// After a step that was given up: hands the weights out again that were, as they were before.
    pub(crate) fn take_back(&mut self, left: Left<'_, '_, '_>) -> Result<(), OptimError> {
        let Left { mut out, handed, .. } = left;
        if handed.iter().all(|elements| *elements == 0) {
            self.latch = None;
            return Ok(());
        }
        let accelerator = self.ring.shared_accelerator();
        let mut result = Ok(());
        self.read::<1>(&mut |part| {
            let (param, first, main) = (part.param, part.first, part.main);
            let range = first..first + main.len();
            if handed[param] == 0 || result.is_err() {
                return;
            }
            match (out.on_device(param, range.clone()), &mut out) {
                (Some(slice), _) => {
                    let away = Away { grads: Vec::new(), weights: vec![(0..main.len(), slice)] };
                    result = accelerator.as_deref().map_or(Err(OptimError::Suspended), |accelerator| {
                        away.send(accelerator, bytemuck::cast_slice(main), &mut accelerator.scratch())
                    });
                }
                (None, Out::Each(weights)) => weights(param, first, main),
                (None, Out::Into(rooms, _)) => {
                    if let Some(room) = &mut rooms[param] {
                        room.part(range).write(0..main.len(), main);
                    }
                }
            }
        })?;
        result.map_err(|error| self.latched(error, false))
    }
}
