//! The arithmetic without the files: for the benchmarks, and for the tests on a GPU. No part of the crate's interface.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DriverError};
use lazy_store::Stream;
use lazy_store::cuda::Gpu;
use rayon::prelude::*;

use crate::DeviceSlice;
use crate::adam::{BlockMut, Gradient, Rule, WeightsOut, update_block};
use crate::cuda::{CudaAdam, DeviceSections};
use crate::moments::{Moment, Moments};
use crate::slot::BLOCK;
use crate::{GroupOptions, OptimError, norm};

/// The constants of a step.
#[derive(Clone, Copy, Debug)]
pub struct Step(Rule);

impl Step {
    /// Step number `count`, from 1.
    pub fn new(options: &GroupOptions, count: u64, scale: f64, clip: f64) -> Step {
        Step(Rule::new(options, count, scale, clip))
    }
}

/// The partial sums of squares of the blocks of a gradient whose first element is number `first` of its parameter.
pub fn sums(grad: Gradient<'_>, first: usize, scale: f64) -> Vec<f64> {
    norm::parts([(0, grad, first)], scale).into_iter().map(|part| part.sum).collect()
}

/// State in memory, laid out as in slot files.
#[derive(Clone, Debug, PartialEq)]
pub struct Sections {
    moments: Moments,
    /// Main weights.
    pub main: Vec<f32>,
    /// Bytes of the first moments, in whole blocks.
    pub avg: Vec<u64>,
    /// Bytes of the second moments.
    pub sq: Vec<u64>,
}

impl Sections {
    /// Main weights, and moments of zero.
    pub fn new(moments: Moments, main: Vec<f32>) -> Sections {
        let words = main.len().div_ceil(BLOCK) * moments.block_bytes() / 8;
        let section = |moment| {
            let mut section = vec![0; words];
            for block in bytemuck::cast_slice_mut(&mut section).chunks_mut(moments.block_bytes()) {
                moments.fill_zero(moment, block);
            }
            section
        };
        Sections { moments, main, avg: section(Moment::First), sq: section(Moment::Second) }
    }

    fn section(&mut self, moment: Moment) -> &mut [u8] {
        bytemuck::cast_slice_mut(if moment == Moment::First { &mut self.avg } else { &mut self.sq })
    }

    /// Gives elements from `first` on moments, which share scales with no others.
    pub fn set_moments(&mut self, first: usize, avg: &[f32], sq: &[f32]) {
        let moments = self.moments;
        for (moment, values) in [(Moment::First, avg), (Moment::Second, sq)] {
            let range = first..first + values.len();
            for (i, block) in self.section(moment).chunks_mut(moments.block_bytes()).enumerate() {
                let here = overlap(&range, i);
                if !here.is_empty() {
                    let values = &values[here.start + i * BLOCK - first..here.end + i * BLOCK - first];
                    moments.encode(moment, values, block, here);
                }
            }
        }
    }

    /// First and second moments as numbers.
    pub fn moments(&mut self) -> [Vec<f32>; 2] {
        let (moments, n) = (self.moments, self.main.len());
        [Moment::First, Moment::Second].map(|moment| {
            let mut all = vec![0.0; n];
            let blocks = self.section(moment).chunks(moments.block_bytes());
            for (block, values) in blocks.zip(all.chunks_mut(BLOCK)) {
                moments.decode(moment, block, 0..values.len(), values);
            }
            all
        })
    }

    /// Updates elements `range`, all of one parameter, on all threads of the current pool.
    pub fn update(
        &mut self,
        step: &Step,
        range: Range<usize>,
        grad: Gradient<'_>,
        mut weights: Option<WeightsOut<'_>>,
    ) {
        let moments = self.moments;
        let bytes = moments.block_bytes();
        let avg = bytemuck::cast_slice_mut(&mut self.avg).chunks_mut(bytes);
        let sq = bytemuck::cast_slice_mut(&mut self.sq).chunks_mut(bytes);
        let blocks = self.main.chunks_mut(BLOCK).zip(avg).zip(sq).enumerate();
        let mut done = 0;
        let jobs: Vec<_> = blocks
            .map(|(i, ((main, avg), sq))| {
                let here = overlap(&range, i);
                let grad = grad.slice(done..done + here.len());
                done += here.len();
                let weights = weights.as_mut().map(|weights| weights.split_off(here.len()));
                (BlockMut { moments, main, avg, sq }, here, grad, weights)
            })
            .collect();
        jobs.into_par_iter().for_each(|(block, here, grad, weights)| {
            if !here.is_empty() {
                update_block(&step.0, block, here, grad, weights);
            }
        });
    }
}

/// Which elements of block `i` a range has.
fn overlap(range: &Range<usize>, i: usize) -> Range<usize> {
    let within = |at: usize| at.clamp(i * BLOCK, (i + 1) * BLOCK) - i * BLOCK;
    within(range.start)..within(range.end)
}

