//! A main row in a warp's registers.
//!
//! A warp holds one row of 512 channels as two chunks of 256: lane `l` has channels `256 c + 8 l .. + 8` of chunk `c`.
//! So a lane moves 16 bytes of BF16, or 8 of E4M3, both contiguous over the warp. A UE8M0 group of 64 channels is 8
//! adjacent lanes, and the 64 BF16 channels of the rotary part are chunk 1 of lanes 24..32.

use kv_layout::format::Ue8m0;
use kv_layout::geometry::{HEAD_DIM, NOPE_DIM};
use kv_layout::main_row::{MainFormat, data_offset, rope_offset};
use simt::mem::{Global, GlobalMut};
use simt::shared::Shared;
use simt::warp;

use crate::convert::{bf16x2_from_f32, e4m3x4_from_f32, f32x2_from_bf16, f32x4_from_e4m3};
use crate::fault_injection;

/// Channels of a chunk.
const CHUNK: u32 = HEAD_DIM / 2;
/// Channels of one lane in a chunk.
const LANE: u32 = CHUNK / 32;
/// Words of a BF16 row.
pub const ROW_WORDS: usize = HEAD_DIM as usize / 2;
/// The first lane whose chunk 1 holds rotary channels.
const ROPE_LANE: u32 = (NOPE_DIM - CHUNK) / LANE;

/// One lane's share of a BF16 row: two chunks of eight channels, two channels to a word.
#[derive(Clone, Copy)]
pub struct Bf16Lane(pub [[u32; 4]; 2]);

/// One lane's share of a stored row, without scales.
#[derive(Clone, Copy)]
pub struct StoredLane {
    /// Chunk 0: eight E4M3 codes.
    low: [u32; 2],
    /// Chunk 1: eight E4M3 codes in the first two words, or eight BF16 on the rotary lanes.
    high: [u32; 4],
}

/// The scales of a row as they are stored: eight bytes, or one f32 twice.
pub type StoredScales = [u32; 2];

/// One lane's share of a stored row with the row's scales, as they were loaded.
#[derive(Clone, Copy)]
pub struct StoredRow {
    lane: StoredLane,
    scales: StoredScales,
}

/// How a main row is scaled: the only difference between the formats.
pub trait RowFormat {
    /// The layout of the format.
    const FORMAT: MainFormat;

    /// The divisors for chunk 0 and chunk 1 of this lane, from the largest magnitude among the lane's own unrotated
    /// channels of each chunk.
    ///
    /// # Safety
    /// All 32 lanes of the warp call it together.
    unsafe fn scales(amax: [f32; 2]) -> [f32; 2];

    /// `value` divided by `scale`, to be rounded to E4M3.
    fn divide(value: f32, scale: f32) -> f32;

    /// Writes the scales of `row`.
    ///
    /// # Safety
    /// `plane` holds `row`; all lanes of the warp call it with the scales of the same row.
    unsafe fn store_scales(plane: GlobalMut<u8>, row: u64, lane: u32, scales: [f32; 2]);

    /// Loads the scales of `row` as they are stored; [`Self::decode_scales`] decodes them. Two steps, so that nothing
    /// waits for the load earlier than necessary.
    ///
    /// # Safety
    /// `plane` holds `row`.
    unsafe fn load_scales(plane: Global<u8>, row: u64) -> StoredScales;

    /// This lane's scales, chunk 0 and chunk 1.
    fn decode_scales(stored: StoredScales, lane: u32) -> [f32; 2];
}

/// [`MainFormat::Ue8m0`]: a power of two for each 64 channels (docs/specification.md, section 3).
pub struct Ue8m0Row;

/// The least magnitude for which a UE8M0 scale is computed; groups with smaller values get the scale of this one.
const UE8M0_AMAX_FLOOR: f32 = 1e-4;
/// Lanes that share a UE8M0 scale.
const UE8M0_LANES: u32 = kv_layout::main_row::UE8M0_GROUP / LANE;

impl RowFormat for Ue8m0Row {
    const FORMAT: MainFormat = MainFormat::Ue8m0;

