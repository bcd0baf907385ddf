//! `dsv4-kv serve`: completions over HTTP.

mod args;
mod identity;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use dsv4_kv::device::{Backend, Device, EmuDevice, EmuOptions};
use dsv4_kv_model::text::Text;
use dsv4_kv_model::{Engine, EngineLimits, Model};
use dsv4_kv_server::scheduler::SchedulerLimits;
use dsv4_kv_server::{ColdCache, ColdError, ColdOptions, Ended, Server, ServerError, Settings};
use sha2::Sha256;

pub use args::ServeArgs;

use crate::error::InputError;
use crate::generate::{EMULATED_MEMORY, load, refused_engine};
use crate::interrupt::Interrupt;
use crate::outcome::Outcome;
use crate::output;
use identity::Files;

/// The default context, if the model supports it.
const CONTEXT: u32 = 8192;
/// Most tokens of a step that is replayed from a graph.
const GRAPH_TOKENS: u32 = 32;

/// Serves until a signal ends it.
///
/// # Errors
/// Refused input; an error of the device.
pub fn run(args: &ServeArgs) -> Result<Outcome> {
    if args.host_cache.as_u64() > 0 && args.checkpoints == 0 {
        return Err(InputError::HostWithoutCheckpoints { size: args.host_cache }.into());
    }
    if args.cold_cache.is_some() && args.host_cache.as_u64() == 0 {
        return Err(InputError::ColdWithoutHost.into());
    }
    let files = args.cold_cache.as_ref().map(|_| Files::of(&args.model)).transpose()?;
    let model = Arc::new(load(&args.model)?);
    let digest = files.as_ref().map(Files::digest).transpose()?;
    let text = Text::of_model(&args.model, model.config.vocab_size);
    let text = text.map_err(|error| InputError::Serve(error.to_string()))?;
    let loaded = Loaded { model, text, digest };
    match args.device.gpu(0)? {
        Some(device) => on_device(&device, args, loaded),
        None => {
            let device = EmuDevice::new(EmuOptions { memory: EMULATED_MEMORY, seed: 0 });
            on_device(&device, args, loaded)
        }
    }
}

/// A loaded model.
struct Loaded {
    model: Arc<Model>,
    text: Text,
    /// Digest of its files, if a cold cache needs it.
    digest: Option<Sha256>,
}

fn on_device<B: Backend>(device: &Device<B>, args: &ServeArgs, loaded: Loaded) -> Result<Outcome> {
    let place = args.attention.place(device, &loaded.model)?;
    let identity = loaded.digest.as_ref();
    let identity = identity.map(|digest| identity::of(digest, place, &device.info().name));
    let Loaded { model, text, .. } = loaded;
    let settings = settings(args, &model, identity.transpose()?);
    let mut engine =
        Engine::with_attention(device, Arc::clone(&model), limits(args, &model), place)
            .map_err(refused_engine)?;
    if args.graphs {
        let tokens = args.draft + 1;
        let requests = GRAPH_TOKENS.min(args.max_step_tokens) / tokens;
        if requests == 0 {
            return Err(InputError::GraphsWithoutTokens { needed: tokens }.into());
        }
        engine.capture(requests.min(args.max_requests), tokens).map_err(refused_engine)?;
    }
    // Only from here on: a signal while the model is read ends the process at once.
    let interrupt = Interrupt::listen_to_both()?;
    let name = settings.model.clone();
    let server = Server::bind(&args.listen, engine, text, settings)
        .map_err(|error| refused(error, &args.listen))?;
    let (address, device) = (server.address()?, &device.info().name);
    output::print(format_args!("serving `{name}` at http://{address} on {device}"))?;
    match server.run(|| interrupt.is_requested())? {
        Ended::Done => Ok(Outcome::Passed),
        Ended::Cut => {
            output::note(
                "note: some completions, or answers on their way to clients, took longer than --shutdown-timeout",
            );
            Ok(Outcome::Interrupted)
        }
    }
}

fn limits(args: &ServeArgs, model: &Model) -> EngineLimits {
    let context = args.context.unwrap_or_else(|| CONTEXT.min(model.config.cache.max_context));
    let quarter = u64::from(args.max_requests) * u64::from(context) / 4;
    let cached = quarter.max(context.into()).min(1 << 31) as u32;
    EngineLimits {
        requests: args.max_requests,
        context,
        max_total_tokens: args.max_total_tokens.unwrap_or(cached),
        max_step_tokens: args.max_step_tokens,
        max_draft: args.draft,
        checkpoints: args.checkpoints,
        host_bytes: args.host_cache.as_u64(),
        event_capacity: 0,
        attention_cluster: args.attention.attention_cluster.into(),
    }
}

fn settings(args: &ServeArgs, model: &Model, identity: Option<Vec<u8>>) -> Settings {
    let cold = |(url, identity): (&String, Vec<u8>)| {
        let timeout = Duration::from_secs_f64(args.cold_timeout);
        let (url, options) = (url.clone(), ColdOptions::from_env());
        ColdCache { url, options, timeout, identity, report: report_cold }
    };
    let (chunk, waiting) = (args.chunk as usize, args.max_waiting as usize);
    Settings {
        cold: args.cold_cache.as_ref().zip(identity).map(cold),
        model: args.model_name.clone().unwrap_or_else(|| folder_name(&args.model)),
        end: model.config.eos.clone(),
        drafts: args.draft as usize,
        scheduler: SchedulerLimits { chunk, waiting },
        body_bytes: usize::try_from(args.max_body.as_u64()).unwrap_or(usize::MAX),
        keep_alive: Some(Duration::from_secs_f64(args.sse_keep_alive))
            .filter(|time| !time.is_zero()),
        shutdown_timeout: Duration::from_secs_f64(args.shutdown_timeout),
    }
}

fn folder_name(folder: &Path) -> String {
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.into());
    folder.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
}

/// Settings that contradict each other, and an address that cannot be used, are refused input.
fn refused(error: ServerError, address: &str) -> anyhow::Error {
    match error {
        ServerError::System { doing: "the address to listen at", error } => {
            InputError::Listen { address: address.into(), source: error }.into()
        }
        ServerError::StepTooShort { .. }
        | ServerError::TooManyDrafts { .. }
        | ServerError::Cold(_)
        | ServerError::System { .. } => InputError::Serve(error.to_string()).into(),
        error => error.into(),
    }
}

/// Prints why the cold cache did not store or read something, and how many errors of the same kind were not printed.
fn report_cold(error: &ColdError, others: u64) {
    match others {
        0 => output::note(format_args!("cold cache: {error}")),
        _ => output::note(format_args!("cold cache: {error} ({others} more of this kind before)")),
    }
}
