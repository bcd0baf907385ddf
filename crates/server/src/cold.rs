//! The cold tier of a server: prefixes in a store that outlive the server. The stored part of a prompt is read to host
//! memory before the prompt is admitted, and prefixes that arrive in host memory are stored.

use std::time::{Duration, Instant};

use dsv4_kv::Prompt;
use dsv4_kv_cold_tier::{ColdError, ColdErrorKind, ColdOptions, ColdStats, ColdTier};
use dsv4_kv_device::Backend;
use dsv4_kv_model::Engine;

use crate::accepted::{Fetch, Request};

/// The settings of the cold tier.
#[derive(Clone, Debug)]
pub struct ColdCache {
    /// A local directory, or the URL of a store.
    pub url: String,
    /// Options of a cloud store: keys, regions, endpoints.
    pub options: ColdOptions,
    /// The longest time that a completion waits for the store. After it, the rest of its prompt is computed.
    pub timeout: Duration,
    /// Identifies the model's weights, and everything else that changes the cached bytes.
    pub identity: Vec<u8>,
    /// Called for errors of the store: for the first error of each kind, then at most once a minute per kind, with the
    /// number of errors of that kind that were not reported since. A miss is no error. At the end it is called for
    /// [`ColdError::Unstored`], if any prefix is not stored.
    pub report: fn(&ColdError, u64),
}

/// The longest single wait of the scheduler for the store, so that it can handle other events.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long dropping a cold tier waits for the store. The next server computes what is not stored by then.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// After a request gave the store up, it is asked for no prompt for as many timeouts, unless it reads one before.
const RETRY_TIMEOUTS: u32 = 10;

/// Whether the store counts as hanging at `now`, with `reads` prompts that it has read in all. `given_up` is when a
/// request gave it up, and how many it had read by then.
fn hangs(
    given_up: Option<(Instant, u64)>,
    reads: u64,
    (now, timeout): (Instant, Duration),
) -> bool {
    given_up.is_some_and(|(since, before)| {
        before == reads && now.duration_since(since) < timeout.saturating_mul(RETRY_TIMEOUTS)
    })
}

/// The least time between two reports of errors of one kind.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// For each kind of error: when one was last reported, and the number of errors since.
#[derive(Debug, Default)]
struct ErrorReports([Option<(Instant, u64)>; ColdErrorKind::COUNT]);

impl ErrorReports {
    /// If an error of this kind should be reported now: the number of errors of the kind since the last report. Else
    /// `None`.
    fn admit(&mut self, kind: ColdErrorKind, now: Instant) -> Option<u64> {
        if kind == ColdErrorKind::NotThere {
            return None;
        }
        let last = &mut self.0[kind.index()];
        match last {
            Some((at, others)) if now.duration_since(*at) < REPORT_INTERVAL => {
                *others += 1;
                None
            }
            _ => Some(last.replace((now, 0)).map_or(0, |(_, others)| others)),
        }
    }

    /// What to report at the end, whenever errors were reported before: that so many prefixes are not stored, if any, and
    /// the number of errors of that kind since the last report.
    fn at_end(&self, prefixes: usize) -> Option<(ColdError, u64)> {
        let error = ColdError::Unstored { prefixes };
        let others = self.0[error.kind().index()].map_or(0, |(_, others)| others);
        (prefixes > 0).then_some((error, others))
    }
}

/// An open cold tier.
struct Open<B: Backend> {
    tier: ColdTier<B>,
    timeout: Duration,
    /// When a request last gave the store up by its timeout, without a prompt that the store read while it waited; and
    /// the number of prompts that the store had read by then.
    given_up: Option<(Instant, u64)>,
    reports: ErrorReports,
    report: fn(&ColdError, u64),
}

impl<B: Backend> Open<B> {
    /// Reports the errors since the last call.
    fn report(&mut self) {
        for error in self.tier.take_errors() {
            if let Some(others) = self.reports.admit(error.kind(), Instant::now()) {
                (self.report)(&error, others);
            }
        }
    }
}

/// The cold tier, if the server has one.
pub(crate) struct Cold<B: Backend>(Option<Open<B>>);

impl<B: Backend> Cold<B> {
    /// No cold tier.
    pub fn none() -> Self {
        Self(None)
    }

    /// Opens the cold tier of an engine.
    pub fn open(engine: &mut Engine<B>, cache: &ColdCache) -> Result<Self, ColdError> {
        let &ColdCache { ref url, ref options, timeout, ref identity, report } = cache;
        let tier = ColdTier::open(engine.cache_mut(), url, identity, options)?;
        Ok(Self(Some(Open {
            tier,
            timeout,
            given_up: None,
            reports: ErrorReports::default(),
            report,
        })))
    }

    /// Whether there is a cold tier.
    pub fn is_open(&self) -> bool {
        self.0.is_some()
    }

    /// Called between steps: takes prefixes that were read from the store, and hands over prefixes to be stored. Waits
    /// for nothing.
    pub fn advance(&mut self, engine: &mut Engine<B>) {
        if let Some(open) = &mut self.0 {
            open.tier.advance(engine.cache_mut());
            open.report();
        }
    }

    /// As [`Self::wait_for_store`], if any prompt is being fetched; else returns `false` at once.
    pub fn wait(&mut self, engine: &mut Engine<B>) -> bool {
        let is_fetching = self.0.as_ref().is_some_and(|open| open.tier.fetching() > 0);
        if is_fetching {
            self.wait_for_store(engine);
        }
        is_fetching
    }

