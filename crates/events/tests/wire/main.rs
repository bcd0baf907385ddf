//! Tests over real sockets on this machine: a subscriber's index equals the cache, whatever is lost.

mod cache;
mod dynamo;
mod http;
mod index;
mod relay;
mod replays;
mod requests;
mod snapshot;
mod source;
mod subscriber;
mod trace;

use std::time::{Duration, Instant};

use cache::Cache;
use dsv4_kv_events::{PublishError, Published, Publisher, PublisherOptions};
use dsv4_kv_prefix::{Drained, EventBatch, EventSource};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use subscriber::Subscriber;

/// Salts and adapters.
const ROOTS: [(&str, &str); 4] = [("", ""), ("tenant", ""), ("", "adapter"), ("Zürich", "adapter")];

const TIMEOUT: Duration = Duration::from_secs(20);

/// Options for a publisher at the endpoints of another one.
fn at_same_endpoints(publisher: &Publisher, options: PublisherOptions) -> PublisherOptions {
    PublisherOptions {
        endpoint: publisher.endpoint().to_owned(),
        replay_endpoint: publisher.replay_endpoint().to_owned(),
        ..options
    }
}

fn options() -> PublisherOptions {
    let any_port = "tcp://127.0.0.1:0".to_owned();
    PublisherOptions {
        endpoint: any_port.clone(),
        replay_endpoint: any_port,
        topic: "topic".to_owned(),
        data_parallel_rank: 3,
        snapshot_interval: Duration::ZERO,
        ..PublisherOptions::default()
    }
}

fn block_on<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
}

async fn join(publisher: &Publisher) -> Subscriber {
    Subscriber::join(publisher.endpoint(), publisher.replay_endpoint()).await
}

/// Publishes until no event is left, and lets the subscriber catch up. Returns the number of snapshots.
async fn settle(cache: &mut Cache, publisher: &mut Publisher, subscriber: &mut Subscriber) -> u32 {
    let (since, mut snapshots) = (Instant::now(), 0);
    loop {
        assert!(since.elapsed() < TIMEOUT, "{:?}, next {}", publisher.stats(), subscriber.next);
        let published = publisher.publish(&mut cache.tree).unwrap();
        snapshots += u32::from(published == Published::Snapshot);
        while subscriber.receive(Duration::from_millis(5), || false).await {}
        subscriber.catch_up().await;
        let is_there = subscriber.next == publisher.stats().next_sequence && !subscriber.is_lost;
        if published == Published::Nothing && is_there {
            // Earlier items are sent once the thread has taken them all.
            tokio::time::sleep(Duration::from_millis(5)).await;
            subscriber.catch_up().await;
            if subscriber.next == publisher.stats().next_sequence
                && publisher.stats().resident == u64::from(cache.tree.counts().blocks)
            {
                return snapshots;
            }
        }
    }
}

/// Runs steps, and publishes after most of them. The subscriber loses some messages at random.
async fn traffic(
    (cache, publisher, subscriber): (&mut Cache, &mut Publisher, &mut Subscriber),
    random: &mut SmallRng,
    steps: u32,
) {
    for _ in 0..steps {
        cache.operation();
        if random.random_bool(0.8) {
            publisher.publish(&mut cache.tree).unwrap();
        }
        let is_lost = random.random_bool(0.2);
        subscriber.receive(Duration::from_millis(1), || is_lost).await;
    }
}

#[test]
fn lost_messages_are_replayed() {
    block_on(async {
        let mut replayed = 0;
        for seed in 0..4 {
            let mut random = SmallRng::seed_from_u64(seed);
            let mut cache = Cache::new(seed, (200, 400), &ROOTS);
            (0..20).for_each(|_| cache.operation());
            let mut publisher = Publisher::start(&mut cache.tree, options()).unwrap();
            let mut subscriber = join(&publisher).await;
            for _ in 0..5 {
                traffic((&mut cache, &mut publisher, &mut subscriber), &mut random, 60).await;
                settle(&mut cache, &mut publisher, &mut subscriber).await;
                assert_eq!(subscriber.index, cache.dump(), "seed {seed}");
            }
            replayed += subscriber.replayed;
            assert!(publisher.stats().removed > 100, "{:?}", publisher.stats());
        }
        assert!(replayed > 100, "{replayed} messages were replayed");
    });
}

