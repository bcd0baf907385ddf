//! `dsv4-kv plan`: what a cache costs and how many requests it holds, before there is one.
//!
//! | module | what it holds |
//! |---|---|
//! | [`args`] | options |
//! | [`report`] | the result: tables and JSON |

mod args;
mod report;

use anyhow::Result;
use bytesize::ByteSize;
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{CacheConfig, capacity};

pub use args::PlanArgs;

use crate::error::InputError;
use crate::outcome::Outcome;
use crate::{device, model, output};
use report::Report;

/// Runs the command and prints its result.
pub fn run(args: &PlanArgs) -> Result<Outcome> {
    let model = model::resolve(&args.model)?;
    let report = planned(args, model)?;
    if args.json {
        output::print(serde_json::to_string_pretty(&report)?)?;
    } else {
        output::print(report)?;
    }
    Ok(Outcome::Passed)
}

/// The plan that the options ask for.
fn planned(args: &PlanArgs, model: ModelConfig) -> Result<Report, InputError> {
    let name = model.name.clone();
    let refused = |left| {
        let (model, memory, left) = (name.clone(), args.gpu_mem, ByteSize(left));
        move |source| InputError::Cache { model, memory, left, source }
    };
    let memory = args.gpu_mem.as_u64();
    let max_context = args.context.unwrap_or(model.max_context);
    let config = CacheConfig {
        main_format: args.main_format,
        index_format: args.index_format,
        max_draft: args.max_draft,
        num_checkpoints: args.checkpoints,
        max_suspended: args.suspended,
        host_bytes: args.host_cache.as_u64(),
        max_context,
        ..CacheConfig::smallest(model)
    };
    let indexer = config
        .validate()
        .and_then(|()| device::indexer(&config, args.indexer_queries, u64::MAX))
        .map_err(refused(memory))?;
    let taken = indexer.map_or(0, |indexer| indexer.bytes);
    let left = memory.saturating_sub(taken + device::rounding(&config, indexer.as_ref()));
    let config = match args.max_requests {
        Some(max_requests) => CacheConfig { max_requests, ..config }.with_memory(left),
        None => capacity::most_requests(config, left, max_context),
    };
    let report = config.and_then(|config| Report::new(config, indexer, memory, left));
    report.map_err(refused(left))
}
