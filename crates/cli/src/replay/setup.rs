//! Everything that a replay needs, derived from the options and from the defaults of its device.

use std::path::Path;

use anyhow::Result;
use bytesize::ByteSize;
use dsv4_kv::transfer::transfer_staging_bytes;
use dsv4_kv::{CacheConfig, KvError, WorkspaceSize, capacity};
use dsv4_kv_trace::TraceReader;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::args::{ARRIVAL_MEMORY, INDEXER_MEMORY, Payloads, ReplayArgs};
use super::clock::Clock;
use super::load::{self, Request};
use super::place::{self, Defaults, Place};
use super::scheduler::Limits;
use super::select::{MAX_QUERIES, Queries};
use super::tensors;
use crate::device::{self, DeviceChoice};
use crate::error::InputError;
use crate::model;
use crate::options::ClusterChoice;
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
        let verify = args.verify.unwrap_or(defaults.verify).min(load.len() as u32);
        let attends = args.attend.unwrap_or(matches!(place, Place::Cuda(_)));
        if !attends && args.attention_cluster != ClusterChoice::default() {
            return Err(InputError::ClusterWithoutAttention.into());
        }
        let model = args.model.as_deref().unwrap_or(defaults.model);
        let heads = attends.then(|| model::heads(model)).transpose()?;
        let share = defaults.memory / u64::from(place.shares(args.peers.unwrap_or(1)));
        let given = args.gpu_mem.map(|size| size.as_u64());
        let memory = args.peer_memory.or(given).unwrap_or(share);
        let smallest = smallest_cache(args, &defaults, &load)?;
        let most = args.indexer_memory.as_u64();
        let indexer = device::indexer(&smallest, MAX_QUERIES, most).map_err(InputError::Indexer)?;
        let beside = Beside {
            indexer: indexer.as_ref(),
            verify,
            heads,
            moving: payloads.map_or(0, |_| (memory / 8).min(args.arrival_memory.as_u64())),
            has_peers: args.peers.is_some(),
        };
        let others = beside.bytes(place, &smallest);
        let host_bytes = args.host_cache.map_or(0, |size| size.as_u64());
        let smallest = CacheConfig { host_bytes, ..smallest };
        let (config, balanced_slots) = sized_cache(args, &load, &smallest, (memory, others))?;
        let sample = sample(verify, &load, limits(&config), args.seed);
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
        limits(&self.config)
    }
}

/// The limits of a cache.
fn limits(config: &CacheConfig) -> Limits {
    Limits {
        slots: config.max_requests,
        blocks: config.num_blocks,
        context: config.max_context,
        step_tokens: config.max_step_tokens,
    }
}

/// The buffers of a replay beside its cache.
struct Beside<'a> {
    /// The indexer's workspace, if the model has an indexer.
    indexer: Option<&'a WorkspaceSize>,
    /// Number of requests to verify.
    verify: u32,
    /// Heads that attend.
    heads: Option<u32>,
    /// Bytes of payloads in memory of the device.
    moving: u64,
    /// Whether requests move between processes.
    has_peers: bool,
}

impl Beside<'_> {
    /// Their bytes for steps of this cache, and what a GPU loses by rounding allocations up.
    fn bytes(&self, place: &Place, cache: &CacheConfig) -> u64 {
        let &Self { indexer, verify, heads, moving, has_peers } = self;
        let own = || {
            let staging = if has_peers { transfer_staging_bytes(cache) } else { 0 };
            tensors::working_bytes(cache, indexer, verify, heads) + staging + moving
        };
        match place {
            Place::Ledger => 0,
            Place::Cpu => own(),
            Place::Cuda(_) => own() + device::rounding(cache, indexer),
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

/// Refuses a host tier for a cache without checkpoints.
fn check_host_cache(args: &ReplayArgs, wish: Wish) -> Result<(), InputError> {
    match args.host_cache.filter(|size| size.as_u64() > 0) {
        Some(size) if args.checkpoints == Some(0) => {
            Err(InputError::HostWithoutCheckpoints { size })
        }
        Some(size) if wish == Wish::Exactly(0) => Err(InputError::HostWithoutPrefixes { size }),
        _ => Ok(()),
    }
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
    check_host_cache(args, wish)?;
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
    load.iter().map(|request| request.arrival.context_tokens()).max().unwrap_or(1)
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
    let tokens = load.iter().map(|request| u64::from(request.arrival.context_tokens()));
    let all = u32::try_from(tokens.sum::<u64>()).unwrap_or(u32::MAX);
    Ok(CacheConfig {
        max_step_tokens: args.max_step_tokens.unwrap_or(defaults.max_step_tokens).min(all),
        max_context: longest(load).clamp(1, smallest.max_context),
        // No prompt of a load contains an earlier answer, since a trace does not record answers.
        keep_outputs: false,
        attention_cluster: args.attention_cluster.into(),
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

/// Indices of `count` requests of the load, or of fewer if fewer fit into an empty cache of `limits`, sampled at random
/// without repetition. A request that does not fit is rejected, and nothing of it could be compared.
fn sample(count: u32, load: &[Request], limits: Limits, seed: u64) -> Vec<usize> {
    let most = limits.most_tokens();
    let fit = (0..load.len()).filter(|&index| load[index].arrival.context_tokens() <= most);
    let fit: Vec<_> = fit.collect();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let drawn = rand::seq::index::sample(&mut rng, fit.len(), fit.len().min(count as usize));
    drawn.into_iter().map(|index| fit[index]).collect()
}
