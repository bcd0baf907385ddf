//! The interface for Dynamo.

use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use async_trait::async_trait;
use dsv4_kv_model::sequence::Finish;
use dynamo_backend_common::{
    BackendError, DynamoError, EngineConfig, GenerateContext, KvEventSource, LLMEngine,
    LLMEngineOutput, LLMEngineOutputExt, LlmRegistration, PreprocessedRequest, PromptTokensDetails,
    chunk, usage,
};
use futures::stream::BoxStream;
use kv_layout::geometry::BLOCK_TOKENS;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::args::Options;
use crate::batch::Ready;
use crate::device;
use crate::moves::{self, Fetched, Offered, Own, PERMITS};
use crate::offers::Kept;
use crate::request::{Job, Update, continuation, error};
use crate::ticket::Ticket;

/// A worker. Its engine runs in a separate thread from `start` to `cleanup`.
pub struct KvWorker {
    options: Options,
    running: Mutex<Option<Running>>,
    /// Permits for the memory of payloads, from before they are read until they are loaded.
    memory: Arc<Semaphore>,
}

struct Running {
    jobs: Sender<Job>,
    ready: Arc<Ready>,
    thread: JoinHandle<()>,
}

impl KvWorker {
    /// A worker that is not started.
    #[must_use]
    pub fn new(options: Options) -> Self {
        let memory = Arc::new(Semaphore::new(PERMITS));
        Self { options, running: Mutex::new(None), memory }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handles(&self) -> Option<(Sender<Job>, Arc<Ready>)> {
        self.lock().as_ref().map(|running| (running.jobs.clone(), Arc::clone(&running.ready)))
    }

    /// Number of offers of a prefill worker that were not claimed yet.
    #[must_use]
    pub fn offers(&self) -> usize {
        let offers = self.handles().and_then(|(_, ready)| ready.offers.clone());
        offers.map_or(0, |offers| offers.open())
    }

    fn registration(&self, ready: &Ready) -> EngineConfig {
        EngineConfig {
            model: self.options.model.to_string_lossy().into_owned(),
            served_model_name: Some(self.options.model_name.clone()),
            llm: Some(LlmRegistration {
                context_length: Some(ready.context),
                kv_cache_block_size: Some(BLOCK_TOKENS),
                total_kv_blocks: Some(ready.blocks.into()),
                max_num_seqs: Some(self.options.max_requests.into()),
                max_num_batched_tokens: Some(ready.step_tokens.into()),
                ..LlmRegistration::default()
            }),
            ..EngineConfig::default()
        }
    }

    /// Reads and verifies the request that a prefill worker has offered, when there is memory for it. `None` if that
    /// fails; the prompt is then computed here. If the request is cancelled meanwhile, this ends early; a read that has
    /// begun goes on, and its result is dropped. The prefill worker is told whenever its request is not taken.
    async fn fetch(
        &self,
        offered: Offered,
        request: &PreprocessedRequest,
        ready: &Arc<Ready>,
        ctx: &GenerateContext,
    ) -> Option<Fetched> {
        let permits = Arc::clone(&self.memory).acquire_many_owned(offered.permits());
        let permits = tokio::select! {
            biased;
            () = ctx.stopped() => return None,
            permits = permits => permits.ok()?,
        };
        let (exchange, prompt) = (self.options.exchange.clone(), Arc::clone(&request.token_ids));
        let ready = Arc::clone(ready);
        let read = tokio::task::spawn_blocking(move || {
            moves::fetch(&exchange, (offered, permits), own(&ready), &prompt)
        });
        let read = tokio::select! {
            biased;
            () = ctx.stopped() => return None,
            read = read => read,
        };
        match read {
            Ok(Ok(fetched)) => {
                let verified = fetched.verified();
                let tokens = verified.manifest().at.trunk;
                tracing::info!(tokens, bytes = verified.bytes(), "a request has come");
                return Some(fetched);
            }
            Ok(Err(error)) => tracing::warn!("{error:#}; the prompt is computed here"),
            Err(error) => tracing::error!(%error, "reading a request has panicked"),
        }
        None
    }
}

#[async_trait]
impl LLMEngine for KvWorker {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        let (jobs, taken) = mpsc::channel();
        let (ready, is_ready) = mpsc::channel();
        let options = self.options.clone();
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || device::run(&options, &taken, &ready))
            .map_err(|failed| error(BackendError::EngineShutdown, failed.to_string()))?;
        let told = tokio::task::spawn_blocking(move || is_ready.recv()).await;
        let ready = match told {
            Ok(Ok(Ok(ready))) => Arc::new(ready),
            Ok(Ok(Err(why))) => {
                return Err(error(BackendError::InvalidArgument, format!("{why:#}")));
            }
            _ => return Err(error(BackendError::EngineShutdown, "the engine's thread has ended")),
        };
        let config = self.registration(&ready);
        *self.lock() = Some(Running { jobs, ready, thread });
        Ok(config)
    }

    async fn generate(
        &self,
        request: PreprocessedRequest,
        ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
        let ended = || error(BackendError::EngineShutdown, "the engine does not run");
        let (jobs, ready) = self.handles().ok_or_else(ended)?;
        let limits = (ready.context, ready.vocabulary);
        // Before the request can be refused: an offer that is dropped tells its prefill worker.
        let offered = offered(&request, &ready);
        let continuation = continuation(&request, limits, &ready.end)?;
        let moved = match offered {
            Some(offered) => self.fetch(offered, &request, &ready, &ctx).await,
            None => None,
        };
        let (updates, mut told) = unbounded_channel();
        let prompt = request.token_ids.to_vec();
        let prompt_tokens = prompt.len() as u32;
        jobs.send(Job { prompt, continuation, moved, updates }).map_err(|_| ended())?;
        Ok(Box::pin(async_stream::stream! {
            let mut tokens = 0;
            loop {
                let update = tokio::select! {
                    biased;
                    () = ctx.stopped() => None,
                    update = next(&mut told) => Some(update),
                };
                let usage = |reused| {
                    let cached_tokens = Some(reused);
                    let details = PromptTokensDetails { cached_tokens, ..Default::default() };
                    let prompt_tokens_details = Some(details);
                    dynamo_backend_common::CompletionUsage {
                        prompt_tokens_details,
                        ..usage(prompt_tokens, tokens)
                    }
                };
                match update {
                    Some(Update::Token(token)) => {
                        tokens += 1;
                        yield Ok(chunk::token(token));
                        continue;
                    }
                    Some(Update::Finished(finish, reused)) => {
                        let output = match finish {
                            Finish::Length => LLMEngineOutput::length(),
                            Finish::End => LLMEngineOutput::stop(),
                        };
                        yield Ok(output.with_usage(usage(reused)));
                    }
                    Some(Update::Offered(offered, reused)) => {
                        let mut output = LLMEngineOutput::length().with_usage(usage(reused));
                        output.disaggregated_params = Some(handed_over(offered));
                        yield Ok(output);
                    }
                    Some(Update::Failed(why)) => yield Err(error(BackendError::Unknown, why)),
                    None => {
                        // Before anything else, so that an offer that has come is taken back at once.
                        drop(told);
                        yield Ok(LLMEngineOutput::cancelled().with_usage(usage(0)));
                    }
                }
                break;
            }
        }))
    }

    async fn is_quiescent(&self) -> Result<Option<bool>, DynamoError> {
        Ok(Some(self.offers() == 0))
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        let Some(Running { jobs, ready, thread }) = self.lock().take() else { return Ok(()) };
        // The thread ends when all senders of jobs are dropped.
        drop((jobs, ready));
        match tokio::task::spawn_blocking(move || thread.join()).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(error(BackendError::EngineShutdown, "the engine's thread has panicked")),
        }
    }

    async fn kv_event_sources(&self) -> Result<Vec<KvEventSource>, DynamoError> {
        let endpoint = self.handles().and_then(|(_, ready)| ready.events.clone());
        let source = |endpoint| KvEventSource::Zmq {
            endpoint,
            topic: String::new(),
            dp_rank: 0,
            image_token_id: None,
        };
        Ok(endpoint.map(source).into_iter().collect())
    }
}

