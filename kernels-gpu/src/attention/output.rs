//! Writes the result of a head: inverse RoPE, rounded to BF16.

use kv_layout::geometry::{HEAD_DIM, NOPE_DIM};
use simt::thread;

use super::memory::Arrays;
use super::softmax::first_row;
use super::work_item::{Heads, Task};
use crate::args::Attend;
use crate::convert::bf16x2_from_f32;
use crate::math::cos_sin;
use crate::unroll::unroll;

/// Channels of a head that a warp handles at a time, four a lane.
pub const CHANNELS: u32 = 4 * 32;
/// Number of such groups of channels (quarters) in a head.
pub const QUARTERS: usize = (HEAD_DIM / CHANNELS) as usize;

/// Writes a head's result: of each 128 channels a lane has four. `values` are all channels, or the block's half. Rotary
/// channels, which are last, get inverse RoPE.
///
/// # Safety
/// As [`super::combine_cluster::write`].
#[inline(always)]
pub unsafe fn store_head<const N: usize>(
    args: &Attend,
    task: Task,
    head: u32,
    (values, rotation): ([[f32; 4]; N], [f32; 4]),
) {
    let channel = task.first_channel() + 4 * thread::lane_id();
    let to = (task.heads.row(args) + u64::from(head)) * u64::from(HEAD_DIM) + u64::from(channel);
    // In the last quarter, half of the lanes have rotary channels. The others are not rotated by an angle of 0 instead:
    // an infinity would make its neighbour NaN.
    let has_rotary = N == QUARTERS || task.channels.has_rotary();
    let is_rotary = has_rotary && channel + CHANNELS * (N as u32 - 1) >= NOPE_DIM;
    unroll::<N>(|n| {
        let pairs = packed(values[n]);
        let is_rotary = n + 1 == N && is_rotary;
        let pairs = if is_rotary { inverse_rope_packed(values[n], rotation) } else { pairs };
        // SAFETY: by this function's own contract.
        unsafe { args.out.store_u32x2(to + u64::from(CHANNELS * n as u32), pairs) }
    });
}

/// Four channels as BF16.
#[inline(always)]
fn packed([a, b, c, d]: [f32; 4]) -> [u32; 2] {
    [bf16x2_from_f32(a, b), bf16x2_from_f32(c, d)]
}

/// Four channels with inverse RoPE, as BF16.
#[inline(always)]
fn inverse_rope_packed(
    [a, b, c, d]: [f32; 4],
    [cos, sin, next_cos, next_sin]: [f32; 4],
) -> [u32; 2] {
    let (low, high) =
        (inverse_rope([a, b], [cos, sin]), inverse_rope([c, d], [next_cos, next_sin]));
    packed([low[0], low[1], high[0], high[1]])
}

/// Rotates a pair of channels back by the angle of this cosine and sine.
#[inline(always)]
pub fn inverse_rope([a, b]: [f32; 2], [cos, sin]: [f32; 2]) -> [f32; 2] {
    [a * cos + b * sin, b * cos - a * sin]
}

/// The bits of cosine and sine of the angle of rotary pair `pair` at a position.
///
/// # Safety
/// Pointers and shapes as in the kernel table; `pair` is below 32.
#[inline(always)]
pub unsafe fn pair_rotation(args: &Attend, position: u32, pair: u32) -> [u32; 2] {
    // SAFETY: by this function's own contract.
    let frequency = unsafe { args.frequencies.load(u64::from(pair)) };
    let (cos, sin) = cos_sin(position as f32 * frequency);
    [cos.to_bits(), sin.to_bits()]
}

/// Cosine and sine of the angles of a lane's two pairs of channels in the last quarter.
///
/// # Safety
/// As [`rotation`].
#[inline(always)]
pub unsafe fn last_rotation(arrays: Arrays) -> [f32; 4] {
    // SAFETY: by this function's own contract.
    unsafe { rotation(arrays, 4 * thread::lane_id() + CHANNELS * (QUARTERS as u32 - 1)) }
}

/// Cosine and sine of the angles of the two pairs of channels from `channel` on; 1 and 0 for channels that are not
/// rotated.
///
/// # Safety
/// `arrays` has them, and a barrier has passed.
#[inline(always)]
pub unsafe fn rotation(arrays: Arrays, channel: u32) -> [f32; 4] {
    if channel < NOPE_DIM {
        return [1.0, 0.0, 1.0, 0.0];
    }
    // SAFETY: pairs below 32, by this function's own contract.
    unsafe { arrays.rotation.load_u32x4(channel - NOPE_DIM) }.map(f32::from_bits)
}

/// Loads the sinks of the thread's two heads, which are used at the end; 0 for heads past the last.
///
/// # Safety
/// Pointers and shapes as in the kernel table.
#[inline(always)]
pub unsafe fn load_sinks(args: &Attend, heads: Heads) -> [f32; 2] {
    let (row, count) = (first_row(), heads.count(args));
    let load = |row: u32| {
        if row < count {
            // SAFETY: by this function's own contract.
            unsafe { args.sinks.load(u64::from(heads.first + row)) }
        } else {
            0.0
        }
    };
    [load(row), load(row + 8)].map(thread::opt_barrier_f32)
}