    #[inline(always)]
    unsafe fn scales(amax: [f32; 2]) -> [f32; 2] {
        amax.map(|amax| {
            // SAFETY: all lanes of the warp are here, by this function's own contract.
            let amax = unsafe { warp::reduce_max_f32_width::<UE8M0_LANES>(amax) };
            let scale = amax.clamp(UE8M0_AMAX_FLOOR, f32::MAX) * (1.0 / 448.0);
            Ue8m0::round_up(scale).to_f32()
        })
    }

    #[inline(always)]
    fn divide(value: f32, scale: f32) -> f32 {
        // Exact, and so equal to a division: the scale is a power of two between 2^-22 and 2^120.
        value * f32::from_bits((254 << 23) - scale.to_bits())
    }

    #[inline(always)]
    unsafe fn store_scales(plane: GlobalMut<u8>, row: u64, lane: u32, scales: [f32; 2]) {
        let group = lane / UE8M0_LANES;
        if !lane.is_multiple_of(UE8M0_LANES) {
            return;
        }
        let at = Self::FORMAT.scale_offset(row) + u64::from(group);
        let byte = |scale: f32| (scale.to_bits() >> 23) as u8;
        // The eighth byte belongs to the rotary lanes, which have no scale: zero.
        let last = if lane < ROPE_LANE { byte(scales[1]) } else { 0 };
        // SAFETY: groups 0..4 and 4..8 of a row that the plane holds.
        unsafe {
            plane.store(at, byte(scales[0]));
            plane.store(at + 4, last);
        }
    }

    #[inline(always)]
    unsafe fn load_scales(plane: Global<u8>, row: u64) -> StoredScales {
        // SAFETY: the eight scale bytes of a row that the plane holds, 8-byte aligned.
        unsafe { plane.load_u32x2(Self::FORMAT.scale_offset(row)) }
    }

    #[inline(always)]
    fn decode_scales(stored: StoredScales, lane: u32) -> [f32; 2] {
        let shift = 8 * (lane / UE8M0_LANES);
        stored.map(|word| Ue8m0((word >> shift) as u8).to_f32())
    }
}

/// [`MainFormat::F32`]: `amax / 448` over the whole unrotated part (docs/specification.md, section 3).
pub struct F32Row;

/// The scale of rows whose largest magnitude is not above it.
const F32_AMAX_FLOOR: f32 = 1e-12;

impl RowFormat for F32Row {
    const FORMAT: MainFormat = MainFormat::F32;

    #[inline(always)]
    unsafe fn scales(amax: [f32; 2]) -> [f32; 2] {
        // SAFETY: all lanes of the warp are here, by this function's own contract.
        let amax = unsafe { warp::reduce_max_f32(amax[0].max(amax[1])) }.min(f32::MAX);
        [if amax > F32_AMAX_FLOOR { amax / 448.0 } else { F32_AMAX_FLOOR }; 2]
    }

    #[inline(always)]
    fn divide(value: f32, scale: f32) -> f32 {
        value / scale
    }

    #[inline(always)]
    unsafe fn store_scales(plane: GlobalMut<u8>, row: u64, lane: u32, scales: [f32; 2]) {
        if lane == 0 {
            // SAFETY: the scale of a row that the plane holds; the plane is an array of f32.
            unsafe { plane.cast::<u32>().store(row, scales[0].to_bits()) }
        }
    }

    #[inline(always)]
    unsafe fn load_scales(plane: Global<u8>, row: u64) -> StoredScales {
        // SAFETY: the scale of a row that the plane holds; the plane is an array of f32.
        [unsafe { plane.cast::<u32>().load(row) }; 2]
    }

    #[inline(always)]
    fn decode_scales(stored: StoredScales, _lane: u32) -> [f32; 2] {
        stored.map(f32::from_bits)
    }
}

impl Bf16Lane {
    /// Eight zeros twice.
    pub const ZERO: Self = Self([[0; 4]; 2]);

    /// Starts the loads of this lane's share of row `row` of a `[rows, 512]` BF16 tensor.
    ///
    /// # Safety
    /// `tensor` holds `row` and is 16-byte aligned.
    #[inline(always)]
    #[must_use]
    pub unsafe fn load(tensor: Global<u16>, row: u64, lane: u32) -> Self {
        let at = row * u64::from(HEAD_DIM) + u64::from(lane * LANE);
        // SAFETY: both chunks lie in a row that the tensor holds; 8 BF16 are 16 bytes.
        unsafe {
            let low = tensor.load_u32x4_volatile(at);
            Self([low, tensor.load_u32x4_volatile(at + u64::from(CHUNK))])
        }
    }

