//! Everything a replay needs, from the options and the defaults of where it runs.

use anyhow::Result;
use bytesize::ByteSize;
use dsv4_kv::CacheConfig;
use dsv4_kv_cli::trace::{Arrival, TraceReader};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::args::ReplayArgs;
use super::clock::Clock;
use super::full;
use super::load;
use super::place::{Defaults, Place};
use super::scheduler::Limits;
use super::select::Queries;
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
    /// The largest cache that fits.
    pub config: CacheConfig,
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
        let config = cache_config(args, place, &defaults, memory, sample.len() as u32)?;
        let clock = Clock::new(args.step_ms, args.token_rate);
        Ok(Self { load, sample, memory, config, clock, seed: args.seed, queries: defaults.queries })
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
    Ok(arrivals.into_iter().map(|arrival| arrival.shrunk(shrink, args.time_scale)).collect())
}

/// The largest cache that the memory holds beside the replay's own buffers.
fn cache_config(
    args: &ReplayArgs,
    place: &Place,
    defaults: &Defaults,
    memory: u64,
    sample: u32,
) -> Result<CacheConfig, InputError> {
    let model = model::resolve(args.model.as_deref().unwrap_or(defaults.model))?;
    let config = CacheConfig {
        max_step_tokens: args.token_budget.unwrap_or(defaults.token_budget),
        max_requests: args.max_requests,
        ..CacheConfig::smallest(model)
    };
    let working = match place {
        Place::Ledger => 0,
        Place::Cpu => full::working_bytes(&config, sample),
        Place::Cuda(_) => full::working_bytes(&config, sample) + device::rounding(&config, None),
    };
    let left = memory
        .checked_sub(working)
        .ok_or(InputError::NoRoomToWork { memory: ByteSize(memory), working: ByteSize(working) })?;
    let name = config.model.name.clone();
    config.with_memory(left).map_err(|source| InputError::Cache {
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
