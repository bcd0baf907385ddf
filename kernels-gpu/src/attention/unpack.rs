//! Keys from their stored rows into BF16 in shared memory.
//!
//! Four lanes have a row: of each 64 channels a lane has 16. Rows wait in shared memory, half a tile at a time: while one
//! half is unpacked, the next one is copied.

use kv_layout::geometry::NOPE_DIM;
use kv_layout::main_row::{UE8M0_GROUP, data_offset};
use simt::math::{mul_bf16x2, permute_bytes};
use simt::{copy, thread};

use super::memory::{Memory, ROW, STAGED, keys_of};
use super::source::Planes;
use crate::fault_injection;
use crate::row::{F32Row, RowFormat, StoredScales, Ue8m0Row, decode};
use crate::unroll::{array_from_fn, unroll};

/// Panels of E4M3 channels.
const CODED: usize = (NOPE_DIM / UE8M0_GROUP) as usize;

/// A row format whose codes can be unpacked 16 at a time.
pub trait KeyFormat: RowFormat {
    /// Whether one multiplication a code is enough for these scales.
    fn is_plain(scales: StoredScales) -> bool;

    /// Whether one of the codes is NaN, and [`Self::unpack`] has to be told.
    fn has_nan(codes: &[[u32; 4]]) -> bool;

    /// The values of 16 codes of group `group` as BF16, `code * scale` rounded once; all NaN if `is_nan`: every score of the
    /// row is one then. `PLAIN` where [`Self::is_plain`] is true and `is_nan` is not.
    fn unpack<const PLAIN: bool>(
        codes: [u32; 4],
        scales: StoredScales,
        group: usize,
        is_nan: bool,
    ) -> [[u32; 4]; 2];
}

/// A BF16 NaN in both halves.
const NAN: u32 = 0x7FC0_7FC0;

/// The scale byte of 2^7, up to which one multiplication is enough.
const LARGEST: u32 = 134;

impl KeyFormat for Ue8m0Row {
    /// Seven bytes at once: the eighth is none of a group.
    #[inline(always)]
    fn is_plain([first, second]: StoredScales) -> bool {
        const LOW: u32 = 0x7F7F_7F7F;
        const ABOVE: u32 = 0x0101_0101 * (0xFF - LARGEST);
        let above = |word: u32| ((word & LOW) + ABOVE) & word;
        (above(first) | above(second) & 0x00FF_FFFF) & !LOW == 0
    }

    /// All bits of a NaN but its sign are ones: one more changes the sign. What carries into the next code is a NaN.
    #[inline(always)]
    fn has_nan(codes: &[[u32; 4]]) -> bool {
        let changed = |word: u32| word.wrapping_add(0x0101_0101) ^ word;
        let any = |i: usize| codes.iter().fold(0, |any, words| any | changed(words[i]));
        (any(0) | any(1) | any(2) | any(3)) & 0x8080_8080 != 0
    }

    /// The bits of a code, placed in a BF16, stand for 2^-120 times its value.
    #[inline(always)]
    fn unpack<const PLAIN: bool>(
        codes: [u32; 4],
        scales: StoredScales,
        group: usize,
        is_nan: bool,
    ) -> [[u32; 4]; 2] {
        let byte = scales[group / 4] >> (8 * (group % 4)) & 0xFF;
        let pair_of = |exponent: u32| exponent << 7 | exponent << 23;
        let factor = pair_of(if PLAIN { byte } else { byte.min(LARGEST) } + 120);
        let factor = if !PLAIN && is_nan { NAN } else { factor };
        let four = |word: u32| {
            // Each code becomes a half, with as many copies of its sign above it as fill that.
            let two = |selectors: u32| {
                let halves = permute_bytes(word, 0, selectors);
                mul_bf16x2(halves << 4 & 0x87F0_87F0, factor)
            };
            [two(0x9180), two(0xB3A2)]
        };
        let eight = |i: usize| {
            let ([a, b], [c, d]) = (four(codes[i]), four(codes[i + 1]));
            [a, b, c, d]
        };
        let values = [eight(0), eight(2)];
        if PLAIN || byte <= LARGEST {
            return values;
        }
        let rest = if byte == 0xFF { NAN } else { pair_of(byte - LARGEST + 127) };
        values.map(|four| four.map(|pair| mul_bf16x2(pair, rest)))
    }
}

impl KeyFormat for F32Row {
    #[inline(always)]
    fn is_plain(_scales: StoredScales) -> bool {
        true
    }

    /// Decoding gives NaN for NaN.
    #[inline(always)]
    fn has_nan(_codes: &[[u32; 4]]) -> bool {
        false
    }