/// A gradient in device memory.
#[derive(Debug)]
pub enum DeviceGradient<'a> {
    /// Float32.
    F32(CudaView<'a, f32>),
    /// Bits of bfloat16.
    Bf16(CudaView<'a, u16>),
}

/// Where new weights go in device memory.
#[derive(Debug)]
pub enum DeviceWeights<'a> {
    /// Float32.
    F32(CudaViewMut<'a, f32>),
    /// Bits of bfloat16.
    Bf16(CudaViewMut<'a, u16>),
}

/// The kernels, and a stream to run them on.
#[derive(Debug)]
pub struct Kernels {
    adam: CudaAdam,
    /// All work goes there.
    pub stream: Arc<CudaStream>,
}

/// State in device memory.
#[derive(Debug)]
pub struct CudaSections {
    moments: Moments,
    main: CudaSlice<f32>,
    avg: CudaSlice<u64>,
    sq: CudaSlice<u64>,
}

impl Kernels {
    /// Of a GPU.
    ///
    /// # Errors
    ///
    /// The compiler's and the driver's.
    pub fn new(gpu: &Gpu) -> Result<Kernels, OptimError> {
        let stream = gpu.context().new_stream().map_err(|error| driver(&error))?;
        Ok(Kernels { adam: CudaAdam::new(gpu)?, stream })
    }

    /// Copies state to the device.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn upload(&self, sections: &Sections) -> Result<CudaSections, DriverError> {
        Ok(CudaSections {
            moments: sections.moments,
            main: self.stream.clone_htod(&sections.main)?,
            avg: self.stream.clone_htod(&sections.avg)?,
            sq: self.stream.clone_htod(&sections.sq)?,
        })
    }

    /// Copies state back.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn download(&self, sections: &CudaSections) -> Result<Sections, DriverError> {
        Ok(Sections {
            moments: sections.moments,
            main: self.stream.clone_dtoh(&sections.main)?,
            avg: self.stream.clone_dtoh(&sections.avg)?,
            sq: self.stream.clone_dtoh(&sections.sq)?,
        })
    }

    /// Queues the update of as many elements from `first` on as there are gradients.
    ///
    /// # Errors
    ///
    /// [`OptimError::Option`] for lengths that do not fit, and those of the launch.
    pub fn update(
        &self,
        step: &Step,
        sections: &mut CudaSections,
        first: usize,
        grads: &DeviceGradient<'_>,
        weights: Option<DeviceWeights<'_>>,
    ) -> Result<(), OptimError> {
        let (grad, n, _reading) = self.grads(grads);
        let mut weights = weights;
        let (out, room, _writing) = match &mut weights {
            None => (None, n, None),
            Some(DeviceWeights::F32(view)) => {
                let room = view.len();
                let (address, used) = view.device_ptr_mut(&self.stream);
                // SAFETY: the view is alive, and borrowed until the work is on the stream that frees it.
                (Some(unsafe { DeviceSlice::f32(address, room) }), room, Some(used))
            }
            Some(DeviceWeights::Bf16(view)) => {
                let room = view.len();
                let (address, used) = view.device_ptr_mut(&self.stream);
                // SAFETY: as above.
                (Some(unsafe { DeviceSlice::bf16(address, room) }), room, Some(used))
            }
        };
        if room != n || first + n > sections.main.len() {
            return Err(OptimError::Option { what: format!("{n} gradients from {first} on do not fit") });
        }
        let (main, _main) = sections.main.device_ptr_mut(&self.stream);
        let (avg, _avg) = sections.avg.device_ptr_mut(&self.stream);
        let (sq, _sq) = sections.sq.device_ptr_mut(&self.stream);
        let sections = DeviceSections { moments: sections.moments, main, avg, sq };
        // SAFETY: the stream and all memory are alive, of the lengths that were checked, in whole blocks; what is borrowed
        // here is used on this stream alone, and freed in its order.
        unsafe {
            let stream = Stream::from_raw(self.stream.cu_stream().cast());
            self.adam.update(stream, &step.0, sections, first as u64, grad, out)
        }
    }

    /// [`sums`], of a gradient in device memory.
    ///
    /// # Errors
    ///
    /// Those of the launch.
    pub fn sums(&self, grads: &DeviceGradient<'_>, first: usize, scale: f64) -> Result<Vec<f64>, OptimError> {
        let (grad, n, _reading) = self.grads(grads);
        let count = norm::blocks(first, n).count();
        let found = self.stream.alloc_zeros::<f64>(count.max(1));
        let mut found = found.map_err(|error| driver(&error))?;
        let (sums, written) = found.device_ptr_mut(&self.stream);
        // SAFETY: as in `update`.
        unsafe {
            let stream = Stream::from_raw(self.stream.cu_stream().cast());
            self.adam.sums(stream, grad, first as u64, scale, sums)?;
        }
        drop(written);
        let mut found = self.stream.clone_dtoh(&found).map_err(|error| driver(&error))?;
        found.truncate(count);
        Ok(found)
    }

    fn grads<'a>(&'a self, grads: &'a DeviceGradient<'_>) -> (DeviceSlice, usize, impl Drop + use<'a>) {
        match grads {
            DeviceGradient::F32(view) => {
                let (address, used) = view.device_ptr(&self.stream);
                // SAFETY: as in `update`.
                (unsafe { DeviceSlice::f32(address, view.len()) }, view.len(), used)
            }
            DeviceGradient::Bf16(view) => {
                let (address, used) = view.device_ptr(&self.stream);
                // SAFETY: as in `update`.
                (unsafe { DeviceSlice::bf16(address, view.len()) }, view.len(), used)
            }
        }
    }
}

fn driver(error: &DriverError) -> OptimError {
    OptimError::Option { what: format!("the driver says {error}") }
}
