//! Matrix products over slices: the one place that hands raw pointers to `gemm`, the kernels candle's own `matmul`
//! uses. Calling them directly lets a product read a head out of a wider matrix, scale, and add to what is there.

use gemm::Parallelism;

/// A matrix inside a slice.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// `rows` x `columns`, rows one after another.
    pub(crate) fn new(data: &'a [f32], rows: usize, columns: usize) -> Self {
        Self::strided(data, rows, columns, columns)
    }

    /// `rows` x `columns`, each row starting `stride` elements after the one before.
    pub(crate) fn strided(data: &'a [f32], rows: usize, columns: usize, stride: usize) -> Self {
        assert!(end(rows, columns, stride) <= data.len(), "a matrix lies inside its slice");
        Matrix { data, rows, columns, row_stride: stride, column_stride: 1 }
    }

    /// The transpose of the same elements.
    pub(crate) fn transposed(self) -> Self {
        Matrix {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// One past the last element that a matrix with contiguous rows touches.
fn end(rows: usize, columns: usize, stride: usize) -> usize {
    if rows == 0 || columns == 0 { 0 } else { (rows - 1) * stride + columns }
}

/// How a product is stored.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Store {
    /// Replaces what was there.
    Set,
    /// Is added to what was there.
    Add,
}

/// How many threads work on one product.
#[derive(Clone, Copy)]
pub(crate) enum Threads {
    /// The calling one: the caller runs several products side by side.
    One,
    /// All of rayon's.
    All,
}

/// `out = scale * a b`, or `out += scale * a b`; the rows of `out` start `stride` elements apart.
pub(crate) fn product(
    out: &mut [f32],
    stride: usize,
    store: Store,
    scale: f32,
    a: Matrix<'_>,
    b: Matrix<'_>,
    threads: Threads,
) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    assert_eq!(k, b.rows, "inner dimensions of a product");
    assert!(n <= stride && end(m, n, stride) <= out.len(), "a product fits its place");
    let parallelism = match threads {
        Threads::All if rayon::current_num_threads() > 1 => Parallelism::Rayon(rayon::current_num_threads()),
        _ => Parallelism::None,
    };
    // SAFETY: `Matrix` keeps every element it describes inside its borrowed slice, the assertions above do so for
    // `out`, whose rows do not overlap, and the borrow rules keep `out` apart from `a` and `b`.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            stride as isize,
            store == Store::Add,
            a.data.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            1.0,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_parts_transposes_scales_and_adds() {
        // Columns 1 and 2 of a 2 x 4 matrix, against a transposed 3 x 2 one.
        let wide = [9.0, 1.0, 2.0, 9.0, 9.0, 3.0, 4.0, 9.0];
        let b = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0];
        let mut out = [100.0; 8];
        let (a, b) = (Matrix::strided(&wide[1..], 2, 2, 4), Matrix::new(&b, 3, 2).transposed());
        product(&mut out, 4, Store::Add, 0.5, a, b, Threads::One);
        assert_eq!(out, [110.5, 121.0, 131.5, 100.0, 121.5, 143.0, 164.5, 100.0]);
        product(&mut out, 4, Store::Set, 1.0, a, b, Threads::All);
        assert_eq!(out, [21.0, 42.0, 63.0, 100.0, 43.0, 86.0, 129.0, 100.0]);
    }

    #[test]
    #[should_panic(expected = "inside its slice")]
    fn a_matrix_outside_its_slice_is_refused() {
        Matrix::strided(&[0.0; 6], 2, 3, 4);
    }
}
