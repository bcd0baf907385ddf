//! Routing of a decode batch in one launch, from hidden states to experts and weights.
//!
//! A cluster of eight blocks computes 24 or 32 experts, each block over an eighth of the hidden state. (A cluster stays
//! within a GPC. With one block a multiprocessor only 12 clusters run at once; of 16, some would wait for others to
//! end.) Within a block each warp sums a part of that eighth; above 32 tokens it sums two parts, for one half of the
//! tokens. Sums are added through shared memory, within a block and within a cluster, in the order that
//! [`super::order`] fixes. Then block `r` of every cluster has the sums of tokens `r`, `r + 8`, ..; the last of these
//! blocks to arrive at a counter selects the tokens' experts.

use crate::args::{DenseRouterDecode, HashRouterDecode};
use crate::params::{DenseRouterDecodeParams, HashRouterDecodeParams};
use kv_layout::router::{DECODE_SLICES, DECODE_TOKENS};
use simt::atomic::DeviceAtomicU32;
use simt::cluster::{block_rank, cluster_arrive, cluster_wait, sync_cluster};
use simt::mem::{Global, GlobalMut};
use simt::shared::Shared;
use simt::{thread, warp};

use super::activation::activation;
use super::hash::Lookup;
use super::order::{PARTS, Slice, add_slices};
use super::select::{Experts, load, load_written};
use super::topk::Routed;
use super::weight;
use crate::fault;
use crate::fragment::{DEPTH, LanePlace, Piece, multiply};
use crate::unroll::{array_from_fn, unroll};

/// Warps of a block.
const WARPS: u32 = 8;
/// Tokens whose sums a warp holds: two fragments of 16 rows.
const WARP_TOKENS: u32 = 32;
/// The most experts of a cluster; also the stride of the tokens' sums, in words.
const MAX_EXPERTS: u32 = 32;
/// Stride of the tokens' partial sums, in words. With it the stores of pairs by a warp have no bank conflicts.
const STRIDE: u32 = MAX_EXPERTS + 8;
/// Words of the sums of all parts, and of the block's sums.
const PARTIALS: usize = (PARTS * DECODE_TOKENS * STRIDE) as usize;
const SUMS: usize = (DECODE_TOKENS * MAX_EXPERTS) as usize;
/// Bytes of shared memory.
pub const SHARED_BYTES: u32 = 4 * (PARTIALS + SUMS) as u32 + 4;
const _: () = assert!(DECODE_SLICES == WARPS, "a warp of a block has one of its tokens");
const _: () = assert!(PARTS == WARPS, "a warp has a part, or two for half of the tokens");

/// Accumulators of a warp: two times 16 tokens by `N` times 8 experts.
type Sums<const N: usize> = [[[f32; 4]; N]; 2];
/// Operands of a warp: pieces of two times 16 tokens and of `N` times 8 experts.
type Operands<const N: usize> = ([[Piece; 2]; 2], [Piece; N]);

/// The product of the gate and a batch of tokens, and the global memory through which blocks exchange results. A
/// cluster has `8 * N` experts.
#[derive(Clone, Copy)]
struct Gate<const N: usize> {
    /// `[tokens, hidden]` BF16.
    x: Global<u16>,
    /// `[experts, hidden]` BF16.
    weight: Global<u16>,
    /// `[64, experts]` f32.
    activations: GlobalMut<f32>,
    /// `[8]` counters of the blocks of each rank that have stored their activations; 0 between launches.
    arrivals: GlobalMut<u32>,
    tokens: u32,
    experts: u32,
    hidden: u32,
}

impl<const N: usize> Gate<N> {
    /// Experts of a cluster.
    const EXPERTS: u32 = 8 * N as u32;

    /// Computes the activations of the cluster's experts and stores them. Returns true in the last block to
    /// arrive among those with the same tokens; there all activations of these tokens are visible.
    ///
    /// The caller must call [`cluster_wait`] before it returns.
    ///
    /// # Safety
    /// Shapes as above; all threads of a launch of `experts / EXPERTS` clusters, rounded up, call it.
    #[inline(always)]
    unsafe fn activate(self) -> bool {
        let (lane, warp_id, rank) = (thread::lane_id(), thread::warp_id(), block_rank());
        let first_expert = thread::block_idx_x() / DECODE_SLICES * Self::EXPERTS;
        // SAFETY: words of shared memory are written by one thread each, with a barrier before others
        // read them; an arrival at the counter is ordered behind the block's stores.
        unsafe {
            let sums = Shared::<f32, SUMS>::at(4 * PARTIALS as u32);
            let last = Shared::<u32, 1>::at(4 * (PARTIALS + SUMS) as u32);
            self.sum_slice(sums, first_expert, rank);
            sync_cluster();
            let (token, expert) = (token_of(warp_id, rank), first_expert + lane);
            if token < self.tokens && lane < Self::EXPERTS && expert < self.experts {
                let of_rank = |rank| sums.load_from(rank, token * MAX_EXPERTS + lane);
                let slices = [0, 1, 2, 3, 4, 5, 6, 7].map(of_rank);
                let logit = add_slices(|rank| slices[rank as usize]);
                let at = u64::from(token) * u64::from(self.experts) + u64::from(expert);
                self.activations.store(at, activation(logit));
            }
            cluster_arrive();
            thread::sync_threads();
            if thread::thread_idx_x() == 0 {
                let arrivals = DeviceAtomicU32::new(self.arrivals, u64::from(rank));
                // One thread arrives for the whole block, whose accesses the barriers before and after order.
                let is_last = arrivals.add_acq_rel(1) == self.experts.div_ceil(Self::EXPERTS) - 1;
                if is_last {
                    arrivals.store(0);
                }
                last.store(0, u32::from(is_last));
            }
            thread::sync_threads();
            last.load(0) != 0
        }
    }

