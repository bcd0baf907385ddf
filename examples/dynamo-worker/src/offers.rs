//! The offers of a prefill worker, as claims see them.
//!
//! The engine's thread alone has the payloads ([`Payloads`](crate::moves::Payloads)). Copying those of long prompts may
//! take longer than a decode worker waits for its answer ([`ANSWER_TIMEOUT`](crate::questions::ANSWER_TIMEOUT)). So a
//! claim needs only the list here, whose lock nobody holds while bytes are copied.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dsv4_kv_transfer::Source;

use crate::questions::{Answers, Question, answer_all, wake};
use crate::ticket::{Asks, asked};

/// How long an offer is kept that is not claimed.
const LIFETIME: Duration = Duration::from_secs(60);

/// The offers of a prefill worker, and the address of the threads that answer claims.
pub struct Offers {
    list: Mutex<List>,
    control: SocketAddr,
}

#[derive(Default)]
struct List {
    /// Offers that can be claimed, and until when.
    open: HashMap<Source, Instant>,
    /// Offers that have ended, and whose payloads the engine's thread has not freed yet.
    ended: Vec<Source>,
}

impl Offers {
    /// Starts to listen for claims at the address `control`.
    ///
    /// # Errors
    /// An address that is not available, or a thread that could not be started.
    pub fn listen(control: &str) -> Result<Arc<Self>> {
        let listener =
            TcpListener::bind(control).with_context(|| format!("--control {control}"))?;
        let offers = Arc::new(Self { list: Mutex::default(), control: listener.local_addr()? });
        answer_all(listener, &Arc::downgrade(&offers))?;
        Ok(offers)
    }

    /// The address at which it listens.
    #[must_use]
    pub fn control(&self) -> SocketAddr {
        self.control
    }

    /// Enters an offer, whose payload is complete. It can be claimed from now on.
    #[must_use = "dropping this takes the offer back"]
    pub fn enter(self: &Arc<Self>, source: Source) -> Kept {
        self.lock().open.insert(source, Instant::now() + LIFETIME);
        Kept { offers: Arc::downgrade(self), source }
    }

    /// Number of offers that were not claimed yet.
    pub fn open(&self) -> usize {
        self.lock().open.len()
    }

    /// Ends an offer. `true` once, and only if it was open: the request then belongs to the caller.
    fn end(&self, source: Source) -> bool {
        let mut list = self.lock();
        let was_open = list.open.remove(&source).is_some();
        if was_open {
            list.ended.push(source);
        }
        was_open
    }

    /// Ends offers whose lifetime is over. Returns the offers that have ended since the last call, for whatever reason;
    /// the caller frees their payloads.
    #[must_use]
    pub fn take_ended(&self) -> Vec<Source> {
        let (mut list, now) = (self.lock(), Instant::now());
        let expired: Vec<_> = list.open.extract_if(|_, until| *until < now).collect();
        let mut ended = std::mem::take(&mut list.ended);
        drop(list);
        for (source, _) in expired {
            tracing::warn!(lease = source.lease, "nobody has claimed a request");
            ended.push(source);
        }
        ended
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Answers for Offers {
    fn answer(&self, question: Question) -> bool {
        match asked(question) {
            Some((Asks::Claim | Asks::GivesUp, source)) => self.end(source),
            None => false,
        }
    }
}

impl Drop for Offers {
    fn drop(&mut self) {
        wake(&self.control);
    }
}

/// An offer whose ticket nobody has yet. Dropping this takes the offer back, which nobody could claim.
pub struct Kept {
    offers: Weak<Offers>,
    source: Source,
}

impl Kept {
    /// The ticket is handed over: from now on the offer is there until it is claimed, given up, or expires.
    pub fn hand_over(mut self) {
        self.offers = Weak::new();
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(offers) = self.offers.upgrade() {
            offers.end(self.source);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However an offer ends, it ends once, and its payload is freed once.
    #[test]
    fn an_offer_ends_once() {
        let offers = Offers::listen("127.0.0.1:0").unwrap();
        let source = |lease| Source { epoch: 7, lease };
        let [claimed, expired, stays, dropped] = [1, 2, 3, 4].map(source);
        for handed_over in [claimed, expired, stays] {
            offers.enter(handed_over).hand_over();
        }
        let kept = offers.enter(dropped);
        assert_eq!((offers.open(), offers.take_ended()), (4, Vec::new()));
        assert!(!offers.end(Source { epoch: 8, ..claimed }), "an offer of another worker");
        assert!(offers.end(claimed));
        assert!(!offers.end(claimed), "it was claimed before");
        drop(kept);
        offers.lock().open.insert(expired, Instant::now());
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(offers.take_ended(), [claimed, dropped, expired]);
        assert!(!offers.end(expired) && !offers.end(dropped));
        assert_eq!((offers.open(), offers.take_ended()), (1, Vec::new()));
    }
}
