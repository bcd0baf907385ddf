//! Weights as the lanes of a product load and unpack them.

use kv_layout::linear::{TILE_CODES, TILE_COLUMNS, TILE_INNER, TILE_SCALES, device_pairs};
use simt::math::{mul_bf16x2, permute_bytes};
use simt::mem::Global;

use crate::convert::{E2M1_BITS_LOG2, f32x4_from_e4m3};
use crate::fragment::{LanePlace, Piece};

/// Pieces of a row of activations in a chunk: 128 values.
pub const CHUNK_PIECES: u32 = TILE_INNER / 8;

/// Number of fragments of 16 columns that a warp has of a weight in BF16: more would not fit in its registers.
pub const BF16_FRAGMENTS: usize = 1;
/// Number of fragments that a warp has of a weight in NVFP4: all columns of a block, so that each warp reads its own
/// part of the activations, and no other warp does.
pub const NVFP4_FRAGMENTS: usize = 4;

/// A weight, `[columns, inner]`: a row of it is a column of the product.
pub trait Weights: Copy {
    /// A lane's part of a chunk of the warp's columns: for each fragment, four pieces of each of the columns
    /// `place.row` and `place.row + 8`.
    type Chunk: Copy + Default;
    /// Number of fragments of 16 columns that a warp has.
    const FRAGMENTS: usize;
    /// The factor by which sums must still be multiplied.
    const UNIT: f32;
    /// Whether no launch writes the weight, so that it may be loaded before the previous launch has ended.
    const IS_FIXED: bool;

    /// Loads the lane's part of chunk `chunk` of the columns from `first` on; zeros past the end of rows. Values of
    /// columns past the last are not used.
    ///
    /// # Safety
    /// The first column of the block exists.
    unsafe fn load(self, first: u32, chunk: u32, place: LanePlace) -> Self::Chunk;

    /// Prefetches `columns` columns from `first` on, a multiple of 64.
    ///
    /// # Safety
    /// The columns exist.
    unsafe fn prefetch(self, first: u32, columns: u32);

    /// Unpacks piece `PIECE` of four, for both columns of fragment `fragment`, as BF16 pairs.
    fn pieces<const PIECE: usize>(chunk: Self::Chunk, fragment: usize) -> [Piece; 2];

    /// The index in a chunk of piece `of_lane` of lane `t` of four.
    fn piece_of(t: u32, of_lane: u32) -> u32;
}

/// A weight in BF16.
#[derive(Clone, Copy)]
pub struct Bf16Weights {
    /// `[columns, inner]`.
    pub values: Global<u16>,
    /// Columns.
    pub columns: u32,
    /// Elements of a row, a multiple of 32.
    pub inner: u32,
}

impl Weights for Bf16Weights {
    type Chunk = [[Piece; 4]; 2];
    const FRAGMENTS: usize = BF16_FRAGMENTS;
    const UNIT: f32 = 1.0;
    const IS_FIXED: bool = false;

    /// Columns past the last one repeat it.
    #[inline(always)]
    unsafe fn load(self, first: u32, chunk: u32, place: LanePlace) -> [[Piece; 4]; 2] {
        [0, 8].map(|eight| {
            let row = u64::from((first + place.row + eight).min(self.columns - 1));
            [0, 1, 2, 3].map(|piece| {
                let k = 8 * (chunk * CHUNK_PIECES + Self::piece_of(place.pair, piece));
                if k >= self.inner {
                    return [0; 4];
                }
                // SAFETY: eight elements of the row, at a multiple of eight.
                unsafe { self.values.load_u32x4(row * u64::from(self.inner) + u64::from(k)) }
            })
        })
    }

    #[inline(always)]
    unsafe fn prefetch(self, first: u32, columns: u32) {
        // SAFETY: rows of a multiple of 64 bytes.
        unsafe {
            self.values
                .prefetch_l2(u64::from(first) * u64::from(self.inner), 2 * columns * self.inner)
        }
    }

    #[inline(always)]
    fn pieces<const PIECE: usize>(chunk: [[Piece; 4]; 2], _: usize) -> [Piece; 2] {
        chunk.map(|column| column[PIECE])
    }

