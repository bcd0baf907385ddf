//! The publisher's thread. It hashes, encodes and sends events, and answers requests for missed messages.

use std::cell::OnceCell;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::runtime::Builder;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use crate::exchange::{Exchange, Handed};
use crate::options::{PublishError, PublisherOptions};
use crate::replay::{Replay, Since};
use crate::resident::Resident;
use crate::sent::counted;

/// The number that ends a replay.
const END: [u8; 8] = [0xff; 8];
/// How long one message of a replay may wait for the subscriber that asked for it.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for subscribers when the publisher is dropped.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between attempts to listen again, and between checks of unsent bytes.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The endpoints at which the thread listens, sent to its creator.
pub(crate) type Bound = Result<[String; 2], PublishError>;

/// The state of the thread.
pub(crate) struct Worker {
    exchange: Arc<Exchange>,
    options: PublisherOptions,
    resident: Resident,
    replay: Arc<Mutex<Replay>>,
    /// When the worker first waited for subscribers of a publisher that was dropped.
    closed: OnceCell<Instant>,
}

/// Why sockets are closed.
enum Closed {
    /// The exchange is closed.
    Ended,
    /// A subscriber does not read.
    Stalled,
}

impl Worker {
    pub fn new(exchange: Arc<Exchange>, options: PublisherOptions) -> Self {
        let first = options.first();
        exchange.counters.next.store(first, Relaxed);
        let replay = Arc::new(Mutex::new(Replay::new(options.replay_bytes, first)));
        let resident = Resident::new(options.data_parallel_rank);
        Self { exchange, options, resident, replay, closed: OnceCell::new() }
    }

