//! `dsv4-kv reuse`: simulates how many tokens of a trace's prompts are reused.
//!
//! | module | what it holds |
//! |---|---|
//! | [`args`] | options |
//! | [`mod@simulate`] | runs the prompts through the prefix tree |
//! | [`report`] | the result: a table and JSON |

mod args;
mod report;
mod simulate;

use anyhow::Result;
use dsv4_kv::{CacheConfig, Capacity};
use dsv4_kv_trace::TraceReader;
use rayon::prelude::*;

pub use args::ReuseArgs;

use crate::error::InputError;
use crate::outcome::Outcome;
use crate::{model, output, progress};
pub use report::Report;
use report::Row;
use simulate::{CASES, Sizes, simulate};

/// Runs the command and prints its result.
pub fn run(args: &ReuseArgs) -> Result<Outcome> {
    let model = model::resolve(&args.model)?;
    let limit = args.requests.map_or(usize::MAX, |requests| requests as usize);
    let reader = TraceReader::open(&args.trace).map_err(InputError::from)?;
    let prompts = reader.read_prompts(limit).map_err(InputError::from)?;
    let name = model.name.clone();
    let config = CacheConfig { num_checkpoints: 1, ..CacheConfig::new(model) };
    let Capacity { block_bytes, checkpoint_bytes, .. } = Capacity::new(&config);
    let pools = args.pool.iter().map(|pool| pool.as_u64());
    let cases: Vec<_> = pools.flat_map(|pool| CASES.map(|case| (pool, case))).collect();
    let tokens = prompts.iter().map(|prompt| u64::from(prompt.tokens)).sum::<u64>();
    let bar = progress::tokens(tokens * cases.len() as u64);
    // Each tree may hold all tokens of the trace, so at most as many trees exist at once as there are cores.
    let row = |&(pool, case)| {
        let (interval, host) = (args.interval, args.host_cache.as_u64());
        let sizes = Sizes { block_bytes, checkpoint_bytes, interval, pool, host };
        simulate(case, sizes, &prompts, &bar).map(|simulated| Row::new(case.name, sizes, simulated))
    };
    let rows = cases.par_iter().map(row).collect::<Result<_, _>>()?;
    bar.finish_and_clear();
    let report = Report { model: name, block_bytes, checkpoint_bytes, rows };
    if args.json {
        output::print(serde_json::to_string_pretty(&report)?)?;
    } else {
        output::print(report)?;
    }
    Ok(Outcome::Passed)
}
