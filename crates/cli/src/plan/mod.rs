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

use crate::Verdict;
use crate::error::InputError;
use crate::{device, model};
use report::Report;

/// Runs the command and prints its result.
pub fn run(args: &PlanArgs) -> Result<Verdict> {
    let model = model::resolve(&args.model)?;
    let memory = args.gpu_mem.as_u64();
    let config = config(args, model)?;
    let report = Report::new(config, memory)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{report}");
    }
    Ok(Verdict::Passed)
}

/// The cache that the options ask for.
fn config(args: &PlanArgs, model: ModelConfig) -> Result<CacheConfig, InputError> {
    let max_context = args.context.unwrap_or(model.max_context);
    let config = CacheConfig {
        main_format: args.main_format,
        index_format: args.index_format,
        max_draft: args.max_draft,
        max_context,
        ..CacheConfig::smallest(model)
    };
    let left = args.gpu_mem.as_u64().saturating_sub(device::rounding(&config));
    let name = config.model.name.clone();
    let planned = match args.max_requests {
        Some(max_requests) => CacheConfig { max_requests, ..config }.with_memory(left),
        None => capacity::most_requests(config, left, max_context),
    };
    let (memory, left) = (args.gpu_mem, ByteSize(left));
    planned.map_err(|source| InputError::Cache { model: name, memory, left, source })
}
