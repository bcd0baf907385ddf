//! Everything that a replay needs, derived from the options and from the defaults of its device.

use std::path::Path;

use anyhow::Result;
use bytesize::ByteSize;
use dsv4_kv::transfer::port_bytes;
use dsv4_kv::{CacheConfig, KvError, WorkspaceSize, capacity};
use dsv4_kv_trace::TraceReader;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::args::{ARRIVAL_MEMORY, INDEXER_MEMORY, Payloads, ReplayArgs};
use super::clock::Clock;
use super::load::{self, Request};
use super::place::{self, Defaults, Place};
use super::scheduler::Limits;
use super::select::{MOST_QUERIES, Queries};
use super::tensors;
use crate::device::{self, DeviceChoice};
use crate::error::InputError;
use crate::model;
use crate::options::SplitChoice;
use crate::share;
use crate::texts::Texts;

/// The setup of a replay.
pub struct Setup {
    /// The requests.
    pub load: Vec<Request>,
    /// Generates their token ids.
    pub texts: Texts,
    /// Indices in the load of the requests to verify.
    pub sample: Vec<usize>,
    /// Bytes for the cache and for the replay's own buffers.
    pub memory: u64,
    /// The configuration of the largest cache that fits, for requests as long as those of the load.
    pub config: CacheConfig,
    /// The number of slots for which slots and blocks suffice for the same number of requests of the load's mean
    /// length.
    pub balanced_slots: u32,
    /// The workspace of the indexer, if the model has an indexer.
    pub indexer: Option<WorkspaceSize>,
    /// Virtual time.
    pub clock: Clock,
    /// Seed of the cache's inputs.
    pub seed: u64,
    /// The queries that gather entries, and the number of heads if they attend.
    pub queries: (Queries, Option<u32>),
    /// Ordinal of the device whose memory holds the payloads of requests that move; `None` for host memory.
    pub payloads: Option<u32>,
    /// Bytes for requests that have arrived and are not admitted yet.
    pub arrival_bytes: u64,
}

impl Setup {
    /// The setup for these options on the device `place`.
    pub fn new(args: &ReplayArgs, place: &Place) -> Result<Self> {
        let defaults = place.defaults()?;
        if matches!(place, Place::Ledger) {
            check_bookkeeping(args)?;
        }
        let payloads = (args.payloads == Payloads::Device).then(|| place::ordinal(args));
        let shrink = if args.trace.is_some() { 1.0 } else { defaults.shrink };
        let (load, texts) = load(&Loading {
            trace: args.trace.as_deref(),
            requests: args.requests,
            synthetic: defaults.requests,
            seed: args.seed,
            shrink: args.shrink.unwrap_or(shrink),
            time_scale: args.time_scale,
        })?;
        let sample = sample(args.verify.unwrap_or(defaults.verify), load.len(), args.seed);
        let attends = args.attend.unwrap_or(matches!(place, Place::Cuda(_)));
        if !attends && args.attention_split != SplitChoice::default() {
            return Err(InputError::NothingToSplit.into());
        }
        let model = args.model.as_deref().unwrap_or(defaults.model);
        let heads = attends.then(|| model::heads(model)).transpose()?;
        let share = defaults.memory / u64::from(place.shares(args.peers.unwrap_or(1)));
        let given = args.gpu_mem.map(|size| size.as_u64());
        let memory = args.peer_memory.or(given).unwrap_or(share);
        let smallest = smallest_cache(args, &defaults, &load)?;
        let most = args.indexer_memory.as_u64();
        let indexer =
            device::indexer(&smallest, MOST_QUERIES, most).map_err(InputError::Indexer)?;
        let working = match place {
            Place::Ledger => 0,
            _ => {
                let verified = sample.len() as u32;
                let own = tensors::working_bytes(&smallest, indexer.as_ref(), verified, heads);
                let port = args.peers.map_or(0, |_| port_bytes(&smallest));
                let moving = payloads.map_or(0, |_| (memory / 8).min(args.arrival_memory.as_u64()));
                own + port + moving
            }
        };
        let rounding = match place {
            Place::Cuda(_) => device::rounding(&smallest, indexer.as_ref()),
            _ => 0,
        };
        let host_bytes = args.host_cache.map_or(0, |size| size.as_u64());
        let smallest = CacheConfig { host_bytes, ..smallest };
        let (config, balanced_slots) =
            sized_cache(args, &load, &smallest, (memory, working + rounding))?;
        let clock = Clock::new(args.step_ms, args.token_rate);
        let (seed, queries) = (args.seed, (defaults.queries, heads));
        Ok(Self {
            load,
            texts,
            sample,
            memory,
            config,
            balanced_slots,
            indexer,
            clock,
            seed,
            queries,
            payloads,
            arrival_bytes: args.arrival_memory.as_u64(),
        })
    }

