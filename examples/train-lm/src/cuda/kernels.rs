//! The decoder's kernels: each with its launch, which checks that the buffers hold what the kernel touches. One of the few modules
//! with `unsafe`.

use lazy_store::cuda::Gpu;
use lazy_store::cuda::kernels::{Arg, Grid, Kernel, Module};
use lazy_store::{DeviceRange, Stream};

use super::attention::Attention;
use super::places::PARTS;
use super::{CudaError, Real, Result};

/// Threads of a block that works on a row, and of one that works element by element.
const THREADS: u32 = 256;
/// Most blocks of a kernel that works element by element.
const MOST_BLOCKS: u64 = 132 * 16;

/// All kernels, compiled for one type of numbers and one width of heads.
pub(super) struct Kernels {
    gpu: Gpu,
    real: Real,
    gradients: Real,
    head_dim: usize,
    pub(super) attention: Attention,
    rms_forward: Kernel,
    rms_backward: Kernel,
    add_parts: Kernel,
    rotary_table: Kernel,
    qk_forward: Kernel,
    qk_backward: Kernel,
    swiglu_forward: Kernel,
    swiglu_backward: Kernel,
    dropout: Kernel,
    embed_forward: Kernel,
    embed_backward: Kernel,
    cross_entropy: Kernel,
    sum_losses: Kernel,
}

/// One norm: rows of `width` elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) eps: f32,
}

/// Heads of queries or keys, one after the other in each token.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub(super) tokens: usize,
    pub(super) heads: usize,
    pub(super) seq: usize,
    pub(super) eps: f32,
}

/// A mask of dropout, as `dropout.rs` makes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceMask {
    pub(super) state: u64,
    pub(super) threshold: u64,
    pub(super) scale: f32,
}

/// A buffer a kernel touches, with the bytes it touches there.
pub(super) fn at(what: &'static str, range: DeviceRange, bytes: usize) -> Result<Arg> {
    if (range.bytes.get() as usize) < bytes {
        return Err(CudaError::Short { what, wanted: bytes as u64, got: range.bytes.get() });
    }
    Ok(Arg::Address(range.address))
}

/// A number that kernels take in 32 bits.
pub(super) fn count(n: usize) -> Result<u32> {
    u32::try_from(n).map_err(|_| {
        CudaError::Config(format!("{n} rows are more than one launch takes: make the batch smaller"))
    })
}

/// Launches a kernel.
pub(super) fn launch(kernel: &Kernel, stream: Stream, grid: Grid, args: &[Arg]) -> Result<()> {
    // SAFETY: each caller, here and in `attention.rs`, gives a kernel of the sources beside this file its own parameters, and `at` has checked
    // that every buffer holds what the kernel touches. The buffers are those of a task, which says what it reads and writes, so nobody
    // else uses them until the stream has come past this.
    Ok(unsafe { kernel.launch(stream, grid, args) }?)
}

impl Kernels {
    pub(super) fn compile(gpu: &Gpu, real: Real, gradients: Real, head_dim: usize) -> Result<Kernels> {
        let mut source = [
            include_str!("kernels/common.cu"),
            include_str!("kernels/layers.cu"),
            include_str!("kernels/attention.cu"),
        ]
        .concat();
        let tensor_cores = Attention::on_tensor_cores(gpu, real, head_dim);
        if tensor_cores {
            source += include_str!("kernels/tensor_cores.cu");
        }
        let width = format!("-DHEAD_DIM={head_dim}");
        let mut options = vec![width.as_str()];
        if real == Real::Bf16 {
            options.push("-DREAL_BF16");
        }
        if gradients == Real::Bf16 {
            options.push("-DGRAD_BF16");
        }
        let module = Module::compile(gpu, "decoder", &source, &options)?;
        let kernel = |name: &str| module.kernel(name);
        let kernels = Kernels {
            gpu: gpu.clone(),
            real,
            gradients,
            head_dim,
            attention: Attention::new(&module, real, head_dim, tensor_cores)?,
            rms_forward: kernel("rms_forward")?,
            rms_backward: kernel("rms_backward")?,
            add_parts: kernel("add_parts")?,
            rotary_table: kernel("rotary_table")?,
            qk_forward: kernel("qk_forward")?,
            qk_backward: kernel("qk_backward")?,
            swiglu_forward: kernel("swiglu_forward")?,
            swiglu_backward: kernel("swiglu_backward")?,
            dropout: kernel("dropout")?,
            embed_forward: kernel("embed_forward")?,
            embed_backward: kernel("embed_backward")?,
            cross_entropy: kernel("cross_entropy")?,
            sum_losses: kernel("sum_losses")?,
        };
        Ok(kernels)
    }

    /// Makes the GPU current on this thread, before a call's launches.
    pub(super) fn bind(&self) -> Result<()> {
        Ok(self.gpu.bind()?)
    }

    fn reals(&self, what: &'static str, range: DeviceRange, elements: usize) -> Result<Arg> {
        at(what, range, elements * self.real.bytes())
    }

