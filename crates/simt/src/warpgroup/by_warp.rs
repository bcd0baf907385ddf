//! [`crate::warpgroup`] by `mma`, warp by warp. A product is computed when it is started. The emulator records its
//! operands, checks that proxy fences have made them visible, and treats them as being read until the product is waited
//! for.

use core::marker::PhantomData;

use super::in_flight::{FragmentsInFlight, InFlight, InFlightN256, NO_PRODUCT};
use super::layout::{
    Fragments, FragmentsN128, IntegerFragments, Operand, Panels, Rows, right_word,
};
use crate::imp::thread as form;
use crate::math::{mul_bf16x2, permute_bytes};
use crate::mma::{bf16_m16n8k16, s8_m16n8k32};
use crate::shared::Shared;
use crate::thread;

#[inline(always)]
pub fn fence_proxy_async() {
    form::fence_proxy_async();
}

#[inline(always)]
pub unsafe fn setmaxnreg_inc<const REGISTERS: u32>() {}

#[inline(always)]
pub unsafe fn setmaxnreg_dec<const REGISTERS: u32>() {}

#[inline(always)]
#[track_caller]
pub unsafe fn bf16_m64n64k128<const N: usize>(
    left: [[u32; 4]; 8],
    right: Shared<u32, N>,
) -> Fragments {
    // Unrolled by hand: an array indexed by a loop variable would go to local memory.
    let columns = |eight: u32| {
        let step = |i: u32, sum: [f32; 4]| {
            // SAFETY: by the caller's promises; all lanes of the warp are together.
            unsafe { bf16_m16n8k16(left[i as usize], right_pair(right, i, eight), sum) }
        };
        let half = step(3, step(2, step(1, step(0, [0.0; 4]))));
        step(7, step(6, step(5, step(4, half))))
    };
    waited(([Operand::plain(right)], true), || eight_times(columns), || ()).0
}

#[inline(always)]
#[track_caller]
pub unsafe fn bf16_m64n128k32<const N: usize>(
    left: Rows<N>,
    right: Rows<N>,
    adds: bool,
    sum: FragmentsN128,
) -> FragmentsN128 {
    // SAFETY: by the caller's promises.
    let two_steps = || unsafe { two_steps(left, right, adds, sum) };
    waited(([left.operand(), right.operand()], adds), two_steps, || ()).0
}

#[inline(always)]
#[track_caller]
pub unsafe fn bf16_m64n128k64<T, const N: usize>(
    left: Rows<N>,
    right: Rows<N>,
    sum: FragmentsN128,
    meanwhile: impl FnOnce() -> T,
) -> (FragmentsN128, T) {
    // SAFETY: by the caller's promises.
    let four_steps = || unsafe {
        let sum = two_steps(left, right, true, sum);
        two_steps(left.from(4, 0), right.from(4, 0), true, sum)
    };
    waited(([left.operand(), right.operand()], true), four_steps, meanwhile)
}

