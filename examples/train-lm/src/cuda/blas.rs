//! Matrix products, by cuBLASLt. One of the few modules with `unsafe`: its interface takes addresses and handles.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use lazy_store::cuda::{Gpu, load_library};
use lazy_store::{DeviceRange, Stream};

use super::{CudaError, Real, Result};

/// A handle of cuBLASLt, and for every shape of product the algorithm that was chosen when it first came up: by the library's own ranking,
/// which is the same in every process, so that a run that goes on gives the same bits.
pub(super) struct Blas {
    gpu: Gpu,
    handle: sys::cublasLtHandle_t,
    real: Real,
    plans: Mutex<HashMap<Key, Plan>>,
}

// SAFETY: cuBLASLt's handle may be used by any thread, by several at once.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

/// Which product: `d = a b` in the library's order, columns first, where `a` has `m` rows and `b` `n` columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    m: usize,
    n: usize,
    k: usize,
    /// Whether each operand is transposed.
    transposed: [bool; 2],
    /// Elements from column to column of `a`, `b` and `d`.
    pitches: [usize; 3],
    out: Real,
    /// Whether something is added.
    adds: bool,
    /// What divides the addresses of `a`, `b`, `c` and `d`.
    alignments: [u32; 4],
    workspace: u64,
}

/// How it is done.
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Drop for Plan {
    fn drop(&mut self) {
        for layout in self.layouts {
            // SAFETY: made in `plan`, destroyed once. Nothing can be done about a failure.
            let _ = unsafe { result::destroy_matrix_layout(layout) };
        }
        // SAFETY: as above.
        let _ = unsafe { result::destroy_matmul_desc(self.product) };
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        self.plans.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
        // SAFETY: made in `load`, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// A row-major matrix of the operands' type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub(super) at: DeviceRange,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Elements from row to row.
    pub(super) pitch: usize,
}

impl Matrix {
    pub(super) fn new(at: DeviceRange, rows: usize, columns: usize) -> Matrix {
        Matrix { at, rows, columns, pitch: columns }
    }

    fn check(&self, what: &'static str, element: usize) -> Result<()> {
        let wanted = ((self.rows.max(1) - 1) * self.pitch + self.columns) * element;
        if (self.at.bytes.get() as usize) < wanted {
            return Err(CudaError::Short { what, wanted: wanted as u64, got: self.at.bytes.get() });
        }
        Ok(())
    }
}

fn failed(what: &str) -> impl FnOnce(CublasError) -> CudaError + '_ {
    move |e| CudaError::Blas { what: what.to_owned(), reason: format!("{:?}", e.0) }
}

fn data_type(real: Real) -> sys::cudaDataType {
    match real {
        Real::F32 => sys::cudaDataType::CUDA_R_32F,
        Real::Bf16 => sys::cudaDataType::CUDA_R_16BF,
    }
}

/// The largest power of two, up to 256, that divides an address.
fn alignment(range: DeviceRange) -> u32 {
    1 << range.address.trailing_zeros().min(8)
}

impl Blas {
    /// Loads the library, for operands of one type.
    pub(super) fn load(gpu: &Gpu, real: Real) -> Result<Blas> {
        // cudarc ends the thread where the library is missing, so that is found out first.
        load_library("cuBLASLt", &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"])?;
        gpu.bind()?;
        let handle = result::create_handle().map_err(failed("start"))?;
        Ok(Blas { gpu: gpu.clone(), handle, real, plans: Mutex::default() })
    }

    /// `y = x wᵀ`, and `add` to it where given, of the shape of `y`. `w` has a row for each column of `y`.
    pub(super) fn linear(
        &self,
        stream: Stream,
        workspace: DeviceRange,
        [x, w, y]: [Matrix; 3],
        add: Option<DeviceRange>,
    ) -> Result<()> {
        let key = self.key([w, x, y], [true, false], [y.columns, y.rows, x.columns], self.real, workspace);
        self.multiply(stream, workspace, key, [w, x], y, add)
    }

    /// `dx = dy w`, added to what is there where `adds`.
    pub(super) fn input_gradient(
        &self,
        stream: Stream,
        workspace: DeviceRange,
        [dy, w, dx]: [Matrix; 3],
        adds: bool,
    ) -> Result<()> {
        let key =
            self.key([w, dy, dx], [false, false], [dx.columns, dx.rows, dy.columns], self.real, workspace);
        self.multiply(stream, workspace, key, [w, dy], dx, adds.then_some(dx.at))
    }

    /// `dw += dyᵀ x`, in `out`, the type of gradients.
    pub(super) fn weight_gradient(
        &self,
        stream: Stream,
        workspace: DeviceRange,
        [dy, x, dw]: [Matrix; 3],
        out: Real,
    ) -> Result<()> {
        let key = self.key([x, dy, dw], [false, true], [dw.columns, dw.rows, dy.rows], out, workspace);
        self.multiply(stream, workspace, key, [x, dy], dw, Some(dw.at))
    }

    fn key(
        &self,
        [a, b, d]: [Matrix; 3],
        transposed: [bool; 2],
        [m, n, k]: [usize; 3],
        out: Real,
        workspace: DeviceRange,
    ) -> Key {
        let pitches = [a.pitch, b.pitch, d.pitch];
        let alignments = [alignment(a.at), alignment(b.at), alignment(d.at), alignment(d.at)];
        Key { m, n, k, transposed, pitches, out, adds: false, alignments, workspace: workspace.bytes.get() }
    }

    /// Puts a product on a stream, whose tasks alone use the workspace.
    fn multiply(
        &self,
        stream: Stream,
        workspace: DeviceRange,
        mut key: Key,
        [a, b]: [Matrix; 2],
        d: Matrix,
        add: Option<DeviceRange>,
    ) -> Result<()> {
        a.check("an operand of a product", self.real.bytes())?;
        b.check("an operand of a product", self.real.bytes())?;
        d.check("a product", key.out.bytes())?;
        let c = Matrix { at: add.unwrap_or(d.at), ..d };
        c.check("what is added to a product", key.out.bytes())?;
        key.adds = add.is_some();
        key.alignments[2] = alignment(c.at);
        self.gpu.bind()?;
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let plan = match plans.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(free) => free.insert(self.plan(&key)?),
        };
        let (one, add) = (1.0_f32, if key.adds { 1.0_f32 } else { 0.0 });
        let [layout_a, layout_b, layout_d] = plan.layouts;
        // SAFETY: the descriptions are alive and were made for these operands, whose memory was checked to hold them; it is in nobody
        // else's use until the stream has come past this, since the tasks of a store's lane say what they read and write.
        let multiplied = unsafe {
            result::matmul(
                self.handle,
                plan.product,
                (&raw const one).cast(),
                (&raw const add).cast(),
                pointer(a.at).cast_const(),
                layout_a,
                pointer(b.at).cast_const(),
                layout_b,
                pointer(c.at).cast_const(),
                layout_d,
                pointer(d.at),
                layout_d,
                &raw const plan.algorithm,
                pointer(workspace),
                key.workspace as usize,
                stream.as_raw().cast(),
            )
        };
        multiplied.map_err(failed("multiply"))
    }

