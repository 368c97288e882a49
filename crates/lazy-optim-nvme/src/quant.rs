//! 8-bit moments: blocks of 256 elements with one scale, and codes into a fixed map of 256 values.
//!
//! The maps are those of bitsandbytes' `create_dynamic_map` (Dettmers et al., "8-bit Optimizers via Block-wise
//! Quantization", 2021): seven decades from 1e-6 to 1, each cut evenly into twice as many bins as the one below, of which
//! the middles are taken; zero; and one. With a sign the lowest decade has one bin of each sign, without a sign it has two.
//!
//! A block's scale is the largest magnitude in it. The code of `x` is that of the map's value nearest to `x / scale`, the
//! quotient rounded to float32; of two values equally near, the lower one. So an exact zero stays an exact zero. A block
//! of zeros has scale 0. A block with an infinity or a NaN cannot be held: its scale is NaN, and so is all that comes out.

/// Elements under one scale.
pub(crate) const QUANT_BLOCK: usize = 256;

/// Bins of quotients of one sign, by their upper 16 bits: as narrow as 1/128 of their own size, so that no bin has more
/// than one bound of the map in it.
const BINS: usize = 4096;
/// The upper 16 bits of 2^-23; what is smaller is nearest to zero.
const LOWEST: u32 = (127 - 23) << 7;

/// A map, and what finds the nearest of its values.
pub(crate) struct Map {
    /// In ascending order.
    values: [f32; 256],
    /// The largest quotient that is nearest to each value; infinity for the last one.
    bounds: [f32; 256],
    /// The code of the lowest quotient of each bin: positive bins, then negative ones, each from zero outwards.
    lowest: [u8; 2 * BINS],
    /// The code of zero.
    zero: u8,
}

/// For first moments.
pub(crate) static SIGNED: Map = Map::new(true);
/// For second moments, which are not negative.
pub(crate) static UNSIGNED: Map = Map::new(false);

const DECADES: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];

/// The end number `i` of `bins` bins that cut 0.1 to 1 evenly, as `torch.linspace` computes it in float32: from the nearer
/// end of the whole, fused.
const fn edge(i: usize, bins: usize) -> f32 {
    let (start, end) = (0.1f32, 1.0f32);
    let step = (end - start) / bins as f32;
    if i < bins.div_ceil(2) {
        (start as f64 + step as f64 * i as f64) as f32
    } else {
        (end as f64 - step as f64 * (bins - i) as f64) as f32
    }
}

const fn values(signed: bool, zero: usize) -> [f32; 256] {
    let mut values = [0.0; 256];
    let (mut at, mut decade) = (zero + 1, 0);
    while decade < DECADES.len() {
        let bins = if signed { 1 << decade } else { 2 << decade };
        let mut bin = 0;
        while bin < bins {
            let middle = (edge(bin, bins) + edge(bin + 1, bins)) / 2.0;
            values[at] = DECADES[decade] * middle;
            if signed {
                values[2 * zero - at] = -values[at];
            }
            at += 1;
            bin += 1;
        }
        decade += 1;
    }
    values[255] = 1.0;
    values
}

/// The largest float32 that is at most halfway between each value and the next.
const fn bounds(values: &[f32; 256]) -> [f32; 256] {
    let mut bounds = [f32::INFINITY; 256];
    let mut i = 0;
    while i < 255 {
        // Exact: both have 24 bits, at most a few decades apart.
        let halfway = (values[i] as f64 + values[i + 1] as f64) / 2.0;
        let near = halfway as f32;
        bounds[i] = if near as f64 > halfway { near.next_down() } else { near };
        i += 1;
    }
    bounds
}

const fn lowest_codes(bounds: &[f32; 256], zero: usize) -> [u8; 2 * BINS] {
    let mut lowest = [0; 2 * BINS];
    let (mut code, mut bin) = (0, BINS);
    while bin > 0 {
        bin -= 1;
        let value = -f32::from_bits((LOWEST + bin as u32) << 16 | 0xffff);
        while value > bounds[code] {
            code += 1;
        }
        lowest[BINS + bin] = code as u8;
    }
    code = zero;
    while bin < BINS {
        // The first bin also holds all that is smaller.
        let value = if bin == 0 { 0.0 } else { f32::from_bits((LOWEST + bin as u32) << 16) };
        while value > bounds[code] {
            code += 1;
        }
        lowest[bin] = code as u8;
        bin += 1;
    }
    lowest
}

