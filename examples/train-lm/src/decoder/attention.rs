//! Causal attention with grouped key and value heads.
//!
//! Queries are taken in blocks, so that the scores of one block are all that exists at a time, and keys after the
//! block's last query are never looked at. Backward computes the probabilities again (Dao et al.,
//! "FlashAttention", 2022), so nothing but the operands and the result is kept.

use std::ops::Range;

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::gemm::{Matrix, Store, Threads, product};
use super::math::{dot, softmax};
use super::ops::{slice, stored, tensor, with_slice};

/// Queries in a block.
pub(crate) const BLOCK: usize = 64;

/// `q` is `[batch, seq, heads * head_dim]`, `k` and `v` are `[batch, seq, kv_heads * head_dim]`; the result has the
/// shape of `q`. Query head `h` uses key head `h / (heads / kv_heads)`.
#[derive(Clone, Copy)]
pub(crate) struct Attention {
    pub(crate) batch: usize,
    pub(crate) seq: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

/// The operands as one task sees them.
#[derive(Clone, Copy)]
struct Operands<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
}

impl Attention {
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Rows `range` of one head of one sequence in a tensor with `heads` heads.
    fn head<'a>(
        &self,
        data: &'a [f32],
        batch: usize,
        head: usize,
        heads: usize,
        range: Range<usize>,
    ) -> Matrix<'a> {
        let stride = heads * self.head_dim;
        let first = (batch * self.seq + range.start) * stride + head * self.head_dim;
        Matrix::strided(&data[first..], range.len(), self.head_dim, stride)
    }

    fn blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let seq = self.seq;
        (0..seq).step_by(BLOCK).map(move |start| start..(start + BLOCK).min(seq))
    }

    /// One (sequence, key head) a task.
    fn tasks(&self) -> impl IndexedParallelIterator<Item = (usize, usize)> {
        let kv_heads = self.kv_heads;
        (0..self.batch * kv_heads).into_par_iter().map(move |task| (task / kv_heads, task % kv_heads))
    }

    /// Attention probabilities of the queries in `rows` over the keys `0..rows.end`, a row a query.
    fn probabilities(
        &self,
        x: Operands<'_>,
        batch: usize,
        head: usize,
        rows: &Range<usize>,
        scores: &mut [f32],
    ) {
        let keys = rows.end;
        let q = self.head(x.q, batch, head, self.heads, rows.clone());
        let k = self.head(x.k, batch, head / self.group(), self.kv_heads, 0..keys);
        product(scores, keys, Store::Set, self.scale(), q, k.transposed(), Threads::One);
        for (row, query) in scores.chunks_exact_mut(keys).zip(rows.clone()) {
            let (seen, later) = row.split_at_mut(query + 1);
            softmax(seen);
            later.fill(0.0);
        }
    }

    /// The result of one task's query heads: `[group, seq, head_dim]`.
    fn forward_task(&self, x: Operands<'_>, batch: usize, kv_head: usize) -> Vec<f32> {
        let mut out = vec![0.0; self.group() * self.seq * self.head_dim];
        let mut scores = vec![0.0; BLOCK.min(self.seq) * self.seq];
        for (in_group, out) in out.chunks_exact_mut(self.seq * self.head_dim).enumerate() {
            for rows in self.blocks() {
                let (keys, count) = (rows.end, rows.len());
                self.probabilities(
                    x,
                    batch,
                    kv_head * self.group() + in_group,
                    &rows,
                    &mut scores[..count * keys],
                );
                let out = &mut out[rows.start * self.head_dim..rows.end * self.head_dim];
                let v = self.head(x.v, batch, kv_head, self.kv_heads, 0..keys);
                let p = Matrix::new(&scores, count, keys);
                product(out, self.head_dim, Store::Set, 1.0, p, v, Threads::One);
            }
        }
        out
    }

    /// The gradients of one task: of its query heads `[group, seq, head_dim]`, its keys and its values
    /// `[seq, head_dim]`.
    ///
    /// With probabilities `P` and `dP = dO V^T`: `dS = P (dP - rowsum(P dP))`, `dQ = scale dS K`,
    /// `dK = scale dS^T Q`, `dV = P^T dO`.
    fn backward_task(&self, x: Operands<'_>, dout: &[f32], batch: usize, kv_head: usize) -> [Vec<f32>; 3] {
        let (width, one) = (self.head_dim, Threads::One);
        let size = self.seq * width;
        let (mut dq, mut dk, mut dv) = (vec![0.0; self.group() * size], vec![0.0; size], vec![0.0; size]);
        let mut p = vec![0.0; BLOCK.min(self.seq) * self.seq];
        let mut ds = p.clone();
        for (in_group, dq) in dq.chunks_exact_mut(size).enumerate() {
            let head = kv_head * self.group() + in_group;
            for rows in self.blocks() {
                let (keys, count) = (rows.end, rows.len());
                let (p, ds) = (&mut p[..count * keys], &mut ds[..count * keys]);
                self.probabilities(x, batch, head, &rows, p);
                let dout = self.head(dout, batch, head, self.heads, rows.clone());
                let v = self.head(x.v, batch, kv_head, self.kv_heads, 0..keys);
                product(ds, keys, Store::Set, 1.0, dout, v.transposed(), one);
                for (ds, p) in ds.chunks_exact_mut(keys).zip(p.chunks_exact(keys)) {
                    let sum = dot(ds, p);
                    ds.iter_mut().zip(p).for_each(|(ds, p)| *ds = p * (*ds - sum));
                }
                let (p, ds) = (Matrix::new(p, count, keys), Matrix::new(ds, count, keys));
                let k = self.head(x.k, batch, kv_head, self.kv_heads, 0..keys);
                let q = self.head(x.q, batch, head, self.heads, rows.clone());
                let dq = &mut dq[rows.start * width..rows.end * width];
                product(dq, width, Store::Set, self.scale(), ds, k, one);
                product(&mut dk[..keys * width], width, Store::Add, self.scale(), ds.transposed(), q, one);
                product(&mut dv[..keys * width], width, Store::Add, 1.0, p.transposed(), dout, one);
            }
        }
        [dq, dk, dv]
    }

    /// Puts a task's `[count, seq, head_dim]` into heads `first..` of a `[batch, seq, heads * head_dim]` tensor.
    fn scatter(&self, part: &[f32], out: &mut [f32], batch: usize, first: usize, heads: usize) {
        let width = self.head_dim;
        for (head, part) in part.chunks_exact(self.seq * width).enumerate() {
            let rows = out[batch * self.seq * heads * width..].chunks_exact_mut(heads * width);
            for (row, part) in rows.zip(part.chunks_exact(width)) {
                row[(first + head) * width..][..width].copy_from_slice(part);
            }
        }
    }

    fn check(&self, q: &Shape, k: &Shape, v: &Shape) -> Result<()> {
        let shape = |heads: usize| [self.batch, self.seq, heads * self.head_dim];
        if q.dims() != shape(self.heads) || k.dims() != shape(self.kv_heads) || v.dims() != k.dims() {
            bail!("attention got {q:?}, {k:?}, {v:?} for {:?}", shape(self.heads));
        }
        Ok(())
    }
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "causal-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.check(q_layout.shape(), k_layout.shape(), v_layout.shape())?;
        let x = Operands { q: slice(q, q_layout)?, k: slice(k, k_layout)?, v: slice(v, v_layout)? };
        let parts: Vec<Vec<f32>> =
            self.tasks().map(|(batch, kv_head)| self.forward_task(x, batch, kv_head)).collect();
        let mut out = vec![0.0; x.q.len()];
        for (task, part) in parts.iter().enumerate() {
            let first = task % self.kv_heads * self.group();
            self.scatter(part, &mut out, task / self.kv_heads, first, self.heads);
        }
        stored(out, q_layout.shape())
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let run = |x: Operands<'_>, dout: &[f32]| -> Vec<[Vec<f32>; 3]> {
            self.tasks().map(|(batch, kv_head)| self.backward_task(x, dout, batch, kv_head)).collect()
        };
        let with_v =
            |q: &[f32], k: &[f32], v: &[f32]| with_slice(dout, |dout| run(Operands { q, k, v }, dout));
        let parts = with_slice(q, |q| with_slice(k, |k| with_slice(v, |v| with_v(q, k, v))))????;
        let mut dq = vec![0.0; q.elem_count()];
        let (mut dk, mut dv) = (vec![0.0; k.elem_count()], vec![0.0; k.elem_count()]);
        for (task, [dq_part, dk_part, dv_part]) in parts.iter().enumerate() {
            let (batch, kv_head) = (task / self.kv_heads, task % self.kv_heads);
            self.scatter(dq_part, &mut dq, batch, kv_head * self.group(), self.heads);
            self.scatter(dk_part, &mut dk, batch, kv_head, self.kv_heads);
            self.scatter(dv_part, &mut dv, batch, kv_head, self.kv_heads);
        }
        Ok((Some(tensor(dq, q.shape())?), Some(tensor(dk, k.shape())?), Some(tensor(dv, k.shape())?)))
    }
}
