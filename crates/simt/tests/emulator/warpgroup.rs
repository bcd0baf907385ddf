//! Products of a warpgroup, compared with plain products, through the layouts of the PTX ISA.

use simt::emu::{Fault, FaultKind, Launch, launch};
use simt::shared::Shared;
use simt::thread::{NamedBarrier, lane_id, sync_threads, thread_idx_x, warp_id};
use simt::warp::sync_warp;
use simt::warpgroup::{
    Fragments, InFlight, Panels, Rows, bf16_m64n64k64, bf16_m64n64k64_twice, bf16_m64n64k128,
    bf16_m64n128k32, bf16_m64n128k64, e4m3_m64n64k64, fence_proxy_async, right_word, s8_m64n64k128,
    start_bf16_m64n64k512, start_bf16_m64n256k32, wait_for_products,
};

use crate::device::{Tensor, block_of};

const SIZE: usize = 64;
/// Words of B over 128 rows of BF16.
const RIGHT_WORDS: usize = 4096;

/// A small integer that looks random, from a position.
fn integer(row: usize, column: usize, salt: usize) -> f32 {
    ((row * 37 + column * 101 + salt * 59) % 31) as f32 - 15.0
}

/// Runs `product` on a block of four warps; `right` gives each 32-bit word of B. Returns the 64 x 64 result, row by
/// row.
fn run(
    right: impl Fn(usize) -> u32 + Sync,
    product: impl Fn(Shared<u32, RIGHT_WORDS>) -> Fragments + Sync,
) -> Vec<f32> {
    let output = Tensor::zeros(SIZE * SIZE);
    let target = output.output();
    let body = || {
        // SAFETY: the block has the memory; each word of B once, then a barrier; all threads come
        // together; each element of the result once.
        unsafe {
            let shared = Shared::<u32, RIGHT_WORDS>::at(0);
            let mut word = thread_idx_x();
            while word < RIGHT_WORDS as u32 {
                shared.store(word, right(word as usize));
                word += 128;
            }
            fence_proxy_async();
            sync_threads();
            let (group, quarter) = (lane_id() / 4, lane_id() % 4);
            for (eight, fragment) in (0..).zip(product(shared)) {
                for (i, value) in (0..).zip(fragment) {
                    let row = 16 * warp_id() + group + 8 * (i / 2);
                    let column: u32 = 8 * eight + 2 * quarter + i % 2;
                    target.store(u64::from(64 * row + column), f32::to_bits(value));
                }
            }
        }
    };
    let shape = Launch { shared_bytes: 4 * RIGHT_WORDS as u32, ..block_of(128) };
    launch(&shape, body).unwrap_or_else(|fault| panic!("{fault}"));
    output.words().into_iter().map(f32::from_bits).collect()
}

/// The column of B that a word belongs to, and the word's place among the column's.
fn place(word: usize) -> (usize, usize) {
    let (sixteen, column) = (word / right_word(1, 0) as usize, word / 4 % SIZE);
    (column, 4 * sixteen + word % 4)
}

fn check(found: &[f32], inner: usize) {
    for (at, &value) in found.iter().enumerate() {
        let (row, column) = (at / SIZE, at % SIZE);
        let sum: f32 = (0..inner).map(|k| integer(row, k, 1) * integer(k, column, 2)).sum();
        assert_eq!(value, sum, "row {row}, column {column}");
    }
}

#[test]
fn products_of_bf16_integers_are_exact_in_every_element() {
    let pair = |low: f32, high: f32| low.to_bits() >> 16 | high.to_bits() & 0xFFFF_0000;
    let right = |word| {
        let (column, at) = place(word);
        pair(integer(2 * at, column, 2), integer(2 * at + 1, column, 2))
    };
    let found = run(right, |right| {
        let (group, quarter) = ((lane_id() / 4) as usize, (lane_id() % 4) as usize);
        let row = 16 * warp_id() as usize + group;
        let left = std::array::from_fn(|step| {
            std::array::from_fn(|i| {
                let (row, k) = (row + i % 2 * 8, 16 * step + 2 * quarter + i / 2 * 8);
                pair(integer(row, k, 1), integer(row, k + 1, 1))
            })
        });
        // SAFETY: all threads come together, after B was written.
        unsafe { bf16_m64n64k128(left, right) }
    });
    check(&found, 128);
}

/// The E4M3 code of an integer below 16.
fn e4m3(value: f32) -> u32 {
    let bits = value.to_bits();
    let (exponent, mantissa) = (bits >> 23 & 0xFF, bits >> 20 & 7);
    let code = if value == 0.0 { 0 } else { (exponent - 127 + 7) << 3 | mantissa };
    bits >> 24 & 0x80 | code
}

