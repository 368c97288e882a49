//! Where a layer and the loss keep what they make: in the bytes they save and in their workspaces.

use lazy_model::Bytes;
use lazy_store::DeviceRange;

use super::{CudaOptions, Geometry, Real};

/// Buffers start at multiples of this.
const ALIGNMENT: u64 = 256;
/// Workspace of a matrix product: what cuBLASLt is advised to have on Hopper.
const BLAS_BYTES: u64 = 32 << 20;
/// Blocks of a kernel that adds up the gradient of a norm's weights, each of which leaves a part.
pub(super) const PARTS: u32 = 512;
/// Tokens whose logits exist at a time.
const LOSS_TOKENS: usize = 4096;

/// Sizes of everything, for one shape.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    tokens: u64,
    geometry: Geometry,
    vocab: usize,
    real: Real,
    table: u64,
    dropout: bool,
}

/// Cuts buffers off a range, one after the other.
struct Cut {
    address: u64,
    end: u64,
}

impl Cut {
    fn of(range: DeviceRange) -> Cut {
        Cut { address: range.address, end: 0 }
    }

    fn take(&mut self, bytes: u64) -> DeviceRange {
        let range = self.take_last(bytes);
        self.end = self.end.next_multiple_of(ALIGNMENT);
        range
    }

    /// A buffer that none comes after.
    fn take_last(&mut self, bytes: u64) -> DeviceRange {
        let range = DeviceRange { address: self.address + self.end, bytes: Bytes(bytes) };
        self.end += bytes;
        range
    }
}

/// A range to ask for sizes alone.
const NOWHERE: DeviceRange = DeviceRange { address: 0, bytes: Bytes(0) };

/// What backward needs of forward besides the layer's input.
#[derive(Clone, Copy, Debug)]
pub(super) struct Internals {
    pub(super) q: DeviceRange,
    pub(super) k: DeviceRange,
    pub(super) v: DeviceRange,
    pub(super) attended: DeviceRange,
    pub(super) lse: DeviceRange,
    pub(super) mid: DeviceRange,
    pub(super) gate: DeviceRange,
    pub(super) up: DeviceRange,
}

/// Where a forward works.
#[derive(Clone, Copy, Debug)]
pub(super) struct ForwardPlaces {
    pub(super) blas: DeviceRange,
    pub(super) table: DeviceRange,
    pub(super) normed: DeviceRange,
    pub(super) rotated_q: DeviceRange,
    pub(super) rotated_k: DeviceRange,
    pub(super) gated: DeviceRange,
    /// A residual branch before its dropout; empty without.
    pub(super) branch: DeviceRange,
    pub(super) internals: Internals,
}

/// Where a backward works.
#[derive(Clone, Copy, Debug)]
pub(super) struct BackwardPlaces {
    pub(super) blas: DeviceRange,
    pub(super) table: DeviceRange,
    pub(super) parts: DeviceRange,
    pub(super) normed: DeviceRange,
    pub(super) d_normed: DeviceRange,
    /// The gradient of a residual branch before its dropout; empty without.
    pub(super) branch: DeviceRange,
    pub(super) gated: DeviceRange,
    pub(super) d_gate: DeviceRange,
    pub(super) d_up: DeviceRange,
    pub(super) delta: DeviceRange,
    pub(super) rotated_q: DeviceRange,
    pub(super) rotated_k: DeviceRange,
    pub(super) d_attended: DeviceRange,
    pub(super) d_q: DeviceRange,
    pub(super) d_k: DeviceRange,
    pub(super) d_v: DeviceRange,
}

/// Where the loss works.
#[derive(Clone, Copy, Debug)]
pub(super) struct LossPlaces {
    /// Tokens at a time.
    pub(super) rows: usize,
    /// Elements from one row of logits to the next.
    pub(super) pitch: usize,
    pub(super) blas: DeviceRange,
    pub(super) parts: DeviceRange,
    pub(super) losses: DeviceRange,
    pub(super) normed: DeviceRange,
    pub(super) d_normed: DeviceRange,
    pub(super) logits: DeviceRange,
}

impl Places {
    pub(super) fn new(geometry: &Geometry, vocab: usize, options: &CudaOptions) -> Places {
        let table = options.shape.seq * geometry.head_dim / 2 * size_of::<[f32; 2]>();
        Places {
            tokens: options.shape.tokens() as u64,
            geometry: *geometry,
            vocab,
            real: options.real,
            table: table as u64,
            dropout: options.dropout > 0.0,
        }
    }

    /// A tensor of `width` elements a token.
    fn wide(&self, width: usize) -> u64 {
        self.tokens * width as u64 * self.real.bytes() as u64
    }

