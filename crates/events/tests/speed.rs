//! The cost of a block for the publisher's thread and for the thread that runs steps, in time and in memory.

use std::time::{Duration, Instant};

use dsv4_kv_events::{Published, Publisher, PublisherOptions};
use dsv4_kv_prefix::{Limits, PrefixTree, RootKey, ScoredLru};
use zeromq::{Socket, SocketRecv, SubSocket};

const T: usize = 128;
/// Blocks of a step: 8,192 tokens.
const STEP: usize = 64;
const STEPS: usize = 500;
/// Longest wait for the publisher's thread.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Most microseconds of the publisher's thread per block; many more without optimization.
const MAX_MICROSECONDS: f64 = if cfg!(debug_assertions) { 200.0 } else { 6.0 };
/// Bytes of messages that are kept, and bytes that may wait: together less than half of the bytes that are sent.
const KEPT: usize = 4 << 20;

/// The CPU time of the publisher's thread, if the system provides it. Wall-clock time would include waits for a core.
fn on_processor() -> Option<Duration> {
    let threads = std::fs::read_dir("/proc/self/task").ok()?.flatten();
    let is_publisher = |thread: &std::path::PathBuf| {
        let name = std::fs::read_to_string(thread.join("comm"));
        name.is_ok_and(|name| name.trim() == "kv-events")
    };
    let thread = threads.map(|thread| thread.path()).find(is_publisher)?;
    let times = std::fs::read_to_string(thread.join("schedstat")).ok()?;
    let nanoseconds = times.split(' ').next()?.parse().ok()?;
    Some(Duration::from_nanos(nanoseconds))
}

/// The limit is for a release build:
#[test]
fn a_block_costs_a_few_microseconds() {
    let room = (STEP * STEPS) as u32;
    let limits = Limits {
        block_bytes: 1,
        checkpoint_bytes: 1,
        lease_bytes: 0,
        remembered: 0,
        reserved_blocks: room,
    };
    let mut tree = PrefixTree::<(), (), _, T>::new(limits, ScoredLru { capacity: 1 << 30 });
    tree.log_events(room);
    let any_port = "tcp://127.0.0.1:0".to_owned();
    let options = PublisherOptions {
        endpoint: any_port.clone(),
        replay_endpoint: any_port,
        replay_bytes: KEPT,
        unsent_bytes: KEPT,
        ..PublisherOptions::default()
    };
    let mut publisher = Publisher::start(&mut tree, options).unwrap();
    let endpoint = publisher.endpoint().to_owned();
    // A subscriber in a separate thread, which only counts.
    let (connected, is_connected) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut subscriber = SubSocket::new();
            subscriber.connect(&endpoint).await.unwrap();
            subscriber.subscribe("").await.unwrap();
            connected.send(()).unwrap();
            while subscriber.recv().await.is_ok() {}
        });
    });
    is_connected.recv().unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let before = on_processor();
    let (mut called, mut took, mut most_bytes) = (Vec::new(), Duration::ZERO, 0);
    for step in 0..STEPS {
        let tokens: Vec<[u32; T]> = (0..STEP)
            .map(|block| {
                std::array::from_fn(|at| ((step + block) * 7919 + at * 31) as u32 % 129_280)
            })
            .collect();
        let root = RootKey::new(&step.to_le_bytes(), b"", b"model");
        // The reference is kept, so that nothing is evicted.
        let mut at = tree.match_and_lock(&root, &[]).reference;
        tree.extend(&mut at, &tokens, |_| (), |_| ()).unwrap();
        let before = publisher.stats().stored;
        let start = Instant::now();
        let published = publisher.publish(&mut tree).unwrap();
        called.push(start.elapsed());
        assert_eq!(published, Published::Events);
        while publisher.stats().stored < before + STEP as u64 {
            assert!(start.elapsed() < TIMEOUT, "{:?}", publisher.stats());
            std::hint::spin_loop();
        }
        took += start.elapsed();
        most_bytes = most_bytes.max(publisher.stats().bytes);
    }
    let each = |time: Duration| time.as_secs_f64() * 1e6 / (STEP * STEPS) as f64;
    let busy = before.and_then(|before| on_processor().map(|now| each(now - before)));
    called.sort_unstable();
    let [median, p99] = [50, 99].map(|percent| called[STEPS * percent / 100]);
    println!("a block, from its step to its message: {:.2} us", each(took));
    println!("of that the publisher's thread was on a processor: {busy:?} us");
    println!("publish() in the step's thread: median {median:?}, p99 {p99:?}");
    println!("{most_bytes} bytes at most; {:?}", publisher.stats());
    let each = busy.unwrap_or_else(|| each(took));
    assert!(each <= MAX_MICROSECONDS, "{each:.2} us a block");
    // The messages of a step are encoded before earlier ones are dropped.
    assert!(most_bytes <= (2 * KEPT + STEP * 1024) as u64, "{most_bytes} bytes");
}
