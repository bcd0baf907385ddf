//! Unpacks keys from their stored rows to BF16 in shared memory.
//!
//! Four lanes unpack a row: a lane has 16 of each 64 channels. Rows are loaded into registers, half a tile at a time:
//! while one half is unpacked, the loads of the next are under way.

use kv_layout::geometry::NOPE_DIM;
use kv_layout::main_row::{UE8M0_GROUP, data_offset};
use simt::math::{mul_bf16x2, permute_bytes};
use simt::mem::Global;
use simt::thread;

use super::memory::{Memory, keys_of};
use super::rows::Row;
use crate::fault_injection;
use crate::row::{F32Row, RowFormat, StoredScales, Ue8m0Row, decode};
use crate::unroll::{array_from_fn, unroll};

/// Number of panels of E4M3 channels.
const CODED: usize = (NOPE_DIM / UE8M0_GROUP) as usize;

/// A row format whose codes can be unpacked 16 at a time.
pub trait KeyFormat: RowFormat {
    /// Whether codes that are not NaN unpack to finite BF16 with any scales for which [`Self::is_plain`] is true.
    const IS_FINITE: bool;

    /// The scales of a row, shifted so that the scale of panel `panel` is the first; the scales of the panels after it,
    /// up to a multiple of four, follow.
    fn scales_of_panel(scales: StoredScales, panel: u32) -> StoredScales;

    /// Loads the scales of the row whose scales start at `plane`.
    ///
    /// # Safety
    /// They lie there.
    unsafe fn scales_at(plane: Global<u8>) -> StoredScales;

    /// Loads the word of a row's scales that holds the scale of panel `panel`.
    ///
    /// # Safety
    /// As [`Self::scales_at`].
    unsafe fn scale_at(plane: Global<u8>, panel: u32) -> u32;

    /// Whether one multiplication per code is enough for these scales.
    fn is_plain(scales: StoredScales) -> bool;

    /// Whether one of the codes is NaN, so that [`Self::unpack`] needs `is_nan`. Always false if `unpack` itself gives
    /// NaN for such a code.
    fn has_nan(codes: &[[u32; 4]]) -> bool;

    /// The values of 16 codes of group `group` as BF16: `code * scale`, rounded once. With `is_nan` all are NaN, since
    /// every score of such a row is NaN. `PLAIN` requires that [`Self::is_plain`] is true and that no code is NaN.
    fn unpack<const PLAIN: bool>(
        codes: [u32; 4],
        scales: StoredScales,
        group: usize,
        is_nan: bool,
    ) -> [[u32; 4]; 2];
}

/// A BF16 NaN in both halves.
const NAN: u32 = 0x7FC0_7FC0;

/// The scale byte of 2^7, the largest for which one multiplication is enough: the exponent of the factor is the scale
/// byte plus 120, and may be at most 254.
const LARGEST: u32 = 134;

impl KeyFormat for Ue8m0Row {
    const IS_FINITE: bool = true;

    #[inline(always)]
    fn scales_of_panel([first, second]: StoredScales, panel: u32) -> StoredScales {
        let word = if panel < 4 { first } else { second };
        [word >> (8 * (panel % 4)), 0]
    }

    #[inline(always)]
    unsafe fn scales_at(plane: Global<u8>) -> StoredScales {
        // SAFETY: the eight scale bytes of a row, 8-byte aligned.
        unsafe { plane.load_u32x2(0) }
    }

    #[inline(always)]
    unsafe fn scale_at(plane: Global<u8>, panel: u32) -> u32 {
        // SAFETY: one of the two words of a row's scales.
        unsafe { plane.cast::<u32>().load_u32_volatile(u64::from(panel / 4)) }
    }

    /// Tests seven bytes at once; the eighth byte is not the scale of a group.
    #[inline(always)]
    fn is_plain([first, second]: StoredScales) -> bool {
        const LOW: u32 = 0x7F7F_7F7F;
        const ABOVE: u32 = 0x0101_0101 * (0xFF - LARGEST);
        let above = |word: u32| ((word & LOW) + ABOVE) & word;
        (above(first) | above(second) & 0x00FF_FFFF) & !LOW == 0
    }

    /// All bits of an E4M3 NaN but its sign are ones, so that adding one changes the sign. A carry into the next code
    /// comes only from a NaN.
    #[inline(always)]
    fn has_nan(codes: &[[u32; 4]]) -> bool {
        let changed = |word: u32| word.wrapping_add(0x0101_0101) ^ word;
        let any = |i: usize| codes.iter().fold(0, |any, words| any | changed(words[i]));
        (any(0) | any(1) | any(2) | any(3)) & 0x8080_8080 != 0
    }