/// With a small log and a small replay buffer, lost events are repaired by snapshots.
#[test]
fn what_is_kept_nowhere_is_told_anew() {
    block_on(async {
        let (mut snapshots, mut gaps) = (0, 0);
        for seed in 0..4 {
            let mut random = SmallRng::seed_from_u64(seed);
            let mut cache = Cache::new(seed, (200, 24), &ROOTS);
            let options = PublisherOptions { replay_bytes: 30_000, batches: 1, ..options() };
            let mut publisher = Publisher::start(&mut cache.tree, options).unwrap();
            let mut subscriber = join(&publisher).await;
            for _ in 0..5 {
                traffic((&mut cache, &mut publisher, &mut subscriber), &mut random, 60).await;
                snapshots += settle(&mut cache, &mut publisher, &mut subscriber).await;
                assert_eq!(subscriber.index, cache.dump(), "seed {seed}");
            }
            // A late subscriber asks for messages that are no longer kept.
            let mut late = join(&publisher).await;
            gaps += u32::from(late.is_lost);
            snapshots += settle(&mut cache, &mut publisher, &mut late).await;
            assert_eq!(late.index, cache.dump(), "seed {seed}");
        }
        assert!(snapshots > 4 && gaps > 0, "{snapshots} snapshots, {gaps} late without a start");
    });
}

/// If the events are also read elsewhere, a snapshot repairs what the publisher misses.
#[test]
fn what_another_reader_takes_is_told_anew() {
    block_on(async {
        let mut cache = Cache::new(12, (200, 1000), &ROOTS);
        let mut publisher = Publisher::start(&mut cache.tree, options()).unwrap();
        let mut subscriber = join(&publisher).await;
        settle(&mut cache, &mut publisher, &mut subscriber).await;
        let mut other = EventBatch::with_capacity(1000);
        for turn in 0..10 {
            let before = cache.dump();
            while cache.dump() == before {
                cache.operation();
            }
            if turn % 2 == 0 {
                assert_eq!(cache.tree.drain_events(&mut other), Drained::Events);
            } else {
                drop(cache.tree.snapshot_events());
            }
            let snapshots = settle(&mut cache, &mut publisher, &mut subscriber).await;
            assert_eq!((snapshots, &subscriber.index), (1, &cache.dump()));
        }
    });
}

/// If the last message is lost and no step follows, a message without events reveals it to the subscriber.
#[test]
fn what_was_lost_last_is_noticed() {
    block_on(async {
        let mut cache = Cache::new(8, (200, 1000), &ROOTS);
        let heartbeat = Duration::from_millis(50);
        let mut publisher =
            Publisher::start(&mut cache.tree, PublisherOptions { heartbeat, ..options() }).unwrap();
        let mut subscriber = join(&publisher).await;
        settle(&mut cache, &mut publisher, &mut subscriber).await;
        for _ in 0..5 {
            (0..5).for_each(|_| cache.operation());
            while publisher.publish(&mut cache.tree).unwrap() != Published::Nothing {}
            // All messages of the next 30 ms are lost.
            let since = Instant::now();
            while since.elapsed() < Duration::from_millis(30) {
                subscriber.receive(Duration::from_millis(5), || true).await;
            }
            let want = cache.dump();
            while subscriber.index != want {
                assert!(since.elapsed() < TIMEOUT, "{:?}", publisher.stats());
                subscriber.receive(Duration::from_millis(5), || false).await;
            }
        }
    });
}