    /// Lanes take pieces in turn, so that their loads touch whole sectors.
    #[inline(always)]
    fn piece_of(t: u32, of_lane: u32) -> u32 {
        4 * of_lane + t
    }
}

/// A weight in NVFP4, in the tiles of `kv_layout::linear`.
#[derive(Clone, Copy)]
pub struct Nvfp4Weights {
    /// `[columns / 64, inner / 128, 4096]`.
    pub codes: Global<u8>,
    /// `[columns / 64, inner / 128, 512]`.
    pub scales: Global<u8>,
    /// Tiles of a row.
    pub row_tiles: u32,
}

/// The lane's codes of eight columns, and two scales of each column.
#[derive(Clone, Copy, Default)]
pub struct Nvfp4Chunk {
    codes: [Piece; 2 * NVFP4_FRAGMENTS],
    scales: Piece,
}

/// log2 of the factor by which unpacked values are too small: with the whole factor of [`E2M1_BITS_LOG2`] a large scale
/// would overflow.
const SMALLER_LOG2: u32 = 8;

impl Nvfp4Weights {
    /// The weight with rows of `inner` values.
    #[inline(always)]
    #[must_use]
    pub fn new(codes: Global<u8>, scales: Global<u8>, inner: u32) -> Self {
        Self { codes, scales, row_tiles: inner.div_ceil(TILE_INNER) }
    }

    /// Index of the first tile of the columns from `first` on.
    #[inline(always)]
    fn first_tile(self, first: u32) -> u64 {
        u64::from(first / TILE_COLUMNS) * u64::from(self.row_tiles)
    }
}

impl Weights for Nvfp4Weights {
    type Chunk = Nvfp4Chunk;
    const FRAGMENTS: usize = NVFP4_FRAGMENTS;
    const UNIT: f32 = (1 << SMALLER_LOG2) as f32;
    /// The weight is uploaded once.
    const IS_FIXED: bool = true;

    #[inline(always)]
    unsafe fn load(self, first: u32, chunk: u32, place: LanePlace) -> Nvfp4Chunk {
        if chunk >= self.row_tiles {
            return Nvfp4Chunk::default();
        }
        let tile = self.first_tile(first) + u64::from(chunk);
        let lane = u64::from(16 * (4 * place.row + place.pair));
        let codes = tile * u64::from(TILE_CODES) + lane;
        // SAFETY: 16 bytes of each 512 of the tile.
        unsafe {
            Nvfp4Chunk {
                codes: [0, 1, 2, 3, 4, 5, 6, 7]
                    .map(|eight| self.codes.load_u32x4_early(codes + 512 * eight)),
                scales: self.scales.load_u32x4_early(tile * u64::from(TILE_SCALES) + lane),
            }
        }
    }

    #[inline(always)]
    unsafe fn prefetch(self, first: u32, _: u32) {
        let tile = self.first_tile(first);
        // SAFETY: the tiles of the columns.
        unsafe {
            self.codes.prefetch_l2(tile * u64::from(TILE_CODES), self.row_tiles * TILE_CODES);
            self.scales.prefetch_l2(tile * u64::from(TILE_SCALES), self.row_tiles * TILE_SCALES);
        }
    }

    /// E2M1 times E4M3 has six significant bits, so that BF16 holds the product exactly.
    #[inline(always)]
    fn pieces<const PIECE: usize>(chunk: Nvfp4Chunk, fragment: usize) -> [Piece; 2] {
        const UNIT: f32 = f32::from_bits((E2M1_BITS_LOG2 - SMALLER_LOG2 + 127) << 23);
        let scales = f32x4_from_e4m3(chunk.scales[fragment]);
        [0, 1].map(|eight| {
            let scale = scales[2 * eight + PIECE / 2] * UNIT;
            // Copies the upper half of the word to both halves: it has all significant bits.
            let scale = permute_bytes(scale.to_bits(), 0, 0x3232);
            let pairs = device_pairs(chunk.codes[2 * fragment + eight][PIECE]);
            pairs.map(|pair| mul_bf16x2(pair, scale))
        })
    }

    /// A lane takes four consecutive pieces: one load.
    #[inline(always)]
    fn piece_of(t: u32, of_lane: u32) -> u32 {
        4 * t + of_lane
    }
}
