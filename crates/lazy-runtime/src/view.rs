//! What layers are given to read and to write.

use std::ops::Range;

use lazy_model::Bytes;
use lazy_store::DeviceRange;
use smallvec::SmallVec;

use crate::layer::LayerError;

/// Most buffers of a call that take no allocation.
pub(crate) const FEW: usize = 12;

/// Bytes that a call reads: in RAM on the host device, in the memory of a GPU on CUDA.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a>(Place<&'a [u8]>);

/// Bytes that a call writes, in the same places. What they held before means nothing, but for gradients of parameters, which are
/// added to.
#[derive(Debug)]
pub struct Output<'a>(Place<&'a mut [u8]>);

#[derive(Clone, Copy, Debug)]
enum Place<S> {
    Host(S),
    Device(DeviceRange),
}

/// A layer wants bytes where they are not.
#[derive(Debug, thiserror::Error)]
enum PlaceError {
    #[error(
        "the layer computes in RAM, but this store's HBM is a GPU's: put its work on `cx.stream()` instead"
    )]
    OnDevice,
    #[error(
        "the layer puts work on a stream, but this store's HBM is RAM: read and write the bytes in the call"
    )]
    OnHost,
    #[error("{0} bytes are no float32 values: declare sizes and parameters that are multiples of four bytes")]
    NotFloats(usize),
}

impl<'a> Input<'a> {
    /// Bytes in RAM: how a test of a layer makes one.
    pub fn of(bytes: &'a [u8]) -> Input<'a> {
        Input(Place::Host(bytes))
    }

    pub(crate) fn device(range: DeviceRange) -> Input<'a> {
        Input(Place::Device(range))
    }

    /// How many.
    pub fn len(&self) -> Bytes {
        match self.0 {
            Place::Host(bytes) => Bytes(bytes.len() as u64),
            Place::Device(range) => range.bytes,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == Bytes::ZERO
    }

    /// The bytes.
    ///
    /// # Errors
    /// On a GPU.
    pub fn bytes(&self) -> Result<&'a [u8], LayerError> {
        match self.0 {
            Place::Host(bytes) => Ok(bytes),
            Place::Device(_) => Err(PlaceError::OnDevice.into()),
        }
    }

    /// The bytes as float32.
    ///
    /// # Errors
    /// On a GPU, and where their number is no multiple of four.
    pub fn f32(&self) -> Result<&'a [f32], LayerError> {
        let bytes = self.bytes()?;
        bytemuck::try_cast_slice(bytes).map_err(|_| PlaceError::NotFloats(bytes.len()).into())
    }

    /// Where they are on a GPU.
    ///
    /// # Errors
    /// On the host device.
    pub fn range(&self) -> Result<DeviceRange, LayerError> {
        match self.0 {
            Place::Device(range) => Ok(range),
            Place::Host(_) => Err(PlaceError::OnHost.into()),
        }
    }

    pub(crate) fn part(&self, part: &Range<usize>) -> Input<'a> {
        match self.0 {
            Place::Host(bytes) => Input(Place::Host(&bytes[part.clone()])),
            Place::Device(range) => Input(Place::Device(part_of(range, part))),
        }
    }
}

impl<'a> Output<'a> {
    /// Bytes in RAM: how a test of a layer makes one.
    pub fn of(bytes: &'a mut [u8]) -> Output<'a> {
        Output(Place::Host(bytes))
    }

    pub(crate) fn device(range: DeviceRange) -> Output<'a> {
        Output(Place::Device(range))
    }

    /// How many.
    pub fn len(&self) -> Bytes {
        match &self.0 {
            Place::Host(bytes) => Bytes(bytes.len() as u64),
            Place::Device(range) => range.bytes,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == Bytes::ZERO
    }

    /// The bytes.
    ///
    /// # Errors
    /// On a GPU.
    pub fn bytes(self) -> Result<&'a mut [u8], LayerError> {
        match self.0 {
            Place::Host(bytes) => Ok(bytes),
            Place::Device(_) => Err(PlaceError::OnDevice.into()),
        }
    }

