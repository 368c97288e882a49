//! The update and the partial sums of the norm on a GPU, with the bits of the CPU.
//!
//! One of the few modules with `unsafe`: kernels take addresses.

use lazy_store::Stream;
use lazy_store::cuda::Gpu;
use lazy_store::cuda::kernels::{Arg, Grid, Kernel, Module};

use crate::OptimError;
use crate::adam::{Rule, unscale};
use crate::device::DeviceSlice;
use crate::moments::Moments;
use crate::norm::NORM_BLOCK;
use crate::quant::{self, QUANT_BLOCK};

/// Threads of a block, in `adam.cu` too.
const THREADS: u32 = 256;
/// Elements that the threads of a block have under way: two groups of four each.
const STRIDE: u64 = THREADS as u64 * 8;
/// Blocks on a multiprocessor where each fills tables of its own first.
const BLOCKS_WITH_TABLES: u32 = 4;
/// Most blocks of a grid.
const MOST_BLOCKS: u64 = i32::MAX as u64;

/// Sections of the state in device memory, laid out as in slot files, by the addresses of their first blocks, which are
/// multiples of 16.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceSections {
    pub(crate) moments: Moments,
    pub(crate) main: u64,
    pub(crate) avg: u64,
    pub(crate) sq: u64,
}

/// The kernels, loaded on one GPU.
#[derive(Debug)]
pub(crate) struct CudaAdam {
    gpu: Gpu,
    /// By format of the moments, then of the gradient.
    update: [[Kernel; 2]; 3],
    /// By format of the gradient.
    squares: [Kernel; 2],
    multiprocessors: u32,
}

impl CudaAdam {
    /// Compiles the kernels or takes them from the cache.
    ///
    /// # Errors
    ///
    /// Those of [`Module::compile`].
    pub(crate) fn new(gpu: &Gpu) -> Result<CudaAdam, OptimError> {
        let source = quant::cuda_source() + include_str!("adam.cu");
        let module = Module::compile(gpu, "adam", &source, &["--fmad=false"])?;
        let kernel = |name: &str| module.kernel(name);
        Ok(CudaAdam {
            gpu: gpu.clone(),
            update: [
                [kernel("adam_f32_f32")?, kernel("adam_f32_bf16")?],
                [kernel("adam_bf16_f32")?, kernel("adam_bf16_bf16")?],
                [kernel("adam_int8_f32")?, kernel("adam_int8_bf16")?],
            ],
            squares: [kernel("squares_f32")?, kernel("squares_bf16")?],
            multiprocessors: gpu.multiprocessors()?,
        })
    }

    /// Puts the update of the elements from `first` on of the sections, all of one parameter, on a stream: as many as `grad`, and
    /// `weights` where the new weights are wanted, have.
    ///
    /// # Errors
    ///
    /// [`OptimError::Option`] for an address that is not aligned, and the driver's refusal.
    ///
    /// # Safety
    ///
    /// The stream is one of this GPU's and alive. The addresses are its memory: the sections' hold all
    /// those elements, in whole blocks where moments are 8-bit. Nobody else uses any of it until the stream
    /// has come past this, save for reading the gradient.
    pub(crate) unsafe fn update(
        &self,
        stream: Stream,
        rule: &Rule,
        sections: DeviceSections,
        first: u64,
        grad: DeviceSlice,
        weights: Option<DeviceSlice>,
    ) -> Result<(), OptimError> {
        let DeviceSections { moments, main, avg, sq } = sections;
        for (address, what) in [(main, "main weights"), (avg, "exp_avg"), (sq, "exp_avg_sq")] {
            aligned(address, 16, what)?;
        }
        check(grad, "a gradient")?;
        weights.map_or(Ok(()), |weights| check(weights, "weights"))?;
        let len = grad.len() as u64;
        if len == 0 {
            return Ok(());
        }
        let blocks = match moments {
            Moments::F32 | Moments::Bf16 => (len + 4).div_ceil(STRIDE).min(MOST_BLOCKS),
            Moments::Int8 => (len + 2 * QUANT_BLOCK as u64)
                .div_ceil(STRIDE)
                .min(u64::from(BLOCKS_WITH_TABLES * self.multiprocessors)),
        };
        let mut args: Vec<Arg> = rule.constants().map(Arg::F32).into();
        args.extend(
            [grad.address(), main, avg, sq, weights.map_or(0, |weights| weights.address())].map(Arg::Address),
        );
        args.push(Arg::U32(weights.map_or(0, |weights| 1 + u32::from(weights.is_bf16()))));
        args.extend([first, len].map(Arg::U64));
        let kernel = &self.update[moments as usize][usize::from(grad.is_bf16())];
        self.gpu.bind()?;
        // SAFETY: the kernel's parameters; the rest is this function's contract.
        Ok(unsafe { kernel.launch(stream, Grid::linear(blocks as u32, THREADS), &args) }?)
    }

    /// Puts the partial sums of squares of a gradient, unscaled, on a stream: those of the blocks of 65,536 elements of its
    /// parameter that its elements, from number `first` on, lie in. They are float64 numbers at `sums`.
    ///
    /// # Errors
    ///
    /// As for [`CudaAdam::update`].
    ///
    /// # Safety
    ///
    /// As for [`CudaAdam::update`]; there is room for a number a block at `sums`.
    pub(crate) unsafe fn sums(
        &self,
        stream: Stream,
        grad: DeviceSlice,
        first: u64,
        scale: f64,
        sums: u64,
    ) -> Result<(), OptimError> {
        check(grad, "a gradient")?;
        aligned(sums, 8, "partial sums")?;
        let len = grad.len() as u64;
        if len == 0 {
            return Ok(());
        }
        let skipped = first % NORM_BLOCK as u64;
        let blocks = (skipped + len).div_ceil(NORM_BLOCK as u64);
        if blocks > MOST_BLOCKS {
            let what = format!("a gradient of {len} elements is too long for one launch; cut the parameter");
            return Err(OptimError::Option { what });
        }
        let args = [
            Arg::Address(grad.address()),
            Arg::U64(skipped),
            Arg::U64(len),
            Arg::F32(unscale(scale)),
            Arg::Address(sums),
        ];
        self.gpu.bind()?;
        // SAFETY: the kernel's parameters; the rest is this function's contract.
        Ok(unsafe {
            self.squares[usize::from(grad.is_bf16())].launch(
                stream,
                Grid::linear(blocks as u32, THREADS),
                &args,
            )
        }?)
    }
}

fn check(slice: DeviceSlice, what: &str) -> Result<(), OptimError> {
    aligned(slice.address(), if slice.is_bf16() { 2 } else { 4 }, what)
}

fn aligned(address: u64, to: u64, what: &str) -> Result<(), OptimError> {
    if address.is_multiple_of(to) {
        return Ok(());
    }
    let what =
        format!("{what} at device address {address:#x}; give memory that starts at a multiple of {to} bytes");
    Err(OptimError::Option { what })
}