#[test]
fn a_subscriber_that_comes_late_has_everything() {
    block_on(async {
        let mut cache = Cache::new(1, (300, 1000), &ROOTS);
        (0..50).for_each(|_| cache.operation());
        let mut publisher = Publisher::start(&mut cache.tree, options()).unwrap();
        for _ in 0..50 {
            cache.operation();
            publisher.publish(&mut cache.tree).unwrap();
        }
        let mut late = join(&publisher).await;
        assert!(!late.is_lost, "everything since the start is kept");
        let snapshots = settle(&mut cache, &mut publisher, &mut late).await;
        assert_eq!((snapshots, late.index), (0, cache.dump()));
    });
}

/// A publisher ends and another one starts at the same ports, 20 times.
#[test]
fn a_restart_is_noticed() {
    block_on(async {
        let mut random = SmallRng::seed_from_u64(9);
        let mut cache = Cache::new(9, (200, 1000), &ROOTS);
        let mut publisher = Publisher::start(&mut cache.tree, options()).unwrap();
        let mut subscriber = join(&publisher).await;
        for _ in 0..20 {
            let parts = (&mut cache, &mut publisher, &mut subscriber);
            traffic(parts, &mut random, 20).await;
            let (next, index) = (publisher.stats().next_sequence, subscriber.next);
            assert!(index <= next);
            let again = at_same_endpoints(&publisher, options());
            drop(publisher);
            // Events without a publisher are not sent.
            (0..5).for_each(|_| cache.operation());
            publisher = start_again(&mut cache, &again);
            assert!(publisher.stats().next_sequence > next, "its numbers go on");
            subscriber = rejoin(subscriber, &publisher).await;
            settle(&mut cache, &mut publisher, &mut subscriber).await;
            assert_eq!(subscriber.index, cache.dump());
        }
    });
}

/// Starts a publisher at the endpoints of an earlier one. Tries again while a client of another test occupies its port.
fn start_again(cache: &mut Cache, options: &PublisherOptions) -> Publisher {
    let begun = Instant::now();
    loop {
        match Publisher::start(&mut cache.tree, options.clone()) {
            Err(PublishError::Bind { .. }) if begun.elapsed() < TIMEOUT => {
                std::thread::sleep(Duration::from_millis(50));
            }
            started => return started.unwrap(),
        }
    }
}

/// The same subscriber, with its index, over new connections.
async fn rejoin(before: Subscriber, publisher: &Publisher) -> Subscriber {
    let mut subscriber = join(publisher).await;
    (subscriber.next, subscriber.index) = (before.next, before.index);
    subscriber.is_lost = before.is_lost;
    subscriber.catch_up().await;
    subscriber
}

/// If numbers started at 0 again, the subscriber would take all messages for old ones.
#[test]
fn a_restart_at_zero_would_freeze_the_index() {
    block_on(async {
        let mut cache = Cache::new(3, (200, 1000), &ROOTS);
        let options = PublisherOptions { first_sequence: Some(0), ..options() };
        let mut publisher = Publisher::start(&mut cache.tree, options.clone()).unwrap();
        let mut subscriber = join(&publisher).await;
        for _ in 0..40 {
            cache.operation();
            publisher.publish(&mut cache.tree).unwrap();
        }
        settle(&mut cache, &mut publisher, &mut subscriber).await;
        drop(publisher);
        publisher = Publisher::start(&mut cache.tree, options).unwrap();
        let before = subscriber.next;
        subscriber = rejoin(subscriber, &publisher).await;
        let mut is_received = false;
        // The first message is not sent to the subscriber if its subscription arrives later.
        for _ in 0..10 {
            (0..10).for_each(|_| cache.operation());
            publisher.publish(&mut cache.tree).unwrap();
            is_received = subscriber.receive(TIMEOUT / 10, || false).await;
            if is_received {
                break;
            }
        }
        assert!(is_received, "nothing arrives that could be ignored");
        tokio::time::sleep(Duration::from_millis(50)).await;
        while subscriber.receive(Duration::from_millis(50), || false).await {}
        assert_eq!(subscriber.next, before);
        assert_ne!(subscriber.index, cache.dump());
    });
}

