//! Answers requests for missed messages. Each client has its own task, and its own limit of answers that it has not
//! read, so that a client that does not read delays nobody else.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::AbortHandle;
use tokio::time::timeout;
use zeromq::{RouterSendHalf, RouterSocket, Socket, SocketEvent, SocketRecv, SocketSend};

use crate::exchange::Exchange;
use crate::replay::{Replay, Since, lock};
use crate::sent::frames;

/// The number that ends a replay.
const END: [u8; 8] = [0xff; 8];
/// How long an answer may wait for its client.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after a failed attempt to receive.
const PAUSE: Duration = Duration::from_millis(2);
/// Requests of a client that may wait; further ones are ignored.
const MAX_REQUESTS: usize = 1000;
/// Answers to a client that may wait in zeromq's queue. Must be below the queue's capacity, 100,000 in zeromq 0.7, so
/// that `send` never waits: if it waits, it may hold a lock that zeromq needs, in the same thread, when the connection
/// ends.
const MAX_QUEUED: usize = 128;
/// Bytes of a queued message for which it counts as one answer more: 256 KiB may wait, or one message.
const PLACE: usize = 2048;

/// What answers are made from.
#[derive(Clone)]
pub(crate) struct Answers {
    pub replay: Arc<Mutex<Replay>>,
    pub exchange: Arc<Exchange>,
    pub topic: Bytes,
}

/// A client that asks for missed messages.
struct Client {
    id: Bytes,
    send: RouterSendHalf,
    /// A permit for each answer that may be added to its queue; a long one takes several.
    room: Arc<Semaphore>,
}

/// The frame with the number of an answer, which is in the queue as long as this frame exists.
struct Queued {
    number: [u8; 8],
    _places: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Queued {
    fn as_ref(&self) -> &[u8] {
        &self.number
    }
}

impl Answers {
    /// Answers all requests; never returns.
    pub async fn serve(self, mut router: RouterSocket) {
        let mut events = router.monitor();
        let (send, mut requests) = router.split();
        let mut clients: HashMap<Bytes, (mpsc::Sender<u64>, AbortHandle)> = HashMap::new();
        loop {
            let request = tokio::select! {
                // In this order, a new connection is known before its first request is received.
                biased;
                Ok(event) = events.recv() => {
                    // If a client connects again under its identity, its old connection is lost. Answers that wait
                    // there take no room from those for the new one, and what was asked there is not answered here.
                    if let SocketEvent::Accepted(_, id) = event
                        && let Some((_, task)) = clients.remove(&Bytes::from(id))
                    {
                        task.abort();
                    }
                    continue;
                }
                request = requests.recv() => request,
            };
            let Ok(request) = request else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            let Some((client, start)) = understood(&request.into_vec()) else { continue };
            clients.retain(|_, (asks, _)| !asks.is_closed());
            let (asks, _) = clients.entry(client).or_insert_with_key(|id| {
                let room = Arc::new(Semaphore::new(MAX_QUEUED));
                let (asks, asked) = mpsc::channel(MAX_REQUESTS);
                let client = Client { id: id.clone(), send: send.clone(), room };
                let task = tokio::spawn(self.clone().answer_all(client, asked));
                (asks, task.abort_handle())
            });
            // A client for which so many requests wait does not read.
            let _ = asks.try_send(start);
        }
    }

    /// Answers the requests of a client in their order. Ends when it has asked nothing for a while and has read all
    /// answers: those that it has not read must still count when it asks again.
    async fn answer_all(self, mut client: Client, mut asked: mpsc::Receiver<u64>) {
        loop {
            match timeout(TIMEOUT, asked.recv()).await {
                Ok(Some(start)) => self.answer(&mut client, start).await,
                Ok(None) => return,
                Err(_) if client.room.available_permits() == MAX_QUEUED => return,
                Err(_) => {}
            }
        }
    }

    /// Sends the kept messages from `start` on, and an end marker. A message is looked up when it is its turn, so that
    /// a slow client keeps few in memory; if it was dropped before, a snapshot replaces it. Ends early if the client
    /// has left or does not read.
    async fn answer(&self, client: &mut Client, start: u64) {
        self.exchange.counters.replays.fetch_add(1, Relaxed);
        let end = lock(&self.replay).end();
        let mut next = start;
        while next < end {
            let Since { message, has_all } = lock(&self.replay).since(next);
            if !has_all {
                self.exchange.want_snapshot();
            }
            let Some((number, message)) = message else { break };
            if number >= end {
                break;
            }
            if !client.send(self.topic.clone(), number.to_be_bytes(), message).await {
                return;
            }
            next = number + 1;
        }
        client.send(Bytes::new(), END, Bytes::new()).await;
    }
}

impl Client {
    /// Sends an answer as soon as there is room for it; `false` if the client has left or does not read.
    async fn send(&mut self, topic: Bytes, number: [u8; 8], message: Bytes) -> bool {
        let places = (1 + message.len() / PLACE).min(MAX_QUEUED) as u32;
        let taken = timeout(TIMEOUT, Arc::clone(&self.room).acquire_many_owned(places)).await;
        let Ok(Ok(places)) = taken else { return false };
        let number = Bytes::from_owner(Queued { number, _places: places });
        let answer = frames([self.id.clone(), Bytes::new(), topic, number, message]);
        let is_sent = self.send.send(answer).await.is_ok();
        // The task that writes to the client runs in this thread, so let it run.
        tokio::task::yield_now().await;
        is_sent
    }
}

/// The client of a request, and the number from which on it asks for messages; `None` for anything else.
fn understood(request: &[Bytes]) -> Option<(Bytes, u64)> {
    let [client, empty, start] = request else { return None };
    let start = <[u8; 8]>::try_from(&start[..]).ok()?;
    empty.is_empty().then(|| (client.clone(), u64::from_be_bytes(start)))
}