/// The tables as CUDA declarations, which `adam.cu` stands behind.
pub(crate) fn cuda_source() -> String {
    let bins = format!("#define LOWEST_BIN {LOWEST}u\n#define BINS {}\n", 2 * BINS);
    bins + &SIGNED.cuda_source("SIGNED") + &UNSIGNED.cuda_source("UNSIGNED")
}

/// Which bin a quotient lies in.
#[inline(always)]
fn bin(quotient: f32) -> u16 {
    let bits = quotient.to_bits();
    let size = (bits >> 16) & 0x7fff;
    let size = size.clamp(LOWEST, LOWEST + BINS as u32 - 1) - LOWEST;
    ((bits >> 31) * BINS as u32 + size) as u16
}

impl Map {
    const fn new(signed: bool) -> Map {
        let zero = if signed { 127 } else { 0 };
        let values = values(signed, zero);
        let bounds = bounds(&values);
        Map { values, bounds, lowest: lowest_codes(&bounds, zero), zero: zero as u8 }
    }

    /// Writes the codes of at most [`QUANT_BLOCK`] values of one block, and returns their scale. Both slices have one
    /// length.
    #[inline(always)]
    pub(crate) fn encode(&self, values: &[f32], codes: &mut [u8]) -> f32 {
        let scale = scale(values);
        if scale == 0.0 || scale.is_nan() {
            codes.fill(self.zero);
            return scale;
        }
        let (mut quotients, mut bins) = ([0.0f32; QUANT_BLOCK], [0u16; QUANT_BLOCK]);
        for ((quotient, bin_of), value) in quotients.iter_mut().zip(&mut bins).zip(values) {
            *quotient = value / scale;
            *bin_of = bin(*quotient);
        }
        for ((code, quotient), bin) in codes.iter_mut().zip(&quotients).zip(&bins) {
            let lowest = self.lowest[usize::from(*bin) % self.lowest.len()];
            *code = lowest.wrapping_add(u8::from(*quotient > self.bounds[usize::from(lowest)]));
        }
        scale
    }

    /// The values that codes of one block stand for. Both slices have one length.
    #[inline(always)]
    pub(crate) fn decode(&self, codes: &[u8], scale: f32, values: &mut [f32]) {
        for (value, code) in values.iter_mut().zip(codes) {
            *value = self.values[usize::from(*code)] * scale;
        }
    }

    fn cuda_source(&self, name: &str) -> String {
        let table = |table: &str, words: &mut dyn Iterator<Item = u32>| {
            let mut text = format!("__device__ const unsigned {name}_{table}[] = {{");
            words.for_each(|word| text += &format!("{word:#x},"));
            text + "};\n"
        };
        let lowest = self.lowest.as_chunks().0.iter().map(|four| u32::from_le_bytes(*four));
        [
            table("VALUES", &mut self.values.iter().map(|value| value.to_bits())),
            table("BOUNDS", &mut self.bounds.iter().map(|bound| bound.to_bits())),
            table("LOWEST", &mut { lowest }),
            format!("#define {name}_ZERO {}\n", self.zero),
        ]
        .concat()
    }

    /// The code of zero.
    pub(crate) fn zero(&self) -> u8 {
        self.zero
    }
}