#[test]
fn what_cannot_be_published_is_an_error() {
    let mut cache = Cache::new(1, (10, 0), &ROOTS);
    let refused = Publisher::start(&mut cache.tree, options());
    assert!(matches!(refused, Err(PublishError::EventsOff)), "{refused:?}");
    cache.tree.log_events(8);
    let wrong = [
        PublisherOptions { batches: 0, ..options() },
        PublisherOptions { batches: usize::MAX, ..options() },
        PublisherOptions { first_sequence: Some(u64::MAX), ..options() },
        PublisherOptions { heartbeat: Duration::ZERO, ..options() },
    ];
    for options in wrong {
        let refused = Publisher::start(&mut cache.tree, options);
        assert!(matches!(refused, Err(PublishError::Option { .. })), "{refused:?}");
    }
    let mut publisher = Publisher::start(&mut cache.tree, options()).unwrap();
    let taken = publisher.endpoint().to_owned();
    let wrong =
        ["nonsense", "udp://127.0.0.1:1", "ipc:///nowhere", "tcp://", ""].map(str::to_owned);
    for endpoint in [taken].into_iter().chain(wrong) {
        let refused = Publisher::start(&mut cache.tree, PublisherOptions { endpoint, ..options() });
        assert!(matches!(refused, Err(PublishError::Bind { .. })), "{refused:?}");
    }
    let most = PublisherOptions {
        unsent_bytes: usize::MAX,
        replay_bytes: usize::MAX,
        stall: Duration::MAX,
        heartbeat: Duration::MAX,
        snapshot_interval: Duration::MAX,
        ..options()
    };
    let mut unlimited = Publisher::start(&mut cache.tree, most).unwrap();
    cache.operation();
    assert!(unlimited.publish(&mut cache.tree).is_ok());
    drop(unlimited);
    cache.tree.log_events(0);
    let refused = publisher.publish(&mut cache.tree);
    assert!(matches!(refused, Err(PublishError::EventsOff)), "{refused:?}");
}

/// A subscriber stops reading: the bytes that wait for it are bounded, it is disconnected, and the others continue.
#[test]
fn who_does_not_read_costs_bounded_memory() {
    block_on(async {
        let mut cache = Cache::new(5, (400, 2000), &ROOTS);
        let (kept, unsent) = (1 << 20, 1 << 20);
        let stall = Duration::from_millis(100);
        let options =
            PublisherOptions { replay_bytes: kept, unsent_bytes: unsent, stall, ..options() };
        let mut publisher = Publisher::start(&mut cache.tree, options).unwrap();
        let stalled = join(&publisher).await;
        // A message has at most 40 blocks, a snapshot 600.
        let most = (kept + unsent + 3 * 600 * 600) as u64;
        let (since, mut waited) = (Instant::now(), 0);
        while publisher.stats().disconnects == 0 {
            assert!(since.elapsed() < TIMEOUT, "{:?}", publisher.stats());
            cache.operation();
            waited += u32::from(publisher.publish(&mut cache.tree).unwrap() == Published::Waiting);
            assert!(publisher.stats().bytes <= most, "{:?}", publisher.stats());
            tokio::task::yield_now().await;
        }
        assert!(waited > 0, "steps did not wait, and batches did");
        let mut other = join(&publisher).await;
        settle(&mut cache, &mut publisher, &mut other).await;
        assert_eq!(other.index, cache.dump());
        drop(stalled);
    });
}