    /// Writes this lane's share of row `row` of a `[rows, 512]` BF16 tensor.
    ///
    /// # Safety
    /// `tensor` holds `row` and is 16-byte aligned.
    #[inline(always)]
    pub unsafe fn store(self, tensor: GlobalMut<u16>, row: u64, lane: u32) {
        let at = row * u64::from(HEAD_DIM) + u64::from(lane * LANE);
        // SAFETY: both chunks lie in a row that the tensor holds; 8 BF16 are 16 bytes.
        unsafe {
            tensor.store_u32x4(at, self.0[0]);
            tensor.store_u32x4(at + u64::from(CHUNK), self.0[1]);
        }
    }

    /// This lane's share of a row that lies in shared memory, two channels to a word.
    ///
    /// # Safety
    /// The row was written, with a barrier since.
    #[inline(always)]
    #[must_use]
    pub unsafe fn from_shared(row: Shared<u32, ROW_WORDS>, lane: u32) -> Self {
        let word = lane * LANE / 2;
        // SAFETY: by this function's own contract.
        unsafe { Self([row.load_u32x4(word), row.load_u32x4(word + CHUNK / 2)]) }
    }

    /// Quantises the row that the warp holds into row `row` of both planes, if there is one.
    ///
    /// # Safety
    /// The planes hold `row`, `data` is 16-byte aligned; all 32 lanes of the warp call it together, with
    /// the same `row`.
    #[inline(always)]
    pub unsafe fn store_quantised<F: RowFormat>(
        self,
        data: GlobalMut<u8>,
        scale: GlobalMut<u8>,
        row: Option<u64>,
        lane: u32,
    ) {
        // SAFETY: by this function's own contract.
        unsafe { self.store_quantised_twice::<F>(data, scale, row, None, lane) }
    }

    /// As [`Self::store_quantised`]; also stores the same row in a row of other planes, if there is one.
    ///
    /// # Safety
    /// As [`Self::store_quantised`], for both.
    #[inline(always)]
    pub unsafe fn store_quantised_twice<F: RowFormat>(
        self,
        data: GlobalMut<u8>,
        scale: GlobalMut<u8>,
        row: Option<u64>,
        other: Option<([GlobalMut<u8>; 2], u64)>,
        lane: u32,
    ) {
        // SAFETY: by this function's own contract.
        unsafe {
            // Quantise first, so that the loads of the row do not wait until its destination is known.
            let (stored, scales) = self.quantise::<F>(lane);
            if let Some(row) = row {
                stored.store(data, row, lane);
                F::store_scales(scale, row, lane, scales);
            }
            if let Some(([data, scale], row)) = other {
                stored.store(data, row, lane);
                F::store_scales(scale, row, lane, scales);
            }
        }
    }

    /// Quantises the row that the warp holds; returns the stored bytes and the scales.
    ///
    /// # Safety
    /// All 32 lanes of the warp call it together.
    #[inline(always)]
    #[must_use]
    pub unsafe fn quantise<F: RowFormat>(self, lane: u32) -> (StoredLane, [f32; 2]) {
        let rotary = lane >= ROPE_LANE;
        let values = self.0.map(values_of);
        let high_amax = if rotary { 0.0 } else { amax(&values[1]) };
        // SAFETY: all lanes of the warp are here, by this function's own contract.
        let scales = unsafe { F::scales([amax(&values[0]), high_amax]) };
        let [a, b] = encode::<F>(&values[1], scales[1]);
        let high = if rotary { self.0[1] } else { [a, b, 0, 0] };
        (StoredLane { low: encode::<F>(&values[0], scales[0]), high }, scales)
    }
}

impl StoredLane {
    /// Loads this lane's share of `row` in a data plane.
    ///
    /// # Safety
    /// `plane` holds `row` and is 16-byte aligned.
    #[inline(always)]
    #[must_use]
    pub unsafe fn load(plane: Global<u8>, row: u64, lane: u32) -> Self {
        // SAFETY: codes and BF16 of a row that the plane holds, aligned by the row's 64 bytes.
        unsafe {
            let low = plane.load_u32x2(code_offset(row, lane));
            let high = if lane >= ROPE_LANE {
                plane.load_u32x4(rotary_offset(row, lane))
            } else {
                let [a, b] = plane.load_u32x2(code_offset(row, lane) + u64::from(CHUNK));
                [a, b, 0, 0]
            };
            Self { low, high }
        }
    }

