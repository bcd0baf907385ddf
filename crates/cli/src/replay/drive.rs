//! The loop: arrivals, admission, step, commit, release, until the load is done.

use anyhow::{Context, Result};
use dsv4_kv::{RequestId, StepRequest};
use indicatif::ProgressBar;

use super::clock::Clock;
use super::execute::{Execute, KernelWork};
use super::scheduler::{Job, Limits, Part, Scheduler};
use super::timeline::{Sample, Timeline};
use crate::interrupt::Interrupt;
use dsv4_kv_cli::trace::Arrival;

/// What a replay was.
#[derive(Debug)]
pub struct Replayed {
    /// Its steps.
    pub timeline: Timeline,
    /// Whether it ended before its load did.
    pub interrupted: bool,
    /// Requests that ran to their end.
    pub finished: u64,
    /// Requests that had to wait for a slot or for blocks.
    pub waited: u64,
    /// Requests that can never fit.
    pub rejected: u64,
    /// What the kernels did.
    pub work: KernelWork,
}

/// Replays `load` through `cache`, to its end or until `interrupt` is requested.
pub fn drive<E: Execute>(
    mut cache: E,
    load: &[Arrival],
    limits: Limits,
    mut clock: Clock,
    progress: &ProgressBar,
    interrupt: &Interrupt,
) -> Result<Replayed> {
    let mut scheduler = Scheduler::new(limits);
    let mut ids: Vec<Option<RequestId>> = vec![None; load.len()];
    let (mut parts, mut step, mut timeline) = (Vec::new(), Vec::new(), Timeline::default());
    let mut arrivals = load.iter().enumerate().peekable();
    let mut finished = Vec::new();
    let (mut count, mut interrupted) = (0, false);
    loop {
        if interrupt.is_requested() {
            interrupted = true;
            break;
        }
        while let Some((index, arrival)) =
            arrivals.next_if(|(_, arrival)| arrival.at_ms <= clock.now_ms())
        {
            let tokens = arrival.cached_tokens();
            let blocks = cache.ledger().blocks_of(tokens);
            scheduler.submit(Job { index, input: arrival.input, tokens, blocks });
        }
        while let Some(job) = scheduler.admit() {
            ids[job.index] = Some(cache.admit(job.index)?);
        }
        scheduler.plan(&mut parts);
        if parts.is_empty() {
            let Some((_, next)) = arrivals.peek() else { break };
            clock.idle_until(next.at_ms);
            continue;
        }
        fill_step(&parts, &ids, &mut step)?;
        let prepare = cache.step(&step)?;
        let sample = sample(&parts, &cache, scheduler.running(), prepare.as_secs_f32() * 1e6);
        clock.step(sample.prefill + sample.decode);
        timeline.push(Sample { at_ms: clock.now_ms(), ..sample });
        scheduler.complete(&parts, |index| finished.push(index));
        for index in finished.drain(..) {
            let id = ids[index].take().context("a request that runs was admitted")?;
            cache.release(id)?;
            count += 1;
        }
        progress.inc(u64::from(sample.prefill + sample.decode));
    }
    progress.finish_and_clear();
    let (waited, rejected) = (scheduler.waited(), scheduler.rejected());
    let work = cache.finish()?;
    Ok(Replayed { timeline, interrupted, finished: count, waited, rejected, work })
}

/// The planned parts with the cache's own names of the requests.
fn fill_step(parts: &[Part], ids: &[Option<RequestId>], step: &mut Vec<StepRequest>) -> Result<()> {
    step.clear();
    for part in parts {
        let id = ids[part.index].context("a request in the step was admitted")?;
        step.push(StepRequest { id, start: part.start, tokens: part.tokens });
    }
    Ok(())
}

fn sample<E: Execute>(parts: &[Part], cache: &E, requests: u32, prepare_us: f32) -> Sample {
    let tokens =
        |prefill| parts.iter().filter(|part| part.prefill == prefill).map(|part| part.tokens).sum();
    let ledger = cache.ledger();
    Sample {
        at_ms: 0.0,
        blocks: ledger.total_blocks() - ledger.free_blocks(),
        requests,
        prefill: tokens(true),
        decode: tokens(false),
        prepare_us,
    }
}
