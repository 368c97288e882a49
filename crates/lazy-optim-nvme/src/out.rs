//! Where updated weights go.

use std::iter::Enumerate;
use std::ops::Range;
use std::slice::IterMut;

use crate::adam::WeightsOut;
use crate::device::DeviceSlice;
use crate::layout::Segment;

/// Where updated weights go.
pub(crate) enum Out<'a, 'w> {
    /// To the caller, chunk by chunk.
    Each(&'a mut (dyn FnMut(usize, usize, &[f32]) + 'a)),
    /// Into each parameter's room, which the caller gets back.
    Into(Vec<Option<WeightsOut<'w>>>, &'a mut (dyn FnMut(usize, WeightsOut<'w>) + 'a)),
}

impl Out<'_, '_> {
    /// Whether the weights of a parameter are wanted.
    pub(crate) fn wants(&self, param: usize) -> bool {
        match self {
            Out::Each(_) => true,
            Out::Into(rooms, _) => rooms[param].is_some(),
        }
    }

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