    /// The limits of the cache.
    pub fn limits(&self) -> Limits {
        Limits {
            slots: self.config.max_requests,
            blocks: self.config.num_blocks,
            context: self.config.max_context,
            step_tokens: self.config.max_step_tokens,
        }
    }
}

/// Refuses options that need the rows of a cache, if there is only bookkeeping.
fn check_bookkeeping(args: &ReplayArgs) -> Result<(), InputError> {
    if args.verify.is_some_and(|verify| verify > 0) {
        return Err(InputError::NothingToVerify);
    }
    if args.attend == Some(true) {
        return Err(InputError::NothingToAttend);
    }
    if args.host_cache.is_some() {
        return Err(InputError::NothingToCopy);
    }
    if args.payloads == Payloads::Device {
        return Err(InputError::NothingMoves);
    }
    if args.arrival_memory != ARRIVAL_MEMORY {
        return Err(InputError::NothingArrives);
    }
    if args.device == DeviceChoice::Cuda {
        return Err(InputError::NothingRuns);
    }
    if args.indexer_memory != INDEXER_MEMORY {
        return Err(InputError::NothingToScore);
    }
    Ok(())
}

/// The largest cache in `memory` bytes, of which `others` are used otherwise; and the number of slots that the load's
/// mean length would give.
fn sized_cache(
    args: &ReplayArgs,
    load: &[Request],
    smallest: &CacheConfig,
    (memory, others): (u64, u64),
) -> Result<(CacheConfig, u32)> {
    let wish = Wish::of(args, load);
    let mean = mean_tokens(load).min(smallest.max_context);
    let most = u32::try_from(load.len()).unwrap_or(u32::MAX).max(1);
    let balanced = Slots::For { tokens: mean, most };
    let size = |slots| largest_cache(smallest.clone(), memory, others, wish, slots);
    Ok(match args.max_requests {
        Some(slots) => {
            let balanced = size(balanced).map_or(slots, |config| config.max_requests);
            (size(Slots::Exactly(slots))?, balanced)
        }
        None => size(balanced).map(|config| (config.clone(), config.max_requests))?,
    })
}

/// The source of a load.
#[derive(Clone, Copy, Debug)]
pub struct Loading<'a> {
    /// A trace, or `None` for the synthetic load.
    pub trace: Option<&'a Path>,
    /// Number of first requests; `None` means the whole trace.
    pub requests: Option<u32>,
    /// Number of requests of the synthetic load if `requests` is `None`.
    pub synthetic: u32,
    /// Seed of the synthetic load.
    pub seed: u64,
    /// Divisor of lengths and times.
    pub shrink: f64,
    /// Factor by which arrivals are faster.
    pub time_scale: f64,
}

/// The requests, and their token ids.
pub fn load(from: &Loading<'_>) -> Result<(Vec<Request>, Texts), InputError> {
    let &Loading { trace, requests, synthetic, seed, shrink, time_scale } = from;
    let limit = requests.map(|requests| requests as usize);
    let requests = match trace {
        Some(path) => {
            let requests = TraceReader::open(path)?.read_requests(limit.unwrap_or(usize::MAX))?;
            let request = |(arrival, prompt)| Request { arrival, prompt };
            requests.into_iter().map(request).collect::<Vec<_>>()
        }
        None => load::synthetic(seed).take(limit.unwrap_or(synthetic as usize)).collect(),
    };
    let shrunk = |(place, Request { arrival, prompt }): (usize, Request)| {
        let shrunk = arrival.shrunk(shrink, time_scale);
        let arrival = shrunk.map_err(|source| InputError::Shrink { request: place, source })?;
        Ok(Request { arrival, prompt })
    };
    let load = (1..).zip(requests).map(shrunk).collect::<Result<_, InputError>>()?;
    Ok((load, Texts::new(shrink)))
}

/// Tokens of the longest request.
pub fn longest(load: &[Request]) -> u32 {
    load.iter().map(|request| request.arrival.cached_tokens()).max().unwrap_or(1)
}

/// Mean number of tokens of a request of the load.
fn mean_tokens(load: &[Request]) -> u32 {
    load::tokens(load).div_ceil(load.len().max(1) as u64).max(1) as u32
}

