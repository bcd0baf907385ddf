//! Matrix products of a warp: from the fragments of all lanes to each lane's part of the result.

use crate::limits::WARP_SIZE;

/// A lane's part of A, B and C.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fragments {
    pub a: [u32; 4],
    pub b: [u32; 2],
    /// Bits of f32 or of integers.
    pub c: [u32; 4],
}

const LANES: usize = WARP_SIZE as usize;
const ROWS: usize = 16;
const COLUMNS: usize = 8;
/// Largest inner dimension, in elements: 32 of 8 bits, or 16 of BF16.
const INNER: usize = 32;

/// Each lane's part of `A B + C` in f32, the products added to C one by one in the order of the inner
/// index.
pub fn multiply_bf16(lanes: &[Fragments; LANES]) -> [[u32; 4]; LANES] {
    multiply(lanes, bf16_pair, |c, a, b| {
        let products = a.iter().zip(b).map(|(x, y)| x * y);
        products.fold(f32::from_bits(c), |sum, product| sum + product).to_bits()
    })
}

/// Each lane's part of `A B + C` in integers.
pub fn multiply_s8(lanes: &[Fragments; LANES]) -> [[u32; 4]; LANES] {
    let four = |word: u32| word.to_le_bytes().map(|byte| i32::from(byte.cast_signed()));
    multiply(lanes, four, |c, a, b| {
        let products = a.iter().zip(b).map(|(x, y)| (x * y).cast_unsigned());
        products.fold(c, u32::wrapping_add)
    })
}

/// Each lane's part of `A B + C`, for elements of which a word holds `WIDTH`. `unpack` unpacks a word; `add` adds the
/// products of a row of A and a column of B to an element of C.
fn multiply<T: Copy + Default, const WIDTH: usize>(
    lanes: &[Fragments; LANES],
    unpack: impl Fn(u32) -> [T; WIDTH],
    add: impl Fn(u32, &[T], &[T]) -> u32,
) -> [[u32; 4]; LANES] {
    let mut a = [[T::default(); INNER]; ROWS];
    let mut b = [[T::default(); INNER]; COLUMNS];
    for (lane, fragments) in lanes.iter().enumerate() {
        let (group, first) = (lane / 4, lane % 4 * WIDTH);
        for (register, &word) in fragments.a.iter().enumerate() {
            let (row, column) = (group + register % 2 * 8, first + register / 2 * 4 * WIDTH);
            a[row][column..column + WIDTH].copy_from_slice(&unpack(word));
        }
        for (register, &word) in fragments.b.iter().enumerate() {
            let row = first + register * 4 * WIDTH;
            b[group][row..row + WIDTH].copy_from_slice(&unpack(word));
        }
    }
    std::array::from_fn(|lane| {
        std::array::from_fn(|register| {
            let (row, column) = (lane / 4 + register / 2 * 8, lane % 4 * 2 + register % 2);
            let inner = ..8 * WIDTH;
            add(lanes[lane].c[register], &a[row][inner], &b[column][inner])
        })
    })
}

/// The exact values of two BF16, the lower half first.
fn bf16_pair(pair: u32) -> [f32; 2] {
    [f32::from_bits(pair << 16), f32::from_bits(pair & 0xFFFF_0000)]
}