    fn fp32(&self, width: usize) -> u64 {
        self.tokens * width as u64 * 4
    }

    pub(super) fn boundary(&self) -> Bytes {
        Bytes(self.wide(self.geometry.hidden))
    }

    fn branch(&self) -> u64 {
        if self.dropout { self.wide(self.geometry.hidden) } else { 0 }
    }

    fn parts(&self) -> u64 {
        let g = &self.geometry;
        u64::from(PARTS) * g.hidden.max(g.head_dim) as u64 * 4
    }

    fn cut_internals(&self, cut: &mut Cut) -> Internals {
        let g = &self.geometry;
        let (q, kv, h, i) = (g.query_width(), g.kv_width(), g.hidden, g.intermediate);
        let [mid, gate, up] = [h, i, i].map(|width| cut.take(self.wide(width)));
        let [q, k, v, attended] = [q, kv, kv, q].map(|width| cut.take(self.wide(width)));
        let lse = cut.take_last(self.fp32(g.heads));
        Internals { q, k, v, attended, lse, mid, gate, up }
    }

    /// The parts of what is saved.
    pub(super) fn internals(&self, saved: DeviceRange) -> Internals {
        self.cut_internals(&mut Cut::of(saved))
    }

    pub(super) fn internals_bytes(&self) -> Bytes {
        let mut cut = Cut::of(NOWHERE);
        self.cut_internals(&mut cut);
        Bytes(cut.end)
    }

    fn cut_forward(&self, workspace: DeviceRange, saved: Option<DeviceRange>) -> (ForwardPlaces, Bytes) {
        let g = &self.geometry;
        let (q, kv, h, i) = (g.query_width(), g.kv_width(), g.hidden, g.intermediate);
        let mut cut = Cut::of(workspace);
        let (blas, table) = (cut.take(BLAS_BYTES), cut.take(self.table));
        let (normed, branch) = (cut.take(self.wide(h)), cut.take(self.branch()));
        // Attention and what follows it are never there at once.
        if let Some(saved) = saved {
            let internals = self.internals(saved);
            let mut other = Cut { ..cut };
            let (rotated_q, rotated_k) = (cut.take(self.wide(q)), cut.take(self.wide(kv)));
            let gated = other.take(self.wide(i));
            let places =
                ForwardPlaces { blas, table, normed, rotated_q, rotated_k, gated, branch, internals };
            return (places, Bytes(cut.end.max(other.end)));
        }
        let mid = cut.take(self.wide(h));
        let mut other = Cut { ..cut };
        let (q, k, v) = (cut.take(self.wide(q)), cut.take(self.wide(kv)), cut.take(self.wide(kv)));
        let (attended, lse) = (cut.take(self.wide(g.query_width())), cut.take(self.fp32(g.heads)));
        let (gate, up) = (other.take(self.wide(i)), other.take(self.wide(i)));
        let internals = Internals { q, k, v, attended, lse, mid, gate, up };
        // Made in place.
        let (rotated_q, rotated_k, gated) = (q, k, gate);
        let places = ForwardPlaces { blas, table, normed, rotated_q, rotated_k, gated, branch, internals };
        (places, Bytes(cut.end.max(other.end)))
    }

    /// Where a forward works; with `saved`, its internals are there.
    pub(super) fn forward(&self, workspace: DeviceRange, saved: Option<DeviceRange>) -> ForwardPlaces {
        self.cut_forward(workspace, saved).0
    }

    /// What a forward takes, whether it saves or not.
    pub(super) fn forward_bytes(&self) -> Bytes {
        self.cut_forward(NOWHERE, None).1.max(self.saving_bytes())
    }

    /// What a forward takes that saves.
    fn saving_bytes(&self) -> Bytes {
        self.cut_forward(NOWHERE, Some(NOWHERE)).1
    }

    fn cut_backward(&self, workspace: DeviceRange) -> (BackwardPlaces, Bytes) {
        let g = &self.geometry;
        let (q, kv, h, i) = (g.query_width(), g.kv_width(), g.hidden, g.intermediate);
        let mut cut = Cut::of(workspace);
        let (blas, table, parts) = (cut.take(BLAS_BYTES), cut.take(self.table), cut.take(self.parts()));
        let (normed, d_normed) = (cut.take(self.wide(h)), cut.take(self.wide(h)));
        let branch = cut.take(self.branch());
        let mut other = Cut { ..cut };
        let places = BackwardPlaces {
            blas,
            table,
            parts,
            normed,
            d_normed,
            branch,
            gated: cut.take(self.wide(i)),
            d_gate: cut.take(self.wide(i)),
            d_up: cut.take(self.wide(i)),
            delta: other.take(self.fp32(g.heads)),
            rotated_q: other.take(self.wide(q)),
            rotated_k: other.take(self.wide(kv)),
            d_attended: other.take(self.wide(q)),
            d_q: other.take(self.wide(q)),
            d_k: other.take(self.wide(kv)),
            d_v: other.take(self.wide(kv)),
        };
        (places, Bytes(cut.end.max(other.end)))
    }