/// The configuration of the smallest cache for requests as long as those of the load, or as the model allows.
fn smallest_cache(
    args: &ReplayArgs,
    defaults: &Defaults,
    load: &[Request],
) -> Result<CacheConfig, InputError> {
    let model = model::resolve(args.model.as_deref().unwrap_or(defaults.model))?;
    let smallest = CacheConfig::new(model);
    // No step has more tokens than the whole load.
    let tokens = load.iter().map(|request| u64::from(request.arrival.cached_tokens()));
    let all = u32::try_from(tokens.sum::<u64>()).unwrap_or(u32::MAX);
    Ok(CacheConfig {
        max_step_tokens: args.token_budget.unwrap_or(defaults.token_budget).min(all),
        max_context: longest(load).clamp(1, smallest.max_context),
        // No prompt of a load contains an earlier answer, since a trace does not record answers.
        keep_outputs: false,
        attention_split: args.attention_split.into(),
        ..smallest
    })
}

/// The number of slots of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slots {
    /// This number.
    Exactly(u32),
    /// As many as let the most requests of `tokens` tokens fit at once, but at most `most`.
    For {
        /// Tokens of a request.
        tokens: u32,
        /// Number of requests in the load.
        most: u32,
    },
}

impl Slots {
    /// The configuration of the largest cache with these slots that fits into `memory`.
    fn sized(self, config: CacheConfig, memory: u64) -> Result<CacheConfig, KvError> {
        match self {
            Self::Exactly(max_requests) => {
                CacheConfig { max_requests, ..config }.with_memory(memory)
            }
            Self::For { tokens, most } => {
                let best = capacity::most_requests(config, memory, tokens)?;
                let max_requests = best.max_requests.min(most);
                // The longest request gets its blocks before there are slots for which no blocks are left.
                let fewer = CacheConfig { max_requests, ..best }.with_memory(memory)?;
                let needed = fewer.max_blocks_per_request();
                if fewer.num_blocks >= needed {
                    Ok(fewer)
                } else {
                    for_longest(fewer, memory, needed)
                }
            }
        }
    }
}

/// The cache with the most slots that leave room for `blocks` blocks; with one slot if even that leaves too few.
fn for_longest(config: CacheConfig, memory: u64, blocks: u32) -> Result<CacheConfig, KvError> {
    let (mut fits, mut too_many) = (1, config.max_requests);
    let sized = |max_requests| CacheConfig { max_requests, ..config.clone() }.with_memory(memory);
    while fits + 1 < too_many {
        let slots = u32::midpoint(fits, too_many);
        match sized(slots)?.num_blocks >= blocks {
            true => fits = slots,
            false => too_many = slots,
        }
    }
    sized(fits)
}

/// The number of checkpoints of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// This number.
    Exactly(u32),
    /// A share of the memory: [`share`].
    Share,
}

impl Wish {
    /// The number for these options; none if no prompt can have a common prefix with another.
    fn of(args: &ReplayArgs, load: &[Request]) -> Self {
        let nothing_shared = load.iter().all(|request| request.prompt.is_none());
        match args.checkpoints {
            Some(checkpoints) => Self::Exactly(checkpoints),
            None if args.no_reuse || nothing_shared => Self::Exactly(0),
            None => Self::Share,
        }
    }
}

/// The largest cache that fits into `memory` beside `working` bytes.
pub fn largest_cache(
    smallest: CacheConfig,
    memory: u64,
    working: u64,
    checkpoints: Wish,
    slots: Slots,
) -> Result<CacheConfig, InputError> {
    let left = memory
        .checked_sub(working)
        .ok_or(InputError::NoRoomToWork { memory: ByteSize(memory), working: ByteSize(working) })?;
    let name = smallest.model.name.clone();
    let sized = match checkpoints {
        Wish::Exactly(num_checkpoints) => {
            slots.sized(CacheConfig { num_checkpoints, ..smallest }, left)
        }
        Wish::Share => {
            let without = slots.sized(CacheConfig { host_bytes: 0, ..smallest.clone() }, left);
            without.and_then(|without| with_share(without, smallest.host_bytes, left, slots))
        }
    };
    sized.map_err(|source| InputError::Cache {
        model: name,
        memory: ByteSize(memory),
        left: ByteSize(left),
        source,
    })
}

/// The cache with checkpoints in place of a part of its blocks. The blocks of the longest request are kept.
fn with_share(
    config: CacheConfig,
    host_bytes: u64,
    memory: u64,
    slots: Slots,
) -> Result<CacheConfig, KvError> {
    let num_checkpoints = share::checkpoints(&config);
    let with = slots.sized(CacheConfig { num_checkpoints, host_bytes, ..config.clone() }, memory);
    // A cache with checkpoints needs additional memory, which may be more than was left.
    if host_bytes == 0 { with.or(Ok(config)) } else { with }
}

/// `count` indices below `requests`, sampled at random without repetition.
fn sample(count: u32, requests: usize, seed: u64) -> Vec<usize> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rand::seq::index::sample(&mut rng, requests, requests.min(count as usize)).into_vec()
}