#[test]
fn products_of_e4m3_integers_are_exact_in_every_element_and_step() {
    for step in 0..3 {
        let four = |value: &dyn Fn(usize) -> f32| {
            (0..4).fold(0, |word, i| word | e4m3(value(i)) << (8 * i))
        };
        let right = |word| {
            let (column, at) = place(word);
            // Rows of B in other steps hold a value that would make the sum wrong.
            let row = |i: usize| (4 * at + i).wrapping_sub(32 * step);
            four(&|i| if row(i) < 64 { integer(row(i), column, 2) } else { 15.0 })
        };
        let found = run(right, |right| {
            let (group, quarter) = ((lane_id() / 4) as usize, (lane_id() % 4) as usize);
            let row = 16 * warp_id() as usize + group;
            let left = std::array::from_fn(|step| {
                std::array::from_fn(|i| {
                    let (row, k) = (row + i % 2 * 8, 32 * step + 4 * quarter + i / 2 * 16);
                    four(&|j| integer(row, k + j, 1))
                })
            });
            // SAFETY: all threads come together, after B was written.
            unsafe { e4m3_m64n64k64(left, right, step as u32) }
        });
        check(&found, 64);
    }
}

#[test]
fn products_of_integers_are_exact_in_every_element_and_what_runs_meanwhile_returns() {
    // Up to 120 in size, so that sums need more than 16 bits.
    let value = |row: usize, column: usize, salt: usize| 8 * integer(row, column, salt) as i8;
    let right = |word| {
        let (column, at) = place(word);
        u32::from_le_bytes([0, 1, 2, 3].map(|i| value(4 * at + i, column, 2).cast_unsigned()))
    };
    let found = run(right, |right| {
        let (group, quarter) = ((lane_id() / 4) as usize, (lane_id() % 4) as usize);
        let row = 16 * warp_id() as usize + group;
        let left = std::array::from_fn(|step| {
            std::array::from_fn(|i| {
                let (row, k) = (row + i % 2 * 8, 32 * step + 4 * quarter + i / 2 * 16);
                u32::from_le_bytes([0, 1, 2, 3].map(|j| value(row, k + j, 1).cast_unsigned()))
            })
        });
        // SAFETY: all threads come together, after B was written.
        let (sums, lane) = unsafe { s8_m64n64k128(left, right, lane_id) };
        assert_eq!(lane, lane_id());
        sums.map(|four| four.map(|sum| sum as f32 / 64.0))
    });
    check(&found, 128);
}

#[test]
fn a_nan_reaches_its_row_and_column_only() {
    let one = e4m3(1.0) * 0x0101_0101;
    let right = |word| if place(word) == (3, 0) { one & !0xFF | 0x7F } else { one };
    // SAFETY: all threads come together, after B was written.
    let found = run(right, |right| unsafe { e4m3_m64n64k64([[one; 4]; 2], right, 0) });
    for (at, &value) in found.iter().enumerate() {
        if at % SIZE == 3 {
            assert!(value.is_nan());
        } else {
            assert_eq!(value, 64.0);
        }
    }
}

/// Rows of both operands in shared memory: 64 rows of A, then 128 columns of B.
const ROWS: u32 = 64 + 128;
/// Element `at` of row `row`: of a row of A, or, from row 64 on, of a column of B.
fn element(row: usize, at: usize) -> f32 {
    if row < SIZE { integer(row, at, 1) } else { integer(at, row - SIZE, 2) }
}

