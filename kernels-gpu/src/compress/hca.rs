//! HCA entries: ratio 128, no overlap. Tokens are folded one by one into running sums, in the same order however they
//! are cut into steps.
//!
//! The unit of work is a *run*: the tokens of one request in a step that lie in one window. Runs are independent,
//! except that the first run of a request may continue from a state row.

use crate::args::CompressHca;
use crate::params::CompressHcaParams;
use kv_layout::geometry::{HCA_RATIO, HEAD_DIM};
use simt::mem::{Global, GlobalMut};
use simt::shared::Shared;
use simt::{copy, thread, warp};

use super::sums::{SumRows, Sums};
use crate::unroll::{array_from_fn, unroll};

/// Columns of a token's projections.
pub const COLUMNS: u32 = HEAD_DIM;
/// Threads of a block of [`compress`], each with one channel: a warp, so that few runs fill the GPU.
pub const THREADS: u32 = 32;
/// Number of blocks that share a run, each with its own channels.
pub const SPLITS: u32 = HEAD_DIM / THREADS;
/// Number of tokens that are folded without a wait.
const BATCH: usize = 8;
/// Number of batches that are copied to shared memory ahead, because a run's tokens are folded faster than memory
/// answers.
const GROUPS: u32 = 8;
/// Words of shared memory.
const STAGED_WORDS: usize = (GROUPS * 3 * THREADS) as usize * BATCH;
/// Bytes of shared memory.
pub const SHARED_BYTES: u32 = Shared::<u32, STAGED_WORDS>::BYTES;

/// Tokens of one request in a step that lie in one window, oldest first.
#[derive(Clone, Copy)]
pub struct Run {
    /// Row of the first token in the step.
    pub token: u32,
    /// Position of the first token.
    pub position: u32,
    /// Number of tokens of the run.
    pub tokens: u32,
    /// Number of tokens of the request that follow the run's last in the step.
    pub remaining: u32,
    /// The request's slot.
    pub slot: u32,
    /// Whether the run continues from the state row of the position before it: it is the request's first run in the
    /// step, and does not start a window.
    pub continues_state: bool,
}

impl Run {
    /// Whether the run's last token closes the window.
    #[inline(always)]
    #[must_use]
    pub fn closes(self) -> bool {
        (self.position + self.tokens).is_multiple_of(HCA_RATIO)
    }

    /// Whether the state row of the run's `i`-th token is to be written: a later step may continue from it, and no
    /// later token of the step has the same ring row. No step continues from a closed window.
    #[inline(always)]
    #[must_use]
    pub fn stores(self, i: u32, ring: u32) -> bool {
        self.stores_any(i, ring) && !(self.position + i + 1).is_multiple_of(HCA_RATIO)
    }

    /// Whether the state row of a token up to the `i`-th may have to be written.
    #[inline(always)]
    #[must_use]
    pub fn stores_any(self, i: u32, ring: u32) -> bool {
        self.remaining + (self.tokens - 1 - i) < ring
    }
}

/// The work list of runs, and the step's data on its tokens.
#[derive(Clone, Copy)]
pub struct Runs {
    /// `[capacity]` row of the last token of each run; -1 = padding.
    pub last: Global<i32>,
    /// `[step]` absolute position of each token.
    pub position: Global<i32>,
    /// `[step]` slot of each token's request; -1 = padding.
    pub slot: Global<i32>,
    /// `[step]` tokens of the same request that precede the token in the step.
    pub index: Global<i32>,
    /// `[step]` tokens of the same request that follow the token in the step.
    pub remaining: Global<i32>,
    /// Tokens of the step.
    pub tokens: u32,
    /// Request slots.
    pub slots: u32,
}

impl Runs {
    /// Run `record`. `None` for padding, and for a record or a token that is invalid: a row that the step does not
    /// have, a number of earlier or later tokens that the step does not have, a slot that does not exist, or a negative
    /// position.
    ///
    /// # Safety
    /// `last` holds `record`, the other arrays `tokens` tokens.
    #[inline(always)]
    #[must_use]
    pub unsafe fn get(self, record: u32) -> Option<Run> {
        // SAFETY: by this function's own contract; a token is one of the step.
        unsafe {
            // Padding, -1, is larger than any number of tokens.
            let token = self.last.load(u64::from(record)) as u32;
            if token >= self.tokens {
                return None;
            }
            let at = u64::from(token);
            let position = self.position.load(at);
            let (index, slot) = (self.index.load(at) as u32, self.slot.load(at) as u32);
            let remaining = self.remaining.load(at) as u32;
            let exists = index <= token && remaining < self.tokens - token;
            if !exists || slot >= self.slots || position < 0 {
                return None;
            }
            let position = position.cast_unsigned();
            let in_window = position % HCA_RATIO;
            let back = if index < in_window { index } else { in_window };
            Some(Run {
                token: token - back,
                position: position - back,
                tokens: back + 1,
                remaining,
                slot,
                continues_state: index == back && in_window > back,
            })
        }
    }
}