/// What the router gives a decode worker of an offer: the ticket, which nobody takes back from now on. Without one the
/// decode worker computes the prompt itself, which is a single token or could not be offered.
fn handed_over(offered: Option<(Ticket, Kept)>) -> Value {
    if let Some((ticket, kept)) = offered
        && let Ok(ticket) = serde_json::to_value(ticket)
    {
        kept.hand_over();
        return ticket;
    }
    json!({})
}

/// The offer of a prefill worker, if this worker can take it.
fn offered(request: &PreprocessedRequest, ready: &Ready) -> Option<Offered> {
    let params = &request.prefill_result.as_ref()?.disaggregated_params;
    let offered = Ticket::from_json(params).and_then(|ticket| {
        ticket.map(|ticket| Offered::new(&ticket, own(ready), &request.token_ids)).transpose()
    });
    offered
        .inspect_err(|error| tracing::warn!("{error:#}; the prompt is computed here"))
        .unwrap_or_default()
}

fn own(ready: &Ready) -> Own<'_> {
    Own { fingerprint: &ready.fingerprint, layout: &ready.layout, max_context: ready.context }
}

/// The next update; an engine that ends drops its jobs.
async fn next(told: &mut UnboundedReceiver<Update>) -> Update {
    told.recv().await.unwrap_or_else(|| Update::Failed("the engine has ended".into()))
}