    #[inline(always)]
    fn unpack<const PLAIN: bool>(
        codes: [u32; 4],
        scales: StoredScales,
        _group: usize,
        _is_nan: bool,
    ) -> [[u32; 4]; 2] {
        let scale = f32::from_bits(scales[0]);
        [decode([codes[0], codes[1]], scale), decode([codes[2], codes[3]], scale)]
    }
}

/// Starts copies of the lane's share of a row into the rows that wait in shared memory, as row `to`, if there is one: of
/// each of the first seven panels 16 codes, of the last 16 BF16.
///
/// # Safety
/// The planes hold the row; the lane has read its share of the last one there.
#[inline(always)]
pub unsafe fn start_copy(place: Option<(Planes, u64)>, to: u32) {
    if let Some((planes, row)) = place {
        unroll::<PIECES>(|piece| {
            let word = piece_word(piece);
            // SAFETY: 16 bytes inside both rows, whose addresses are multiples of 64.
            unsafe {
                let from = data_offset(row) + u64::from(4 * word);
                Memory::at(0).copy_from(STAGED + ROW * to + word, planes.data, from);
            }
        });
    }
    copy::commit_group();
}

/// Pieces of 16 bytes that a lane has of a row.
const PIECES: usize = CODED + 2;

/// The word of a row that the lane's piece `piece` starts at.
#[inline(always)]
fn piece_word(piece: usize) -> u32 {
    let quarter = thread::lane_id() % 4;
    if piece < CODED {
        return (UE8M0_GROUP * piece as u32 + 16 * quarter) / 4;
    }
    let eighth = fault_injection::rotary_eighth(2 * quarter + (piece - CODED) as u32);
    (NOPE_DIM + 16 * eighth) / 4
}

/// A lane's share of a row: of each of the first seven panels 16 codes, of the last 16 BF16.
#[derive(Clone, Copy)]
pub struct RawKeys {
    pieces: [[u32; 4]; PIECES],
    scales: StoredScales,
}

impl RawKeys {
    /// Reads the lane's share of row `from` of those that wait in shared memory; zeros if it does not count.
    ///
    /// # Safety
    /// The lane has waited for its copies.
    #[inline(always)]
    pub unsafe fn read(counts: bool, scales: StoredScales, from: u32) -> Self {
        if !counts {
            return Self { pieces: [[0; 4]; PIECES], scales };
        }
        // SAFETY: words that the lane itself has copied.
        let pieces = array_from_fn(|piece| unsafe {
            Memory::at(0).load_u32x4(STAGED + ROW * from + piece_word(piece))
        });
        Self { pieces, scales }
    }

    /// The lane's share as BF16.
    #[inline(always)]
    pub fn unpack<F: KeyFormat>(&self, is_plain: bool) -> UnpackedKeys {
        let is_nan = F::has_nan(&self.pieces[..CODED]);
        if is_plain && !is_nan {
            self.panels::<F, true>(false)
        } else {
            self.panels::<F, false>(is_nan)
        }
    }

    #[inline(always)]
    fn panels<F: KeyFormat, const PLAIN: bool>(&self, is_nan: bool) -> UnpackedKeys {
        let mut panels: [[[u32; 4]; 2]; CODED + 1] = array_from_fn(|group| {
            if group < CODED {
                F::unpack::<PLAIN>(self.pieces[group], self.scales, group, is_nan)
            } else {
                [[0; 4]; 2]
            }
        });
        panels[CODED] = [self.pieces[CODED], self.pieces[CODED + 1]];
        UnpackedKeys(panels)
    }
}

/// A lane's share of a row as BF16: of each panel 16 channels.
pub struct UnpackedKeys([[[u32; 4]; 2]; CODED + 1]);

impl UnpackedKeys {
    /// Writes the lane's share into row `row` of the keys of tile `tile`.
    ///
    /// # Safety
    /// No thread reads the row without a barrier between.
    #[inline(always)]
    pub unsafe fn store(&self, tile: u32, row: u32) {
        let (quarter, keys) = (thread::lane_id() % 4, keys_of(tile));
        unroll::<{ CODED + 1 }>(|i| {
            let (panel, [low, high]) = (keys.panel(i as u32), self.0[i]);
            // SAFETY: the block's shared memory; each word by one thread.
            unsafe {
                let memory = Memory::at(0);
                memory.store_u32x4(panel.word(2 * quarter, row), low);
                memory.store_u32x4(panel.word(2 * quarter + 1, row), high);
            }
        });
    }
}

/// The scales of a row; zeros if there is none.
///
/// # Safety
/// The planes hold the row.
#[inline(always)]
pub unsafe fn load_scales<F: KeyFormat>(place: Option<(Planes, u64)>) -> StoredScales {
    match place {
        // SAFETY: by this function's own contract.
        Some((planes, row)) => unsafe { F::load_scales(planes.scale, row) },
        None => [0; 2],
    }
}
