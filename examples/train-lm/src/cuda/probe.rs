//! Times of a decoder's layers on a GPU, and a parameter for trial steps of an optimizer. One of the few modules with `unsafe`: such a
//! parameter is named by its address.

use std::path::Path;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DriverError};
use lazy_model::{BytesPerSecond, Lane, Links, Marked, Observations, Placement};
use lazy_optim_nvme::{DeviceSlice, Gradient, NvmeAdam, StepInput, StepOutcome, WeightsOut};
use lazy_runtime::StepReport;
use lazy_store::{StoreError, Stream};

use super::trial::{Trial, bytes_of};
use super::{CudaDecoder, CudaError, CudaOptions, Real};
use crate::error::{Result, TrainError};
use crate::probe::{apart, median, schedule};
use crate::stop;

/// Steps after one that warms up.
const STEPS: u64 = 4;
/// Most elements of a trial parameter.
pub(crate) const TRIAL_ELEMENTS: usize = 64 << 20;

/// Rates of copies between HBM and host RAM while layers ran, in bytes a second.
#[derive(Default)]
pub struct Beside {
    d2h: Vec<f64>,
    h2d: Vec<f64>,
}

impl Beside {
    /// Links at the rates that copies had beside layers, which is where plans have them; at those alone where no copy was made.
    pub fn correct(self, links: &mut Links, when: &str) {
        for (samples, link) in [(self.d2h, &mut links.d2h), (self.h2d, &mut links.h2d)] {
            if !samples.is_empty() {
                let rate = BytesPerSecond(median(samples));
                *link = Marked::measured(rate, "copies of one boundary beside layers", when);
            }
        }
    }
}

/// Adds the rates of a step's copies.
fn add(beside: &mut Beside, report: &StepReport) {
    for span in &report.timeline.spans {
        let rate = span.bytes.get() as f64 / span.duration().get().max(f64::MIN_POSITIVE);
        match span.lane {
            Lane::D2h => beside.d2h.push(rate),
            Lane::H2d => beside.h2d.push(rate),
            _ => {}
        }
    }
}

/// What is seen of steps of the decoder, on weights and tokens made up, and the rates of copies beside them. What goes to a file lies in `spill`.
///
/// # Errors
/// When the GPU has no room for a step that keeps little, and when a step fails.
pub fn layer_times(decoder: &CudaDecoder, spill: &Path) -> Result<(Observations, Beside)> {
    let spec = decoder.spec();
    // Whatever the steps of the run are, one micro-batch shows all.
    let mut options = CudaOptions { dropout: decoder.options().dropout, ..*decoder.options() };
    options.model.micro_batches = 1;
    let choose = |model: &lazy_runtime::Model| {
        let mut schedule = schedule(model);
        // As many boundaries are in host RAM.
        let inner = 1..spec.layers();
        inner
            .step_by(apart(spec.layers()))
            .for_each(|boundary| schedule.placement[boundary] = Placement::Host);
        Ok(schedule)
    };
    let pool = Pool::new(options.real);
    let mut trial =
        Trial::open(decoder.gpu(), spec, options, spill, choose, |_, shape| pool.parameter(shape))
            .map_err(TrainError::Layer)?;
    let batch = vec![ids(options.shape.tokens(), spec.vocab)];
    let mut seen = Observations::new(trial.program.plan(), STEPS as usize);
    let mut beside = Beside::default();
    for step in 0..=STEPS {
        stop::check()?;
        let report = trial.step(step, &batch).map_err(TrainError::Layer)?;
        if step > 0 {
            seen.note(&report.timeline);
            add(&mut beside, &report);
        }
    }
    Ok((seen, beside))
}

/// Ids that look like text: some often, most seldom.
pub fn ids(tokens: usize, vocabulary: usize) -> Vec<u32> {
    (0..tokens).map(|i| ((i * 7919 + i * i % 977) % vocabulary) as u32).collect()
}

/// So many bytes of what is repeated.
fn repeated(part: &[u8], bytes: usize) -> Vec<u8> {
    let mut all = Vec::with_capacity(bytes);
    while all.len() < bytes {
        all.extend_from_slice(&part[..part.len().min(bytes - all.len())]);
    }
    all
}

/// Weights cut from one pool of random numbers.
pub struct Pool {
    real: Real,
    bytes: Vec<u8>,
}

impl Pool {
    /// Of this type.
    pub fn new(real: Real) -> Pool {
        let stream = crate::random::Stream::keyed(&[0]);
        let values: Vec<f32> = (0..1 << 22).map(|i| 0.07 * (stream.uniform(i) as f32 - 0.5)).collect();
        Pool { real, bytes: bytes_of(real, &values) }
    }

    /// The bytes of a parameter: ones for a vector.
    pub fn parameter(&self, shape: &[usize]) -> Vec<u8> {
        let elements: usize = shape.iter().product();
        if shape.len() == 1 {
            return bytes_of(self.real, &vec![1.0; elements]);
        }
        repeated(&self.bytes, elements * self.real.bytes())
    }
}

/// Gradient and weights of one parameter in the memory of the GPU.
pub(crate) struct TrialParameter {
    stream: Arc<CudaStream>,
    options: CudaOptions,
    elements: usize,
    gradient: CudaSlice<u8>,
    weights: CudaSlice<u8>,
}

impl TrialParameter {
    /// Of `elements`, or as many as tell the rate.
    pub(crate) fn new(decoder: &CudaDecoder, elements: usize) -> Result<TrialParameter> {
        let failed = |e: DriverError| {
            CudaError::from(StoreError::Cuda { what: "make a trial parameter", reason: e.to_string() })
        };
        let (elements, options) = (elements.min(TRIAL_ELEMENTS), *decoder.options());
        let stream = decoder.gpu().context().new_stream().map_err(failed)?;
        // A small value in float32 and in bfloat16.
        let all =
            repeated(&bytes_of(options.gradients, &[1e-3; 1 << 16]), elements * options.gradients.bytes());
        let gradient = stream.clone_htod(&all).map_err(failed)?;
        let weights = stream.alloc_zeros(elements * options.real.bytes()).map_err(failed)?;
        stream.synchronize().map_err(failed)?;
        Ok(TrialParameter { stream, options, elements, gradient, weights })
    }

    pub(crate) fn elements(&self) -> usize {
        self.elements
    }

    /// A step of the optimizer.
    pub(crate) fn step(&self, adam: &mut NvmeAdam, input: &StepInput<'_>) -> Result<StepOutcome> {
        let slice = |memory: &CudaSlice<u8>, real| {
            let (address, _) = memory.device_ptr(&self.stream);
            // SAFETY: memory of so many numbers, held by `self`, whose last use has been waited for.
            unsafe {
                match real {
                    Real::F32 => DeviceSlice::f32(address, self.elements),
                    Real::Bf16 => DeviceSlice::bf16(address, self.elements),
                }
            }
        };
        let gradient = Gradient::Device(slice(&self.gradient, self.options.gradients));
        let weights = WeightsOut::Device(slice(&self.weights, self.options.real));
        // SAFETY: a stream of that GPU's primary context, held by `self`. Memory taken on a stream is there for other streams once they
        // have waited for it.
        let stream = unsafe { Stream::from_raw(self.stream.cu_stream().cast()) };
        let input = StepInput { stream: Some(stream), ..*input };
        Ok(adam.step_into(&[Some(gradient)], &input, vec![Some(weights)], &mut |_, _| {})?)
    }
}
