//! Each collective, compared with a plain model over arrays of 32.

use simt::{thread, warp};

use crate::device::{Tensor, run};

const WARPS: usize = 2;
const LANES: usize = 32;

/// Values that use all bits and differ in all lanes.
fn values() -> Vec<u32> {
    (0..(WARPS * LANES) as u32).map(|i| (i + 1).wrapping_mul(0x9E37_79B9)).collect()
}

/// The result of `device` in each thread, given the thread's value.
fn on_device(device: impl Fn(u32) -> u32 + Sync) -> Vec<u32> {
    let input = Tensor::new(&values());
    let output = Tensor::zeros(WARPS * LANES);
    let (source, target) = (input.input(), output.output());
    run((WARPS * LANES) as u32, || {
        let i = u64::from(thread::thread_idx_x());
        // SAFETY: one element per thread.
        unsafe { target.store(i, device(source.load(i))) }
    });
    output.words()
}

/// The result of `model` for each thread, given its lane and its warp's values.
fn on_paper(model: impl Fn(usize, &[u32]) -> u32) -> Vec<u32> {
    let per_warp = |warp: &[u32]| (0..LANES).map(|lane| model(lane, warp)).collect::<Vec<_>>();
    values().chunks(LANES).flat_map(per_warp).collect()
}

#[test]
fn shuffles_move_values_between_lanes() {
    for operand in [0, 1, 5, 16, 31] {
        let distance = operand as usize;
        // SAFETY: all lanes shuffle together, here and below.
        let xor = on_device(|v| unsafe { warp::shuffle_xor_u32(v, operand) });
        assert_eq!(xor, on_paper(|lane, warp| warp[lane ^ distance]));
        // SAFETY: as above.
        let idx = on_device(|v| unsafe { warp::shuffle_idx_u32(v, operand) });
        assert_eq!(idx, on_paper(|_, warp| warp[distance]));
        // SAFETY: as above.
        let up = on_device(|v| unsafe { warp::shuffle_up_found_u32(v, operand) }.unwrap_or(0));
        assert_eq!(up, on_paper(|lane, warp| lane.checked_sub(distance).map_or(0, |of| warp[of])));
    }
}

#[test]
fn shuffles_take_an_operand_per_lane() {
    // SAFETY: all lanes shuffle together.
    let reversed = on_device(|v| unsafe { warp::shuffle_idx_u32(v, 31 - thread::lane_id()) });
    assert_eq!(reversed, on_paper(|lane, warp| warp[31 - lane]));
}

#[test]
fn shuffles_use_the_low_five_bits_of_their_operand() {
    // SAFETY: all lanes shuffle together, here and below.
    let xor = on_device(|v| unsafe { warp::shuffle_xor_u32(v, 32 + 3) });
    assert_eq!(xor, on_paper(|lane, warp| warp[lane ^ 3]));
    // SAFETY: as above.
    let up = on_device(|v| unsafe { warp::shuffle_up_found_u32(v, 32 + 3) }.unwrap_or(0));
    assert_eq!(up, on_paper(|lane, warp| lane.checked_sub(3).map_or(0, |of| warp[of])));
}

#[test]
fn float_shuffles_move_bits() {
    // A signalling NaN would lose its bits in arithmetic.
    let bits = |v: u32| 0x7F80_0001 | (v & 0xFF);
    let float = |v| f32::from_bits(bits(v));
    // SAFETY: all lanes shuffle together, here and below.
    let xor = on_device(|v| unsafe { warp::shuffle_xor_f32(float(v), 7) }.to_bits());
    assert_eq!(xor, on_paper(|lane, warp| bits(warp[lane ^ 7])));
    // SAFETY: as above.
    let idx = on_device(|v| unsafe { warp::shuffle_idx_f32(float(v), 9) }.to_bits());
    assert_eq!(idx, on_paper(|_, warp| bits(warp[9])));
}