    pub(super) fn backward(&self, workspace: DeviceRange) -> BackwardPlaces {
        self.cut_backward(workspace).0
    }

    /// What a backward takes, and a forward for its internals alone before it.
    pub(super) fn backward_bytes(&self) -> Bytes {
        self.cut_backward(NOWHERE).1.max(self.saving_bytes())
    }

    fn cut_loss(&self, workspace: DeviceRange) -> (LossPlaces, Bytes) {
        let rows = LOSS_TOKENS.min(self.tokens as usize);
        let element = self.real.bytes();
        let pitch = self.vocab.next_multiple_of(16 / element);
        let normed = (rows * self.geometry.hidden * element) as u64;
        let mut cut = Cut::of(workspace);
        let places = LossPlaces {
            rows,
            pitch,
            blas: cut.take(BLAS_BYTES),
            parts: cut.take(self.parts()),
            losses: cut.take(self.fp32(1)),
            normed: cut.take(normed),
            d_normed: cut.take(normed),
            logits: cut.take((rows * pitch * element) as u64),
        };
        (places, Bytes(cut.end))
    }

    pub(super) fn loss(&self, workspace: DeviceRange) -> LossPlaces {
        self.cut_loss(workspace).0
    }

    pub(super) fn loss_bytes(&self) -> Bytes {
        self.cut_loss(NOWHERE).1
    }
}

