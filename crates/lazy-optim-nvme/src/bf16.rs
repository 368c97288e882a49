//! bfloat16: the upper half of a float32.

/// The nearest bfloat16, ties to the even one. NaN stays NaN.
#[inline(always)]
pub(crate) fn round(value: f32) -> u16 {
    let bits = value.to_bits();
    let high = bits >> 16;
    let rounded = bits.wrapping_add(0x7fff + (high & 1)) >> 16;
    // What makes a value a NaN may lie in the half that is dropped.
    (if value.is_nan() { high | 0x40 } else { rounded }) as u16
}

/// The same value as a float32.
#[inline(always)]
pub(crate) fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds every value. Both slices have one length.
#[inline(always)]
pub(crate) fn round_all(values: &[f32], rounded: &mut [u16]) {
    for (rounded, value) in rounded.iter_mut().zip(values) {
        *rounded = round(*value);
    }
}

/// Widens every value. Both slices have one length.
#[inline(always)]
pub(crate) fn widen_all(rounded: &[u16], values: &mut [f32]) {
    for (value, bits) in values.iter_mut().zip(rounded) {
        *value = widen(*bits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o5_every_bfloat16_comes_back() {
        for bits in 0..=u16::MAX {
            let (wide, back) = (widen(bits), round(widen(bits)));
            if wide.is_nan() {
                assert!(widen(back).is_nan() && widen(back).is_sign_negative() == wide.is_sign_negative());
            } else {
                assert_eq!(back, bits);
            }
        }
    }

    /// The nearer of the two neighbours by exact distance, the even one where both are as near. From the largest value
    /// on, infinity counts as the next step would.
    fn nearest(value: f32) -> u16 {
        let exact = |bits: u16| {
            if bits & 0x7fff == 0x7f80 {
                2f64.powi(128).copysign(f64::from(widen(bits)))
            } else {
                widen(bits).into()
            }
        };
        let toward_zero = (value.to_bits() >> 16) as u16;
        let away = toward_zero + 1;
        let distance = |bits: u16| (exact(bits) - f64::from(value)).abs();
        match distance(toward_zero).total_cmp(&distance(away)) {
            std::cmp::Ordering::Less => toward_zero,
            std::cmp::Ordering::Greater => away,
            std::cmp::Ordering::Equal => toward_zero + (toward_zero & 1),
        }
    }

    #[test]
    fn o5_rounding_is_to_the_nearest_and_ties_go_to_the_even_one() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(u32::from(high) << 16 | low);
                if value.is_nan() {
                    assert!(widen(round(value)).is_nan(), "{value:?} {low:x}");
                } else if value.is_finite() {
                    assert_eq!(round(value), nearest(value), "{value:e}");
                }
            }
        }
    }
}
