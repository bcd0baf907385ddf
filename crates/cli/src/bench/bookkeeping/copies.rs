//! The host's work to fork, suspend and resume requests.

use anyhow::Result;
use dsv4_kv::device::{Null, NullDevice, Stream};
use dsv4_kv::{Accepted, CacheConfig, KvCacheManager, KvError, Launches, RequestId, StepRequest};

use super::inputs::Inputs;
use super::row::Row;
use super::samples::{Clock, Samples, WARM_UP};
use super::setup::{CONTEXT, MEMORY, STEPS, config};

/// Tokens of the request: at the end of a block, in the middle of a block, and many.
const TOKENS: [u32; 3] = [CONTEXT, CONTEXT + 64, 131_008];

/// Measures all rows.
///
/// # Errors
/// If a copy is refused.
pub(super) fn measure() -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for tokens in TOKENS {
        rows.extend(measure_copies(tokens)?);
    }
    Ok(rows)
}

fn measure_copies(tokens: u32) -> Result<[Row; 3]> {
    let device = NullDevice::null(MEMORY);
    let config = CacheConfig { max_suspended: 1, num_blocks: 2048, ..config(2)? };
    let (stream, inputs) = (device.stream()?, Inputs::new(&device, &config)?);
    let mut cache = KvCacheManager::new(device, config)?;
    let mut id = filled(&mut cache, &stream, &inputs, tokens)?;
    let (clock, [mut fork, mut suspend, mut resume]) = (Clock::new(), <[Samples; 3]>::default());
    for _ in 0..WARM_UP + STEPS {
        let copy = fork.time(clock, || cache.fork(&stream, id))?;
        cache.release(copy)?;
        let suspended = suspend.time(clock, || cache.suspend(&stream, id))?;
        let resumed = resume.time(clock, || cache.resume(&stream, suspended));
        id = resumed?;
    }
    let size = format!("{tokens} tokens");
    Ok([
        Row::new("cache: fork", &size, &fork, 1),
        Row::new("cache: suspend", &size, &suspend, 1),
        Row::new("cache: resume", &size, &resume, 1),
    ])
}

/// Admits a request and prefills its prompt.
fn filled(
    cache: &mut KvCacheManager<Null>,
    stream: &Stream<Null>,
    inputs: &Inputs,
    tokens: u32,
) -> Result<RequestId, KvError> {
    let id = cache.admit()?;
    for start in (0..tokens).step_by(CONTEXT as usize) {
        let part = StepRequest { id, start, tokens: (tokens - start).min(CONTEXT) };
        let mut step = cache.begin_step(stream, Launches::Eager, &[part])?;
        inputs.queue(&mut step)?;
        step.commit(&[Accepted::count(id, part.tokens)])?;
    }
    Ok(id)
}
