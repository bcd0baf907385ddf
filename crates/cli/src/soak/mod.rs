//! `dsv4-kv soak`: runs a load for a long time, with every event that can happen to requests.
//!
//! | module | what it holds |
//! |---|---|
//! | [`args`] | options |
//! | [`mod@run`] | the rounds, and the checks after each |
//! | [`disturb`] | the events of requests, and their times |
//! | [`checked`] | the cache, compared with its model |
//! | [`model`], [`prefixes`] | the model: its requests, and the prefixes that they share |
//! | [`report`] | the result: a table and JSON |

mod args;
mod checked;
mod disturb;
mod model;
mod prefixes;
mod report;
mod run;

use anyhow::Result;
use dsv4_kv::CacheConfig;

pub use args::SoakArgs;

use crate::error::InputError;
use crate::interrupt::Interrupt;
use crate::outcome::Outcome;
use crate::replay::setup::{self, Loading, Slots, Wish};
use crate::{model as models, output, progress};
use disturb::Shares;
pub use report::Report;
use run::{Plan, SUSPENDED};

/// Progress over all rounds, and the current round.
const BAR: &str = "{bar:20} {percent:>3} % of {len} tokens, {left}  {wide_msg}";
/// Number of requests of the synthetic load.
const REQUESTS: u32 = 2048;

/// Runs the command and prints its result.
pub fn run(args: &SoakArgs) -> Result<Outcome> {
    let (load, texts) = setup::load(&Loading {
        trace: args.trace.as_deref(),
        requests: args.requests,
        synthetic: REQUESTS,
        seed: args.seed,
        shrink: 1.0,
        time_scale: args.time_scale,
    })?;
    // Without them no prefix would be shared, and the soak would pass all the same.
    if let Some((path, index)) =
        args.trace.as_ref().zip(load.iter().position(|request| request.prompt.is_none()))
    {
        return Err(InputError::NoHashIds { path: path.clone(), request: index + 1 }.into());
    }
    let smallest = CacheConfig::new(models::resolve(&args.model)?);
    let smallest = CacheConfig {
        max_suspended: SUSPENDED,
        max_step_tokens: args.max_step_tokens,
        max_context: setup::longest(&load).clamp(1, smallest.max_context),
        ..smallest
    };
    let config = setup::largest_cache(
        smallest,
        args.gpu_mem.as_u64(),
        0,
        Wish::Share,
        Slots::Exactly(args.max_requests),
    )?;
    let percent = |value: f64| value / 100.0;
    let shares = Shares {
        aborts: percent(args.aborts),
        forks: percent(args.forks),
        preemptions: percent(args.preemptions),
    };
    let (rounds, seed) = (args.rounds, args.seed);
    let plan = Plan { config: &config, load: (&load, texts), shares, rounds, seed };
    let interrupt = Interrupt::listen()?;
    let bar = progress::bar(plan.tokens() * args.fill.len() as u64, BAR);
    let runs = args.fill.iter().map(|&fill| plan.run(fill, &bar, &interrupt));
    let runs = runs.collect::<Result<Vec<_>>>()?;
    bar.finish_and_clear();
    let report = Report {
        model: config.model.name.clone(),
        blocks: config.num_blocks,
        checkpoints: config.num_checkpoints,
        requests: load.len() as u64,
        runs,
    };
    if args.json {
        output::print(serde_json::to_string_pretty(&report)?)?;
    } else {
        output::print(&report)?;
    }
    let wrong = report.runs.iter().any(|row| !row.faults.is_empty());
    let interrupted = report.runs.iter().any(|row| row.interrupted);
    Ok(match (wrong, interrupted) {
        (true, _) => Outcome::Mismatch,
        (false, true) => Outcome::Interrupted,
        (false, false) => Outcome::Passed,
    })
}