#[test]
fn votes_see_every_lane() {
    for threshold in [0, 1 << 31, u32::MAX] {
        let passes = |v: &u32| *v >= threshold;
        // SAFETY: all lanes vote together, here and below.
        let ballot = on_device(|v| unsafe { warp::ballot(passes(&v)) });
        let bits = |warp: &[u32]| (0..LANES).map(|l| u32::from(passes(&warp[l])) << l).sum();
        assert_eq!(ballot, on_paper(|_, warp| bits(warp)));
        // SAFETY: as above.
        let all = on_device(|v| u32::from(unsafe { warp::all(passes(&v)) }));
        assert_eq!(all, on_paper(|_, warp| u32::from(warp.iter().all(passes))));
        // SAFETY: as above.
        let any = on_device(|v| u32::from(unsafe { warp::any(passes(&v)) }));
        assert_eq!(any, on_paper(|_, warp| u32::from(warp.iter().any(passes))));
    }
}

#[test]
fn integer_reductions_cover_the_warp() {
    // SAFETY: all lanes reduce together, here and below.
    let sum = on_device(|v| unsafe { warp::reduce_add_u32(v) });
    assert_eq!(sum, on_paper(|_, warp| warp.iter().fold(0, |sum, v| sum.wrapping_add(*v))));
    // SAFETY: as above.
    let most = on_device(|v| unsafe { warp::reduce_max_u32(v) });
    assert_eq!(most, on_paper(|_, warp| *warp.iter().max().expect("32 lanes")));
    // SAFETY: as above.
    let least = on_device(|v| unsafe { warp::reduce_min_u32(v) });
    assert_eq!(least, on_paper(|_, warp| *warp.iter().min().expect("32 lanes")));
}

/// A float with many mantissa bits, so that the order of a sum shows in its bits.
fn float(v: u32) -> f32 {
    (v.cast_signed() as f32) * 1e-7
}

#[test]
fn float_sum_is_the_same_tree_in_every_lane() {
    fn tree(values: &[u32]) -> f32 {
        // The butterfly's first step adds lanes 16 apart: halves, from the outside in.
        let mut level: Vec<f32> = values.iter().map(|&v| float(v)).collect();
        while level.len() > 1 {
            let (low, high) = level.split_at(level.len() / 2);
            level = low.iter().zip(high).map(|(a, b)| a + b).collect();
        }
        level[0]
    }
    // SAFETY: all lanes reduce together.
    let sum = on_device(|v| unsafe { warp::reduce_add_f32(float(v)) }.to_bits());
    assert_eq!(sum, on_paper(|_, warp| tree(warp).to_bits()));
}

#[test]
fn float_maximum_over_the_warp_and_over_segments() {
    fn largest(values: &[u32]) -> u32 {
        values.iter().map(|&v| float(v)).fold(f32::NEG_INFINITY, f32::max).to_bits()
    }
    let segment = |lane: usize, warp: &[u32], width: usize| {
        let first = lane / width * width;
        largest(&warp[first..first + width])
    };
    // SAFETY: all lanes reduce together, here and below.
    let whole = on_device(|v| unsafe { warp::reduce_max_f32(float(v)) }.to_bits());
    assert_eq!(whole, on_paper(|_, warp| largest(warp)));
    // SAFETY: as above.
    let eight = on_device(|v| unsafe { warp::reduce_max_f32_width::<8>(float(v)) }.to_bits());
    assert_eq!(eight, on_paper(|lane, warp| segment(lane, warp, 8)));
    // SAFETY: as above.
    let one = on_device(|v| unsafe { warp::reduce_max_f32_width::<1>(float(v)) }.to_bits());
    assert_eq!(one, on_paper(|lane, warp| segment(lane, warp, 1)));
}