    /// Runs until the exchange is closed. Ends at once if it cannot listen at the start.
    pub fn run(mut self, bound: &mpsc::Sender<Bound>) {
        let mut is_bound = false;
        loop {
            let runtime = match Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(_) if is_bound && !self.exchange.is_closed() => {
                    self.exchange.counters.failed_listens.fetch_add(1, Relaxed);
                    std::thread::sleep(POLL_INTERVAL);
                    continue;
                }
                Err(error) => return drop(bound.send(Err(error.into()))),
            };
            // Dropping the runtime drops the messages that wait for subscribers, which its tasks hold.
            let closed = runtime.block_on(async {
                let sockets = self.listen(is_bound).await;
                let (sockets, at) = match sockets {
                    Ok(listening) => listening,
                    Err(error) => {
                        drop(bound.send(Err(error)));
                        return Closed::Ended;
                    }
                };
                if !is_bound {
                    let [endpoint, replay_endpoint] = at.clone();
                    (self.options.endpoint, self.options.replay_endpoint) =
                        (endpoint, replay_endpoint);
                    drop(bound.send(Ok(at)));
                    is_bound = true;
                }
                self.serve(sockets).await
            });
            match closed {
                Closed::Ended => return,
                Closed::Stalled if self.exchange.is_closed() => return,
                Closed::Stalled => self.exchange.counters.disconnects.fetch_add(1, Relaxed),
            };
        }
    }

    /// Listens at both endpoints. With `again`, tries until it succeeds or the exchange is closed.
    async fn listen(
        &self,
        again: bool,
    ) -> Result<((PubSocket, RouterSocket), [String; 2]), PublishError> {
        loop {
            let (mut publish, mut replay) = (PubSocket::new(), RouterSocket::new());
            let listening = async {
                let endpoint = bind(&mut publish, &self.options.endpoint).await?;
                Ok([endpoint, bind(&mut replay, &self.options.replay_endpoint).await?])
            };
            match listening.await {
                Ok(at) => return Ok(((publish, replay), at)),
                Err(error) if !again || self.exchange.is_closed() => return Err(error),
                Err(_) => {
                    self.exchange.counters.failed_listens.fetch_add(1, Relaxed);
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
            }
        }
    }

    async fn serve(&mut self, (mut publish, router): (PubSocket, RouterSocket)) -> Closed {
        let answers = Answers {
            replay: Arc::clone(&self.replay),
            exchange: Arc::clone(&self.exchange),
            topic: self.options.topic.clone().into(),
        };
        tokio::spawn(answers.serve(router));
        loop {
            let handed = tokio::time::timeout(self.options.heartbeat, self.exchange.take()).await;
            let messages = match handed {
                Ok(Some(handed)) => self.write(handed),
                Ok(None) => break,
                Err(_) => self.keep(vec![self.resident.nothing()]),
            };
            // Messages that are not sent are kept for replay nevertheless. All messages of a snapshot are here at once,
            // whatever the limits for replay and unsent bytes are.
            let mut in_hand: usize = messages.iter().map(|(_, message)| message.len()).sum();
            for (number, message) in messages {
                in_hand -= message.len();
                self.send(&mut publish, number, message).await;
                if !self.waits_for_less(self.options.unsent_bytes.saturating_add(in_hand)).await {
                    return Closed::Stalled;
                }
            }
        }
        // Messages in the sockets' queues are still sent, if a subscriber reads them.
        self.waits_for_less(0).await;
        tokio::time::sleep(POLL_INTERVAL).await;
        Closed::Ended
    }

    /// Encodes an item as messages, and keeps them for replay. Returns them with their numbers.
    fn write(&mut self, handed: Handed) -> Vec<(u64, Bytes)> {
        let Self { exchange, resident, .. } = self;
        let counters = &exchange.counters;
        let mut messages = Vec::new();
        let is_snapshot = matches!(handed, Handed::Snapshot(_));
        let told = match handed {
            Handed::Events(batch) => {
                let told = resident.tell(&batch, |message| messages.push(message));
                exchange.give_back(batch);
                told
            }
            Handed::Snapshot(snapshot) => {
                let told = resident.restart(&snapshot, |message| messages.push(message));
                drop(snapshot);
                exchange.snapshot_dropped();
                told
            }
        };
        match told {
            Ok(told) => {
                counters.stored.fetch_add(told.stored, Relaxed);
                counters.removed.fetch_add(told.removed, Relaxed);
            }
            Err(_) => exchange.want_snapshot(),
        }
        counters.resident.store(resident.blocks() as u64, Relaxed);
        counters.snapshots.fetch_add(is_snapshot.into(), Relaxed);
        if is_snapshot {
            lock(&self.replay).restart();
        }
        self.keep(messages)
    }

    /// Keeps messages for replay, and returns them with their numbers.
    fn keep(&self, messages: Vec<Bytes>) -> Vec<(u64, Bytes)> {
        let counters = &self.exchange.counters;
        counters.messages.fetch_add(messages.len() as u64, Relaxed);
        let mut replay = lock(&self.replay);
        let keep = |message| {
            let message = counted(message, &self.exchange, |counters| &counters.bytes);
            (replay.push(message.clone()), message)
        };
        let messages: Vec<_> = messages.into_iter().map(keep).collect();
        if let Some((last, _)) = messages.last() {
            counters.next.store(last + 1, Relaxed);
        }
        messages
    }

    async fn send(&self, publish: &mut PubSocket, number: u64, message: Bytes) {
        let topic = Bytes::copy_from_slice(self.options.topic.as_bytes());
        let number = Bytes::copy_from_slice(&number.to_be_bytes());
        let message = counted(message, &self.exchange, |counters| &counters.unsent);
        // Without a subscriber the message is lost; later subscribers ask for a replay.
        drop(publish.send(frames([topic, number, message])).await);
        // The tasks that write to subscribers run in this thread, so let them run.
        tokio::task::yield_now().await;
    }

    /// Waits until at most `most` bytes wait for subscribers; `false` after the timeout.
    async fn waits_for_less(&self, most: usize) -> bool {
        let (mut since, mut least) = (Instant::now(), usize::MAX);
        loop {
            let unsent = self.unsent();
            if unsent <= most {
                return true;
            }
            let mut is_late = since.elapsed() > self.options.stall;
            if self.exchange.is_closed() {
                // Subscribers that read are waited for, but all messages together have a limited time.
                if unsent < least {
                    (since, least, is_late) = (Instant::now(), unsent, false);
                }
                is_late |= self.closed.get_or_init(Instant::now).elapsed() > CLOSE_TIMEOUT;
            }
            if is_late {
                return false;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Bytes that wait in subscribers' queues, or that are held elsewhere than in the replay.
    fn unsent(&self) -> usize {
        let all = self.exchange.counters.bytes.load(Relaxed) as usize;
        let unsent = self.exchange.counters.unsent.load(Relaxed) as usize;
        unsent.max(all.saturating_sub(lock(&self.replay).bytes()))
    }
}

/// Answers requests for missed messages.
struct Answers {
    replay: Arc<Mutex<Replay>>,
    exchange: Arc<Exchange>,
    topic: Bytes,
}

impl Answers {
    async fn serve(self, mut router: RouterSocket) {
        loop {
            match router.recv().await {
                Ok(request) => self.answer(&mut router, &request.into_vec()).await,
                Err(_) => tokio::time::sleep(POLL_INTERVAL).await,
            }
        }
    }

    /// Sends the kept messages from the requested number on, and an end marker. Ignores requests that it does not
    /// understand.
    async fn answer(&self, router: &mut RouterSocket, request: &[Bytes]) {
        let [client, empty, start] = request else { return };
        let (true, Ok(start)) = (empty.is_empty(), <[u8; 8]>::try_from(&start[..])) else { return };
        self.exchange.counters.replays.fetch_add(1, Relaxed);
        let Since { messages, has_all } = lock(&self.replay).since(u64::from_be_bytes(start));
        if !has_all {
            self.exchange.want_snapshot();
        }
        let end = [Bytes::new(), Bytes::from_static(&END), Bytes::new()];
        let number = |number: u64| Bytes::copy_from_slice(&number.to_be_bytes());
        let told = |(at, message)| [self.topic.clone(), number(at), message];
        for [topic, number, message] in messages.into_iter().map(told).chain([end]) {
            let answer = frames([client.clone(), Bytes::new(), topic, number, message]);
            // A client that has disconnected or does not read gets no more messages.
            match tokio::time::timeout(REPLAY_TIMEOUT, router.send(answer)).await {
                Ok(Ok(())) => tokio::task::yield_now().await,
                _ => return,
            }
        }
    }
}

/// Listens, and returns the endpoint with its actual port.
async fn bind(socket: &mut impl Socket, endpoint: &str) -> Result<String, PublishError> {
    let bound = socket.bind(endpoint).await;
    bound.map(|at| at.to_string()).map_err(|error| PublishError::Bind {
        endpoint: endpoint.to_owned(),
        reason: error.to_string(),
    })
}

fn frames<const N: usize>(frames: [Bytes; N]) -> ZmqMessage {
    let [first, rest @ ..] = &frames[..] else { unreachable!("a message has frames") };
    let mut message = ZmqMessage::from(first.clone());
    rest.iter().for_each(|frame| message.push_back(frame.clone()));
    message
}

fn lock(replay: &Mutex<Replay>) -> std::sync::MutexGuard<'_, Replay> {
    // Nothing can panic in the middle of a change.
    replay.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If another process takes the port while the publisher does not listen, dropping the publisher still ends its
    /// thread.
    #[test]
    fn who_cannot_listen_again_ends_when_told() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("tcp://{}", taken.local_addr().unwrap());
        let options = PublisherOptions { endpoint, ..PublisherOptions::default() };
        let exchange = Arc::new(Exchange::new(1, 1));
        let worker = Worker::new(Arc::clone(&exchange), options);
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let waits = runtime.block_on(async {
            tokio::time::timeout(Duration::from_millis(100), worker.listen(true)).await
        });
        assert!(waits.is_err(), "it tries again");
        assert!(exchange.counters.failed_listens.load(Relaxed) > 1);
        exchange.close();
        let ends = runtime.block_on(async {
            tokio::time::timeout(Duration::from_secs(10), worker.listen(true)).await
        });
        assert!(matches!(ends, Ok(Err(PublishError::Bind { .. }))));
    }
}
