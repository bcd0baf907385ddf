//! NVFP4 weights and products, by definition. See docs/specification.md, section 3.

use crate::number::{bf16_value, e2m1_value, e4m3_value};

/// Number of values of a row that share a scale.
pub const GROUP: usize = 16;

/// Decodes a weight: its codes (two per byte, the even value in the low nibble), one E4M3 scale per group of 16 values,
/// and one scale of the whole weight.
#[must_use]
pub fn decode(codes: &[u8], scales: &[u8], scale: f32) -> Vec<f64> {
    let codes = codes.iter().flat_map(|byte| [byte & 0xF, byte >> 4]);
    let of_group = |index: usize| e4m3_value(scales[index / GROUP]) * f64::from(scale);
    codes.enumerate().map(|(index, code)| e2m1_value(code) * of_group(index)).collect()
}

/// The non-negative E4M3 code whose value times `6 scale` is nearest to `amax`; of two equally near codes, the even
/// one.
#[must_use]
pub fn group_scale(amax: f32, scale: f32) -> u8 {
    let distance = |code: u8| (e4m3_value(code) * 6.0 * f64::from(scale) - f64::from(amax)).abs();
    nearest(0x7E, distance)
}

/// The E2M1 code whose value times the group's scale times `scale` is nearest to `value`; of two equally near codes,
/// the even one. 0 if the product of the scales is 0.
#[must_use]
pub fn code(value: f32, group: u8, scale: f32) -> u8 {
    let unit = e4m3_value(group) * f64::from(scale);
    if unit == 0.0 {
        return 0;
    }
    let distance = |code: u8| (e2m1_value(code) * unit - f64::from(value.abs())).abs();
    nearest(7, distance) | if value.is_sign_negative() { 8 } else { 0 }
}

/// The code in `0..=last` with the least distance; of two equally near codes, the even one. The two distances of a tie
/// are exact in `f64`.
fn nearest(last: u8, distance: impl Fn(u8) -> f64) -> u8 {
    let by = |a: &u8, b: &u8| distance(*a).total_cmp(&distance(*b)).then((a % 2).cmp(&(b % 2)));
    (0..=last).min_by(by).expect("some code")
}

/// A sum, and the sum of the magnitudes of its terms, by which an error is measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sum {
    /// `sum_k x_k w_k`.
    pub value: f64,
    /// `sum_k |x_k w_k|`.
    pub magnitude: f64,
}

/// The product of a row of activations (BF16 bits) with a row of a weight.
#[must_use]
pub fn product(x: &[u16], weight: &[f64]) -> Sum {
    let terms = x.iter().zip(weight).map(|(&x, w)| bf16_value(x) * w);
    let mut sum = Sum { value: 0.0, magnitude: 0.0 };
    for term in terms {
        sum.value += term;
        sum.magnitude += term.abs();
    }
    sum
}

/// Largest difference from [`product`] of a sum of `terms` products that is added in f32 as the kernels do and then
/// scaled, as a fraction of the sum of magnitudes. Each addition rounds the sum so far by at most 2^-23 of it (a tensor
/// core may truncate). No term passes through more than a fourth of the additions and those of the four parts. Scaling
/// adds two more roundings.
#[must_use]
pub fn bound(terms: usize) -> f64 {
    (terms as f64 / 4.0 + 128.0 + 5.0) * 2f64.powi(-23)
}
