//! Everything a replay needs, from the options and the defaults of where it runs.

use anyhow::Result;
use bytesize::ByteSize;
use dsv4_kv::{CacheConfig, WorkspaceSize};
use dsv4_kv_cli::trace::{Arrival, TraceReader};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::args::ReplayArgs;
use super::clock::Clock;
use super::load;
use super::place::{Defaults, Place};
use super::scheduler::Limits;
use super::select::{MOST_QUERIES, Queries};
use super::tensors;
use crate::device;
use crate::error::InputError;
use crate::model;

/// A replay that can begin.
pub struct Setup {
    /// The requests.
    pub load: Vec<Arrival>,
    /// Places in the load of the requests to verify.
    pub sample: Vec<usize>,
    /// Bytes for the cache and the replay's own buffers.
    pub memory: u64,
    /// The largest cache that fits, for requests as long as those of the load.
    pub config: CacheConfig,
    /// The workspace of the indexer of a model that has one.
    pub indexer: Option<WorkspaceSize>,
    /// Virtual time.
    pub clock: Clock,
    /// Seed of the values that the cache is fed with.
    pub seed: u64,
    /// Queries that gather entries.
    pub queries: Queries,
}

impl Setup {
    /// What the options ask for at `place`.
    pub fn new(args: &ReplayArgs, place: &Place) -> Result<Self> {
        let defaults = place.defaults()?;
        if matches!(place, Place::Ledger) && args.verify.is_some_and(|verify| verify > 0) {
            return Err(InputError::NothingToVerify.into());
        }
        let load = load(args, &defaults)?;
        let sample = sample(args.verify.unwrap_or(defaults.verify), load.len(), args.seed);
        let memory = args.gpu_mem.map_or(defaults.memory, |size| size.as_u64());
        let smallest = smallest_cache(args, &defaults, &load)?;
        let most = args.indexer_memory.as_u64();
        let indexer =
            device::indexer(&smallest, MOST_QUERIES, most).map_err(InputError::Indexer)?;
        let working = match place {
            Place::Ledger => 0,
            _ => tensors::working_bytes(&smallest, indexer.as_ref(), sample.len() as u32),
        };
        let rounding = match place {
            Place::Cuda(_) => device::rounding(&smallest, indexer.as_ref()),
            _ => 0,
        };
        let config = largest_cache(smallest, memory, working + rounding)?;
        let clock = Clock::new(args.step_ms, args.token_rate);
        let (seed, queries) = (args.seed, defaults.queries);
        Ok(Self { load, sample, memory, config, indexer, clock, seed, queries })
    }

    /// What the cache has room for.
    pub fn limits(&self) -> Limits {
        Limits {
            slots: self.config.max_requests,
            blocks: self.config.num_blocks,
            context: self.config.max_context,
            step_tokens: self.config.max_step_tokens,
        }
    }
}

/// The requests to replay.
fn load(args: &ReplayArgs, defaults: &Defaults) -> Result<Vec<Arrival>, InputError> {
    let limit = args.requests.map(|requests| requests as usize);
    let (arrivals, shrink) = match &args.trace {
        Some(path) => (TraceReader::open(path)?.read(limit.unwrap_or(usize::MAX))?, 1.0),
        None => {
            let limit = limit.unwrap_or(defaults.requests as usize);
            (load::synthetic(args.seed).take(limit).collect(), defaults.shrink)
        }
    };
    let shrink = args.shrink.unwrap_or(shrink);
    let shrunk = |(request, arrival): (usize, Arrival)| {
        let shrunk = arrival.shrunk(shrink, args.time_scale);
        shrunk.map_err(|source| InputError::Shrink { request, source })
    };
    (1..).zip(arrivals).map(shrunk).collect()
}

/// The smallest cache for requests as long as those of the load, or as the model allows.
fn smallest_cache(
    args: &ReplayArgs,
    defaults: &Defaults,
    load: &[Arrival],
) -> Result<CacheConfig, InputError> {
    let model = model::resolve(args.model.as_deref().unwrap_or(defaults.model))?;
    let smallest = CacheConfig::smallest(model);
    let tokens = |arrival: &Arrival| u64::from(arrival.cached_tokens());
    let longest = load.iter().map(Arrival::cached_tokens).max().unwrap_or(1);
    // No step has more tokens than the load.
    let all = u32::try_from(load.iter().map(tokens).sum::<u64>()).unwrap_or(u32::MAX);
    Ok(CacheConfig {
        max_step_tokens: args.token_budget.unwrap_or(defaults.token_budget).min(all),
        max_requests: args.max_requests,
        max_context: longest.clamp(1, smallest.max_context),
        ..smallest
    })
}

/// The largest cache that the memory holds beside `working` bytes.
fn largest_cache(
    smallest: CacheConfig,
    memory: u64,
    working: u64,
) -> Result<CacheConfig, InputError> {
    let left = memory
        .checked_sub(working)
        .ok_or(InputError::NoRoomToWork { memory: ByteSize(memory), working: ByteSize(working) })?;
    let name = smallest.model.name.clone();
    smallest.with_memory(left).map_err(|source| InputError::Cache {
        model: name,
        memory: ByteSize(memory),
        left: ByteSize(left),
        source,
    })
}

/// Places in a load of `requests`, sampled at random without repetition.
fn sample(count: u32, requests: usize, seed: u64) -> Vec<usize> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rand::seq::index::sample(&mut rng, requests, requests.min(count as usize)).into_vec()
}