/// Publishes the logged events when a batch is free. Returns whether that was in time.
fn is_handed(cache: &mut Cache, publisher: &mut Publisher, timeout: Duration) -> bool {
    let since = Instant::now();
    while publisher.publish(&mut cache.tree).unwrap() == Published::Waiting {
        if since.elapsed() > timeout {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Dropping a publisher waits while messages wait for a slow subscriber.
#[test]
fn the_end_waits_for_who_is_slow() {
    block_on(async {
        let mut cache = Cache::new(7, (400, 4000), &ROOTS);
        let options = PublisherOptions { stall: Duration::from_secs(5), ..options() };
        let mut publisher = Publisher::start(&mut cache.tree, options).unwrap();
        let mut slow = join(&publisher).await;
        settle(&mut cache, &mut publisher, &mut slow).await;
        // More than the sockets' buffers hold, and less than is kept for replay.
        let enough = publisher.stats().bytes + (32 << 20);
        while publisher.stats().bytes < enough {
            cache.operation();
            assert!(is_handed(&mut cache, &mut publisher, TIMEOUT));
        }
        assert_eq!(publisher.stats().snapshots, 1, "all is kept");
        let sent = publisher.stats().next_sequence - slow.next;
        let ended = std::thread::spawn(move || drop(publisher));
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!ended.is_finished(), "somebody reads yet");
        let mut received = 0;
        while slow.receive(Duration::from_millis(500), || true).await {
            received += 1;
        }
        ended.join().unwrap();
        // If the reader is slower than `stall`, the last messages are lost.
        assert!(received > 0, "{received} messages of {sent}");
    });
}

/// A subscriber that never reads cannot keep the publisher from ending, even with the longest `stall`.
#[test]
fn the_end_waits_for_nobody_for_ever() {
    block_on(async {
        let mut cache = Cache::new(7, (400, 4000), &ROOTS);
        let options = PublisherOptions {
            stall: Duration::MAX,
            unsent_bytes: 1 << 20,
            replay_bytes: 1 << 20,
            ..options()
        };
        let mut publisher = Publisher::start(&mut cache.tree, options).unwrap();
        let stalled = join(&publisher).await;
        while is_handed(&mut cache, &mut publisher, Duration::from_secs(1)) {
            cache.operation();
        }
        assert_eq!(publisher.stats().disconnects, 0);
        let since = Instant::now();
        drop(publisher);
        assert!(since.elapsed() < TIMEOUT);
        drop(stalled);
    });
}

/// If the log always overflows, snapshots still keep their least interval.
#[test]
fn snapshots_have_a_least_interval() {
    let mut cache = Cache::new(13, (200, 1), &ROOTS);
    let snapshot_interval = Duration::from_secs(1);
    let options = PublisherOptions { snapshot_interval, ..options() };
    let start = Instant::now();
    let mut publisher = Publisher::start(&mut cache.tree, options).unwrap();
    let (mut snapshots, mut waiting) = (0, 0);
    while start.elapsed() < Duration::from_millis(2500) {
        cache.operation();
        match publisher.publish(&mut cache.tree).unwrap() {
            Published::Snapshot => snapshots += 1,
            Published::Waiting => waiting += 1,
            _ => {}
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let most = start.elapsed().as_secs();
    assert!((1..=most).contains(&snapshots) && waiting > 100, "{snapshots}, {waiting}");
}

/// `publish` allocates nothing, whether the publisher's thread keeps up or not.
#[test]
fn publishing_allocates_nothing_in_the_steps_thread() {
    let mut cache = Cache::new(6, (400, 4000), &ROOTS);
    let mut publisher = Publisher::start(&mut cache.tree, options()).unwrap();
    let mut seen = [0; 2];
    let since = Instant::now();
    while seen.contains(&0) {
        assert!(since.elapsed() < TIMEOUT, "{seen:?}");
        cache.operation();
        let mut published = Published::Nothing;
        let publish = || published = publisher.publish(&mut cache.tree).unwrap();
        let counted = allocation_counter::measure(publish);
        match published {
            Published::Nothing => {}
            Published::Events => seen[0] += 1,
            Published::Waiting => seen[1] += 1,
            // The thread had no core for so long that the log overflowed.
            Published::Snapshot => continue,
        }
        assert_eq!(counted.count_total, 0, "{published:?}");
    }
}
