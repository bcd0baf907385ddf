//! The whole server: the scheduler's thread, the connections, and the shutdown of both.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use axum::serve::ListenerExt;
use dsv4_kv_device::Backend;
use dsv4_kv_model::Engine;
use dsv4_kv_model::text::Text;
use tokio::sync::{Semaphore, oneshot};

use crate::answer::unix_time;
use crate::app::App;
use crate::cold::{CLOSE_TIMEOUT, ColdCache};
use crate::error::ServerError;
use crate::metrics::Metrics;
use crate::queue::CloseOnDrop;
use crate::routes::router;
use crate::scheduler::{Scheduler, SchedulerLimits};

/// Interval between checks whether the server should end.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long a shutdown waits for each of these: the last step of an aborted scheduler, and connections that still send.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a shutdown waits until a scheduler that has ended is dropped: its cold tier waits for the store, and then
/// reports what is not stored.
const DROP_TIMEOUT: Duration = CLOSE_TIMEOUT.saturating_add(Duration::from_secs(1));

/// Most requests whose texts are encoded at the same time. Encoding eight million bytes of one word takes a minute and
/// 1.6 GiB.
const ENCODERS: usize = 4;

/// Most bodies that are parsed at the same time. An array of token ids takes 16 times its size while it is parsed.
const PARSERS: usize = 4;

/// The settings of a server.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The name of the model in requests.
    pub model: String,
    /// Tokens that end a completion.
    pub end: Vec<u32>,
    /// Draft tokens of a sequence in a step; the engine must have been built for as many.
    pub drafts: usize,
    /// How steps are filled, and how many sequences may wait.
    pub scheduler: SchedulerLimits,
    /// Most bytes of a request's body.
    pub body_bytes: usize,
    /// After so long without an event a stream sends a comment, so that proxies keep its connection open; `None`: it
    /// sends none. Several clients take a comment for an event and fail, among them those of vLLM's and SGLang's
    /// benchmarks.
    pub keep_alive: Option<Duration>,
    /// The cold tier, in which prefixes outlive the server; optional.
    pub cold: Option<ColdCache>,
    /// How long a shutdown lets running requests continue.
    pub shutdown_timeout: Duration,
}

/// A server that listens at its address. It answers after [`Self::run`] was called.
pub struct Server<B: Backend> {
    listener: TcpListener,
    scheduler: Scheduler<B>,
    app: Arc<App>,
    settings: Settings,
}

/// How a requested shutdown went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All requests were completed.
    Done,
    /// Some requests were aborted at the timeout, or their answers could not be sent completely.
    Cut,
}

impl<B: Backend> Server<B> {
    /// A server for this engine, listening at `address`.
    ///
    /// # Errors
    /// [`ServerError`] for an address that is not available, or settings that do not fit the engine.
    pub fn bind(
        address: impl ToSocketAddrs,
        engine: Engine<B>,
        text: Text,
        settings: Settings,
    ) -> Result<Self, ServerError> {
        let (drafts, most) = (settings.drafts, engine.cache().config().max_draft);
        if drafts > most as usize {
            return Err(ServerError::TooManyDrafts { drafts, most });
        }
        let system = |error| ServerError::System { doing: "the address to listen at", error };
        let listener = TcpListener::bind(address).map_err(system)?;
        listener.set_nonblocking(true).map_err(system)?;
        let metrics = Metrics::new()?;
        let mut scheduler = Scheduler::new(engine, settings.scheduler, metrics.clone())?;
        settings.cold.as_ref().map_or(Ok(()), |cold| scheduler.open_cold(cold))?;
        let app = App {
            queue: scheduler.queue(),
            most_bytes_per_token: text.most_bytes_per_token(),
            encoders: Arc::new(Semaphore::new(ENCODERS)),
            parsers: Arc::new(Semaphore::new(PARSERS)),
            body_bytes: settings.body_bytes,
            keep_alive: settings.keep_alive,
            text: Arc::new(text),
            model: settings.model.clone(),
            created: unix_time(),
            end: settings.end.clone(),
            drafts,
            metrics,
        };
        Ok(Self { listener, scheduler, app: Arc::new(app), settings })
    }

    /// The address at which it listens.
    ///
    /// # Errors
    /// [`ServerError::System`].
    pub fn address(&self) -> Result<SocketAddr, ServerError> {
        let system =
            |error| ServerError::System { doing: "the address that is listened at", error };
        self.listener.local_addr().map_err(system)
    }