    /// `y = x / rms(x) w`, row by row.
    pub(super) fn rms_forward(&self, stream: Stream, norm: Norm, [x, w, y]: [DeviceRange; 3]) -> Result<()> {
        let Norm { rows, width, eps } = norm;
        let args = [
            self.reals("a norm's input", x, rows * width)?,
            self.reals("a norm's weights", w, width)?,
            self.reals("a norm's output", y, rows * width)?,
            Arg::U32(count(width)?),
            Arg::F32(eps),
        ];
        launch(&self.rms_forward, stream, Grid::linear(count(rows)?, THREADS), &args)
    }

    /// `dx = residual` and the gradient through the norm; the weights' is added to `dw` by way of `parts`.
    pub(super) fn rms_backward(
        &self,
        stream: Stream,
        norm: Norm,
        [x, w, dy, dx]: [DeviceRange; 4],
        residual: Option<DeviceRange>,
        [parts, dw]: [DeviceRange; 2],
    ) -> Result<()> {
        let Norm { rows, width, eps } = norm;
        let none = Ok(Arg::Address(0));
        let shared_bytes = 4 * count(width)?;
        self.rms_backward.allow_shared(shared_bytes)?;
        let args = [
            self.reals("a norm's input", x, rows * width)?,
            self.reals("a norm's weights", w, width)?,
            self.reals("the gradient of a norm's output", dy, rows * width)?,
            residual.map_or(none, |residual| self.reals("a residual's gradient", residual, rows * width))?,
            self.reals("the gradient of a norm's input", dx, rows * width)?,
            at("parts of a gradient", parts, PARTS as usize * width * 4)?,
            Arg::U32(count(rows)?),
            Arg::U32(count(width)?),
            Arg::F32(eps),
        ];
        launch(&self.rms_backward, stream, Grid { shared_bytes, ..Grid::linear(PARTS, THREADS) }, &args)?;
        self.add_parts(stream, parts, dw, width)
    }

    fn add_parts(&self, stream: Stream, parts: DeviceRange, dw: DeviceRange, width: usize) -> Result<()> {
        let args = [
            at("parts of a gradient", parts, PARTS as usize * width * 4)?,
            at("the gradient of a norm's weights", dw, width * self.gradients.bytes())?,
            Arg::U32(PARTS),
            Arg::U32(count(width)?),
        ];
        let blocks = count(width)?.div_ceil(32);
        let grid = Grid { blocks: [blocks, 1, 1], threads: [32, 8, 1], shared_bytes: 0 };
        launch(&self.add_parts, stream, grid, &args)
    }

    /// Angles of all positions.
    pub(super) fn rotary_table(
        &self,
        stream: Stream,
        table: DeviceRange,
        seq: usize,
        theta: f64,
    ) -> Result<()> {
        let pairs = seq * self.head_dim / 2;
        let args =
            [at("the rotary table", table, pairs * 8)?, Arg::U32(count(seq)?), Arg::F32(theta.log2() as f32)];
        launch(&self.rotary_table, stream, Grid::linear(count(pairs.div_ceil(256))?.min(1024), 256), &args)
    }

    /// Norms and rotates the heads of `x`; `y` may be `x`.
    pub(super) fn qk_forward(
        &self,
        stream: Stream,
        heads: Heads,
        [x, w, table, y]: [DeviceRange; 4],
    ) -> Result<()> {
        let rows = heads.tokens * heads.heads;
        let args = [
            self.reals("heads", x, rows * self.head_dim)?,
            self.reals("the weights of the heads' norm", w, self.head_dim)?,
            at("the rotary table", table, heads.seq * self.head_dim / 2 * 8)?,
            self.reals("rotated heads", y, rows * self.head_dim)?,
            Arg::U32(count(rows)?),
            Arg::U32(count(heads.heads)?),
            Arg::U32(count(heads.seq)?),
            Arg::F32(heads.eps),
        ];
        launch(&self.qk_forward, stream, Grid::linear(count(rows.div_ceil(8))?, 256), &args)
    }

    /// The gradient through [`Kernels::qk_forward`], in place.
    pub(super) fn qk_backward(
        &self,
        stream: Stream,
        heads: Heads,
        [x, w, table, d]: [DeviceRange; 4],
        [parts, dw]: [DeviceRange; 2],
    ) -> Result<()> {
        let rows = heads.tokens * heads.heads;
        let args = [
            self.reals("heads", x, rows * self.head_dim)?,
            self.reals("the weights of the heads' norm", w, self.head_dim)?,
            at("the rotary table", table, heads.seq * self.head_dim / 2 * 8)?,
            self.reals("the gradient of rotated heads", d, rows * self.head_dim)?,
            at("parts of a gradient", parts, PARTS as usize * self.head_dim * 4)?,
            Arg::U32(count(rows)?),
            Arg::U32(count(heads.heads)?),
            Arg::U32(count(heads.seq)?),
            Arg::F32(heads.eps),
        ];
        // The kernel has room for eight warps.
        launch(&self.qk_backward, stream, Grid::linear(PARTS, 256), &args)?;
        self.add_parts(stream, parts, dw, self.head_dim)
    }

