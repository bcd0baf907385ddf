//! The publisher's thread. It hashes, encodes and sends events, and has requests for missed messages answered.

use std::cell::OnceCell;
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::runtime::Builder;
use zeromq::{PubSocket, RouterSocket, SocketSend};

use crate::answers::Answers;
use crate::exchange::{Exchange, Handed};
use crate::listeners::Listeners;
use crate::options::PublisherOptions;
use crate::replay::{Replay, lock};
use crate::resident::Resident;
use crate::sent::{cost, counted, frames};

/// Longest wait for subscribers when the publisher is dropped.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between attempts to accept connections, and between checks of unsent messages.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Messages that may wait for subscribers. If 100,000 wait for one, zeromq 0.7 drops further ones without a word.
const MAX_UNSENT: u64 = 50_000;

/// The state of the thread.
pub(crate) struct Worker {
    exchange: Arc<Exchange>,
    options: PublisherOptions,
    listeners: Listeners,
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
    pub fn new(exchange: Arc<Exchange>, listeners: Listeners, options: PublisherOptions) -> Self {
        let first = options.first();
        exchange.counters.next.store(first, Relaxed);
        let replay = Arc::new(Mutex::new(Replay::new(options.replay_bytes, first)));
        let resident = Resident::new(options.data_parallel_rank);
        Self { exchange, options, listeners, resident, replay, closed: OnceCell::new() }
    }

    /// Runs until the exchange is closed. Tells once that connections are accepted, or that they cannot be accepted at the
    /// start, and ends then.
    pub fn run(mut self, tell: &mpsc::Sender<io::Result<()>>) {
        let mut has_started = false;
        loop {
            let closed = self.open(|| {
                if !std::mem::replace(&mut has_started, true) {
                    drop(tell.send(Ok(())));
                }
            });
            let (is_over, counters) = (self.exchange.is_closed(), &self.exchange.counters);
            match closed {
                Ok(Closed::Ended) => return,
                Err(error) if !has_started => return drop(tell.send(Err(error))),
                _ if is_over => return,
                Ok(Closed::Stalled) => {
                    counters.disconnects.fetch_add(1, Relaxed);
                }
                Err(_) => {
                    counters.failed_listens.fetch_add(1, Relaxed);
                    std::thread::sleep(POLL_INTERVAL);
                }
            }
        }
    }

    /// Accepts connections, calls `opened`, and serves the connections until they are closed.
    fn open(&mut self, opened: impl FnOnce()) -> io::Result<Closed> {
        // Dropping the runtime drops the messages that wait for subscribers, which its tasks hold.
        let runtime = Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let sockets = self.listeners.sockets().await?;
            opened();
            Ok::<_, io::Error>(self.serve(sockets).await)
        })
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
            let mut in_hand: usize = messages.iter().map(|(_, message)| cost(message)).sum();
            for (number, message) in messages {
                in_hand -= cost(&message);
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
            let message = counted(message, &self.exchange, |counters| &counters.held);
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

    /// Waits until at most `most` bytes and [`MAX_UNSENT`] messages wait for subscribers; `false` after the timeout.
    async fn waits_for_less(&self, most: usize) -> bool {
        let (mut since, mut least) = (Instant::now(), usize::MAX);
        loop {
            let unsent = self.unsent();
            let messages = self.exchange.counters.unsent.messages.load(Relaxed);
            if unsent <= most && messages <= MAX_UNSENT {
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
        let counters = &self.exchange.counters;
        let held = counters.held.bytes.load(Relaxed) as usize;
        let unsent = counters.unsent.bytes.load(Relaxed) as usize;
        unsent.max(held.saturating_sub(lock(&self.replay).bytes()))
    }
}

#[cfg(test)]
mod tests {
    use zeromq::{Socket, SocketRecv, SubSocket};

    use super::*;

    fn options() -> PublisherOptions {
        let any_port = "tcp://127.0.0.1:0".to_owned();
        PublisherOptions {
            endpoint: any_port.clone(),
            replay_endpoint: any_port,
            stall: Duration::from_millis(50),
            ..PublisherOptions::default()
        }
    }

    /// A publisher that cannot accept connections at the start, for example because the process has too many open
    /// files, ends and says why.
    #[cfg(unix)]
    #[test]
    fn a_start_without_sockets_fails() {
        let options = options();
        let mut listeners = Listeners::bind(&options).unwrap();
        let no_socket = std::fs::File::open("/dev/null").unwrap();
        listeners.replay = std::os::fd::OwnedFd::from(no_socket).into();
        let exchange = Arc::new(Exchange::new(1, 1));
        let worker = Worker::new(Arc::clone(&exchange), listeners, options);
        let (tell, told) = mpsc::channel();
        let thread = std::thread::spawn(move || worker.run(&tell));
        let told = told.recv_timeout(Duration::from_secs(20));
        exchange.close();
        thread.join().unwrap();
        assert!(matches!(told, Ok(Err(_))), "{told:?}");
    }

    /// zeromq drops messages without a word if 100,000 of them wait for a subscriber. A publisher stops before that,
    /// however small they are.
    #[test]
    fn many_messages_are_too_many_however_small() {
        let options = options();
        let listeners = Listeners::bind(&options).unwrap();
        let worker = Worker::new(Arc::new(Exchange::new(1, 1)), listeners, options);
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let waiting = runtime.block_on(async {
            let (mut publish, _router) = worker.listeners.sockets().await.unwrap();
            let mut subscriber = SubSocket::new();
            subscriber.connect(&worker.listeners.endpoints[0]).await.unwrap();
            subscriber.subscribe("").await.unwrap();
            // They fill the buffers of the connection soon. Any number of bytes may wait.
            let message = Bytes::from(vec![0; 4096]);
            while tokio::time::timeout(POLL_INTERVAL, subscriber.recv()).await.is_err() {
                worker.send(&mut publish, 0, message.clone()).await;
            }
            let mut sent = 0;
            while worker.waits_for_less(usize::MAX).await {
                assert!(sent < 200_000, "nobody notices that {sent} messages are not read");
                worker.send(&mut publish, 0, message.clone()).await;
                sent += 1;
            }
            worker.exchange.counters.unsent.messages.load(Relaxed)
        });
        assert!((MAX_UNSENT..100_000).contains(&waiting), "{waiting} messages wait");
    }
}
