//! The matrix product of a warp, compared with a plain product, through the fragment layout of the PTX ISA.

use simt::emu::{FaultKind, Operation};
use simt::{mma, thread, warp};

use crate::device::{Tensor, fault_kind, run};

const ROWS: usize = 16;
const COLUMNS: usize = 8;
const INNER: usize = 16;

/// The BF16 bits of a value that BF16 holds exactly.
fn bf16(value: f32) -> u32 {
    assert_eq!(value.to_bits() & 0xFFFF, 0, "{value} is no BF16");
    value.to_bits() >> 16
}

/// A small integer that looks random, from a position.
fn integer(row: usize, column: usize, salt: usize) -> f32 {
    ((row * 37 + column * 101 + salt * 59) % 31) as f32 - 15.0
}

/// Runs one product on each of `warps` warps; returns their 16 x 8 results, row by row.
fn product(
    warps: usize,
    a: impl Fn(usize, usize) -> f32 + Sync,
    b: impl Fn(usize, usize) -> f32 + Sync,
    c: impl Fn(usize, usize) -> f32 + Sync,
) -> Vec<f32> {
    let output = Tensor::zeros(warps * ROWS * COLUMNS);
    let target = output.output();
    run(32 * warps as u32, || {
        let lane = thread::lane_id() as usize;
        let (g, t) = (lane / 4, lane % 4);
        let pair = |low: f32, high: f32| bf16(low) | bf16(high) << 16;
        let a_pair = |row, column| pair(a(row, column), a(row, column + 1));
        let b_pair = |row, column| pair(b(row, column), b(row + 1, column));
        let fragment_a = [
            a_pair(g, 2 * t),
            a_pair(g + 8, 2 * t),
            a_pair(g, 2 * t + 8),
            a_pair(g + 8, 2 * t + 8),
        ];
        let fragment_b = [b_pair(2 * t, g), b_pair(2 * t + 8, g)];
        let places = [(g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1)];
        let fragment_c = places.map(|(row, column)| c(row, column));
        // SAFETY: all lanes come together; one element per lane and register.
        unsafe {
            let d = mma::bf16_m16n8k16(fragment_a, fragment_b, fragment_c);
            let first = thread::warp_id() as usize * ROWS * COLUMNS;
            for ((row, column), value) in places.into_iter().zip(d) {
                target.store((first + row * COLUMNS + column) as u64, value);
            }
        }
    });
    output.words().into_iter().map(f32::from_bits).collect()
}

#[test]
fn products_of_integers_are_exact_in_every_element() {
    let (a, b, c) = (
        |row, k| integer(row, k, 1),
        |k, column| integer(k, column, 2),
        |row, column| integer(row, column, 3),
    );
    let found = product(2, a, b, c);
    for (at, &value) in found.iter().enumerate() {
        let (row, column) = (at / COLUMNS % ROWS, at % COLUMNS);
        let sum: f32 = (0..INNER).map(|k| a(row, k) * b(k, column)).sum();
        assert_eq!(value, c(row, column) + sum, "row {row}, column {column}");
    }
}

#[test]
fn products_are_added_to_c_in_the_order_of_the_inner_index() {
    // 2^24 + 1 - 2^24 is 0 or 1, by the order.
    let big = 2f32.powi(24);
    let a = |_, k| [big, 1.0, -big, 1.0].get(k).copied().unwrap_or(0.0);
    let ones = |_, _| 1.0;
    let found = product(1, a, ones, |_, _| 1.0);
    let expected = (((1.0 + big) + 1.0) - big) + 1.0;
    assert!(found.iter().all(|&value| value == expected), "{found:?}, not {expected}");
}

#[test]
fn infinities_and_nan_reach_their_elements_only() {
    let a = |row, k| if (row, k) == (3, 5) { f32::INFINITY } else { 1.0 };
    let b = |k, column| if (k, column) == (5, 2) { 0.0 } else { 1.0 };
    let found = product(1, a, b, |_, _| 0.0);
    for (at, &value) in found.iter().enumerate() {
        match (at / COLUMNS, at % COLUMNS) {
            (3, 2) => assert!(value.is_nan()),
            (3, _) => assert_eq!(value, f32::INFINITY),
            (_, 2) => assert_eq!(value, 15.0),
            _ => assert_eq!(value, 16.0),
        }
    }
}

#[test]
fn a_product_that_not_all_lanes_reach_is_a_fault() {
    let kind = fault_kind(32, || {
        if thread::lane_id() < 16 {
            // SAFETY: broken on purpose: only half of the lanes come.
            let _ = unsafe { mma::bf16_m16n8k16([0; 4], [0; 2], [0.0; 4]) };
        } else {
            // SAFETY: broken on purpose.
            unsafe { warp::sync_warp() };
        }
    });
    let FaultKind::Divergence { groups } = kind else { panic!("{kind:?}") };
    let waiting = groups.iter().filter_map(|group| group.waiting).map(|(operation, _)| operation);
    assert!(waiting.collect::<Vec<_>>().contains(&Operation::MmaBf16));
}