    fn elementwise(&self, elements: usize) -> Grid {
        let vectors = (elements * self.real.bytes()).div_ceil(16) as u64;
        Grid::linear(vectors.div_ceil(u64::from(THREADS)).clamp(1, MOST_BLOCKS) as u32, THREADS)
    }

    /// `y = silu(gate) up`; `y` may be `gate`.
    pub(super) fn swiglu_forward(
        &self,
        stream: Stream,
        elements: usize,
        [gate, up, y]: [DeviceRange; 3],
    ) -> Result<()> {
        let args = [
            self.reals("the gate", gate, elements)?,
            self.reals("what is gated", up, elements)?,
            self.reals("the gated product", y, elements)?,
            Arg::U64(elements as u64),
        ];
        launch(&self.swiglu_forward, stream, self.elementwise(elements), &args)
    }

    /// The gradients through it: what `d_up` holds is that of `y`. Makes `y` again.
    pub(super) fn swiglu_backward(
        &self,
        stream: Stream,
        elements: usize,
        [gate, up, d_up, d_gate, y]: [DeviceRange; 5],
    ) -> Result<()> {
        let args = [
            self.reals("the gate", gate, elements)?,
            self.reals("what is gated", up, elements)?,
            self.reals("the gradient of the gated product", d_up, elements)?,
            self.reals("the gate's gradient", d_gate, elements)?,
            self.reals("the gated product", y, elements)?,
            Arg::U64(elements as u64),
        ];
        launch(&self.swiglu_backward, stream, self.elementwise(elements), &args)
    }

    /// `y = residual + mask branch`, or without residual.
    pub(super) fn dropout(
        &self,
        stream: Stream,
        elements: usize,
        mask: DeviceMask,
        [branch, y]: [DeviceRange; 2],
        residual: Option<DeviceRange>,
    ) -> Result<()> {
        let none = Ok(Arg::Address(0));
        let args = [
            self.reals("a residual branch", branch, elements)?,
            residual.map_or(none, |residual| self.reals("a residual", residual, elements))?,
            self.reals("a sum", y, elements)?,
            Arg::U64(elements as u64),
            Arg::U64(mask.state),
            Arg::U64(mask.threshold),
            Arg::F32(mask.scale),
        ];
        launch(&self.dropout, stream, self.elementwise(elements), &args)
    }

    /// Rows of the embedding `w`. The ids were checked against the vocabulary.
    pub(super) fn embed_forward(
        &self,
        stream: Stream,
        [ids, w, y]: [DeviceRange; 3],
        [tokens, vocab, width]: [usize; 3],
    ) -> Result<()> {
        let args = [
            at("token ids", ids, 4 * tokens)?,
            self.reals("the embedding", w, vocab * width)?,
            self.reals("a boundary", y, tokens * width)?,
            Arg::U32(count(width)?),
        ];
        launch(&self.embed_forward, stream, Grid::linear(count(tokens)?, 128), &args)
    }

    /// Adds to the gradient of the embedding.
    pub(super) fn embed_backward(
        &self,
        stream: Stream,
        [ids, dy, dw]: [DeviceRange; 3],
        [tokens, vocab, width]: [usize; 3],
    ) -> Result<()> {
        let shared_bytes = 4 * count(width)?;
        self.embed_backward.allow_shared(shared_bytes)?;
        let args = [
            at("token ids", ids, 4 * tokens)?,
            self.reals("the gradient of a boundary", dy, tokens * width)?,
            at("the gradient of the embedding", dw, vocab * width * self.gradients.bytes())?,
            Arg::U32(count(tokens)?),
            Arg::U32(count(width)?),
        ];
        // The kernel has room for eight warps.
        launch(
            &self.embed_backward,
            stream,
            Grid { shared_bytes, ..Grid::linear(count(tokens)?, 256) },
            &args,
        )
    }

    /// Losses of rows of logits; with a scale that is not zero, the logits become their gradients times that.
    pub(super) fn cross_entropy(
        &self,
        stream: Stream,
        [logits, targets, losses]: [DeviceRange; 3],
        [rows, vocab, pitch]: [usize; 3],
        scale: f32,
    ) -> Result<()> {
        let args = [
            self.reals("logits", logits, rows * pitch)?,
            at("targets", targets, 4 * rows)?,
            at("losses", losses, 4 * rows)?,
            Arg::U32(count(vocab)?),
            Arg::U32(count(pitch)?),
            Arg::F32(scale),
        ];
        launch(&self.cross_entropy, stream, Grid::linear(count(rows)?, 512), &args)
    }

    /// The sum of losses, times a scale.
    pub(super) fn sum_losses(
        &self,
        stream: Stream,
        [losses, out]: [DeviceRange; 2],
        rows: usize,
        scale: f32,
    ) -> Result<()> {
        let args = [
            at("losses", losses, 4 * rows)?,
            at("the loss", out, 4)?,
            Arg::U32(count(rows)?),
            Arg::F32(scale),
        ];
        launch(&self.sum_losses, stream, Grid::linear(1, 1024), &args)
    }
}
