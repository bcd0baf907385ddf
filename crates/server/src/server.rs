//! The server as a whole: the scheduler's thread, the connections, and how both end.

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
use crate::cold::ColdCache;
use crate::error::ServerError;
use crate::metrics::Metrics;
use crate::routes::router;
use crate::scheduler::{Scheduler, SchedulerLimits};

/// How often is looked whether the server should end.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long the end of a server waits for each of these: the last step of a scheduler that was aborted, a cold store that still
/// writes, and connections that still send.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// Requests whose texts are encoded at once. Eight million bytes of one word take a minute and 1.6 GiB.
const ENCODERS: usize = 4;

/// How a server serves.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The name under which the model is asked for.
    pub model: String,
    /// Tokens that end a completion.
    pub end: Vec<u32>,
    /// Drafts of a step and sequence; the engine must have been made for them.
    pub drafts: usize,
    /// How steps are filled, and how many may wait.
    pub scheduler: SchedulerLimits,
    /// Most bytes of a request's body.
    pub body_bytes: usize,
    /// Where prefixes are kept beyond the server's end, if anywhere.
    pub cold: Option<ColdCache>,
    /// How long requests may take to their end when the server shuts down.
    pub shutdown_timeout: Duration,
}

/// A server that listens, and answers once it runs.
pub struct Server<B: Backend> {
    listener: TcpListener,
    scheduler: Scheduler<B>,
    app: Arc<App>,
    settings: Settings,
}

/// How a server that was told to end has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All requests came to their end.
    Done,
    /// Some were ended, or their answers were not sent, within its timeout.
    Cut,
}

impl<B: Backend> Server<B> {
    /// A server of this engine that listens at `address`.
    ///
    /// # Errors
    /// [`ServerError`] for an address that cannot be had, or settings that do not fit the engine.
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
            text: Arc::new(text),
            model: settings.model.clone(),
            created: unix_time(),
            end: settings.end.clone(),
            drafts,
            metrics,
        };
        Ok(Self { listener, scheduler, app: Arc::new(app), settings })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// [`ServerError::System`].
    pub fn address(&self) -> Result<SocketAddr, ServerError> {
        let system =
            |error| ServerError::System { doing: "the address that is listened at", error };
        self.listener.local_addr().map_err(system)
    }

    /// Serves until `stop` says so: then new requests get 503, and those that were taken come to their end, or
    /// to that of [`Settings::shutdown_timeout`].
    ///
    /// # Errors
    /// [`ServerError`]: the scheduler has ended by itself, or the system refuses threads.
    pub fn run(self, stop: impl Fn() -> bool) -> Result<Ended, ServerError> {
        let Self { listener, mut scheduler, app, settings } = self;
        let system = |error| ServerError::System { doing: "threads to serve with", error };
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.map_err(system)?;
        let (tell, told) = channel();
        let work = move || {
            let ended = catch_unwind(AssertUnwindSafe(|| scheduler.run()));
            // Told before the scheduler is dropped, which waits for the store. If nobody asks any more, the server has ended.
            let _ = tell.send(ended.unwrap_or(Err(ServerError::Panicked)));
        };
        let thread = thread::Builder::new().name("scheduler".into()).spawn(work).map_err(system)?;
        let mut scheduler = Running { told, end: None };
        let ended = runtime.block_on(serve(listener, &app, &settings, &mut scheduler, stop));
        runtime.shutdown_background();
        // Whatever the reason, nothing is taken any more.
        app.queue.abort();
        let ended = ended?;
        if scheduler.has_ended() {
            let begin = Instant::now();
            while !thread.is_finished() && begin.elapsed() < FLUSH_TIMEOUT {
                thread::sleep(POLL_INTERVAL);
            }
        }
        // A scheduler that has not ended by now is in a call of the device that does not return.
        scheduler.end.unwrap_or(Ok(()))?;
        Ok(ended)
    }
}

/// The scheduler on its thread.
struct Running {
    told: Receiver<Result<(), ServerError>>,
    /// How it has ended.
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

    /// Whether it ends within this time.
    async fn ends_within(&mut self, timeout: Duration) -> bool {
        let begin = Instant::now();
        while !self.has_ended() && begin.elapsed() < timeout {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        self.has_ended()
    }
}

/// Serves until the end, and waits for what is under way.
async fn serve(
    listener: TcpListener,
    app: &Arc<App>,
    settings: &Settings,
    scheduler: &mut Running,
    stop: impl Fn() -> bool,
) -> Result<Ended, ServerError> {
    let system = |error| ServerError::System { doing: "the address to listen at", error };
    let listener = tokio::net::TcpListener::from_std(listener).map_err(system)?;
    // A token is to go out when it comes.
    let listener = listener.tap_io(|connection| {
        let _ = connection.set_nodelay(true);
    });
    let (close, closed) = oneshot::channel::<()>();
    let serving = axum::serve(listener, router(Arc::clone(app), settings.body_bytes));
    let serving = serving.with_graceful_shutdown(async { closed.await.unwrap_or_default() });
    let connections = tokio::spawn(serving.into_future());
    let tidying = tokio::spawn(tidy(app.metrics.clone()));
    while !stop() && !scheduler.has_ended() {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    let timeout = if scheduler.has_ended() { FLUSH_TIMEOUT } else { settings.shutdown_timeout };
    // The listener stays open meanwhile: new requests are told that there is no use.
    app.queue.close();
    let begin = Instant::now();
    // It has ended once the store has taken what is to be stored.
    if !scheduler.ends_within(timeout).await {
        app.queue.abort();
        scheduler.ends_within(FLUSH_TIMEOUT).await;
    }
    let is_done = app.queue.is_done();
    let _ = close.send(());
    // Answers that are whole may still be on their way to clients that read slowly.
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