    /// The bytes as float32.
    ///
    /// # Errors
    /// On a GPU, and where their number is no multiple of four.
    pub fn f32(self) -> Result<&'a mut [f32], LayerError> {
        let bytes = self.bytes()?;
        let len = bytes.len();
        bytemuck::try_cast_slice_mut(bytes).map_err(|_| PlaceError::NotFloats(len).into())
    }

    /// Where they are on a GPU.
    ///
    /// # Errors
    /// On the host device.
    pub fn range(&self) -> Result<DeviceRange, LayerError> {
        match self.0 {
            Place::Device(range) => Ok(range),
            Place::Host(_) => Err(PlaceError::OnHost.into()),
        }
    }

    /// The same bytes for a while.
    pub fn reborrow(&mut self) -> Output<'_> {
        match &mut self.0 {
            Place::Host(bytes) => Output(Place::Host(bytes)),
            Place::Device(range) => Output(Place::Device(*range)),
        }
    }

    /// What has been written, to be read.
    pub fn as_input(&self) -> Input<'_> {
        match &self.0 {
            Place::Host(bytes) => Input(Place::Host(bytes)),
            Place::Device(range) => Input(Place::Device(*range)),
        }
    }

    pub(crate) fn part(self, part: &Range<usize>) -> Output<'a> {
        match self.0 {
            Place::Host(bytes) => Output(Place::Host(&mut bytes[part.clone()])),
            Place::Device(range) => Output(Place::Device(part_of(range, part))),
        }
    }
}

pub(crate) fn part_of(range: DeviceRange, part: &Range<usize>) -> DeviceRange {
    let bytes = Bytes(part.len() as u64);
    DeviceRange { address: range.address + part.start as u64, bytes }
}

/// Where one parameter of an owner lies: in which of the buffers of a call, and which bytes there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) buffer: usize,
    pub(crate) bytes: Range<usize>,
}

/// The weights of a layer, in the order in which it declares its parameters.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    pub(crate) buffers: &'a [Input<'a>],
    pub(crate) slots: &'a [Slot],
}

impl<'a> Weights<'a> {
    /// Those of an owner whose parameters the runtime does not keep.
    pub fn none() -> Weights<'a> {
        Weights { buffers: &[], slots: &[] }
    }

    /// The weights of the `i`-th parameter that the layer declares; empty where it keeps them itself.
    ///
    /// # Panics
    /// When it declares no more than `i`.
    pub fn get(&self, i: usize) -> Input<'a> {
        let slot = &self.slots[i];
        self.buffers.get(slot.buffer).map_or(Input::of(&[]), |buffer| buffer.part(&slot.bytes))
    }
}

/// The gradients of a layer's parameters, in the order in which it declares them. A layer *adds* what one micro-batch contributes, and adds it
/// once: so a sum is the same wherever it is kept in between.
pub struct Grads<'a> {
    pub(crate) buffers: SmallVec<[Output<'a>; FEW]>,
    pub(crate) slots: &'a [Slot],
}

impl<'a> Grads<'a> {
    /// Those of an owner whose parameters the runtime does not keep.
    pub fn none() -> Grads<'a> {
        Grads { buffers: SmallVec::new(), slots: &[] }
    }

    /// The gradient of the `i`-th parameter that the layer declares, to be added to; empty where it keeps it itself.
    ///
    /// # Panics
    /// When it declares no more than `i`.
    pub fn get(&mut self, i: usize) -> Output<'_> {
        let slot = &self.slots[i];
        match self.buffers.get_mut(slot.buffer) {
            Some(buffer) => buffer.reborrow().part(&slot.bytes),
            None => Output::of(&mut []),
        }
    }

    /// Adds to the gradient of the `i`-th parameter, in float32 on the host device.
    ///
    /// # Errors
    /// When it has another number of elements, and on a GPU.
    pub fn add(&mut self, i: usize, contribution: &[f32]) -> Result<(), LayerError> {
        let sum = self.get(i).f32()?;
        if sum.len() != contribution.len() {
            let (got, want) = (contribution.len(), sum.len());
            return Err(format!("a gradient of {got} elements is added to one of {want}").into());
        }
        sum.iter_mut().zip(contribution).for_each(|(sum, value)| *sum += value);
        Ok(())
    }
}
