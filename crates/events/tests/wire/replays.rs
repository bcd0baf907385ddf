//! Clients that ask for missed messages and do not read the answers.

use std::time::{Duration, Instant};

use bytes::Bytes;
use dsv4_kv_events::{Publisher, PublisherOptions};
use dsv4_kv_prefix::RootKey;
use tokio::time::{sleep, timeout};
use zeromq::{DealerSocket, Socket, SocketOptions, SocketRecv, SocketSend, ZmqMessage};

use crate::cache::{Cache, T};
use crate::subscriber::connect;
use crate::{TIMEOUT, block_on, is_handed, options};

/// Blocks that are published at once, each in a message of about 550 bytes.
const BLOCKS: u32 = 2000;
/// Requests of a client that does not read. All answers are more than zeromq and the connection keep for it: zeromq
/// keeps 100,000, and the connection 16 MiB.
const REQUESTS: u32 = 80;

/// A cache without blocks, and options for its publisher.
fn begin() -> (Cache, PublisherOptions) {
    let cache = Cache::new(1, (3 * BLOCKS, 100), &[("", "")]);
    (cache, PublisherOptions { batches: 64, ..options() })
}

/// Publishes new blocks.
fn publish(cache: &mut Cache, publisher: &mut Publisher, from: u32) {
    let root = RootKey::new(b"", b"", b"model");
    for token in from..from + BLOCKS {
        cache.compute(&root, &[token; T], None);
        assert!(is_handed(cache, publisher, TIMEOUT), "{:?}", publisher.stats());
    }
}

/// Asks for all messages that are kept.
async fn ask(client: &mut DealerSocket) {
    let mut request = ZmqMessage::from(Bytes::new());
    request.push_back(Bytes::from_static(&[0; 8]));
    client.send(request).await.expect("asks");
}

/// Receives the answers to a request, whose numbers must follow each other, and returns the number of messages.
async fn receive(client: &mut DealerSocket) -> u32 {
    let (mut messages, mut next) = (0, None::<u64>);
    loop {
        let answer = timeout(TIMEOUT, client.recv()).await.expect("in time").expect("answers");
        let number = answer.get(2).expect("a number");
        let number = u64::from_be_bytes(number[..].try_into().expect("eight bytes"));
        if number == u64::MAX {
            return messages;
        }
        assert!(next.is_none_or(|next| next == number), "{number} after {messages} messages");
        (messages, next) = (messages + 1, Some(number + 1));
    }
}

/// Connects a client with an identity, which is the same in all calls.
async fn connect_with_identity(publisher: &Publisher) -> DealerSocket {
    let mut options = SocketOptions::default();
    options.peer_identity("a client".parse().expect("an identity"));
    let mut client = DealerSocket::with_options(options);
    client.connect(publisher.replay_endpoint()).await.expect("connects");
    client
}

/// A client that asks again and again, and does not read. Returns it when no further answer can be sent to it.
async fn ask_and_do_not_read(publisher: &Publisher) -> DealerSocket {
    let mut client = connect_with_identity(publisher).await;
    for _ in 0..REQUESTS {
        ask(&mut client).await;
    }
    let begin = Instant::now();
    let (mut replays, mut since) = (0, begin);
    // A request counts when its answers begin.
    while replays == 0 || since.elapsed() < Duration::from_millis(500) {
        assert!(begin.elapsed() < TIMEOUT, "{replays} requests, and it is not over");
        sleep(Duration::from_millis(10)).await;
        if publisher.stats().replays != replays {
            (replays, since) = (publisher.stats().replays, Instant::now());
        }
    }
    client
}

/// A client asks and does not read: another one gets its answers, and nobody is disconnected when the messages that
/// wait for the first are no longer kept.
#[test]
fn who_asks_and_does_not_read_delays_nobody() {
    block_on(async {
        let (mut cache, options) = begin();
        let (kept, unsent) = (2 << 20, 256 << 10);
        let stall = Duration::from_millis(50);
        let options =
            PublisherOptions { replay_bytes: kept, unsent_bytes: unsent, stall, ..options };
        let mut publisher = Publisher::start(&mut cache.tree, options).unwrap();
        publish(&mut cache, &mut publisher, 0);
        let stuck = ask_and_do_not_read(&publisher).await;
        let mut other: DealerSocket = connect(publisher.replay_endpoint()).await;
        ask(&mut other).await;
        let messages = receive(&mut other).await;
        assert!(messages > BLOCKS, "{messages} messages");
        publish(&mut cache, &mut publisher, BLOCKS);
        let stats = publisher.stats();
        assert_eq!(stats.disconnects, 0, "{stats:?}");
        assert!(stats.bytes <= (kept + unsent) as u64, "{stats:?}");
        drop(stuck);
    });
}

/// A client asks and loses its connection, which the publisher does not notice: when the client connects again under the
/// same identity, it gets what it asks for then, and nothing else.
#[test]
fn who_connects_again_gets_its_answers() {
    block_on(async {
        let (mut cache, options) = begin();
        let mut publisher = Publisher::start(&mut cache.tree, options).unwrap();
        publish(&mut cache, &mut publisher, 0);
        let lost = ask_and_do_not_read(&publisher).await;
        let mut client = connect_with_identity(&publisher).await;
        for _ in 0..2 {
            ask(&mut client).await;
            let messages = receive(&mut client).await;
            assert!(messages > BLOCKS, "{messages} messages");
        }
        drop(lost);
    });
}

/// A client asks, does not read, and is killed, while another one is connected: the publisher continues, and ends when
/// it is dropped. zeromq looks clients up in a table if there are several, and holds its lock if it waits for one.
#[test]
fn who_asks_and_is_killed_stops_nobody() {
    block_on(async {
        let (mut cache, options) = begin();
        let options = PublisherOptions { heartbeat: Duration::from_millis(50), ..options };
        let mut publisher = Publisher::start(&mut cache.tree, options).unwrap();
        publish(&mut cache, &mut publisher, 0);
        let other: DealerSocket = connect(publisher.replay_endpoint()).await;
        drop(ask_and_do_not_read(&publisher).await);
        // The publisher notices that the connection is gone.
        sleep(Duration::from_millis(300)).await;
        let (before, since) = (publisher.stats().messages, Instant::now());
        while publisher.stats().messages == before && since.elapsed() < TIMEOUT {
            sleep(Duration::from_millis(10)).await;
        }
        let continues = publisher.stats().messages > before;
        let (ended, since) = (std::thread::spawn(move || drop(publisher)), Instant::now());
        while !ended.is_finished() && since.elapsed() < TIMEOUT {
            sleep(Duration::from_millis(10)).await;
        }
        assert!(continues, "no heartbeat follows");
        assert!(ended.is_finished(), "the publisher does not end");
        drop(other);
    });
}