    /// Serves until `stop` returns `true`. From then on new requests get 503, and accepted requests run until they are
    /// completed, or until [`Settings::shutdown_timeout`] has passed.
    ///
    /// # Errors
    /// [`ServerError`] if the scheduler has ended by itself, or the system refuses threads.
    pub fn run(self, stop: impl Fn() -> bool) -> Result<Ended, ServerError> {
        let Self { listener, mut scheduler, app, settings } = self;
        let system = |error| ServerError::System { doing: "threads to serve with", error };
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.map_err(system)?;
        let (tell, told) = channel();
        let work = move || {
            let ended = catch_unwind(AssertUnwindSafe(|| scheduler.run()));
            // Sent before the scheduler is dropped, since dropping it waits for the store. Sending fails if the server
            // has ended.
            let _ = tell.send(ended.unwrap_or(Err(ServerError::Panicked)));
        };
        let thread = thread::Builder::new().name("scheduler".into()).spawn(work).map_err(system)?;
        // Accepts no more requests when serving has ended, also by a panic in `stop`.
        let closed = CloseOnDrop(Arc::clone(&app.queue));
        let mut scheduler = Running { told, end: None };
        let ended = runtime.block_on(serve(listener, &app, &settings, &mut scheduler, stop));
        runtime.shutdown_background();
        drop(closed);
        let ended = ended?;
        if scheduler.has_ended() {
            let begin = Instant::now();
            while !thread.is_finished() && begin.elapsed() < DROP_TIMEOUT {
                thread::sleep(POLL_INTERVAL);
            }
        }
        // A scheduler that has not ended by now is stuck in a device call. Its thread is left alone.
        scheduler.end.unwrap_or(Ok(()))?;
        Ok(ended)
    }
}

/// The scheduler's thread, as seen from the server.
struct Running {
    told: Receiver<Result<(), ServerError>>,
    /// Its result, once it has ended.
    end: Option<Result<(), ServerError>>,
}

impl Running {
    /// Whether it has ended.
    fn has_ended(&mut self) -> bool {
        if self.end.is_none() {
            self.end = self.told.try_recv().ok();
        }
        self.end.is_some()
    }

    /// Waits until it has ended, at most for `timeout`. Returns whether it has ended.
    async fn ends_within(&mut self, timeout: Duration) -> bool {
        let begin = Instant::now();
        while !self.has_ended() && begin.elapsed() < timeout {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        self.has_ended()
    }
}

/// Serves until `stop` returns `true` or the scheduler ends. Then waits for requests and answers under way.
async fn serve(
    listener: TcpListener,
    app: &Arc<App>,
    settings: &Settings,
    scheduler: &mut Running,
    stop: impl Fn() -> bool,
) -> Result<Ended, ServerError> {
    let system = |error| ServerError::System { doing: "the address to listen at", error };
    let listener = tokio::net::TcpListener::from_std(listener).map_err(system)?;
    // Send each token at once, without Nagle's algorithm.
    let listener = listener.tap_io(|connection| {
        let _ = connection.set_nodelay(true);
    });
    let (close, closed) = oneshot::channel::<()>();
    let serving = axum::serve(listener, router(Arc::clone(app)));
    let serving = serving.with_graceful_shutdown(async { closed.await.unwrap_or_default() });
    let connections = tokio::spawn(serving.into_future());
    let tidying = tokio::spawn(tidy(app.metrics.clone()));
    while !stop() && !scheduler.has_ended() {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    let timeout = if scheduler.has_ended() { FLUSH_TIMEOUT } else { settings.shutdown_timeout };
    // The listener stays open, so that new requests get 503.
    app.queue.close();
    let begin = Instant::now();
    // The scheduler ends only after the cold store has written its prefixes.
    if !scheduler.ends_within(timeout).await {
        app.queue.abort();
        scheduler.ends_within(FLUSH_TIMEOUT).await;
    }
    let is_done = app.queue.is_done();
    let _ = close.send(());
    // Complete answers may still be in transit to slow clients.
    let left = timeout.saturating_sub(begin.elapsed()).max(FLUSH_TIMEOUT);
    let are_told = tokio::time::timeout(left, connections).await.is_ok();
    tidying.abort();
    Ok(if is_done && are_told { Ended::Done } else { Ended::Cut })
}

async fn tidy(metrics: Metrics) {
    loop {
        tokio::time::sleep(Duration::from_secs(5)).await;
        metrics.tidy();
    }
}
