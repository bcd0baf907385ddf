//! Queries of several tokens at once, each spread over four lanes of a warp: the row layout of a product.

use kv_layout::geometry::ROPE_DIM;
use kv_layout::index_row::{IndexFormat, QUERY_HEADS};
use simt::math::permute_bytes;
use simt::{thread, warp};

use super::query::{Queries, bytes_of_integers};
use crate::compress::Quad;
use crate::convert::{bf16x2_from_f32, e4m3x4_from_f32};
use crate::index_row::{FourLanes, IndexRowFormat, Lanes, Requantised, quad_from_bf16};
use crate::indexer::CHANNELS;
use crate::math::rotate;
use crate::unroll::{array_from_fn, unroll};

/// The first quad of a lane that is rotated.
const FIRST_ROTATED: usize = ((CHANNELS - ROPE_DIM) / 16) as usize;
/// Number of rotated pairs of a lane: pair `4 i + t` of a vector is pair `i` of lane `t` of four.
pub const LANE_PAIRS: u32 = ROPE_DIM / 2 / 4;

/// 16 bytes of a query, with their index: `i` if `i` vectors of 16 bytes of all heads precede them in the row.
type Piece = (u32, [u32; 4]);

impl Queries {
    /// As [`Self::store`], for vectors in the layout of `FourLanes`. Stores the vector of row `row` if `is_there`.
    /// `rotation` gives the cosine and sine of the lane's rotated pairs.
    ///
    /// # Safety
    /// The head exists, and the row if `is_there`; both are the same in four lanes, the head in all. All lanes of one
    /// warp call it together.
    #[inline(always)]
    pub unsafe fn store_of_four<F: IndexRowFormat>(
        self,
        (row, is_there): (u32, bool),
        head: u32,
        projected: [Quad; 8],
        rotation: impl Fn(u32) -> (f32, f32),
    ) {
        let rotated = |i: usize| {
            let [a, b, c, d] = projected[i];
            if i < FIRST_ROTATED {
                return [a, b, c, d];
            }
            let pair = 2 * (i - FIRST_ROTATED) as u32;
            let ([a, b], [c, d]) = (rotate(a, b, rotation(pair)), rotate(c, d, rotation(pair + 1)));
            [a, b, c, d]
        };
        let rounded: [Quad; 8] = array_from_fn(|i| {
            let [a, b, c, d] = rotated(i);
            quad_from_bf16([bf16x2_from_f32(a, b), bf16x2_from_f32(c, d)])
        });
        let quarter = thread::lane_id() % 4;
        // SAFETY: by this function's own contract; pieces of 16 bytes of the row.
        unsafe {
            let Requantised { values, scale, exponent_gaps } =
                F::requantised::<FourLanes, 8>(FourLanes::hadamard(rounded));
            let first = u64::from(row) * u64::from(IndexFormat::MAX_QUERY_BYTES);
            let store = |(sixteen, words): Piece| {
                let at = first + u64::from(16 * (QUERY_HEADS * sixteen + head));
                if is_there {
                    self.query.store_u32x4(at, words);
                }
            };
            match F::FORMAT {
                IndexFormat::Nvfp4 => {
                    let pieces = bf16_pieces(values);
                    unroll::<4>(|i| store(pieces[i]));
                }
                IndexFormat::Mxfp4 => {
                    let pieces = byte_pieces(array_from_fn(|i| bytes_of_integers(values[i])));
                    unroll::<2>(|i| store(pieces[i]));
                }
                IndexFormat::Fp8 => {
                    let pieces = byte_pieces(array_from_fn(|i| e4m3x4_from_f32(values[i])));
                    unroll::<2>(|i| store(pieces[i]));
                }
            }
            if is_there && quarter == 0 {
                self.store_weight(row, head, scale);
                if F::FORMAT == IndexFormat::Mxfp4 {
                    let at = first + u64::from(IndexFormat::query_exponent_gap_byte(head, 0));
                    let [a, _, b, _, c, _, d, _] = exponent_gaps;
                    self.query.cast::<u32>().store(at / 4, a | b << 8 | c << 16 | d << 24);
                }
            }
        }
    }
}

/// The low halves of two words, or the high ones.
#[inline(always)]
fn halves(a: u32, b: u32, are_high: bool) -> u32 {
    permute_bytes(a, b, if are_high { 0x7632 } else { 0x5410 })
}

/// The lane's pieces of a query of bytes. Its input are the bytes of the lane's quads.
///
/// Two adjacent lanes have two bytes each of the same words. They exchange them: the even lane gets the first two
/// pieces of both, the odd lane the other two.
///
/// # Safety
/// All lanes of the warp call it together.
#[inline(always)]
unsafe fn byte_pieces(quads: [u32; 8]) -> [Piece; 2] {
    let quarter = thread::lane_id() % 4;
    let is_odd = quarter % 2 == 1;
    // The lane's two bytes of each word of piece `c`; the other lane of the pair has the other two.
    let halves_of = |c: usize| {
        let pair = |w: usize| halves(quads[w + c / 2], quads[w + 2 + c / 2], c % 2 == 1);
        [pair(0), pair(4)]
    };
    array_from_fn(|c| {
        let (own, others) = (halves_of(c), halves_of(c + 2));
        let (keep, give) = if is_odd { (others, own) } else { (own, others) };
        let c = c as u32 + if is_odd { 2 } else { 0 };
        // SAFETY: by this function's own contract.
        (2 * c + quarter / 2, unsafe { exchange(keep, give, 1) })
    })
}

/// The lane's pieces of a query in BF16, exchanged as in `byte_pieces` with the lane two further.
///
/// # Safety
/// All lanes of the warp call it together.
#[inline(always)]
unsafe fn bf16_pieces(values: [Quad; 8]) -> [Piece; 4] {
    let quarter = thread::lane_id() % 4;
    let is_upper = quarter >= 2;
    array_from_fn(|c| {
        let pairs_of = |j: usize| {
            let at = 2 * (c % 2) + j;
            let pair = |w: usize| bf16x2_from_f32(values[w + c / 2][at], values[w + 2 + c / 2][at]);
            [pair(0), pair(4)]
        };
        let (even, odd) = (pairs_of(0), pairs_of(1));
        let (keep, give) = if is_upper { (odd, even) } else { (even, odd) };
        // SAFETY: by this function's own contract.
        let words = unsafe { exchange(keep, give, 2) };
        (4 * c as u32 + 2 * (quarter % 2) + u32::from(is_upper), words)
    })
}

/// Builds four words of which this lane has one half of each, `keep`, and lane `lane ^ mask` has the other. The low
/// halves come from the lower lane. Gives `give` to the other lane.
///
/// # Safety
/// All lanes of the warp call it together.
#[inline(always)]
unsafe fn exchange(keep: [u32; 2], give: [u32; 2], mask: u32) -> [u32; 4] {
    // SAFETY: by this function's own contract.
    let other = give.map(|word| unsafe { warp::shuffle_xor_u32(word, mask) });
    let is_lower = thread::lane_id() & mask == 0;
    let (low, high) = if is_lower { (keep, other) } else { (other, keep) };
    let mut words = [0; 4];
    unroll::<4>(|i| words[i] = halves(low[i / 2], high[i / 2], i % 2 == 1));
    words
}