/// `sum + A B`, or `A B` if not `adds`, over two steps, with 128 columns.
///
/// # Safety
/// As [`super::bf16_m64n128k32`].
#[inline(always)]
#[track_caller]
unsafe fn two_steps<const N: usize>(
    left: Rows<N>,
    right: Rows<N>,
    adds: bool,
    sum: FragmentsN128,
) -> FragmentsN128 {
    // SAFETY: by this function's own contract; all lanes of the warp are together.
    unsafe {
        let (first, second) = (own_rows(left, 0), own_rows(left, 1));
        let columns = |eight: u32| {
            let sum = if adds { sum[eight as usize] } else { [0.0; 4] };
            let sum = bf16_m16n8k16(first, own_pairs(right, 0, 8 * eight), sum);
            bf16_m16n8k16(second, own_pairs(right, 1, 8 * eight), sum)
        };
        let [a, b, c, d, e, f, g, h] = eight_times(columns);
        let [i, j, k, l, m, n, o, p] = eight_times(|eight| columns(8 + eight));
        [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
    }
}

#[inline(always)]
#[track_caller]
pub unsafe fn start_bf16_m64n64k512<const N: usize>(
    left: Panels<N>,
    right: Panels<N>,
) -> FragmentsInFlight<N> {
    let number = form::start_product([left.panel(0), right.panel(0)].map(Rows::operand), true);
    let (mut sum, mut step) = ([[0.0; 4]; 8], 0);
    while step < 32 {
        let (left, right) = (left.panel(step / 4), right.panel(step / 4));
        // SAFETY: by the caller's promises; all lanes of the warp are together.
        unsafe {
            let rows = own_rows(left, step % 4);
            sum = eight_times(|eight| {
                let column = own_pairs(right, step % 4, 8 * eight);
                bf16_m16n8k16(rows, column, sum[eight as usize])
            });
        }
        step += 1;
    }
    in_flight(sum, number)
}

#[inline(always)]
#[track_caller]
pub unsafe fn bf16_m64n64k64<T, const N: usize>(
    left: [[u32; 4]; 4],
    right: Panels<N>,
    sum: Fragments,
    meanwhile: impl FnOnce() -> T,
) -> (Fragments, T) {
    // SAFETY: by the caller's promises.
    waited(([right.panel(0).operand()], true), || unsafe { panel(left, right, sum) }, meanwhile)
}

#[inline(always)]
#[track_caller]
pub unsafe fn bf16_m64n64k64_twice<T, const N: usize>(
    [a, b]: [[[u32; 4]; 4]; 2],
    [first, second]: [Panels<N>; 2],
    sum: Fragments,
    meanwhile: impl FnOnce() -> T,
) -> (Fragments, T) {
    let operands = [first.panel(0), second.panel(0)].map(Rows::operand);
    // SAFETY: by the caller's promises.
    waited((operands, true), || unsafe { panel(b, second, panel(a, first, sum)) }, meanwhile)
}

#[inline(always)]
#[track_caller]
pub unsafe fn start_bf16_m64n256k32<const N: usize>(
    left: Rows<N>,
    right: Panels<N>,
    sum: InFlightN256<N>,
) -> InFlightN256<N> {
    let number = form::start_product([left, right.panel(0)].map(Rows::operand), true);
    let (mut sum, mut step) = (sum.fragments, 0);
    while step < 2 {
        // SAFETY: by the caller's promises; all lanes of the warp are together.
        unsafe {
            let rows = rows_in_order(left, step);
            let half = |panel, sum| wide_step((rows, step), right.from(panel, 0), sum);
            sum = [half(0, sum[0]), half(2, sum[1])];
        }
        step += 1;
    }
    in_flight(sum, number)
}

#[inline(always)]
#[track_caller]
pub unsafe fn wait_for_products<const PENDING: u32>() {
    form::check_product(NO_PRODUCT, PENDING);
}

/// Wraps the fragments of product `number`, which counts as reading its operands until it is waited for.
#[inline(always)]
fn in_flight<T, Operands>(fragments: T, number: u32) -> InFlight<T, Operands> {
    form::end_operands();
    InFlight { fragments, number, operands: PhantomData }
}

/// Computes a product of these operands, which is added to a sum if `adds`; calls `meanwhile`, and then waits for the
/// product. Returns both results.
#[inline(always)]
#[track_caller]
fn waited<const OPERANDS: usize, T, R>(
    (operands, adds): ([Operand; OPERANDS], bool),
    product: impl FnOnce() -> T,
    meanwhile: impl FnOnce() -> R,
) -> (T, R) {
    let number = form::start_product(operands, adds);
    let fragments = product();
    form::end_operands();
    let done = meanwhile();
    form::check_product(number, 0);
    (fragments, done)
}

impl<T, Operands> InFlight<T, Operands> {
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn finish<const PENDING: u32>(self) -> T {
        form::check_product(self.number, PENDING);
        self.fragments
    }
}

/// Adds the product of four steps of A and a panel, which is a transposed B.
///
/// # Safety
/// As [`super::bf16_m64n64k64`].
#[inline(always)]
#[track_caller]
unsafe fn panel<const N: usize>(
    left: [[u32; 4]; 4],
    right: Panels<N>,
    sum: Fragments,
) -> Fragments {
    // Unrolled by hand: an array indexed by a loop variable would go to local memory.
    let [a, b, c, d] = left;
    let step = |step: u32, rows: [u32; 4], sum: Fragments| {
        // SAFETY: by this function's own contract; all lanes of the warp are together.
        unsafe { panel_step((rows, step), right, sum) }
    };
    step(3, d, step(2, c, step(1, b, step(0, a, sum))))
}

/// Adds the product of one step of A and the first panel of `right`, which is a transposed B.
///
/// # Safety
/// As [`super::bf16_m64n64k64`].
#[inline(always)]
#[track_caller]
unsafe fn panel_step<const N: usize>(
    (rows, step): ([u32; 4], u32),
    right: Panels<N>,
    sum: Fragments,
) -> Fragments {
    eight_times(|eight| {
        // SAFETY: by this function's own contract.
        unsafe {
            let column = transposed_pairs(right.panel(0), step, eight);
            bf16_m16n8k16(rows, column, sum[eight as usize])
        }
    })
}

/// Adds the product of one step of A and the first two panels of `right`, which are a transposed B.
///
/// # Safety
/// As [`super::start_bf16_m64n256k32`].
#[inline(always)]
#[track_caller]
unsafe fn wide_step<const N: usize>(
    (rows, step): ([u32; 4], u32),
    right: Panels<N>,
    sum: FragmentsN128,
) -> FragmentsN128 {
    let columns = |eight: u32| {
        // SAFETY: by this function's own contract.
        unsafe {
            let column = transposed_pairs(right.panel(eight / 8), step, eight % 8);
            bf16_m16n8k16(rows, column, sum[eight as usize])
        }
    };
    let [a, b, c, d, e, f, g, h] = eight_times(columns);
    let [i, j, k, l, m, n, o, p] = eight_times(|eight| columns(8 + eight));
    [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
}

/// The lane's fragment of step `step` of the warp's 16 rows of A, with the inner index in the order of [`Rows`].
///
/// # Safety
/// As [`super::bf16_m64n128k32`].
#[inline(always)]
#[track_caller]
unsafe fn own_rows<const N: usize>(rows: Rows<N>, step: u32) -> [u32; 4] {
    let first = 16 * (thread::warp_id() % 4);
    // SAFETY: by this function's own contract.
    let (low, high) = unsafe { (own_pairs(rows, step, first), own_pairs(rows, step, first + 8)) };
    [low[0], high[0], low[1], high[1]]
}

/// As `own_rows`, with the inner index in the order of [`crate::mma`].
///
/// # Safety
/// As [`super::start_bf16_m64n256k32`].
#[inline(always)]
#[track_caller]
unsafe fn rows_in_order<const N: usize>(rows: Rows<N>, step: u32) -> [u32; 4] {
    let (group, quarter) = (thread::lane_id() / 4, thread::lane_id() % 4);
    let first = 16 * (thread::warp_id() % 4) + group;
    let pair = |eighth: u32, row: u32| {
        // SAFETY: by this function's own contract.
        unsafe { rows.memory().load(rows.word(2 * step + eighth, row) + quarter) }
    };
    [pair(0, first), pair(0, first + 8), pair(1, first), pair(1, first + 8)]
}

/// The lane's fragment of step `step` of eight columns of a transposed B: the unit of 16 bytes `sixteen` of 16 rows,
/// with the inner index in the order of [`crate::mma`].
///
/// # Safety
/// As [`super::start_bf16_m64n256k32`].
#[inline(always)]
#[track_caller]
unsafe fn transposed_pairs<const N: usize>(rows: Rows<N>, step: u32, sixteen: u32) -> [u32; 2] {
    let (column, quarter) = (thread::lane_id() / 4, thread::lane_id() % 4);
    let selectors = if column.is_multiple_of(2) { 0x5410 } else { 0x7632 };
    let pair = |row: u32| {
        let word = |row| rows.word(sixteen, row) + column / 2;
        // SAFETY: by this function's own contract.
        let (a, b) = unsafe { (rows.memory().load(word(row)), rows.memory().load(word(row + 1))) };
        permute_bytes(a, b, selectors)
    };
    let row = 16 * step + 2 * quarter;
    [pair(row), pair(row + 8)]
}

/// The lane's 8 bytes of step `step`, in the row of its group of four lanes among the eight rows from `first_row` on.
///
/// # Safety
/// As [`super::bf16_m64n128k32`].
#[inline(always)]
#[track_caller]
unsafe fn own_pairs<const N: usize>(rows: Rows<N>, step: u32, first_row: u32) -> [u32; 2] {
    let (group, quarter) = (thread::lane_id() / 4, thread::lane_id() % 4);
    let word = rows.word(2 * step + quarter / 2, first_row + group) + quarter % 2 * 2;
    // SAFETY: by this function's own contract.
    unsafe { rows.memory().load_u32x2(word) }
}

#[inline(always)]
#[track_caller]
pub unsafe fn s8_m64n64k128<T, const N: usize>(
    left: [[u32; 4]; 4],
    right: Shared<u32, N>,
    meanwhile: impl FnOnce() -> T,
) -> (IntegerFragments, T) {
    let columns = |eight: u32| {
        let step = |i: u32, sum: [i32; 4]| {
            // SAFETY: by the caller's promises; all lanes of the warp are together.
            unsafe { s8_m16n8k32(left[i as usize], right_pair(right, i, eight), sum) }
        };
        step(3, step(2, step(1, step(0, [0; 4]))))
    };
    waited(([Operand::plain(right)], true), || eight_times(columns), meanwhile)
}

#[inline(always)]
#[track_caller]
pub unsafe fn e4m3_m64n64k64<const N: usize>(
    left: [[u32; 4]; 2],
    right: Shared<u32, N>,
    step: u32,
) -> Fragments {
    let left = left.map(|step| step.map(bf16_from_e4m3));
    let columns = |eight: u32| {
        // SAFETY: by the caller's promises; all lanes of the warp are together.
        unsafe {
            let one = |i: usize, sum: [f32; 4]| {
                let right = right_pair(right, step + i as u32, eight).map(bf16_from_e4m3);
                // The order of the inner index is free, if it is the same for A and B.
                let half = |j: usize, sum: [f32; 4]| {
                    bf16_m16n8k16(left[i].map(|pair| pair[j]), right.map(|pair| pair[j]), sum)
                };
                half(1, half(0, sum))
            };
            one(1, one(0, [0.0; 4]))
        }
    };
    waited(([Operand::plain(right)], true), || eight_times(columns), || ()).0
}

#[inline(always)]
#[track_caller]
fn eight_times<T>(columns: impl Fn(u32) -> T) -> [T; 8] {
    [columns(0), columns(1), columns(2), columns(3), columns(4), columns(5), columns(6), columns(7)]
}

/// The lane's fragment of step `step` of B, for the eight columns from `8 eight` on.
///
/// # Safety
/// As [`super::bf16_m64n64k128`].
#[inline(always)]
#[track_caller]
unsafe fn right_pair<const N: usize>(right: Shared<u32, N>, step: u32, eight: u32) -> [u32; 2] {
    let (group, quarter) = (thread::lane_id() / 4, thread::lane_id() % 4);
    let word = |sixteen: u32| right_word(sixteen, 8 * eight + group) + quarter;
    // SAFETY: by this function's own contract.
    unsafe { [right.load(word(2 * step)), right.load(word(2 * step + 1))] }
}

/// Four E4M3 as two pairs of BF16, which hold them exactly.
#[inline(always)]
fn bf16_from_e4m3(codes: u32) -> [u32; 2] {
    [pair_from_e4m3(codes), pair_from_e4m3(codes >> 8)]
}

/// The E4M3 in the low byte of each half as BF16.
#[inline(always)]
fn pair_from_e4m3(codes: u32) -> u32 {
    /// 2^120 in both halves: the bits of an E4M3, placed in a BF16, stand for 2^-120 times its value.
    const UNIT: u32 = (127 + 120) << 7 | (127 + 120) << 23;
    let magnitude = codes & 0x007F_007F;
    let value = mul_bf16x2((codes & 0x0080_0080) << 8 | magnitude << 4, UNIT);
    let nan = |half: u32| if magnitude >> half & 0xFFFF == 0x7F { 0x7FC0 << half } else { 0 };
    value | nan(0) | nan(16)
}
