//! NVFP4 keys as BF16, which represents the product of a code and its scale exactly.
//!
//! Lane `4 g + t` holds channels `32 t .. 32 t + 32` of key `g`: one vector load. A product allows any order of its
//! inner index, so this is the order in which codes are cheapest to unpack: step `s` of eight takes from each lane the
//! pairs `(c, c + 4)` and `(c + 1, c + 5)` with `c = 8 (s / 2) + 2 (s % 2)`. The query is stored in the same order
//! (`kv_layout::index_row::query_byte`).

use kv_layout::index_row::IndexFormat;
use simt::warpgroup::{Fragments, bf16_m64n64k128};
use simt::{copy, thread};

use super::{Block, Half, Keys, Query};
use crate::convert::{E2M1_BITS_LOG2, bf16x8_from_e2m1, f32x4_from_e4m3};
use crate::indexer::score::weights::{twice_positive, weighted};

/// log2 of the factor of a scale. A code's bits times the scale times this factor are the key, divided by
/// 2^[`SMALLER_LOG2`]: otherwise a large scale would overflow.
const E2M1_UNIT: u32 = E2M1_BITS_LOG2 - SMALLER_LOG2;
/// The factor by which unpacked keys are too small; [`Keys::UNIT`] corrects it.
const SMALLER: f32 = (1_u64 << SMALLER_LOG2) as f32;
const SMALLER_LOG2: u32 = 32;

/// Words of a query.
const QUERY_WORDS: usize = IndexFormat::Nvfp4.query_bytes() as usize / 4;

/// [`IndexFormat::Nvfp4`].
#[derive(Clone, Copy)]
pub struct Nvfp4Keys {
    codes: [u32; 4],
    /// Two E4M3 in the lowest bytes: of channels 0 to 15 and of 16 to 31.
    scales: u32,
}

impl Nvfp4Keys {
    /// The lane's channels of a key.
    ///
    /// # Safety
    /// The block is in shared memory, `key < 32`.
    #[inline(always)]
    unsafe fn read(block: Block, key: u32) -> Self {
        let quarter = thread::lane_id() % 4;
        // SAFETY: 16 of the key's 64 bytes, and half of its eight scales.
        unsafe {
            Self {
                codes: block.codes::<Self>(4 * key + quarter),
                scales: block.scales::<Self>(2 * key + quarter / 2) >> (16 * (quarter % 2)),
            }
        }
    }

    /// Channels `8 WORD .. 8 WORD + 8` as BF16 pairs: (0, 4), (1, 5), (2, 6), (3, 7).
    #[inline(always)]
    fn pairs<const WORD: usize>(self) -> [u32; 4] {
        /// 2^94, the factor of a scale: its product with an E4M3 is exact.
        const UNIT: f32 = f32::from_bits((E2M1_UNIT + 127) << 23);
        let scale = f32x4_from_e4m3(self.scales)[WORD / 2] * UNIT;
        let high = scale.to_bits() & 0xFFFF_0000;
        bf16x8_from_e2m1(self.codes[WORD], high | high >> 16)
    }
}

impl Keys for Nvfp4Keys {
    const FORMAT: IndexFormat = IndexFormat::Nvfp4;
    const STAGES: u32 = 3;
    const UNIT: f32 = 0.5 * SMALLER;
    type Left = [[u32; 4]; 8];
    type Products = Fragments;

    #[inline(always)]
    fn wait_for_oldest() {
        copy::wait_for_groups::<1>();
    }

    #[inline(always)]
    unsafe fn unpack(half: Half) -> Self::Left {
        // SAFETY: by this function's own contract.
        let [upper, lower] = half.keys().map(|key| unsafe { Self::read(half.block, key) });
        let steps = |[a, b, c, d]: [u32; 4], [e, f, g, h]: [u32; 4]| [[a, e, b, f], [c, g, d, h]];
        let [a, b] = steps(upper.pairs::<0>(), lower.pairs::<0>());
        let [c, d] = steps(upper.pairs::<1>(), lower.pairs::<1>());
        let [e, f] = steps(upper.pairs::<2>(), lower.pairs::<2>());
        let [g, h] = steps(upper.pairs::<3>(), lower.pairs::<3>());
        [a, b, c, d, e, f, g, h]
    }

    #[inline(always)]
    unsafe fn product<T>(
        left: Self::Left,
        query: Query,
        meanwhile: impl FnOnce() -> T,
    ) -> (Fragments, T) {
        // SAFETY: by this function's own contract.
        let products = unsafe { bf16_m64n64k128(left, query.words::<{ QUERY_WORDS }>()) };
        (products, meanwhile())
    }

    #[inline(always)]
    fn sums(products: Fragments, of_sixteen: impl Fn(usize) -> [f32; 4]) -> [f32; 2] {
        weighted(products, twice_positive, of_sixteen)
    }

    #[inline(always)]
    unsafe fn factor(_: Block, _: u32) -> f32 {
        1.0
    }
}
