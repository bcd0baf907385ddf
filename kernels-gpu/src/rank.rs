//! The order of scores in every selection: larger first, a number before NaN, and among equals the lower index (which
//! the caller ensures).

/// The key of no score: ranks below NaN.
pub const ABSENT: u32 = 0;

/// A key whose order as `u32` is that of the scores. Both zeros have the same key; the key of NaN is below that of
/// every number, and above [`ABSENT`].
#[inline(always)]
#[must_use]
pub fn key(score: f32) -> u32 {
    // -0.0 + 0.0 is +0.0.
    if score.is_nan() { 1 } else { ordered(score + 0.0) }
}

/// As [`key`], for numbers only; -0.0 is below +0.0.
#[inline(always)]
#[must_use]
pub fn ordered(number: f32) -> u32 {
    const SIGN: u32 = 1 << 31;
    let bits = number.to_bits();
    bits ^ ((bits.cast_signed() >> 31).cast_unsigned() | SIGN)
}

/// The score whose [`key`] or [`ordered`] this is; NaN for that of NaN and for [`ABSENT`].
#[inline(always)]
#[must_use]
pub fn score(key: u32) -> f32 {
    const SIGN: u32 = 1 << 31;
    f32::from_bits(if key & SIGN == 0 { !key } else { key & !SIGN })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_the_order_of_the_scores() {
        let ascending = [
            f32::NEG_INFINITY,
            f32::MIN,
            -1.0,
            -f32::MIN_POSITIVE,
            -f32::from_bits(1),
            0.0,
            f32::from_bits(1),
            1.0,
            f32::MAX,
            f32::INFINITY,
        ];
        for pair in ascending.windows(2) {
            assert!(key(pair[0]) < key(pair[1]), "{pair:?}");
        }
        assert!(ascending.iter().all(|&number| score(key(number)) == number));
        assert!(score(key(f32::NAN)).is_nan() && score(ABSENT).is_nan());
        assert_eq!(key(0.0), key(-0.0));
        for nan in [f32::NAN, -f32::NAN] {
            assert!(ABSENT < key(nan) && key(nan) < key(f32::NEG_INFINITY));
        }
    }
}
