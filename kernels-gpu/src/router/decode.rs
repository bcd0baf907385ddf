//! Routing of a decode batch in one launch, from hidden states to experts and weights.
//!
//! A cluster of eight blocks has 32 experts, each block an eighth of the hidden state, so that the
//! whole chip reads the gate's weights once. Within a block warps split that eighth again (and, above
//! 32 tokens, the tokens in two). Partial sums meet in shared memory, in the order of the hidden state
//! at both levels: a result does not depend on who came first. After that, block r of every cluster has
//! the tokens r, r + 8, ..; the last of those blocks to arrive selects their experts.

use kv_layout::params::{DenseRouterDecodeParams, HashRouterDecodeParams};
use kv_layout::router::{DECODE_EXPERTS, DECODE_SLICES, DECODE_TOKENS};
use simt::atomic::{DeviceAtomicU32, fence_device};
use simt::cluster::{block_rank, sync_cluster};
use simt::mem::{Global, GlobalMut};
use simt::shared::Shared;
use simt::{thread, warp};

use super::activation::activation;
use super::fragment::{DEPTH, Piece, Place, multiply};
use super::hash::Lookup;
use super::select::{Experts, load, load_written};
use super::topk::Routed;
use super::weight;
use crate::fault;

/// Warps of a block.
const WARPS: u32 = 8;
/// Tokens whose sums a warp holds: four products of 8.
const WARP_TOKENS: u32 = 32;
/// Words from one token's partial sums to the next one's: the four that a warp writes at once are
/// then in different banks.
const STRIDE: u32 = DECODE_EXPERTS + 4;
/// Words of the partial sums of all warps, and of the block's sums.
const PARTIALS: usize = (WARPS * WARP_TOKENS * STRIDE) as usize;
const SUMS: usize = (DECODE_TOKENS * DECODE_EXPERTS) as usize;
/// Bytes of shared memory.
const SHARED_BYTES: u32 = 4 * (PARTIALS + SUMS) as u32 + 4;
const _: () = assert!(SHARED_BYTES == 45_060, "as in the kernel table");
const _: () = assert!(DECODE_SLICES == WARPS, "a warp of a block has one of its tokens");

/// Sums of a warp: two times 16 experts by four times 8 tokens.
type Sums = [[[f32; 4]; 4]; 2];
/// Pieces of a warp's operands: of two times 16 experts, and of four times 8 tokens.
type Operands = ([[Piece; 2]; 2], [Piece; 4]);

/// The gate's product with a batch, and where its parts meet.
#[derive(Clone, Copy)]
struct Gate {
    /// `[tokens, hidden]` BF16.
    x: Global<u16>,
    /// `[experts, hidden]` BF16.
    weight: Global<u16>,
    /// `[64, experts]` f32.
    activations: GlobalMut<f32>,
    /// `[8]` blocks that have left theirs; zero between launches.
    arrivals: GlobalMut<u32>,
    tokens: u32,
    experts: u32,
    hidden: u32,
}

impl Gate {
    /// Computes the activations of the cluster's experts, and leaves them for whoever comes last. In the
    /// block that does, all activations of its tokens are there, and the result is true.
    ///
    /// # Safety
    /// Shapes as above; all threads of a launch of `experts / 32` clusters call it.
    #[inline(always)]
    unsafe fn activate(self) -> bool {
        let (lane, warp_id, rank) = (thread::lane_id(), thread::warp_id(), block_rank());
        let cluster = thread::block_idx_x() / DECODE_SLICES;
        // SAFETY: words of shared memory are written by one thread each, with a barrier before others
        // read them; a block is last when all others' stores were fenced before they arrived.
        unsafe {
            let sums = Shared::<f32, SUMS>::at(4 * PARTIALS as u32);
            let last = Shared::<u32, 1>::at(4 * (PARTIALS + SUMS) as u32);
            self.sum_slice(sums, cluster, rank);
            sync_cluster();
            let token = token_of(warp_id, rank);
            if token < self.tokens {
                let of_rank = |rank| sums.load_from(rank, token * DECODE_EXPERTS + lane);
                let parts = [0, 1, 2, 3, 4, 5, 6, 7].map(of_rank);
                let logit = parts.into_iter().fold(0.0, |sum, part| sum + part);
                let at = token * self.experts + cluster * DECODE_EXPERTS + lane;
                self.activations.store(u64::from(at), activation(logit));
                fence_device();
            }
            thread::sync_threads();
            if thread::thread_idx_x() == 0 {
                let arrivals = DeviceAtomicU32::new(self.arrivals, u64::from(rank));
                let is_last = arrivals.add(1) == self.experts / DECODE_EXPERTS - 1;
                if is_last {
                    arrivals.store(0);
                }
                last.store(0, u32::from(is_last));
            }
            thread::sync_threads();
            let is_last = last.load(0) != 0;
            if is_last {
                fence_device();
            }
            is_last
        }
    }