    /// Computes the sums over the block's eighth of the hidden state, for the cluster's experts: `[tokens, 32]`.
    ///
    /// # Safety
    /// As [`Self::activate`].
    #[inline(always)]
    unsafe fn sum_slice(self, sums: Shared<f32, SUMS>, first_expert: u32, rank: u32) {
        let (lane, warp_id) = (thread::lane_id(), thread::warp_id());
        let slice = Slice::of(rank, self.hidden);
        // SAFETY: by this function's own contract; each part of the slice has a row of sums for each token of
        // the batch, which one warp writes; the branch is the block's.
        unsafe {
            let partial = Shared::<f32, PARTIALS>::at(0);
            if self.tokens > WARP_TOKENS {
                let (part, first_token) = (warp_id / 2 * 2, warp_id % 2 * WARP_TOKENS);
                let tile = Tile { gate: self, first_expert, first_token };
                let [from, middle, to] = [0, 1, 2].map(|i| slice.part(part + i));
                let [low, high] = tile.sum::<true>(from, middle, to);
                tile.store(partial, part, low);
                tile.store(partial, part + 1, high);
            } else {
                let tile = Tile { gate: self, first_expert, first_token: 0 };
                let (from, to) = (slice.part(warp_id), slice.part(warp_id + 1));
                let [sums, _] = tile.sum::<false>(from, to, to);
                tile.store(partial, warp_id, sums);
            }
            thread::sync_threads();
            let mut token = warp_id;
            while token < self.tokens {
                let part = |part: u32| partial.load((part * DECODE_TOKENS + token) * STRIDE + lane);
                if lane < Self::EXPERTS {
                    let parts = [0, 1, 2, 3, 4, 5, 6, 7].map(part);
                    let sum = parts.into_iter().fold(0.0, |sum, part| sum + part);
                    sums.store(token * MAX_EXPERTS + lane, sum);
                }
                token += WARPS;
            }
        }
    }
}

/// The token that warp `warp_id` of the last block of rank `rank` finishes.
#[inline(always)]
fn token_of(warp_id: u32, rank: u32) -> u32 {
    warp_id * DECODE_SLICES + rank
}

/// 32 tokens of a warp by the experts of its cluster.
#[derive(Clone, Copy)]
struct Tile<const N: usize> {
    gate: Gate<N>,
    first_expert: u32,
    first_token: u32,
}

impl<const N: usize> Tile<N> {
    /// Whether the second 16 rows of the tile have tokens.
    #[inline(always)]
    fn has_second(self) -> bool {
        self.first_token + 16 < self.gate.tokens
    }

    /// The lane's pieces of chunk `chunk` of the hidden state. Rows past the last token or expert repeat the
    /// last one; their results are not used.
    ///
    /// # Safety
    /// The chunk exists.
    #[inline(always)]
    unsafe fn load(self, chunk: u32) -> Operands<N> {
        let Self { gate, first_expert, first_token } = self;
        let place = LanePlace::of(thread::lane_id());
        // SAFETY: row and chunk exist.
        let load = |matrix: Global<u16>, row: u32, rows: u32| unsafe {
            place.load(matrix, gate.hidden, (row + place.row).min(rows - 1), chunk * DEPTH)
        };
        let experts =
            array_from_fn(|n| load(gate.weight, first_expert + 8 * n as u32, gate.experts));
        let tokens = |row: u32| {
            let row = first_token + row;
            [load(gate.x, row, gate.tokens), load(gate.x, row + 8, gate.tokens)]
        };
        let second = if self.has_second() { tokens(16) } else { [[0; 4]; 2] };
        ([tokens(0), second], experts)
    }

    /// The sums of chunks `from..middle` and, if `IS_TWO`, of chunks `middle..to`; else `middle` is `to`. Four chunks
    /// are loaded at once: a warp rarely has more.
    ///
    /// # Safety
    /// The chunks below `to` exist; all lanes of the warp call it together.
    #[inline(always)]
    unsafe fn sum<const IS_TWO: bool>(self, from: u32, middle: u32, to: u32) -> [Sums<N>; 2] {
        let zeros = [[[0.0; 4]; N]; 2];
        let (mut first, mut acc) = (zeros, zeros);
        let mut chunk = from;
        while chunk < to {
            // SAFETY: by this function's own contract; the branches depend on the warp alone.
            unsafe {
                let load = |i: u32| self.load((chunk + i).min(to - 1));
                let [a, b, c, d] = [load(0), load(1), load(2), load(3)];
                let mut take = |i: u32, operands: Operands<N>| {
                    if IS_TWO && chunk + i == middle && middle < to {
                        (first, acc) = (acc, zeros);
                    }
                    if chunk + i < to {
                        acc = self.multiply(operands, acc);
                    }
                };
                take(0, a);
                take(1, b);
                take(2, c);
                take(3, d);
            }
            chunk += 4;
        }
        if IS_TWO && middle < to { [first, acc] } else { [acc, zeros] }
    }