/// Folds the runs of a step. Stores the pooled vectors of runs that close a window in `pooled`, `[capacity, 512]` f32,
/// and sums from which a later step may continue in the state ring. A thread has one channel; [`SPLITS`] blocks share a
/// run.
///
/// In a chunk longer than the ring, the last run may overwrite the row from which the first continues. So there are two
/// launches: first the runs that continue from a state row, then those that start a window and read no state.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the launch call it.
#[inline(always)]
pub unsafe fn compress(args: CompressHca) {
    let params = args.params;
    let record = thread::block_idx_x();
    let channel = thread::block_idx_y() * THREADS + thread::thread_idx_x();
    let runs = Runs {
        last: args.runs,
        position: args.token_position,
        slot: args.token_slot,
        index: args.token_index,
        remaining: args.token_remaining,
        tokens: params.tokens,
        slots: params.slots,
    };
    // SAFETY: the grid has SPLITS blocks a record; a run's rows are in the step and in the ring. Of a state
    // row a thread reads and writes its own channel only, and reads before it writes.
    unsafe {
        let Some(run) = runs.get(record) else { return };
        if run.continues_state != (params.part == CompressHcaParams::CONTINUING) {
            return;
        }
        let sums = fold_run(args, run, channel);
        if run.closes() {
            let at = u64::from(record) * u64::from(HEAD_DIM) + u64::from(channel);
            args.pooled.store(at, sums.mean());
        }
    }
}

/// Returns the sums of a channel after all tokens of a run. Stores those from which a later step may continue.
///
/// # Safety
/// The run's tokens are in the step, its slot in the state; the block's channels are below 512; all lanes of the block
/// call it together.
#[inline(always)]
unsafe fn fold_run(args: CompressHca, run: Run, channel: u32) -> Sums {
    let rows = SumRows { ring: args.params.ring };
    let row = |position: u32| ChannelRow {
        state: args.state,
        at: rows.at(run.slot, position) + u64::from(channel),
    };
    let staging = Staging { args, run, first_channel: channel - thread::thread_idx_x() };
    let mut group = 0;
    while group < GROUPS {
        // SAFETY: by this function's own contract; no group has been read.
        unsafe { staging.start(group) }
        group += 1;
    }
    let mut sums = Sums::EMPTY;
    if run.continues_state {
        // SAFETY: by this function's own contract: a row of the slot's ring.
        sums = unsafe { row(run.position - 1).load() };
    }
    let (mut group, mut first) = (0, 0);
    while first < run.tokens {
        // SAFETY: by this function's own contract: a group's words are read between two barriers.
        let tokens = unsafe {
            copy::wait_for_groups::<{ GROUPS as usize - 1 }>();
            warp::sync_warp();
            let tokens = staging.load(group);
            warp::sync_warp();
            staging.start(group + GROUPS);
            tokens
        };
        let end = first + BATCH as u32;
        if end <= run.tokens && !run.stores_any(end - 1, rows.ring) {
            // No branch between the tokens, so that their exponentials are computed in parallel.
            unroll::<BATCH>(|i| sums = sums.fold(tokens[i].gate + tokens[i].bias, tokens[i].key));
        } else {
            unroll::<BATCH>(|i| {
                let (Staged { key, gate, bias }, i) = (tokens[i], first + i as u32);
                if i < run.tokens {
                    sums = sums.fold(gate + bias, key);
                    if run.stores(i, rows.ring) {
                        // SAFETY: by this function's own contract: a row of the slot's ring.
                        unsafe { row(run.position + i).store(sums) }
                    }
                }
            });
        }
        (group, first) = (group + 1, end);
    }
    sums
}

/// One channel of a token.
#[derive(Clone, Copy, Default)]
struct Staged {
    key: f32,
    gate: f32,
    bias: f32,
}