    /// The block's part of the sums of the cluster's experts, `[tokens, 32]`.
    ///
    /// # Safety
    /// As [`Self::activate`].
    #[inline(always)]
    unsafe fn sum_slice(self, sums: Shared<f32, SUMS>, cluster: u32, rank: u32) {
        let (lane, warp_id) = (thread::lane_id(), thread::warp_id());
        let halves = if self.tokens > WARP_TOKENS { 2 } else { 1 };
        let (part, parts) = (warp_id / halves, WARPS / halves);
        let first_token = warp_id % halves * WARP_TOKENS;
        // SAFETY: by this function's own contract; the partial sums of a part have a row for each of
        // the half's or whole batch's tokens.
        unsafe {
            let partial = Shared::<f32, PARTIALS>::at(0);
            let tile = Tile { gate: self, first_expert: cluster * DECODE_EXPERTS, first_token };
            let chunks = self.hidden / DEPTH;
            let (from, to) = (rank * chunks / DECODE_SLICES, (rank + 1) * chunks / DECODE_SLICES);
            let acc = tile.sum(from + part, to, parts);
            tile.store(partial, part * halves * WARP_TOKENS, acc);
            thread::sync_threads();
            let mut token = warp_id;
            while token < self.tokens {
                let mut sum = 0.0;
                let mut part = 0;
                while part < parts {
                    let row = part * halves * WARP_TOKENS + token;
                    sum += partial.load(row * STRIDE + lane);
                    part += 1;
                }
                sums.store(token * DECODE_EXPERTS + lane, sum);
                token += WARPS;
            }
        }
    }
}

/// The token that warp `warp_id` of the blocks of rank `rank` finishes.
#[inline(always)]
fn token_of(warp_id: u32, rank: u32) -> u32 {
    warp_id * DECODE_SLICES + rank
}

/// 32 experts by 32 tokens of a warp.
#[derive(Clone, Copy)]
struct Tile {
    gate: Gate,
    first_expert: u32,
    first_token: u32,
}

impl Tile {
    /// The lane's pieces of chunk `chunk` of the hidden state; zeros from chunk `to` on.
    ///
    /// # Safety
    /// The experts exist.
    #[inline(always)]
    unsafe fn load(self, chunk: u32, to: u32) -> Operands {
        let Self { gate, first_expert, first_token } = self;
        let place = Place::of(thread::lane_id());
        let wanted = chunk < to;
        // SAFETY: a chunk below `to` lies in the hidden state; tokens are checked.
        let expert = |row: u32| unsafe {
            let row = first_expert + row + place.row;
            place.load(gate.weight, gate.hidden, row, chunk * DEPTH, wanted)
        };
        // SAFETY: as above.
        let token = |row: u32| unsafe {
            let row = first_token + row + place.row;
            place.load(gate.x, gate.hidden, row, chunk * DEPTH, wanted && row < gate.tokens)
        };
        let experts = [[expert(0), expert(8)], [expert(16), expert(24)]];
        (experts, [token(0), token(8), token(16), token(24)])
    }

    /// Sums over the chunks `from`, `from + step`, .. below `to`. Four chunks are on their way at once:
    /// a warp seldom has more.
    ///
    /// # Safety
    /// The experts exist, and so do the chunks below `to`; all lanes of the warp call it together.
    #[inline(always)]
    unsafe fn sum(self, from: u32, to: u32, step: u32) -> Sums {
        let mut acc = [[[0.0; 4]; 4]; 2];
        let mut chunk = from;
        while chunk < to {
            // SAFETY: by this function's own contract; the branch depends on the warp alone.
            unsafe {
                let load = |i: u32| self.load(chunk + i * step, to);
                let [a, b, c, d] = [load(0), load(1), load(2), load(3)];
                acc = self.multiply(a, acc);
                acc = self.multiply(b, acc);
                acc = self.multiply(c, acc);
                acc = self.multiply(d, acc);
            }
            chunk += 4 * step;
        }
        acc
    }

    /// # Safety
    /// All lanes of the warp call it together.
    #[inline(always)]
    unsafe fn multiply(self, (experts, tokens): Operands, acc: Sums) -> Sums {
        let [[a, b], [c, d]] = experts;
        // SAFETY: the branch depends on the warp alone.
        let both = |n: usize| unsafe {
            if !self.has_tokens(n) {
                return [acc[0][n], acc[1][n]];
            }
            [multiply(a, b, tokens[n], acc[0][n]), multiply(c, d, tokens[n], acc[1][n])]
        };
        let [p, q, r, s] = [both(0), both(1), both(2), both(3)];
        [[p[0], q[0], r[0], s[0]], [p[1], q[1], r[1], s[1]]]
    }