    /// Writes this lane's share of `row` into a data plane.
    ///
    /// # Safety
    /// `plane` holds `row` and is 16-byte aligned.
    #[inline(always)]
    pub unsafe fn store(self, plane: GlobalMut<u8>, row: u64, lane: u32) {
        // SAFETY: codes and BF16 of a row that the plane holds, aligned by the row's 64 bytes.
        unsafe {
            plane.store_u32x2(code_offset(row, lane), self.low);
            if lane >= ROPE_LANE {
                plane.store_u32x4(rotary_offset(row, lane), self.high);
            } else {
                let codes = [self.high[0], self.high[1]];
                plane.store_u32x2(code_offset(row, lane) + u64::from(CHUNK), codes);
            }
        }
    }

    /// Dequantises to BF16: each code times its scale, rounded once; rotary channels as they are.
    #[inline(always)]
    #[must_use]
    pub fn dequantise(self, scales: [f32; 2], lane: u32) -> Bf16Lane {
        let high = if lane >= ROPE_LANE {
            self.high
        } else {
            decode([self.high[0], self.high[1]], scales[1])
        };
        Bf16Lane([decode(self.low, scales[0]), high])
    }
}

impl StoredRow {
    /// Starts the loads of this lane's share of `row`, and of the row's scales.
    ///
    /// # Safety
    /// Both planes hold `row`; `data` is 16-byte aligned, `scale` 8-byte.
    #[inline(always)]
    #[must_use]
    pub unsafe fn load<F: RowFormat>(
        data: Global<u8>,
        scale: Global<u8>,
        row: u64,
        lane: u32,
    ) -> Self {
        // SAFETY: a row of both planes, which are aligned, by this function's own contract.
        unsafe {
            let scales = F::load_scales(scale, row);
            Self { lane: StoredLane::load(data, row, lane), scales }
        }
    }

    /// Dequantises to BF16; see [`StoredLane::dequantise`].
    #[inline(always)]
    #[must_use]
    pub fn dequantise<F: RowFormat>(self, lane: u32) -> Bf16Lane {
        self.lane.dequantise(F::decode_scales(self.scales, lane), lane)
    }
}

#[inline(always)]
fn code_offset(row: u64, lane: u32) -> u64 {
    data_offset(row) + u64::from(lane * LANE)
}

#[inline(always)]
fn rotary_offset(row: u64, lane: u32) -> u64 {
    rope_offset(row) + u64::from(fault_injection::rotary_eighth(lane - ROPE_LANE) * LANE * 2)
}

#[inline(always)]
fn values_of(words: [u32; 4]) -> [f32; 8] {
    let [[a, b], [c, d], [e, f], [g, h]] = words.map(f32x2_from_bf16);
    [a, b, c, d, e, f, g, h]
}

/// The largest magnitude. A NaN does not count: it is stored as a NaN code, and must not change the scale of its
/// neighbours.
#[inline(always)]
fn amax(values: &[f32; 8]) -> f32 {
    values.iter().fold(0.0, |amax: f32, value| amax.max(value.abs()))
}

#[inline(always)]
fn encode<F: RowFormat>(values: &[f32; 8], scale: f32) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = values.map(|value| F::divide(value, scale));
    [e4m3x4_from_f32([a, b, c, d]), e4m3x4_from_f32([e, f, g, h])]
}

/// Eight codes times their scale, each rounded once to BF16.
#[inline(always)]
pub(crate) fn decode(codes: [u32; 2], scale: f32) -> [u32; 4] {
    let [a, b, c, d] = f32x4_from_e4m3(codes[0]).map(|value| value * scale);
    let [e, f, g, h] = f32x4_from_e4m3(codes[1]).map(|value| value * scale);
    [bf16x2_from_f32(a, b), bf16x2_from_f32(c, d), bf16x2_from_f32(e, f), bf16x2_from_f32(g, h)]
}