/// Brings the block's channels of a run through shared memory: in groups of [`BATCH`] tokens, with [`GROUPS`] groups
/// under way. A group has the keys, gates and biases.
#[derive(Clone, Copy)]
struct Staging {
    args: CompressHca,
    run: Run,
    first_channel: u32,
}

impl Staging {
    /// Words of one tensor (keys, gates or biases) in a group.
    const TENSOR: u32 = BATCH as u32 * THREADS;
    /// Number of lanes that copy a token's channels, 16 bytes each.
    const LANES: u32 = THREADS / 4;
    /// Number of tokens that the block's lanes copy at once.
    const AT_ONCE: u32 = THREADS / Self::LANES;

    /// First word of group `group`.
    #[inline(always)]
    fn word(group: u32) -> u32 {
        group % GROUPS * 3 * Self::TENSOR
    }

    /// Starts the lane's copies of group `group`. The copy group is empty past the run's end. Within the last group,
    /// tokens past the last repeat it.
    ///
    /// # Safety
    /// As [`fold_run`]; no lane reads the group that was there any more.
    #[inline(always)]
    unsafe fn start(self, group: u32) {
        let Self { args, run, first_channel } = self;
        let (token, piece) = (thread::lane_id() / Self::LANES, thread::lane_id() % Self::LANES);
        let channel = first_channel + 4 * piece;
        // SAFETY: the block's shared memory.
        let memory = unsafe { Shared::<u32, STAGED_WORDS>::at(0) };
        let first = group * BATCH as u32;
        unroll::<{ BATCH / Self::AT_ONCE as usize }>(|i| {
            let token = token + i as u32 * Self::AT_ONCE;
            let of_run = (first + token).min(run.tokens - 1);
            let at = u64::from(run.token + of_run) * u64::from(COLUMNS) + u64::from(channel);
            let bias = (run.position + of_run) % HCA_RATIO * COLUMNS + channel;
            let word = Self::word(group) + token * THREADS + 4 * piece;
            let is_there = first < run.tokens;
            // SAFETY: by this function's own contract: 16 bytes of the token's row, and of its position's bias.
            unsafe {
                memory.copy_from_if(is_there, word, args.kv, at);
                memory.copy_from_if(is_there, word + Self::TENSOR, args.gate, at);
                memory.copy_from_if(is_there, word + 2 * Self::TENSOR, args.ape, bias.into());
            }
        });
        copy::commit_group();
    }

    /// The lane's channel of the tokens of group `group`.
    ///
    /// # Safety
    /// The group is there, with a barrier since.
    #[inline(always)]
    unsafe fn load(self, group: u32) -> [Staged; BATCH] {
        // SAFETY: the block's shared memory.
        let memory = unsafe { Shared::<u32, STAGED_WORDS>::at(0) };
        let word = Self::word(group) + thread::lane_id();
        array_from_fn(|i| {
            let word = word + i as u32 * THREADS;
            // SAFETY: by this function's own contract.
            let load = |i: u32| f32::from_bits(unsafe { memory.load(word + i * Self::TENSOR) });
            Staged { key: load(0), gate: load(1), bias: load(2) }
        })
    }
}

/// One channel of a state row.
#[derive(Clone, Copy)]
struct ChannelRow {
    state: GlobalMut<f32>,
    /// Element of the maximum; sum and weighted sum follow, 512 elements apart.
    at: u64,
}

impl ChannelRow {
    const STRIDE: u64 = HEAD_DIM as u64;

    /// # Safety
    /// The row exists.
    #[inline(always)]
    unsafe fn load(self) -> Sums {
        let Self { state, at } = self;
        // SAFETY: by this function's own contract.
        unsafe {
            Sums {
                maximum: state.load(at),
                sum: state.load(at + Self::STRIDE),
                weighted: state.load(at + 2 * Self::STRIDE),
            }
        }
    }

    /// # Safety
    /// The row exists; no other thread accesses the channel.
    #[inline(always)]
    unsafe fn store(self, sums: Sums) {
        let (Self { state, at }, Sums { maximum, sum, weighted }) = (self, sums);
        // SAFETY: by this function's own contract.
        unsafe {
            state.store(at, maximum);
            state.store(at + Self::STRIDE, sum);
            state.store(at + 2 * Self::STRIDE, weighted);
        }
    }
}
