//! FP8 keys without conversion, E4M3.
//!
//! Hopper's tensor cores accumulate E4M3 products with about 14 bits below the largest, fewer than f32 has.
//! So each 64 channels are one product, and the two results are added in f32.

use kv_layout::index_row::IndexFormat;
use simt::warpgroup::{Fragments, e4m3_m64n64k64};
use simt::{copy, thread};

use super::{Block, Half, Keys, Query};
use crate::fragment::add;
use crate::indexer::score::weights::{twice_positive, weighted};

/// Words of a query.
const QUERY_WORDS: usize = IndexFormat::Fp8.query_bytes() as usize / 4;

/// [`IndexFormat::Fp8`].
#[derive(Clone, Copy)]
pub struct Fp8Keys;

impl Keys for Fp8Keys {
    const FORMAT: IndexFormat = IndexFormat::Fp8;
    const STAGES: u32 = 2;
    const UNIT: f32 = 0.5;
    type Left = [[[u32; 4]; 2]; 2];
    type Products = Fragments;

    #[inline(always)]
    fn place(vector: u32) -> u32 {
        vector ^ (vector / 8 % 2)
    }

    #[inline(always)]
    fn wait_for_oldest() {
        copy::wait_for_groups::<0>();
    }

    #[inline(always)]
    unsafe fn unpack(half: Half) -> Self::Left {
        let quarter = thread::lane_id() % 4;
        half.keys().map(|key| {
            // SAFETY: by this function's own contract: 32 codes of the key.
            let codes = |i: u32| unsafe { half.block.codes::<Self>(8 * key + 2 * quarter + i) };
            [codes(0), codes(1)]
        })
    }

    #[inline(always)]
    unsafe fn product<T>(
        [upper, lower]: Self::Left,
        query: Query,
        meanwhile: impl FnOnce() -> T,
    ) -> (Fragments, T) {
        // SAFETY: by this function's own contract.
        unsafe {
            let step = |group: usize| {
                let (eight, at) = (group / 2, group % 2 * 2);
                let ([a, c], [b, d]) = (
                    [upper[eight][at], upper[eight][at + 1]],
                    [lower[eight][at], lower[eight][at + 1]],
                );
                [a, b, c, d]
            };
            let right = query.words::<{ QUERY_WORDS }>();
            let product = |left: [[u32; 4]; 2], first: u32| e4m3_m64n64k64(left, right, first);
            // One product at a time: there are no registers for two.
            let sum = opt_barrier(product([step(0), step(1)], 0));
            (add(sum, product([step(2), step(3)], 2)), meanwhile())
        }
    }

    #[inline(always)]
    fn sums(products: Fragments, of_sixteen: impl Fn(usize) -> [f32; 4]) -> [f32; 2] {
        weighted(products, twice_positive, of_sixteen)
    }

    #[inline(always)]
    unsafe fn factor(block: Block, key: u32) -> f32 {
        // SAFETY: the key's scale.
        unsafe { f32::from_bits(block.scales::<Self>(key)) }
    }
}

/// The same elements, behind an optimisation barrier ([`thread::opt_barrier_f32`]).
#[inline(always)]
fn opt_barrier(fragments: Fragments) -> Fragments {
    fragments.map(|four| four.map(thread::opt_barrier_f32))
}
