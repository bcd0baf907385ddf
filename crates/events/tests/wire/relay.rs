//! A relay between a publisher and its subscribers, which loses messages.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::runtime::Builder;
use tokio::time::timeout;
use zeromq::{PubSocket, Socket, SocketRecv, SocketSend, SubSocket};

/// Passes a publisher's messages on unchanged, except for those that it loses.
pub struct Relay {
    /// The endpoint to which subscribers connect.
    pub endpoint: String,
    counts: Arc<Counts>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Counts {
    passed: AtomicU64,
    lost: AtomicU64,
    is_over: AtomicBool,
}

impl Relay {
    /// Starts a relay for the publisher at this endpoint. After each message that is passed on, with probability 1/4,
    /// up to six following messages are lost.
    pub fn start(publisher: &str, seed: u64) -> Self {
        let counts = Arc::new(Counts::default());
        let (tell, told) = std::sync::mpsc::channel();
        let (publisher, own) = (publisher.to_owned(), Arc::clone(&counts));
        let thread = std::thread::spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let (mut from, mut to) = (SubSocket::new(), PubSocket::new());
                from.connect(&publisher).await.expect("connects");
                from.subscribe("").await.expect("subscribes");
                let endpoint = to.bind("tcp://127.0.0.1:0").await.expect("listens");
                tell.send(endpoint.to_string()).expect("somebody waits for it");
                pass(&mut from, &mut to, &own, SmallRng::seed_from_u64(seed)).await;
            });
        });
        let endpoint = told.recv().expect("it listens");
        Self { endpoint, counts, thread: Some(thread) }
    }

    /// Messages that were passed on, and that were lost.
    pub fn counts(&self) -> (u64, u64) {
        (self.counts.passed.load(Relaxed), self.counts.lost.load(Relaxed))
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.counts.is_over.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread has reported its own panic, if any.
            drop(thread.join());
        }
    }
}

async fn pass(from: &mut SubSocket, to: &mut PubSocket, counts: &Counts, mut random: SmallRng) {
    let mut losing = 0;
    while !counts.is_over.load(Relaxed) {
        let Ok(received) = timeout(Duration::from_millis(50), from.recv()).await else { continue };
        let Ok(message) = received else { return };
        if losing > 0 {
            losing -= 1;
            counts.lost.fetch_add(1, Relaxed);
            continue;
        }
        if random.random_bool(0.25) {
            losing = random.random_range(1..=6);
        }
        // Without a subscriber the message is lost.
        drop(to.send(message).await);
        counts.passed.fetch_add(1, Relaxed);
    }
}