    /// The bits of a code, placed in a BF16, have 2^-120 times the value of the code.
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
            // `permute_bytes` puts each code in the low byte of a half-word, and copies of its sign in the high byte.
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
    const IS_FINITE: bool = false;

    #[inline(always)]
    fn scales_of_panel(scales: StoredScales, _panel: u32) -> StoredScales {
        scales
    }

    #[inline(always)]
    unsafe fn scales_at(plane: Global<u8>) -> StoredScales {
        // SAFETY: by this function's own contract.
        [unsafe { Self::scale_at(plane, 0) }; 2]
    }

    #[inline(always)]
    unsafe fn scale_at(plane: Global<u8>, _panel: u32) -> u32 {
        // SAFETY: the scale of a row.
        unsafe { plane.cast::<u32>().load_u32_volatile(0) }
    }

    #[inline(always)]
    fn is_plain(_scales: StoredScales) -> bool {
        true
    }

    /// Always false: decoding gives NaN for a NaN code.
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

/// Number of 16-byte pieces of a row that a lane has.
const PIECES: usize = CODED + 2;

/// The byte of a row at which the lane's piece `piece` starts.
#[inline(always)]
fn piece_byte(piece: usize) -> u32 {
    let quarter = thread::lane_id() % 4;
    if piece < CODED {
        return UE8M0_GROUP * piece as u32 + 16 * quarter;
    }
    let eighth = fault_injection::rotary_eighth(2 * quarter + (piece - CODED) as u32);
    NOPE_DIM + 16 * eighth
}

/// A lane's channels of a row, as they are stored: 16 codes of each of the first seven panels, and 16 BF16 of the last
/// one.
#[derive(Clone, Copy)]
pub struct RawKeys {
    pieces: [[u32; 4]; PIECES],
    scales: StoredScales,
    is_there: bool,
}

impl RawKeys {
    /// Starts the loads of the lane's channels of a row.
    ///
    /// # Safety
    /// The planes hold the row.
    #[inline(always)]
    pub unsafe fn load<F: KeyFormat>(at: Row) -> Self {
        // SAFETY: 16 bytes inside the row; planes are aligned to 16 bytes, and so are rows of 576 and pieces of 16.
        unsafe {
            let from = data_offset(at.row);
            let pieces = array_from_fn(|piece| {
                at.planes.data.load_u32x4_volatile(from + u64::from(piece_byte(piece)))
            });
            Self { pieces, scales: F::load_scales(at.planes.scale, at.row), is_there: at.is_there }
        }
    }

    /// Whether the row is that of a key.
    #[inline(always)]
    pub const fn is_there(&self) -> bool {
        self.is_there
    }

    /// Whether one of the codes is NaN. Waits for the loads of all codes.
    #[inline(always)]
    pub fn has_nan<F: KeyFormat>(&self) -> bool {
        F::has_nan(&self.pieces[..CODED])
    }

    /// Writes the lane's channels as BF16 into row `row` of the keys of tile `tile`; zeros if the row is not that of a
    /// key.
    ///
    /// # Safety
    /// No thread reads the row without a barrier between.
    #[inline(always)]
    pub unsafe fn unpack<F: KeyFormat>(self, is_nan: bool, tile: u32, row: u32) {
        // SAFETY: by this function's own contract.
        unsafe {
            if self.is_there && !is_nan && F::is_plain(self.scales) {
                self.panels::<F, true>(false, tile, row);
            } else {
                let zero = |piece: [u32; 4]| if self.is_there { piece } else { [0; 4] };
                let pieces = array_from_fn(|i| zero(self.pieces[i]));
                let scales = if self.is_there { self.scales } else { [0; 2] };
                Self { pieces, scales, ..self }.panels::<F, false>(
                    is_nan && self.is_there,
                    tile,
                    row,
                );
            }
        }
    }

    /// Writes the lane's channels; all NaN if `is_nan`.
    ///
    /// # Safety
    /// As [`Self::unpack`].
    #[inline(always)]
    unsafe fn panels<F: KeyFormat, const PLAIN: bool>(&self, is_nan: bool, tile: u32, row: u32) {
        let (quarter, keys) = (thread::lane_id() % 4, keys_of(tile));
        unroll::<{ CODED + 1 }>(|i| {
            let [low, high] = if i < CODED {
                F::unpack::<PLAIN>(self.pieces[i], self.scales, i, is_nan)
            } else {
                [self.pieces[CODED], self.pieces[CODED + 1]]
            };
            let panel = keys.panel(i as u32);
            // SAFETY: the block's shared memory; each word by one thread.
            unsafe {
                let memory = Memory::at(0);
                memory.store_u32x4(panel.word(2 * quarter, row), low);
                memory.store_u32x4(panel.word(2 * quarter + 1, row), high);
            }
        });
    }
}