/// Part of a tensor: `rows` rows from row `first` on, of `bytes` each.
pub(super) fn rows_of(tensor: DeviceRange, first: usize, rows: usize, bytes: usize) -> DeviceRange {
    let address = tensor.address + (first * bytes) as u64;
    DeviceRange { address, bytes: Bytes((rows * bytes) as u64) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Shape;
    use lazy_model::{FusedBytes, FusedKernels, LayerIndex, ModelSpec, Saving, Workload};
    use lazy_runtime::ModelOptions;

    const ADDRESS: u64 = 1 << 20;
    const CONFIG: &str = include_str!("../../tests/data/decoder/qwen3-untied/config.json");

    fn places(
        real: Real,
        dropout: f32,
        [hidden, intermediate, heads, kv_heads, head_dim]: [usize; 5],
    ) -> Places {
        places_of(
            real,
            dropout,
            [hidden, intermediate, heads, kv_heads, head_dim],
            Shape { batch: 3, seq: 33 },
        )
    }

    fn places_of(
        real: Real,
        dropout: f32,
        [hidden, intermediate, heads, kv_heads, head_dim]: [usize; 5],
        shape: Shape,
    ) -> Places {
        let geometry = Geometry { hidden, heads, kv_heads, head_dim, intermediate, parameters: 0 };
        let (gradients, model) = (Real::F32, ModelOptions::default());
        let options = CudaOptions { shape, real, gradients, dropout, model, poison: false };
        Places::new(&geometry, 203, &options)
    }

    fn all() -> impl Iterator<Item = Places> {
        let shapes = [[64, 160, 4, 2, 32], [48, 72, 3, 1, 16], [512, 64, 8, 8, 128]];
        let kinds = [(Real::F32, 0.0), (Real::Bf16, 0.0), (Real::Bf16, 0.1)];
        shapes.into_iter().flat_map(move |shape| kinds.map(|(real, dropout)| places(real, dropout, shape)))
    }

    /// Buffers that are there at the same time lie apart, on vector boundaries, and inside what was asked for.
    fn apart(buffers: &[DeviceRange], bytes: Bytes) {
        let mut sorted = buffers.to_vec();
        sorted.retain(|b| b.bytes > Bytes::ZERO);
        sorted.sort_by_key(|b| b.address);
        for pair in sorted.windows(2) {
            assert!(pair[0].address + pair[0].bytes.get() <= pair[1].address, "{pair:?}");
        }
        let end = sorted.last().map_or(ADDRESS, |b| b.address + b.bytes.get());
        assert!(sorted[0].address >= ADDRESS && end <= ADDRESS + bytes.get());
        assert!(sorted.iter().all(|b| b.address.is_multiple_of(16)));
    }

    fn workspace(bytes: Bytes) -> DeviceRange {
        DeviceRange { address: ADDRESS, bytes }
    }

    #[test]
    fn what_a_forward_holds_at_once_lies_apart() {
        for places in all() {
            let bytes = places.forward_bytes();
            let f = places.forward(workspace(bytes), Some(workspace(places.internals_bytes())));
            let i = f.internals;
            apart(&[i.q, i.k, i.v, i.attended, i.lse, i.mid, i.gate, i.up], places.internals_bytes());
            apart(&[f.blas, f.table, f.normed, f.branch, f.rotated_q, f.rotated_k], bytes);
            apart(&[f.blas, f.table, f.normed, f.branch, f.gated], bytes);
            let f = places.forward(workspace(bytes), None);
            let i = f.internals;
            apart(&[f.blas, f.table, f.normed, f.branch, i.q, i.k, i.v, i.attended, i.lse, i.mid], bytes);
            apart(&[f.blas, f.table, f.normed, f.branch, i.mid, i.gate, i.up], bytes);
        }
    }

    #[test]
    fn what_is_saved_is_what_the_planner_counts() {
        let spec = ModelSpec::from_json(CONFIG).unwrap();
        // Where tensors are whole numbers of aligned parts; else less than one more for each of seven.
        for (real, seq) in [(Real::F32, 128), (Real::Bf16, 128)] {
            let places = places_of(real, 0.0, [64, 160, 4, 4, 32], Shape { batch: 3, seq });
            let work = Workload::new(3, seq, real.bytes()).unwrap().with_saving(Saving::Products);
            assert_eq!(spec.internals_bytes(LayerIndex(0), &work), places.internals_bytes());
            assert_eq!(spec.boundary_bytes(&work), places.boundary());
            let odd =
                places_of(real, 0.0, [64, 160, 4, 4, 32], Shape { batch: 3, seq: 33 }).internals_bytes();
            let work = Workload::new(3, 33, real.bytes()).unwrap().with_saving(Saving::Products);
            let counted = spec.internals_bytes(LayerIndex(0), &work);
            assert!(odd >= counted && odd < counted + Bytes(7 * ALIGNMENT), "{odd} for {counted}");
        }
        // Qwen3-4B at 16 x 1024: (2 x 4096 + 2 x 1024 + 2560 + 2 x 9728) bfloat16 numbers and 32 float32 a token.
        let places = places_of(Real::Bf16, 0.0, [2560, 9728, 32, 8, 128], Shape { batch: 16, seq: 1024 });
        assert_eq!(places.internals_bytes(), Bytes(16 * 1024 * (32_256 * 2 + 32 * 4)));
    }

    #[test]
    fn what_is_declared_is_what_the_planner_counts() {
        for places in all() {
            let g = &places.geometry;
            let mut config: serde_json::Value = serde_json::from_str(CONFIG).unwrap();
            for (key, value) in [
                ("hidden_size", g.hidden),
                ("intermediate_size", g.intermediate),
                ("num_attention_heads", g.heads),
                ("num_key_value_heads", g.kv_heads),
                ("head_dim", g.head_dim),
                ("vocab_size", places.vocab),
            ] {
                config[key] = value.into();
            }
            let spec = ModelSpec::from_json(&config.to_string()).unwrap();
            let work = Workload::new(3, 33, places.real.bytes()).unwrap();
            let kernels = FusedKernels { dropout: places.dropout, ..FusedKernels::default() };
            let declared = FusedBytes {
                internals: places.internals_bytes(),
                forward: places.forward_bytes(),
                backward: places.backward_bytes(),
                loss: places.loss_bytes(),
            };
            assert_eq!(spec.fused_bytes(LayerIndex(0), &work, &kernels), Some(declared));
        }
    }

    #[test]
    fn what_a_backward_and_a_loss_hold_at_once_lies_apart() {
        for places in all() {
            let bytes = places.backward_bytes();
            let b = places.backward(workspace(bytes));
            let always = [b.blas, b.table, b.parts, b.normed, b.d_normed, b.branch];
            apart(&[&always[..], &[b.gated, b.d_gate, b.d_up]].concat(), bytes);
            let attention = [b.delta, b.rotated_q, b.rotated_k, b.d_attended, b.d_q, b.d_k, b.d_v];
            apart(&[&always[..], &attention].concat(), bytes);
            let l = places.loss(workspace(places.loss_bytes()));
            apart(&[l.blas, l.parts, l.losses, l.normed, l.d_normed, l.logits], places.loss_bytes());
            assert!(l.pitch >= 203 && l.rows == 99);
        }
    }
}
