//! Causal attention with shared keys: on tensor cores where the numbers are bfloat16 and heads fit, else row by row.

use lazy_store::cuda::Gpu;
use lazy_store::cuda::kernels::{Arg, Grid, Kernel, Module};
use lazy_store::{DeviceRange, Stream};

use super::kernels::{at, count, launch};
use super::{Real, Result};

/// Queries of a block of the forward, keys of a tile, queries of a tile of the backward: as in `tensor_cores.cu`.
const FORWARD_ROWS: usize = 128;
const KEYS: usize = 64;
const BACKWARD_ROWS: usize = 64;
/// Rows of a block without tensor cores.
const WARP_ROWS: usize = 4;

/// The kernels of attention.
pub(super) struct Attention {
    real: Real,
    head_dim: usize,
    tensor_cores: bool,
    delta: Kernel,
    forward: Kernel,
    queries: Kernel,
    keys: Kernel,
}

/// Which rows and heads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub(super) batch: usize,
    pub(super) seq: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
}

impl Heads {
    fn tokens(&self) -> usize {
        self.batch * self.seq
    }
}

impl Attention {
    /// Whether tensor cores are used: they multiply parts of 16 bfloat16 numbers, and registers hold heads of up to 128.
    pub(super) fn on_tensor_cores(gpu: &Gpu, real: Real, head_dim: usize) -> bool {
        real == Real::Bf16 && head_dim.is_multiple_of(16) && head_dim <= 128 && gpu.capability() >= (8, 0)
    }

    pub(super) fn new(module: &Module, real: Real, head_dim: usize, tensor_cores: bool) -> Result<Attention> {
        let [forward, queries, keys] = if tensor_cores {
            ["attention_forward", "attention_queries", "attention_keys"]
        } else {
            ["attention_forward_rows", "attention_query_rows", "attention_key_rows"]
        };
        let attention = Attention {
            real,
            head_dim,
            tensor_cores,
            delta: module.kernel("attention_delta")?,
            forward: module.kernel(forward)?,
            queries: module.kernel(queries)?,
            keys: module.kernel(keys)?,
        };
        if tensor_cores {
            attention.forward.allow_shared(attention.tiles(FORWARD_ROWS + 4 * KEYS, 0))?;
            attention.queries.allow_shared(attention.backward_bytes())?;
            attention.keys.allow_shared(attention.backward_bytes())?;
        }
        Ok(attention)
    }

    /// Shared memory of so many rows of tiles and so many float32 numbers.
    fn tiles(&self, rows: usize, floats: usize) -> u32 {
        (rows * (self.head_dim + 8) * 2 + floats * 4) as u32
    }

    fn backward_bytes(&self) -> u32 {
        self.tiles(2 * KEYS + 4 * BACKWARD_ROWS, 4 * BACKWARD_ROWS)
    }

    fn grid(&self, tile: usize, shared_bytes: u32, heads: usize, shape: Heads) -> Result<Grid> {
        let (tile, shared_bytes) = if self.tensor_cores { (tile, shared_bytes) } else { (WARP_ROWS, 0) };
        let blocks = [count(shape.seq.div_ceil(tile))?, count(heads)?, count(shape.batch)?];
        Ok(Grid { blocks, threads: [128, 1, 1], shared_bytes })
    }

    fn wide(&self, what: &'static str, range: DeviceRange, shape: Heads, heads: usize) -> Result<Arg> {
        at(what, range, shape.tokens() * heads * self.head_dim * self.real.bytes())
    }

    fn numbers(&self, shape: Heads) -> Result<[Arg; 4]> {
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        let [seq, heads, kv_heads] = [shape.seq, shape.heads, shape.kv_heads].map(count);
        Ok([Arg::U32(seq?), Arg::U32(heads?), Arg::U32(kv_heads?), Arg::F32(scale)])
    }

    /// The attended values, and the log-sum-exps that the backward takes.
    pub(super) fn forward(
        &self,
        stream: Stream,
        shape: Heads,
        [q, k, v, out, lse]: [DeviceRange; 5],
    ) -> Result<()> {
        let mut args = vec![
            self.wide("queries", q, shape, shape.heads)?,
            self.wide("keys", k, shape, shape.kv_heads)?,
            self.wide("values", v, shape, shape.kv_heads)?,
            self.wide("attended values", out, shape, shape.heads)?,
            at("log-sum-exps", lse, shape.tokens() * shape.heads * 4)?,
        ];
        args.extend(self.numbers(shape)?);
        let grid = self.grid(FORWARD_ROWS, self.tiles(FORWARD_ROWS + 4 * KEYS, 0), shape.heads, shape)?;
        launch(&self.forward, stream, grid, &args)
    }

    /// The gradients of queries, keys and values from that of the output. `delta` is as large as the log-sum-exps.
    pub(super) fn backward(
        &self,
        stream: Stream,
        shape: Heads,
        [q, k, v, out, lse]: [DeviceRange; 5],
        [dout, delta]: [DeviceRange; 2],
        [dq, dk, dv]: [DeviceRange; 3],
    ) -> Result<()> {
        let rows = shape.tokens() * shape.heads;
        let dout = self.wide("the gradient of attended values", dout, shape, shape.heads)?;
        let delta = at("sums of attention's backward", delta, rows * 4)?;
        let args = [
            dout,
            self.wide("attended values", out, shape, shape.heads)?,
            delta,
            Arg::U32(count(rows)?),
            Arg::U32(count(shape.heads)?),
            Arg::U32(count(shape.seq)?),
        ];
        launch(&self.delta, stream, Grid::linear(count(rows.div_ceil(8))?, 256), &args)?;
        let mut args = vec![
            self.wide("queries", q, shape, shape.heads)?,
            self.wide("keys", k, shape, shape.kv_heads)?,
            self.wide("values", v, shape, shape.kv_heads)?,
            dout,
            at("log-sum-exps", lse, rows * 4)?,
            delta,
        ];
        let inputs = args.len();
        args.push(self.wide("the queries' gradient", dq, shape, shape.heads)?);
        args.extend(self.numbers(shape)?);
        let grid = self.grid(BACKWARD_ROWS, self.backward_bytes(), shape.heads, shape)?;
        launch(&self.queries, stream, grid, &args)?;
        args.truncate(inputs);
        args.push(self.wide("the keys' gradient", dk, shape, shape.kv_heads)?);
        args.push(self.wide("the values' gradient", dv, shape, shape.kv_heads)?);
        args.extend(self.numbers(shape)?);
        let grid = self.grid(KEYS, self.backward_bytes(), shape.kv_heads, shape)?;
        launch(&self.keys, stream, grid, &args)
    }
}