/// Multiplies over the first half of an inner dimension of 64, then adds the product over the second half. A product
/// over the whole dimension has the same bits.
#[test]
fn products_of_128_columns_are_exact_and_add_up() {
    const WORDS: usize = 32 * ROWS as usize;
    let output = Tensor::zeros(SIZE * 128);
    let target = output.output();
    let pair = |low: f32, high: f32| low.to_bits() >> 16 | high.to_bits() & 0xFFFF_0000;
    let body = || {
        // SAFETY: the block has the memory; each word of the rows once, then a barrier; all threads come
        // together; each element of the result once.
        unsafe {
            let memory = Shared::<u32, WORDS>::at(0);
            let rows = Rows::at(memory, 0);
            for row in (thread_idx_x()..ROWS).step_by(128) {
                for word in 0..32 {
                    let at = 2 * word as usize;
                    let value = pair(element(row as usize, at), element(row as usize, at + 1));
                    memory.store(rows.word(word / 4, row) + word % 4, value);
                }
            }
            fence_proxy_async();
            sync_threads();
            let (left, right) = (rows, rows.from(0, 64));
            let garbage = [[f32::NAN; 4]; 16];
            let sum = bf16_m64n128k32(left, right, false, garbage);
            let sum = bf16_m64n128k32(left.from(4, 0), right.from(4, 0), true, sum);
            let (whole, lane) = bf16_m64n128k64(left, right, [[0.0; 4]; 16], lane_id);
            assert!(whole == sum && lane == lane_id());
            let (group, quarter) = (lane_id() / 4, lane_id() % 4);
            for (eight, fragment) in (0..).zip(sum) {
                for (i, value) in (0..).zip(fragment) {
                    let row = 16 * warp_id() + group + 8 * (i / 2);
                    let column: u32 = 8 * eight + 2 * quarter + i % 2;
                    target.store(u64::from(128 * row + column), f32::to_bits(value));
                }
            }
        }
    };
    let shape = Launch { shared_bytes: 4 * WORDS as u32, ..block_of(128) };
    launch(&shape, body).unwrap_or_else(|fault| panic!("{fault}"));
    for (at, &value) in output.words().iter().enumerate() {
        let (row, column) = (at / 128, at % 128);
        let sum: f32 = (0..64).map(|k| integer(row, k, 1) * integer(k, column, 2)).sum();
        assert_eq!(f32::from_bits(value), sum, "row {row}, column {column}");
    }
}

/// Words of two matrices of 64 rows and 512 columns in panels, and of a third of 64 by 64.
const PANEL_WORDS: usize = 2 * 8 * 2048 + 2048;

/// Element (`row`, `column`) of matrix `matrix`: small, so that sums over 512 are exact.
fn panel_element(matrix: usize, row: usize, column: usize) -> f32 {
    integer(row, column, 3 + matrix)
}

/// Runs `product` on a warpgroup, with the three matrices in shared memory. Returns 64 rows of `columns` columns; each
/// fragment of the product has eight columns.
fn run_panels(
    columns: usize,
    product: impl Fn([Panels<PANEL_WORDS>; 3]) -> Vec<[f32; 4]> + Sync,
) -> Result<Vec<f32>, Fault> {
    run_panels_beside(columns, product, |_| ())
}

/// As [`run_panels`], beside a fifth warp that runs `other`.
fn run_panels_beside(
    columns: usize,
    product: impl Fn([Panels<PANEL_WORDS>; 3]) -> Vec<[f32; 4]> + Sync,
    other: impl Fn([Panels<PANEL_WORDS>; 3]) + Sync,
) -> Result<Vec<f32>, Fault> {
    let output = Tensor::zeros(SIZE * columns);
    let target = output.output();
    let pair = |low: f32, high: f32| low.to_bits() >> 16 | high.to_bits() & 0xFFFF_0000;
    let body = || {
        // SAFETY: the block has the memory; each word once, then a barrier; all threads come together; each element of
        // the result once.
        unsafe {
            let memory = Shared::<u32, PANEL_WORDS>::at(0);
            let matrices = [0, 1, 2].map(|i| Panels::at(memory, i * 8 * 2048));
            let row = thread_idx_x() % 64;
            for (matrix, panels) in matrices.iter().enumerate() {
                let width = if warp_id() == 4 {
                    0
                } else if matrix < 2 {
                    8
                } else {
                    1
                };
                for panel in (thread_idx_x() / 64..width).step_by(2) {
                    for word in 0..32 {
                        let column = (64 * panel + 2 * word) as usize;
                        let at = |c| panel_element(matrix, row as usize, column + c);
                        let to = panels.panel(panel).word(word / 4, row) + word % 4;
                        memory.store(to, pair(at(0), at(1)));
                    }
                }
            }
            fence_proxy_async();
            sync_threads();
            if warp_id() == 4 {
                return other(matrices);
            }
            let (group, quarter) = (lane_id() / 4, lane_id() % 4);
            for (eight, fragment) in (0..).zip(product(matrices)) {
                for (i, value) in (0..).zip(fragment) {
                    let row = 16 * warp_id() + group + 8 * (i / 2);
                    let column: u32 = 8 * eight + 2 * quarter + i % 2;
                    let at = row * columns as u32 + column;
                    target.store(u64::from(at), f32::to_bits(value));
                }
            }
        }
    };
    let shape = Launch { shared_bytes: 4 * PANEL_WORDS as u32, ..block_of(160) };
    launch(&shape, body)?;
    Ok(output.words().into_iter().map(f32::from_bits).collect())
}

