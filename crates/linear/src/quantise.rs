//! Converts numbers to NVFP4. Each code is the exact quotient, rounded to nearest even.
//!
//! No quotient is computed: it is below the midpoint of two codes if its numerator is below midpoint times denominator.
//! Such a product has at most 35 significant bits, so it is exact in f64.

use kv_layout::format::{E2m1, E4m3};

use crate::error::LinearError;

/// The scale of a weight whose largest magnitude is `amax`: it maps `amax` to the largest E2M1 times the largest E4M3.
///
/// It is at least the smallest normal f32, so that it has full precision.
pub fn weight_scale(amax: f32) -> f32 {
    (amax / (E2m1::MAX * E4m3::MAX)).max(f32::MIN_POSITIVE)
}

/// The largest magnitude of `values`.
///
/// # Errors
/// [`LinearError::NotFinite`].
pub fn largest<T: Copy + Into<f32>>(values: &[T]) -> Result<f32, LinearError> {
    let mut amax: f32 = 0.0;
    for (index, &value) in values.iter().enumerate() {
        let value = value.into();
        if !value.is_finite() {
            return Err(LinearError::NotFinite { index, value });
        }
        amax = amax.max(value.abs());
    }
    Ok(amax)
}

/// The E4M3 number nearest to `amax / (6 scale)`.
pub fn group_scale(amax: f32, scale: f32) -> E4m3 {
    let unit = f64::from(E2m1::MAX) * f64::from(scale);
    let code = nearest(f64::from(amax), unit, 0x7E, |code| E4m3(code).to_f32());
    E4m3(code)
}

/// The E2M1 number nearest to `value / (group * scale)`; 0 if the divisor is 0.
pub fn code(value: f32, group: E4m3, scale: f32) -> E2m1 {
    let unit = f64::from(group.to_f32()) * f64::from(scale);
    if unit == 0.0 {
        return E2m1(0);
    }
    let code = nearest(f64::from(value.abs()), unit, 7, |code| E2m1(code).to_f32());
    E2m1(code | if value.is_sign_negative() { 8 } else { 0 })
}

/// The code from 0 to `last` whose value times `unit` is nearest to `magnitude`; on a tie, the even code. `value` must
/// grow with the code.
fn nearest(magnitude: f64, unit: f64, last: u8, value: impl Fn(u8) -> f32) -> u8 {
    let (mut low, mut high) = (0, last);
    while low < high {
        let code = low + (high - low) / 2;
        let midpoint = (f64::from(value(code)) + f64::from(value(code + 1))) / 2.0 * unit;
        let is_above = magnitude > midpoint || (magnitude == midpoint && code % 2 == 1);
        if is_above {
            low = code + 1;
        } else {
            high = code;
        }
    }
    low
}