    fn plan(&self, key: &Key) -> Result<Plan> {
        let (real, f32) = (data_type(self.real), sys::cudaDataType::CUDA_R_32F);
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let product = result::create_matmul_desc(compute, f32).map_err(failed("describe a product"))?;
        let layout = |kind, transposed: bool, [rows, columns]: [usize; 2], pitch: usize| {
            let [rows, columns] = if transposed { [columns, rows] } else { [rows, columns] };
            result::create_matrix_layout(kind, rows as u64, columns as u64, pitch as i64)
                .map_err(failed("describe a matrix"))
        };
        let [m, n, k] = [key.m, key.n, key.k];
        let layouts = [
            layout(real, key.transposed[0], [m, k], key.pitches[0])?,
            layout(real, key.transposed[1], [k, n], key.pitches[1])?,
            layout(data_type(key.out), false, [m, n], key.pitches[2])?,
        ];
        for (attribute, transposed) in [
            (sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA, key.transposed[0]),
            (sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSB, key.transposed[1]),
        ] {
            // 0 and 1 are cuBLAS's numbers for plain and transposed.
            let operation = i32::from(transposed);
            // SAFETY: the description is alive, and the attribute is a number of this size.
            let set = unsafe {
                result::set_matmul_desc_attribute(
                    product,
                    attribute,
                    (&raw const operation).cast(),
                    size_of::<i32>(),
                )
            };
            set.map_err(failed("describe a product"))?;
        }
        let algorithm = self.algorithm(key, product, layouts)?;
        Ok(Plan { product, layouts, algorithm })
    }

    /// The library's first choice.
    fn algorithm(
        &self,
        key: &Key,
        product: sys::cublasLtMatmulDesc_t,
        [a, b, d]: [sys::cublasLtMatrixLayout_t; 3],
    ) -> Result<sys::cublasLtMatmulAlgo_t> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = result::create_matmul_pref().map_err(failed("describe what it may use"))?;
        let alignments = [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        let set = |attribute, value: *const c_void, bytes| {
            // SAFETY: the description is alive, and each attribute is given with its own size.
            unsafe { result::set_matmul_pref_attribute(preference, attribute, value, bytes) }
        };
        let workspace = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let mut told = set(workspace, (&raw const key.workspace).cast(), size_of::<u64>());
        for (attribute, value) in alignments.into_iter().zip(&key.alignments) {
            told = told.and_then(|()| set(attribute, (&raw const *value).cast(), size_of::<u32>()));
        }
        let chosen = told.and_then(|()| {
            // SAFETY: all descriptions are alive.
            unsafe { result::get_matmul_algo_heuristic(self.handle, product, a, b, d, d, preference) }
        });
        // SAFETY: made above, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        let [m, n, k] = [key.m, key.n, key.k];
        chosen.map(|chosen| chosen.algo).map_err(|e| {
            let what = format!("find an algorithm for a product of {m} x {k} and {k} x {n}");
            failed(&what)(e)
        })
    }
}

fn pointer(range: DeviceRange) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(range.address as usize)
}