    /// Whether the `n`-th 8 tokens of the tile hold one.
    #[inline(always)]
    fn has_tokens(self, n: usize) -> bool {
        self.first_token + 8 * (n as u32) < self.gate.tokens
    }

    /// Leaves the sums in rows `row + token` of `partial`.
    ///
    /// # Safety
    /// The rows exist and are nobody else's.
    #[inline(always)]
    unsafe fn store(self, partial: Shared<f32, PARTIALS>, row: u32, acc: Sums) {
        let place = Place::of(thread::lane_id());
        let store = |n: usize| {
            if !self.has_tokens(n) {
                return;
            }
            let token = row + self.first_token + 8 * n as u32 + 2 * place.pair;
            // SAFETY: by this function's own contract.
            let put = |expert: u32, [a, b, c, d]: [f32; 4]| unsafe {
                let at = token * STRIDE + expert + place.row;
                partial.store(at, a);
                partial.store(at + STRIDE, b);
                partial.store(at + 8, c);
                partial.store(at + STRIDE + 8, d);
            };
            put(0, acc[0][n]);
            put(16, acc[1][n]);
        };
        store(0);
        store(1);
        store(2);
        store(3);
    }
}

/// Selects the experts of up to 64 tokens.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of `experts / 32` clusters of 8
/// blocks of 8 warps call it.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one for each pointer of the kernel table")]
pub unsafe fn dense<const Q: usize>(
    x: Global<u16>,
    gate: Global<u16>,
    bias: Global<f32>,
    token_mask: Global<i32>,
    activations: GlobalMut<f32>,
    arrivals: GlobalMut<u32>,
    ids: GlobalMut<i32>,
    weights: GlobalMut<f32>,
    faults: GlobalMut<u32>,
    params: DenseRouterDecodeParams,
) {
    let DenseRouterDecodeParams { tokens, experts, hidden, selected, scaling_bits } = params;
    let gate = Gate { x, weight: gate, activations, arrivals, tokens, experts, hidden };
    // SAFETY: by this function's own contract; the branches depend on block and warp. The barrier at
    // the end keeps every block there while others read its shared memory.
    unsafe {
        let is_last = gate.activate();
        let token = token_of(thread::warp_id(), block_rank());
        if is_last && token < tokens {
            let lane = thread::lane_id();
            let (first, count) = Experts::<Q>::of_lane(lane, experts);
            let routed = Routed { ids, weights, selected };
            let live = token_mask.load(u64::from(token)) >= 0;
            let row = u64::from(token) * u64::from(experts) + u64::from(first);
            let raw = load_written::<Q>(activations, row, count);
            let bias = load::<Q>(bias, u64::from(first), count);
            if live {
                let experts = Experts::new(raw, bias, count);
                let (id, activation) = experts.select(lane, selected);
                routed.store(token, lane, id, weight(activation, f32::from_bits(scaling_bits)));
                fault::count(faults, lane, warp::reduce_add_u32(experts.faults));
            } else {
                routed.store(token, lane, -1, 0.0);
            }
        }
        sync_cluster();
    }
}

/// Weighs the listed experts of up to 64 tokens.
///
/// # Safety
/// As [`dense`].
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one for each pointer of the kernel table")]
pub unsafe fn hash(
    x: Global<u16>,
    gate: Global<u16>,
    table: Global<i32>,
    token_id: Global<i32>,
    activations: GlobalMut<f32>,
    arrivals: GlobalMut<u32>,
    ids: GlobalMut<i32>,
    weights: GlobalMut<f32>,
    faults: GlobalMut<u32>,
    params: HashRouterDecodeParams,
) {
    let HashRouterDecodeParams { tokens, experts, hidden, .. } = params;
    let gate = Gate { x, weight: gate, activations, arrivals, tokens, experts, hidden };
    // SAFETY: as in `dense`.
    unsafe {
        let is_last = gate.activate();
        let token = token_of(thread::warp_id(), block_rank());
        if is_last && token < tokens {
            let lane = thread::lane_id();
            let id = token_id.load(u64::from(token));
            let lookup =
                Lookup { table, vocabulary: params.vocabulary, experts, selected: params.selected };
            let row = u64::from(token) * u64::from(experts);
            let expert = lookup.weigh(id, lane, |expert| activations.load(row + expert));
            let weight = weight(expert.activation, f32::from_bits(params.scaling_bits));
            let routed = Routed { ids, weights, selected: params.selected };
            routed.store(token, lane, expert.id, weight);
            fault::count(faults, lane, warp::reduce_add_u32(expert.refusals));
        }
        sync_cluster();
    }
}
