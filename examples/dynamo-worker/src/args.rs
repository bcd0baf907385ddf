//! Options.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use clap::Parser;
use dynamo_backend_common::{CommonArgs, DisaggregationMode, ModelInput, WorkerConfig};

use crate::worker::KvWorker;

/// A worker of Dynamo on the model and the cache of dsv4-kv.
#[derive(Clone, Debug, Parser)]
pub struct Cli {
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    options: Options,
}

/// What is the worker's own.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The model: config.json, safetensors files and tokenizer.json.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// What clients call the model.
    #[arg(long, default_value = "dsv4-kv")]
    pub model_name: String,
    /// What tells these weights from others, never empty. A request moves only between workers that say the same: let
    /// workers on unlike machines, or of unlike builds, say different things if their bits shall not be mixed.
    #[arg(long)]
    pub revision: String,
    /// Where prefill workers leave requests, and decode workers of the same machine and user find them. A directory that
    /// does not exist, or that nobody else may write.
    #[arg(long, value_name = "DIR", default_value_os_t = default_exchange())]
    pub exchange: PathBuf,
    /// Where a prefill worker is asked whether a request may be taken. Only in networks that are trusted.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub control: String,
    /// Requests in the cache at once.
    #[arg(long, default_value_t = 8)]
    pub max_requests: u32,
    /// Most tokens of a request, prompt included.
    #[arg(long, default_value_t = 1024)]
    pub context: u32,
    /// Tokens of one prompt in a step.
    #[arg(long, default_value_t = 128)]
    pub chunk: u32,
    /// Checkpoints that prompts go on from.
    #[arg(long, default_value_t = 16)]
    pub checkpoints: u32,
    /// Runs on the first GPU instead of the CPU.
    #[arg(long)]
    pub gpu: bool,
    /// Which part of a request is done; set by `--disaggregation-mode`.
    #[arg(skip)]
    pub mode: DisaggregationMode,
}

/// A directory in memory whose name no two users share.
fn default_exchange() -> PathBuf {
    // The files of a process in `/proc` belong to its user.
    let user = std::fs::metadata("/proc/self").map_or(0, |process| process.uid());
    PathBuf::from(format!("/dev/shm/dsv4-kv-{user}"))
}

impl Cli {
    /// The worker, and what Dynamo's runtime needs to know of it.
    pub fn into_worker(self) -> (KvWorker, WorkerConfig) {
        let Self { common, mut options } = self;
        options.mode = common.disaggregation_mode;
        let prefill = options.mode.is_prefill() && common.component == "backend";
        let config = WorkerConfig {
            namespace: common.namespace,
            // As the frontend's router expects it.
            component: if prefill { "prefill".into() } else { common.component },
            endpoint: common.endpoint,
            model_name: options.model.to_string_lossy().into_owned(),
            served_model_name: Some(options.model_name.clone()),
            model_input: ModelInput::Tokens,
            endpoint_types: common.endpoint_types,
            custom_jinja_template: common.custom_jinja_template,
            // Decode workers share no prompts: what they have came for one request.
            enable_local_indexer: !options.mode.is_decode(),
            disaggregation_mode: options.mode,
            runtime: common.runtime,
            ..WorkerConfig::default()
        };
        (KvWorker::new(options), config)
    }
}
