//! Parameters in the memory of the GPU, as the trainer and its optimizer use them between steps. One of the few modules with
//! `unsafe`: such memory is named by its address.

use cudarc::driver::{CudaEvent, DriverError, result, sys};
use lazy_model::Bytes;
use lazy_optim_nvme::{DeviceSlice, Gradient, WeightsOut};
use lazy_runtime::{Executor, ParameterId, RuntimeError};
use lazy_store::cuda::Gpu;
use lazy_store::{DeviceRange, Store, StoreError, Stream};

use super::trial::bytes_of;
use super::{CudaDecoder, CudaError, Real, Result};
use crate::homes;

/// Where an executor's parameters and their gradients lie.
pub(crate) struct DeviceParameters {
    gpu: Gpu,
    real: Real,
    gradients: Real,
    /// Weights and gradient of each; none of what is at home in RAM.
    places: Vec<Option<[DeviceRange; 2]>>,
    /// Holds the memory.
    _store: Store,
}

fn failed(what: &'static str) -> impl Fn(DriverError) -> StoreError {
    move |e| StoreError::Cuda { what, reason: e.to_string() }
}

/// A run of numbers.
fn slice(real: Real, range: DeviceRange) -> DeviceSlice {
    let elements = range.bytes.get() as usize / real.bytes();
    // SAFETY: memory that `DeviceParameters` holds. It hands this out for a step of the optimizer alone, which begins when the
    // gradients are final or waits for each, and which the next step of the executor follows.
    unsafe {
        match real {
            Real::F32 => DeviceSlice::f32(range.address, elements),
            Real::Bf16 => DeviceSlice::bf16(range.address, elements),
        }
    }
}

impl DeviceParameters {
    /// Those of a decoder's executor.
    ///
    /// # Errors
    /// When some are neither in the memory of the GPU, with their gradients, nor as a whole at home in RAM.
    pub(crate) fn of(
        decoder: &CudaDecoder,
        executor: &Executor,
    ) -> std::result::Result<DeviceParameters, RuntimeError> {
        let options = decoder.shared.options;
        let in_ram = homes::are_in_ram(&options.model);
        let place = |parameter: usize| {
            let id = ParameterId(parameter);
            match executor.weights_on_device(id).and_then(|w| Ok([w, executor.gradient_on_device(id)?])) {
                Err(RuntimeError::NotOnDevice { .. }) if in_ram => Ok(None),
                place => place.map(Some),
            }
        };
        Ok(DeviceParameters {
            gpu: decoder.gpu.clone(),
            real: options.real,
            gradients: options.gradients,
            places: (0..decoder.spec().parameters().len())
                .map(place)
                .collect::<std::result::Result<_, RuntimeError>>()?,
            _store: executor.store().clone(),
        })
    }

    /// Whether a parameter is there.
    pub(crate) fn has(&self, parameter: usize) -> bool {
        self.places[parameter].is_some()
    }

    fn weights_of(&self, parameter: usize) -> DeviceRange {
        self.places[parameter].map_or(DeviceRange { address: 0, bytes: Bytes::ZERO }, |[weights, _]| weights)
    }

    /// Sets elements of a parameter from `first` on.
    pub(crate) fn write(&self, parameter: usize, first: usize, values: &[f32]) -> Result<()> {
        self.write_bytes(parameter, first, &bytes_of(self.real, values))
    }

    /// The same, of their bytes.
    pub(super) fn write_bytes(&self, parameter: usize, first: usize, bytes: &[u8]) -> Result<()> {
        let weights = self.weights_of(parameter);
        let at = (first * self.real.bytes()) as u64;
        let (wanted, got) = (at + bytes.len() as u64, weights.bytes.get());
        if wanted > got {
            return Err(CudaError::Short { what: "a parameter", wanted, got });
        }
        self.gpu.bind()?;
        // SAFETY: inside the parameter, which no step uses now.
        unsafe { result::memcpy_htod_sync(weights.address + at, bytes) }
            .map_err(failed("write weights to the GPU"))?;
        Ok(())
    }

    /// The bytes of a parameter.
    pub(crate) fn read(&self, parameter: usize) -> Result<Vec<u8>> {
        let weights = self.weights_of(parameter);
        let mut bytes = vec![0; weights.bytes.get() as usize];
        self.gpu.bind()?;
        // SAFETY: the parameter, which no step uses now.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, weights.address) }
            .map_err(failed("read weights from the GPU"))?;
        Ok(bytes)
    }

    /// The gradient of a parameter, for a step of the optimizer.
    pub(crate) fn gradient(&self, parameter: usize) -> Option<Gradient<'static>> {
        self.places[parameter].map(|[_, gradient]| Gradient::Device(slice(self.gradients, gradient)))
    }

    /// All gradients that are there.
    pub(crate) fn gradients(&self) -> Vec<Option<Gradient<'static>>> {
        (0..self.places.len()).map(|parameter| self.gradient(parameter)).collect()
    }

    /// Room for the weights of all parameters that are there, for a step of the optimizer.
    pub(crate) fn weights(&self) -> Vec<Option<WeightsOut<'static>>> {
        let room = |[weights, _]: &[DeviceRange; 2]| WeightsOut::Device(slice(self.real, *weights));
        self.places.iter().map(|place| place.as_ref().map(room)).collect()
    }
}

/// A place on a stream.
pub(crate) struct Mark(CudaEvent);

impl Mark {
    /// Behind what is on a stream now.
    pub(crate) fn on(gpu: &Gpu, stream: Stream) -> Result<Mark> {
        let flags = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC;
        let event = gpu.context().new_event(Some(flags)).map_err(failed("make an event"))?;
        // SAFETY: the event is this mark's alone, and the stream is that of a task under way.
        unsafe { result::event::record(event.cu_event(), stream.as_raw().cast()) }
            .map_err(failed("mark a place on a stream"))?;
        Ok(Mark(event))
    }

    /// Waits until it is reached.
    pub(crate) fn wait(&self) -> Result<()> {
        Ok(self.0.synchronize().map_err(failed("wait for a gradient"))?)
    }
}