/// The largest magnitude; NaN if one is not finite.
#[inline(always)]
fn scale(values: &[f32]) -> f32 {
    // Magnitudes compare as their bits do, infinity above all that is finite and NaN above that.
    let largest = values.iter().fold(0, |largest, value| largest.max(value.to_bits() & 0x7fff_ffff));
    if largest < f32::INFINITY.to_bits() { f32::from_bits(largest) } else { f32::NAN }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn maps() -> [(&'static Map, &'static str); 2] {
        [
            (&SIGNED, include_str!("../tests/data/dynamic_map_signed.txt")),
            (&UNSIGNED, include_str!("../tests/data/dynamic_map_unsigned.txt")),
        ]
    }

    #[test]
    fn both_maps_are_those_of_bitsandbytes() {
        for (map, recorded) in maps() {
            let recorded: Vec<f32> = recorded.lines().map(|line| line.parse().unwrap()).collect();
            assert_eq!(recorded, map.values);
            assert_eq!(map.values[usize::from(map.zero)], 0.0);
        }
    }

    /// Of all 256, by exact distance; the first of two that are as near is the lower one.
    fn nearest(map: &Map, quotient: f32) -> u8 {
        let distance = |code: &u8| (f64::from(map.values[usize::from(*code)]) - f64::from(quotient)).abs();
        (0..=255).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap()
    }

    fn code(map: &Map, quotient: f32) -> u8 {
        // Where another value is the largest, a value is its own quotient.
        let mut codes = [0; 2];
        assert_eq!(map.encode(&[quotient, 1.0], &mut codes), 1.0);
        assert_eq!(codes[1], 255);
        codes[0]
    }

    #[test]
    fn every_code_is_that_of_the_nearest_value() {
        for (map, _) in maps() {
            let mut tried: Vec<f32> = map.values.into();
            for pair in map.values.windows(2) {
                let halfway = ((f64::from(pair[0]) + f64::from(pair[1])) / 2.0) as f32;
                tried.extend([halfway, halfway.next_down(), halfway.next_up()]);
            }
            // Codes are constant between bounds, and one bound at most lies in a bin: the ends of each bin tell.
            for size in 0..=(1.0f32.to_bits() >> 16) {
                for bits in [size << 16, size << 16 | 0xffff, size << 16 | 0x8000] {
                    tried.extend([f32::from_bits(bits), -f32::from_bits(bits)]);
                }
            }
            for quotient in tried.into_iter().filter(|q| q.abs() <= 1.0) {
                assert_eq!(code(map, quotient), nearest(map, quotient), "{quotient:e}");
            }
        }
    }

    #[test]
    fn a_round_trip_errs_by_half_a_gap_at_most() {
        for (map, signed) in [(&SIGNED, true), (&UNSIGNED, false)] {
            for scale in [1.0f32, 3.7e-9, 1e-38, 1e-44, 2.9e30] {
                let value = |i: usize| {
                    let size = scale * (i as f32 / 255.0).powi(5);
                    if signed && i % 2 == 1 { -size } else { size }
                };
                let values: Vec<f32> = (0..256).rev().map(value).collect();
                let (mut codes, mut back) = ([0; 256], [0.0; 256]);
                let found = map.encode(&values, &mut codes);
                map.decode(&codes, found, &mut back);
                for ((value, back), code) in values.iter().zip(back).zip(codes) {
                    let at = usize::from(code);
                    let below = map.values[at] - map.values[at.saturating_sub(1)];
                    let above = map.values[(at + 1).min(255)] - map.values[at];
                    // The product and the quotient are rounded too.
                    let most = below.max(above) / 2.0 * found * 1.000_01 + 1e-6 * value.abs() + 2e-45;
                    assert!((value - back).abs() <= most, "{value:e} became {back:e} at scale {found:e}");
                }
            }
        }
    }

    #[test]
    fn zero_stays_zero_and_the_largest_stays_itself() {
        for (map, _) in maps() {
            let (mut codes, mut back) = ([9; 5], [9.0; 5]);
            for values in [[0.0, -0.0, 0.0, 0.0, 0.0], [0.0, 7.5e-20, -0.0, 0.0, 1e-30]] {
                let scale = map.encode(&values, &mut codes);
                map.decode(&codes, scale, &mut back);
                for (value, back) in values.iter().zip(back) {
                    if *value == 0.0 || *value == scale {
                        assert_eq!(*value, back);
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_shows_in_the_whole_block() {
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN] {
            let (mut codes, mut back) = ([0; 3], [0.0; 3]);
            let scale = SIGNED.encode(&[1.0, bad, 0.0], &mut codes);
            SIGNED.decode(&codes, scale, &mut back);
            assert!(back.iter().all(|value| value.is_nan()));
            assert_eq!(scale.to_bits(), f32::NAN.to_bits());
        }
    }
}
