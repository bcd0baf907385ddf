//! [`crate::mma`] on the CPU.

use super::block::wait_product;
use crate::warp::WARP_SIZE;

/// A lane's part of A, B and C.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fragments {
    pub a: [u32; 4],
    pub b: [u32; 2],
    pub c: [f32; 4],
}

#[track_caller]
pub unsafe fn bf16_m16n8k16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    wait_product(Fragments { a, b, c })
}

const LANES: usize = WARP_SIZE as usize;
const ROWS: usize = 16;
const COLUMNS: usize = 8;
const INNER: usize = 16;

/// Each lane's part of `A B + C`, the products added to C one by one in the order of the inner index.
pub fn multiply(lanes: &[Fragments; LANES]) -> [[f32; 4]; LANES] {
    let mut a = [[0.0; INNER]; ROWS];
    let mut b = [[0.0; INNER]; COLUMNS];
    for (lane, fragments) in lanes.iter().enumerate() {
        let (group, first) = (lane / 4, lane % 4 * 2);
        for (register, &pair) in fragments.a.iter().enumerate() {
            let (row, column) = (group + register % 2 * 8, first + register / 2 * 8);
            [a[row][column], a[row][column + 1]] = bf16_pair(pair);
        }
        for (register, &pair) in fragments.b.iter().enumerate() {
            let row = first + register * 8;
            [b[group][row], b[group][row + 1]] = bf16_pair(pair);
        }
    }
    std::array::from_fn(|lane| {
        std::array::from_fn(|register| {
            let (row, column) = (lane / 4 + register / 2 * 8, lane % 4 * 2 + register % 2);
            let products = a[row].iter().zip(&b[column]).map(|(x, y)| x * y);
            products.fold(lanes[lane].c[register], |sum, product| sum + product)
        })
    })
}

/// The exact values of two BF16, the lower half first.
fn bf16_pair(pair: u32) -> [f32; 2] {
    [f32::from_bits(pair << 16), f32::from_bits(pair & 0xFFFF_0000)]
}
