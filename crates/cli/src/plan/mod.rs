//! `dsv4-kv plan`: the cost of a cache, and the number of requests that it holds, before it is created.
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
use dsv4_kv::{CacheConfig, Capacity, KvError, WorkspaceSize, capacity};

pub use args::PlanArgs;

use crate::error::InputError;
use crate::outcome::Outcome;
use crate::{device, model, output, share};
pub use report::Report;

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

/// The plan for these options.
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
        max_suspended: args.suspended,
        max_context,
        ..CacheConfig::new(model)
    };
    let indexer = config
        .validate()
        .and_then(|()| device::indexer(&config, args.indexer_queries, u64::MAX))
        .map_err(refused(memory))?;
    let plan = Plan { args, memory, config, indexer };
    let without = plan.sized(0, 0);
    let host_bytes = args.host_cache.as_u64();
    if host_bytes > 0 && args.checkpoints == Some(0) {
        return Err(InputError::HostWithoutCheckpoints { size: args.host_cache });
    }
    let wanted = match (args.checkpoints, &without.1) {
        (Some(checkpoints), _) => checkpoints,
        (None, Ok(without)) => share::checkpoints(without),
        // So the error is about the memory, not about missing checkpoints.
        (None, Err(_)) => u32::from(host_bytes > 0),
    };
    let (mut left, mut sized) = plan.sized(wanted, host_bytes);
    // A cache with checkpoints needs additional memory, which may be more than was left.
    if sized.is_err() && args.checkpoints.is_none() && host_bytes == 0 {
        (left, sized) = plan.sized(0, 0);
    }
    let sized = sized.map_err(refused(left))?;
    let without = without.1.ok().map(|without| Capacity::new(&without).requests_of(max_context));
    Report::new(sized, plan.indexer, without, (memory, left)).map_err(refused(left))
}

/// The inputs of a plan.
struct Plan<'a> {
    args: &'a PlanArgs,
    memory: u64,
    config: CacheConfig,
    indexer: Option<WorkspaceSize>,
}

impl Plan<'_> {
    /// The configuration of the cache with this number of checkpoints and this size of host memory; and the memory that
    /// is left for it.
    fn sized(&self, num_checkpoints: u32, host_bytes: u64) -> (u64, Result<CacheConfig, KvError>) {
        let config = CacheConfig { num_checkpoints, host_bytes, ..self.config.clone() };
        if let Err(refusal) = config.validate() {
            return (self.memory, Err(refusal));
        }
        let indexer = self.indexer.as_ref();
        let taken = indexer.map_or(0, |indexer| indexer.bytes);
        let left = self.memory.saturating_sub(taken + device::rounding(&config, indexer));
        let context = config.max_context;
        let sized = match self.args.max_requests {
            Some(max_requests) => CacheConfig { max_requests, ..config }.with_memory(left),
            None => capacity::most_requests(config, left, context),
        };
        (left, sized)
    }
}
