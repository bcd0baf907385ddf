//! A subscriber over real sockets, like a router: it asks for the messages that it missed.

use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::time::{sleep, timeout};
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use crate::index::{Event, Index, Message};

const TIMEOUT: Duration = Duration::from_secs(20);

pub struct Subscriber {
    subscription: SubSocket,
    replay: DealerSocket,
    /// The number of the next message.
    pub next: u64,
    pub index: Index,
    /// Whether messages are missing that no replay had. Events are ignored until `AllBlocksCleared`.
    pub is_lost: bool,
    /// Number of messages that arrived by replay.
    pub replayed: u64,
}

/// Connects. Tries again, as routers do: a publisher disconnects all subscribers when one does not read.
pub async fn connect<S: Socket>(endpoint: &str) -> S {
    let begun = Instant::now();
    loop {
        let mut socket = S::new();
        match socket.connect(endpoint).await {
            Ok(()) => return socket,
            Err(error) => assert!(begun.elapsed() < TIMEOUT, "{error}"),
        }
        sleep(Duration::from_millis(10)).await;
    }
}

impl Subscriber {
    /// Connects, and asks for all messages.
    pub async fn join(endpoint: &str, replay_endpoint: &str) -> Self {
        let mut subscription: SubSocket = connect(endpoint).await;
        subscription.subscribe("topic").await.expect("subscribes");
        let replay = connect(replay_endpoint).await;
        let index = Index::default();
        let mut joined = Self { subscription, replay, next: 0, index, is_lost: true, replayed: 0 };
        joined.catch_up().await;
        joined
    }

    /// Receives the next message, if one arrives in time. `lost` decides whether it is lost.
    pub async fn receive(&mut self, wait: Duration, lost: impl FnOnce() -> bool) -> bool {
        let Ok(Ok(message)) = timeout(wait, self.subscription.recv()).await else { return false };
        let [topic, number, payload] = &message.into_vec()[..] else { panic!("three frames") };
        assert_eq!(&topic[..], b"topic");
        if lost() {
            return true;
        }
        let number = u64::from_be_bytes(number[..].try_into().expect("eight bytes"));
        if number > self.next {
            self.catch_up().await;
        }
        if number >= self.next {
            // Also applies messages that no replay has had.
            self.take(number, payload);
        }
        true
    }

    /// Asks for the messages from `next` on.
    pub async fn catch_up(&mut self) {
        let mut request = ZmqMessage::from(Bytes::new());
        request.push_back(self.next.to_be_bytes().to_vec().into());
        self.replay.send(request).await.expect("asks");
        loop {
            let answer =
                timeout(TIMEOUT, self.replay.recv()).await.expect("in time").expect("answers");
            let [empty, topic, number, payload] = &answer.into_vec()[..] else {
                panic!("four frames")
            };
            assert!(empty.is_empty());
            let number = u64::from_be_bytes(number[..].try_into().expect("eight bytes"));
            if number == u64::MAX {
                assert!(topic.is_empty() && payload.is_empty());
                return;
            }
            assert_eq!(&topic[..], b"topic");
            assert!(number >= self.next);
            self.replayed += 1;
            self.take(number, payload);
        }
    }

    fn take(&mut self, number: u64, payload: &[u8]) {
        let message: Message = rmp_serde::from_slice(payload).expect("a message");
        assert!(message.0 > 1.7e9 && message.2 == 3, "{} {:?}", message.0, message.2);
        self.is_lost |= number > self.next;
        self.next = number + 1;
        if matches!(message.1.first(), Some(Event::AllBlocksCleared {})) {
            self.is_lost = false;
        }
        if !self.is_lost {
            self.index.apply(&message);
        }
    }
}