    /// # Safety
    /// All lanes of the warp call it together.
    #[inline(always)]
    unsafe fn multiply(self, (tokens, experts): Operands<N>, [first, second]: Sums<N>) -> Sums<N> {
        // SAFETY: the branch depends on the warp alone.
        unsafe {
            let by = |[low, high]: [Piece; 2], acc: [[f32; 4]; N]| {
                array_from_fn(|n| multiply(low, high, experts[n], acc[n]))
            };
            let first = by(tokens[0], first);
            let second = if self.has_second() { by(tokens[1], second) } else { second };
            [first, second]
        }
    }

    /// Stores the sums of part `part`.
    ///
    /// # Safety
    /// No other warp writes the part's sums of these tokens.
    #[inline(always)]
    unsafe fn store(self, partial: Shared<f32, PARTIALS>, part: u32, acc: Sums<N>) {
        let place = LanePlace::of(thread::lane_id());
        let store = |token: u32, acc: [[f32; 4]; N]| {
            let row = part * DECODE_TOKENS + self.first_token + token + place.row;
            let at = row * STRIDE + 2 * place.pair;
            // SAFETY: by this function's own contract; rows and pairs start at multiples of 8 bytes.
            unroll::<N>(|n| unsafe {
                let (at, [a, b, c, d]) = (at + 8 * n as u32, acc[n].map(f32::to_bits));
                partial.store_u32x2(at, [a, b]);
                partial.store_u32x2(at + 8 * STRIDE, [c, d]);
            });
        };
        store(0, acc[0]);
        if self.has_second() {
            store(16, acc[1]);
        }
    }
}

/// Selects the experts of up to 64 tokens.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of `experts / 8 N` clusters
/// of 8 blocks of 8 warps, rounded up, call it.
#[inline(always)]
pub unsafe fn dense<const Q: usize, const N: usize>(args: DenseRouterDecode) {
    let DenseRouterDecodeParams { tokens, experts, hidden, selected, scaling_bits } = args.params;
    let gate = Gate::<N> {
        x: args.x,
        weight: args.gate,
        activations: args.activations,
        arrivals: args.arrivals,
        tokens,
        experts,
        hidden,
    };
    // SAFETY: by this function's own contract; branches are uniform in the warp.
    unsafe {
        let is_last = gate.activate();
        let token = token_of(thread::warp_id(), block_rank());
        if is_last && token < tokens {
            let lane = thread::lane_id();
            let (first, count) = Experts::<Q>::of_lane(lane, experts);
            let routed = Routed { ids: args.ids, weights: args.weights, selected };
            let live = args.token.load(u64::from(token)) >= 0;
            let row = u64::from(token) * u64::from(experts) + u64::from(first);
            let raw = load_written::<Q>(args.activations, row, count);
            let bias = load::<Q>(args.bias, u64::from(first), count);
            if live {
                let experts = Experts::new(raw, bias, count);
                let (id, activation) = experts.select(lane, selected);
                routed.store(token, lane, id, weight(activation, f32::from_bits(scaling_bits)));
                fault::count(args.faults, lane, warp::reduce_add_u32(experts.faults));
            } else {
                routed.store(token, lane, -1, 0.0);
            }
        }
        cluster_wait();
    }
}

/// Computes the weights of the listed experts of up to 64 tokens.
///
/// # Safety
/// As [`dense`].
#[inline(always)]
pub unsafe fn hash<const N: usize>(args: HashRouterDecode) {
    let params = args.params;
    let HashRouterDecodeParams { tokens, experts, hidden, .. } = args.params;
    let gate = Gate::<N> {
        x: args.x,
        weight: args.gate,
        activations: args.activations,
        arrivals: args.arrivals,
        tokens,
        experts,
        hidden,
    };
    // SAFETY: as in `dense`.
    unsafe {
        let is_last = gate.activate();
        let token = token_of(thread::warp_id(), block_rank());
        if is_last && token < tokens {
            let lane = thread::lane_id();
            let id = args.token.load(u64::from(token));
            let lookup = Lookup {
                table: args.table,
                vocabulary: params.vocabulary,
                experts,
                selected: params.selected,
            };
            let row = u64::from(token) * u64::from(experts);
            let expert = lookup.weigh(id, lane, |expert| args.activations.load(row + expert));
            let weight = weight(expert.activation, f32::from_bits(params.scaling_bits));
            let routed = Routed { ids: args.ids, weights: args.weights, selected: params.selected };
            routed.store(token, lane, expert.id, weight);
            fault::count(args.faults, lane, warp::reduce_add_u32(expert.refusals));
        }
        cluster_wait();
    }
}