#[test]
fn products_over_512_are_exact_in_every_element() {
    // SAFETY: all threads come together, after the operands were written.
    let found = run_panels(64, |[left, right, _]| unsafe {
        start_bf16_m64n64k512(left, right).wait::<0>().to_vec()
    });
    for (at, &value) in found.expect("no rule is broken").iter().enumerate() {
        let (row, column) = (at / 64, at % 64);
        let product = |k| panel_element(0, row, k) * panel_element(1, column, k);
        assert_eq!(value, (0..512).map(product).sum::<f32>(), "row {row}, column {column}");
    }
}

/// B is transposed: its rows are the inner dimension. For each half of its panels, two products over 32 rows each are
/// added to a sum of ones, with another product in flight between them.
#[test]
fn products_with_a_transposed_matrix_are_exact_and_add_up() {
    for first in [0, 4] {
        // SAFETY: all threads come together, after the operands were written.
        let found = run_panels(256, |[other, right, left]| unsafe {
            let (left, right) = (left.panel(0), right.from(first as u32, 0));
            let ones = InFlight::idle([[[1.0; 4]; 16]; 2]);
            let low = start_bf16_m64n256k32(left, right, ones);
            let scores = start_bf16_m64n64k512(other, other);
            let both = start_bf16_m64n256k32(left.from(4, 0), right.from(0, 32), low);
            wait_for_products::<2>();
            let _ = scores.wait::<1>();
            both.wait::<0>().concat()
        });
        for (at, &value) in found.expect("no rule is broken").iter().enumerate() {
            let (row, column) = (at / 256, at % 256 + 64 * first);
            let product = |k| panel_element(2, row, k) * panel_element(1, k, column);
            let sum: f32 = (0..64).map(product).sum();
            assert_eq!(value, 1.0 + sum, "row {row}, column {column}");
        }
    }
}

/// Products with two panels of B, over all 64 rows, are added to a sum of ones.
#[test]
fn products_with_a_transposed_panel_are_exact_and_add_up() {
    // SAFETY: all threads come together, after the operands were written.
    let found = run_panels(64, |[_, right, left]| unsafe {
        // The thread's pairs of A: rows 8 apart, then columns 8 apart.
        let row = 16 * warp_id() + lane_id() / 4;
        let pair = |eighth: u32, row: u32| {
            let word = left.panel(0).word(eighth, row) + lane_id() % 4;
            Shared::<u32, PANEL_WORDS>::at(0).load(word)
        };
        let left = [0, 2, 4, 6].map(|step| {
            [pair(step, row), pair(step, row + 8), pair(step + 1, row), pair(step + 1, row + 8)]
        });
        let (one, seven) = bf16_m64n64k64(left, right.from(7, 0), [[1.0; 4]; 8], || 7);
        assert_eq!(seven, 7);
        let (two, ()) = bf16_m64n64k64(left, right.from(2, 0), one, || ());
        let panels = [right.from(7, 0), right.from(2, 0)];
        let twice = bf16_m64n64k64_twice([left; 2], panels, [[1.0; 4]; 8], || two);
        assert_eq!(twice.0, twice.1, "one after the other");
        two.to_vec()
    });
    for (at, &value) in found.expect("no rule is broken").iter().enumerate() {
        let (row, column) = (at / 64, at % 64);
        let product = |panel: usize, k: usize| {
            panel_element(2, row, k) * panel_element(1, k, 64 * panel + column)
        };
        let sum: f32 = (0..64).map(|k| product(7, k) + product(2, k)).sum();
        assert_eq!(value, 1.0 + sum, "row {row}, column {column}");
    }
}

#[test]
fn a_wait_that_leaves_the_product_in_flight() {
    // SAFETY: all threads come together, after the operands were written.
    let found = run_panels(64, |[left, right, _]| unsafe {
        start_bf16_m64n64k512(left, right).wait::<1>().to_vec()
    });
    let Err(fault) = found else { panic!("no fault") };
    let FaultKind::Panic { message, .. } = *fault.kind else { panic!("{fault}") };
    assert!(message.contains("may be in flight: 0 were started after it"), "{message}");
}

