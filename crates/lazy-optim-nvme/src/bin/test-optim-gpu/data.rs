//! Values of every kind that an update may meet.

use lazy_store::gpu_test::Random;

/// Numbers drawn in rows.
pub(crate) trait Values {
    /// Mostly ordinary numbers; now and then a zero of either sign, a subnormal or a huge one.
    fn value(&mut self) -> f32;

    fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }

    /// Values that are not negative.
    fn squares(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value().powi(2)).collect()
    }

    /// Bits of bfloat16, cut off: which ones does not matter.
    fn halves(&mut self, n: usize) -> Vec<u16> {
        (0..n).map(|_| (self.value().to_bits() >> 16) as u16).collect()
    }
}

impl Values for Random {
    fn value(&mut self) -> f32 {
        let sign = if self.below(2) == 0 { 1.0 } else { -1.0 };
        let unit = (self.any() >> 40) as f32 / (1u64 << 24) as f32;
        let size = match self.below(64) {
            0 => 0.0,
            1 => f32::from_bits(self.below(1 << 23) as u32),
            2 => unit * 1e18,
            3..16 => unit * 1e-12,
            _ => unit,
        };
        sign * size
    }
}