#[test]
fn maximum_and_minimum_order_zeros_and_drop_nan() {
    use simt::math::{max, min};
    assert_eq!(max(-0.0, 0.0).to_bits(), 0.0f32.to_bits());
    assert_eq!(max(0.0, -0.0).to_bits(), 0.0f32.to_bits());
    assert_eq!(min(0.0, -0.0).to_bits(), (-0.0f32).to_bits());
    assert_eq!(min(-0.0, 0.0).to_bits(), (-0.0f32).to_bits());
    assert_eq!((max(f32::NAN, 1.0), max(1.0, f32::NAN)), (1.0, 1.0));
    assert_eq!((min(f32::NAN, 1.0), min(1.0, f32::NAN)), (1.0, 1.0));
    assert_eq!((max(-2.0, 1.0), min(-2.0, 1.0)), (1.0, -2.0));
    assert!(max(f32::NAN, f32::NAN).is_nan());
}

#[test]
fn maximum_that_keeps_nan() {
    use simt::math::max_or_nan;
    assert_eq!((max_or_nan(1.0, 2.0), max_or_nan(-0.0, 0.0).to_bits()), (2.0, 0));
    assert!(max_or_nan(f32::NAN, 1.0).is_nan() && max_or_nan(1.0, f32::NAN).is_nan());
}

#[test]
fn saturated_products_lie_between_zero_and_one() {
    use simt::math::mul_saturated;
    assert_eq!(mul_saturated(0.5, 0.25), 0.125);
    assert_eq!(mul_saturated(3.0, 0.5), 1.0);
    for below in [mul_saturated(-3.0, 0.5), mul_saturated(f32::NAN, 1.0), mul_saturated(-0.0, 1.0)]
    {
        assert_eq!(below.to_bits(), 0);
    }
    let subnormal = f32::from_bits(12_345);
    assert_eq!(mul_saturated(subnormal, f32::from_bits(254 << 23)), 12_345.0 / 4_194_304.0);
}

#[test]
fn halves_and_bytes_are_taken_one_by_one() {
    use simt::math::{max_u16x2, permute_bytes};
    assert_eq!(max_u16x2(0x0001_FFFF, 0x0002_7FFF), 0x0002_FFFF);
    let (a, b) = (0x4433_2211, 0x8877_6655);
    assert_eq!(permute_bytes(a, b, 0x7530), 0x8866_4411);
    // The fourth bit of a selector repeats the byte's top bit eight times. Bits above the four selectors do not count.
    assert_eq!(permute_bytes(a, b, 0xABCD_F8F7), 0xFF00_FF88);
}

#[test]
fn products_of_bf16_pairs_round_once() {
    // 1.0078125 squared is 1.01568603515625: nearer to 1.015625 than to the next BF16.
    let (a, b) = (0x3F81_3F80, 0x3F81_4000);
    assert_eq!(simt::math::mul_bf16x2(a, b), 0x3F82_4000);
    // A subnormal times a power of two; infinity times zero.
    assert_eq!(simt::math::mul_bf16x2(0x0040_7F80, 0x7E80_0000), 0x3F00_7FFF);
    // Half way between two: the even one.
    assert_eq!(simt::math::mul_bf16x2(0x3F83_3F83, 0x3FC0_BFC0), 0x3FC4_BFC4);
}

#[test]
fn exact_math_rounds_once_and_to_even() {
    use simt::math;
    // (1 + 2^-12)^2 - (1 + 2^-11) is 2^-24 only when the product is not rounded first.
    let a = 1.0 + 2f32.powi(-12);
    assert_eq!(math::mul_add(a, a, -(1.0 + 2f32.powi(-11))), 2f32.powi(-24));
    assert_eq!(math::sqrt(2.0).to_bits(), 0x3FB5_04F3);
}

#[test]
fn approximations_are_within_half_an_ulp_of_the_truth() {
    use simt::math::approx;
    assert_eq!(approx::ex2(10.0), 1024.0);
    assert_eq!(approx::lg2(1024.0), 10.0);
    assert_eq!(approx::rcp_ftz(3.0), 1.0 / 3.0);
}
