//! Selects the best experts of a token, in one warp.

use simt::mem::{Global, GlobalMut};
use simt::warp;

use super::activation::activation;
use crate::rank;
use crate::unroll::array_from_fn;

/// One number for each expert of a lane, in groups of four: LLVM unrolls loops of that length early enough to
/// keep the array in registers.
pub type Quads<T, const Q: usize> = [[T; 4]; Q];

/// The experts of a lane: `4 * Q` consecutive ones from `lane * 4 * Q` on, or fewer if the experts end before.
#[derive(Clone, Copy)]
pub struct Experts<const Q: usize> {
    /// [`rank::key`] of the scores by which the experts are selected.
    keys: Quads<u32, Q>,
    /// Activations of the experts.
    activations: Quads<f32, Q>,
    /// Number of scores that are NaN.
    pub faults: u32,
}

/// Loads the lane's part of `values`, from element `start` on. The first `count` elements exist, a multiple of 4; the
/// others are 0.
///
/// # Safety
/// The elements exist, and the first one's address is a multiple of 16.
#[inline(always)]
#[must_use]
pub unsafe fn load<const Q: usize>(values: Global<f32>, start: u64, count: u32) -> Quads<f32, Q> {
    // SAFETY: by this function's own contract.
    load_by(count, |at| unsafe { values.load_u32x4(start + at) })
}

/// As [`load()`], for values that other blocks of the launch have written.
///
/// # Safety
/// As [`load()`]; the values are visible to this thread.
#[inline(always)]
#[must_use]
pub unsafe fn load_written<const Q: usize>(
    values: GlobalMut<f32>,
    start: u64,
    count: u32,
) -> Quads<f32, Q> {
    // SAFETY: by this function's own contract.
    load_by(count, |at| unsafe { values.load_u32x4(start + at) })
}

#[inline(always)]
fn load_by<const Q: usize>(count: u32, quad: impl Fn(u64) -> [u32; 4]) -> Quads<f32, Q> {
    array_from_fn(|q| {
        let exists = 4 * (q as u32) < count;
        if exists { quad(4 * q as u64).map(f32::from_bits) } else { [0.0; 4] }
    })
}

impl<const Q: usize> Experts<Q> {
    /// Experts of a lane.
    const PER_LANE: u32 = 4 * Q as u32;

    /// The first expert of lane `lane`, and the number of experts from it on, out of `experts`: may exceed those of the
    /// lane.
    #[inline(always)]
    #[must_use]
    pub fn of_lane(lane: u32, experts: u32) -> (u32, u32) {
        let first = lane * Self::PER_LANE;
        (first, experts.saturating_sub(first))
    }

    /// Computes scores from activations and biases; the first `count` experts exist. A NaN activation counts as 0; a
    /// NaN score ranks last.
    #[inline(always)]
    #[must_use]
    pub fn new(raw: Quads<f32, Q>, bias: Quads<f32, Q>, count: u32) -> Self {
        let score = |q: usize, i: usize| raw[q][i] + bias[q][i];
        let exists = |q: usize| 4 * (q as u32) < count;
        let keys = quads(|q, i| if exists(q) { rank::key(score(q, i)) } else { rank::ABSENT });
        let activations = quads(|q, i| if raw[q][i].is_nan() { 0.0 } else { raw[q][i] });
        let wrong: Quads<u32, Q> =
            quads(|q, i| u32::from(exists(q)) & u32::from(score(q, i).is_nan()));
        let faults = combine(wrong, |a, b| a + b);
        Self { keys, activations, faults }
    }

    /// [`Self::new`] from logits.
    #[inline(always)]
    #[must_use]
    pub fn of_logits(logits: Quads<f32, Q>, bias: Quads<f32, Q>, count: u32) -> Self {
        Self::new(quads(|q, i| activation(logits[q][i])), bias, count)
    }

    /// The warp's `selected` best experts, best first; of equal experts the lower one is first. Lane `i` gets the
    /// `i`-th expert and its activation; lanes from `selected` on get -1 and 0.
    ///
    /// # Safety
    /// All lanes of the warp call it together, with the same `selected`, at most 32.
    #[inline(always)]
    #[must_use]
    pub unsafe fn select(self, lane: u32, selected: u32) -> (i32, f32) {
        let Self { mut keys, activations, .. } = self;
        let mut mine = lane * Self::PER_LANE;
        let mut place = 0;
        while place < selected {
            let best = combine(keys, u32::max);
            // SAFETY: by this function's own contract; the trip count is uniform in the warp.
            let owner = unsafe {
                let maximum = warp::reduce_max_u32(best);
                warp::ballot(best == maximum).trailing_zeros()
            };
            // Lanes hold experts in order, so the lowest lane has the lowest of equal experts.
            let at = first_equal(keys, best);
            let taken = if lane == owner { at } else { Self::PER_LANE };
            keys = quads(|q, i| if index(q, i) == taken { rank::ABSENT } else { keys[q][i] });
            // SAFETY: as above.
            let at = unsafe { warp::shuffle_idx_u32(at, owner) };
            mine = if lane == place { owner * Self::PER_LANE + at } else { mine };
            place += 1;
        }
        let (owner, at) = (mine / Self::PER_LANE, mine % Self::PER_LANE);
        let of_owner = quads(|q, i| {
            // SAFETY: as above.
            let bits = unsafe { warp::shuffle_idx_u32(activations[q][i].to_bits(), owner) };
            if index(q, i) == at { bits } else { 0 }
        });
        let activation = f32::from_bits(combine::<Q>(of_owner, |a, b| a | b));
        if lane < selected { (mine as i32, activation) } else { (-1, 0.0) }
    }
}

/// Place in a lane's run of its expert `i` of quad `q`.
#[inline(always)]
fn index(q: usize, i: usize) -> u32 {
    4 * q as u32 + i as u32
}

#[inline(always)]
fn quads<T: Copy + Default, const Q: usize>(value: impl Fn(usize, usize) -> T) -> Quads<T, Q> {
    array_from_fn(|q| [value(q, 0), value(q, 1), value(q, 2), value(q, 3)])
}

/// All elements combined as a tree, for a short dependency chain. 0 is the neutral element of `pair`.
#[inline(always)]
fn combine<const Q: usize>(values: Quads<u32, Q>, pair: impl Fn(u32, u32) -> u32) -> u32 {
    const { assert!(Q <= 4) };
    let quad = |q: usize| {
        if q < Q {
            let [a, b, c, d] = values[q];
            pair(pair(a, b), pair(c, d))
        } else {
            0
        }
    };
    pair(pair(quad(0), quad(1)), pair(quad(2), quad(3)))
}

/// Index of the first of `keys` that equals `key`, which is one of them.
#[inline(always)]
fn first_equal<const Q: usize>(keys: Quads<u32, Q>, key: u32) -> u32 {
    let found = quads(|q, i| u32::from(keys[q][i] == key) << index(q, i));
    combine::<Q>(found, |a, b| a | b).trailing_zeros()
}