#[test]
fn an_operand_that_is_written_while_its_product_is_in_flight() {
    // SAFETY: broken on purpose: all warps read the word for their products.
    let found = run_panels(64, |[left, right, _]| unsafe {
        let product = start_bf16_m64n64k512(left, right);
        if thread_idx_x() == 0 {
            Shared::<u32, PANEL_WORDS>::at(0).store(right.panel(0).word(0, 0), 0);
        }
        product.wait::<0>().to_vec()
    });
    let Err(fault) = found else { panic!("no fault") };
    assert!(matches!(*fault.kind, FaultKind::SharedRace { .. }), "{fault}");
}

/// Starts a product in two halves, the second of which adds to the first, and another product between them. Once the
/// warpgroup has waited until at most `pending` products are in flight (`None`: without a wait), the fifth warp writes
/// to an operand of the first half, or, if `last`, of the second.
fn overwritten(pending: Option<u32>, last: bool) -> Result<Vec<f32>, Fault> {
    let barrier = NamedBarrier::new(1, 160);
    // SAFETY: all threads come together, after the operands were written; the operand is written too early on purpose,
    // where too many products are left in flight.
    run_panels_beside(
        256,
        |[other, right, left]| unsafe {
            let left = left.panel(0);
            let low = start_bf16_m64n256k32(left, right, InFlight::idle([[[0.0; 4]; 16]; 2]));
            let scores = start_bf16_m64n64k512(other, other);
            let both = start_bf16_m64n256k32(left.from(4, 0), right.from(0, 32), low);
            match pending {
                Some(0) => wait_for_products::<0>(),
                Some(1) => wait_for_products::<1>(),
                Some(2) => wait_for_products::<2>(),
                Some(3) => wait_for_products::<3>(),
                _ => {}
            }
            barrier.arrive();
            let _ = scores.wait::<1>();
            both.wait::<0>().concat()
        },
        |[_, right, _]| unsafe {
            barrier.sync();
            if lane_id() == 0 {
                let row = if last { 32 } else { 0 };
                Shared::<u32, PANEL_WORDS>::at(0).store(right.panel(0).word(0, row), 0);
            }
        },
    )
}

#[test]
fn an_operand_of_a_sum_in_flight_that_is_written() {
    for (pending, last) in [(None, false), (Some(3), false), (None, true), (Some(1), true)] {
        let Err(fault) = overwritten(pending, last) else { panic!("{pending:?}, {last}") };
        assert!(
            matches!(*fault.kind, FaultKind::SharedRace { .. }),
            "{pending:?}, {last}: {fault}"
        );
    }
    // Operands of a product that was waited for may be written, even before its result is taken.
    let all = overwritten(Some(0), true).expect("the last product has ended");
    assert_eq!(overwritten(Some(2), false).expect("the first product has ended"), all);
    let product = |k| panel_element(2, 5, k) * panel_element(1, k, 7);
    assert_eq!(all[256 * 5 + 7], (0..64).map(product).sum::<f32>());
}

#[test]
fn a_product_that_nobody_waits_for() {
    // SAFETY: broken on purpose: the product is in flight to the end.
    let found = run_panels(64, |[left, right, _]| unsafe {
        let _ = start_bf16_m64n64k512(left, right);
        Vec::new()
    });
    let Err(fault) = found else { panic!("no fault") };
    let FaultKind::Panic { message, location, .. } = *fault.kind else { panic!("{fault}") };
    assert_eq!(message, "a product is in flight when its thread returns");
    assert!(location.is_some_and(|location| location.contains("emulator/warpgroup.rs")));
}

/// A warp reads only its own 16 rows of A. So the warp itself may write them before the product, if `sync_warp`
/// follows.
#[test]
fn rows_of_a_are_read_by_their_own_warp() {
    let run = |together: bool| {
        // SAFETY: a row by a lane of its warp; broken on purpose if lanes are not brought together.
        run_panels(256, move |[_, right, left]| unsafe {
            let left = left.panel(0);
            if lane_id() < 16 {
                let word = left.word(0, 16 * warp_id() + lane_id());
                Shared::<u32, PANEL_WORDS>::at(0).store(word, 0);
            }
            if together {
                sync_warp();
            }
            fence_proxy_async();
            let sum = InFlight::idle([[[0.0; 4]; 16]; 2]);
            start_bf16_m64n256k32(left, right, sum).wait::<0>().concat()
        })
    };
    let found = run(true).expect("no rule is broken");
    let product = |k| panel_element(2, 60, k) * panel_element(1, k, 7);
    assert_eq!(found[256 * 60 + 7], (2..32).map(product).sum::<f32>());
    let Err(fault) = run(false) else { panic!("no fault") };
    assert!(matches!(*fault.kind, FaultKind::SharedRace { .. }), "{fault}");
}
