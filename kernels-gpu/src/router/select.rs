//! The best experts of a token, by a warp.

use simt::mem::Global;
use simt::warp;

use super::activation::activation;
use crate::rank;

/// One number for each expert of a lane, four by four: what is walked by a longer loop than that would
/// live in local memory.
pub type Quads<T, const Q: usize> = [[T; 4]; Q];

/// The experts of a lane: `4 * Q` consecutive ones from `lane * 4 * Q` on, as far as there are so many.
#[derive(Clone, Copy)]
pub struct Experts<const Q: usize> {
    /// [`rank::key`] of what they are selected by.
    keys: Quads<u32, Q>,
    /// What they weigh.
    activations: Quads<f32, Q>,
    /// How many of their scores are no numbers.
    pub faults: u32,
}

/// The lane's part of `values`, which starts at element `start` and of which the first `count` exist, a
/// multiple of 4; 0 beyond.
///
/// # Safety
/// The elements exist, and the first one's address is a multiple of 16.
#[inline(always)]
#[must_use]
pub unsafe fn load<const Q: usize>(values: Global<f32>, start: u64, count: u32) -> Quads<f32, Q> {
    core::array::from_fn(|q| {
        if 4 * (q as u32) < count {
            // SAFETY: by this function's own contract.
            unsafe { values.load_u32x4(start + 4 * q as u64) }.map(f32::from_bits)
        } else {
            [0.0; 4]
        }
    })
}

impl<const Q: usize> Experts<Q> {
    /// Experts of a lane.
    const PER_LANE: u32 = 4 * Q as u32;

    /// The first expert of lane `lane`, and how many of its experts exist, out of `experts`.
    #[inline(always)]
    #[must_use]
    pub fn of_lane(lane: u32, experts: u32) -> (u32, u32) {
        let first = lane * Self::PER_LANE;
        (first, experts.saturating_sub(first))
    }

    /// From logits and biases, of which the first `count` exist. A logit that is no number weighs
    /// nothing, and a score that is none ranks last.
    #[inline(always)]
    #[must_use]
    pub fn new(logits: Quads<f32, Q>, bias: Quads<f32, Q>, count: u32) -> Self {
        let raw = logits.map(|quad| quad.map(activation));
        let score = |q: usize, i: usize| raw[q][i] + bias[q][i];
        let exists = |q: usize| 4 * (q as u32) < count;
        let keys = quads(|q, i| if exists(q) { rank::key(score(q, i)) } else { rank::ABSENT });
        let activations = quads(|q, i| if raw[q][i].is_nan() { 0.0 } else { raw[q][i] });
        let wrong: Quads<u32, Q> = quads(|q, i| u32::from(exists(q) && score(q, i).is_nan()));
        let faults = wrong.map(|[a, b, c, d]| a + b + c + d).into_iter().sum();
        Self { keys, activations, faults }
    }

    /// The warp's `selected` best experts, best first, the lower one of equals: lane i gets the i-th
    /// with its activation, lanes beyond get -1 and 0.
    ///
    /// # Safety
    /// All lanes of the warp call it together, with the same `selected`, at most 32.
    #[inline(always)]
    #[must_use]
    pub unsafe fn select(self, lane: u32, selected: u32) -> (i32, f32) {
        let Self { mut keys, activations, .. } = self;
        let mut mine = (-1, 0.0);
        let mut place = 0;
        while place < selected {
            let best = largest(keys);
            // SAFETY: the caller brings all lanes, as often as each other.
            let owner = unsafe {
                let most = warp::reduce_max_u32(best);
                warp::ballot(best == most).trailing_zeros()
            };
            // Lanes hold experts in order, so the lowest lane has the lowest of equal experts.
            let at = first_equal(keys, best);
            let value = pick(activations, at);
            let taken = if lane == owner { at } else { Self::PER_LANE };
            keys = quads(|q, i| if index(q, i) == taken { rank::ABSENT } else { keys[q][i] });
            // SAFETY: as above.
            let (at, value) =
                unsafe { (warp::shuffle_idx_u32(at, owner), warp::shuffle_idx_f32(value, owner)) };
            if lane == place {
                mine = ((owner * Self::PER_LANE + at) as i32, value);
            }
            place += 1;
        }
        mine
    }
}

/// Place in a lane's run of its expert `i` of quad `q`.
#[inline(always)]
fn index(q: usize, i: usize) -> u32 {
    4 * q as u32 + i as u32
}

#[inline(always)]
fn quads<T, const Q: usize>(value: impl Fn(usize, usize) -> T) -> Quads<T, Q> {
    core::array::from_fn(|q| core::array::from_fn(|i| value(q, i)))
}

/// The largest key, pairwise: the chain of comparisons is what a selection waits for.
#[inline(always)]
fn largest<const Q: usize>(keys: Quads<u32, Q>) -> u32 {
    let largest = keys.map(|[a, b, c, d]| a.max(b).max(c.max(d)));
    largest.into_iter().fold(0, u32::max)
}

/// Index of the first of `keys` that is `key`, one of them.
#[inline(always)]
fn first_equal<const Q: usize>(keys: Quads<u32, Q>, key: u32) -> u32 {
    let found: Quads<u32, Q> = quads(|q, i| u32::from(keys[q][i] == key) << index(q, i));
    let found = found.map(|[a, b, c, d]| a | b | c | d);
    found.into_iter().fold(0, |all, quad| all | quad).trailing_zeros()
}

/// Element `at` of `values`, without an address.
#[inline(always)]
fn pick<const Q: usize>(values: Quads<f32, Q>, at: u32) -> f32 {
    let picked: Quads<u32, Q> =
        quads(|q, i| if index(q, i) == at { values[q][i].to_bits() } else { 0 });
    let picked = picked.map(|[a, b, c, d]| a | b | c | d);
    f32::from_bits(picked.into_iter().fold(0, |all, quad| all | quad))
}