    /// Whether the store still has to read or write.
    pub fn is_busy(&self) -> bool {
        self.0.as_ref().is_some_and(|open| open.tier.pending() > 0)
    }

    /// As [`Self::advance`], after waiting until the store has finished a job, at most 50 ms.
    pub fn wait_for_store(&mut self, engine: &mut Engine<B>) {
        if let Some(open) = &mut self.0 {
            open.tier.wait(engine.cache_mut(), POLL_INTERVAL);
            open.report();
        }
    }

    /// Requests the prompt of a request from the store, unless that was done before. If a request has just given the
    /// store up by its timeout, and the store has read no prompt since that one was requested, the prompt is computed at
    /// once: a store that hangs delays only requests that were asked for before that, until it is tried again.
    pub fn ask(&mut self, engine: &Engine<B>, request: &mut Request) {
        let open = self.0.as_mut().filter(|_| request.fetch == Fetch::New);
        let Some(Open { tier, timeout, given_up, .. }) = open else { return };
        let reads = tier.finished_reads();
        let hangs = hangs(*given_up, reads, (Instant::now(), *timeout));
        if hangs || !request.sequence.may_reuse() || request.sequence.finish().is_some() {
            request.fetch = Fetch::Done;
            return;
        }
        let prompt =
            Prompt { tokens: request.sequence.tokens(), salt: &request.salt, adapter: b"" };
        request.fetch = match tier.fetch(engine.cache(), &prompt) {
            Ok(Some(id)) => Fetch::Asked { id, since: Instant::now(), reads },
            // The prompt is computed, as without a store. That includes the error that too many prompts are being
            // fetched already.
            Ok(None) | Err(_) => Fetch::Done,
        };
    }

    /// Stops waiting for the store on behalf of one request. Other requests with the same prompt continue to wait.
    pub fn give_up(&mut self, engine: &mut Engine<B>, request: &mut Request) {
        let fetch = std::mem::replace(&mut request.fetch, Fetch::Done);
        if let (Some(open), Fetch::Asked { id, since, reads }) = (&mut self.0, fetch) {
            // A store that has read other prompts meanwhile is slow, but does not hang.
            let has_read = open.tier.finished_reads() != reads;
            if open.tier.is_fetching(id) && since.elapsed() >= open.timeout && !has_read {
                open.given_up = Some((Instant::now(), reads));
            }
            open.tier.cancel(engine.cache_mut(), id);
        }
    }

    /// Whether a request need not wait for the store any longer: the stored part of its prompt has arrived, or its
    /// timeout has passed.
    pub fn is_ready(&self, request: &Request) -> bool {
        let Some(open) = &self.0 else { return true };
        match request.fetch {
            Fetch::Done => true,
            Fetch::New => false,
            Fetch::Asked { id, since, .. } => {
                !open.tier.is_fetching(id) || since.elapsed() >= open.timeout
            }
        }
    }

    /// The counters of the cold tier.
    pub fn stats(&self) -> ColdStats {
        self.0.as_ref().map_or(ColdStats::default(), |open| open.tier.stats())
    }
}

impl<B: Backend> Drop for Cold<B> {
    fn drop(&mut self) {
        let Some(mut open) = self.0.take() else { return };
        open.report();
        let Open { tier, reports, report, .. } = open;
        if let Some((error, others)) = reports.at_end(tier.close(CLOSE_TIMEOUT)) {
            report(&error, others);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_a_kind_is_reported_and_then_one_in_a_minute() {
        use ColdErrorKind::{Damaged, Failed, NotThere};
        let (mut reports, start) = (ErrorReports::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(reports.admit(NotThere, at(0)), None);
        assert_eq!(reports.admit(Failed, at(0)), Some(0));
        assert_eq!([1, 30, 59].map(|second| reports.admit(Failed, at(second))), [None; 3]);
        assert_eq!(reports.admit(Damaged, at(59)), Some(0), "another kind");
        assert_eq!(reports.admit(Failed, at(60)), Some(3));
        assert_eq!(reports.admit(Failed, at(61)), None);
        assert_eq!(reports.admit(Failed, at(500)), Some(1));
    }

    #[test]
    fn a_store_that_hangs_is_tried_again_when_it_has_read_or_after_ten_timeouts() {
        let (start, timeout) = (Instant::now(), Duration::from_secs(10));
        let at = |seconds| (start + Duration::from_secs(seconds), timeout);
        assert!(!hangs(None, 3, at(0)), "nobody gave it up");
        let given_up = Some((start, 3));
        assert!(hangs(given_up, 3, at(0)) && hangs(given_up, 3, at(99)));
        assert!(!hangs(given_up, 3, at(100)), "ten timeouts have passed");
        assert!(!hangs(given_up, 4, at(1)), "it has read one");
        assert!(!hangs(given_up, 3, (start, Duration::ZERO)), "without a timeout");
    }

    #[test]
    fn what_is_not_stored_at_the_end_is_reported() {
        let (mut reports, now) = (ErrorReports::default(), Instant::now());
        assert!(matches!(reports.at_end(2), Some((ColdError::Unstored { prefixes: 2 }, 0))));
        for _ in 0..4 {
            reports.admit(ColdErrorKind::Failed, now);
        }
        assert!(matches!(reports.at_end(1), Some((ColdError::Unstored { prefixes: 1 }, 3))));
        assert!(reports.at_end(0).is_none());
    }
}
