//! The subject where requests share prefixes.

use std::time::Duration;

use dsv4_kv::events::{Drained, EventBatch};
use dsv4_kv::reuse::PinRefused;
use dsv4_kv::{Admission, KvError, RequestId};

use super::answer::{Answer, Counts, Pinned};
use super::op::Name;
use super::text::Text;

/// A subject whose requests share prefixes. It keeps suspended requests and leases, by name.
pub trait Reuse {
    /// Admits a request with its prompt.
    ///
    /// # Errors
    /// The cache's refusal.
    fn admit_with(&mut self, text: &Text) -> Result<Admission, KvError>;

    /// Admits a copy of a request.
    ///
    /// # Errors
    /// The cache's refusal.
    fn fork(&mut self, of: RequestId) -> Result<RequestId, KvError>;

    /// Suspends a request, and keeps it under `name`.
    ///
    /// # Errors
    /// The cache's refusal.
    fn suspend(&mut self, name: Name, id: RequestId) -> Result<(), KvError>;

    /// Resumes the suspended request of this name; `None` if there is none.
    fn resume(&mut self, name: Name) -> Option<Answer<RequestId>>;

    /// Ends the suspended request of this name; false if there is none.
    fn discard(&mut self, name: Name) -> bool;

    /// Pins a prompt.
    ///
    /// # Errors
    /// The cache's refusal.
    fn pin(&mut self, lease: Name, text: &Text, until: Duration) -> Result<Pinned, PinRefused>;

    /// Ends a lease; `false` if there is none of this name, or it has expired.
    fn unpin(&mut self, lease: Name) -> bool;

    /// Ends the leases that expire before `now`; returns their number.
    fn expire(&mut self, now: Duration) -> usize;

    /// For each block of a request, whether the request is its only owner.
    fn own_blocks(&self, id: RequestId) -> Option<Vec<bool>>;

    /// The ledger's counts.
    fn counts(&self) -> Counts;

    /// The events of the prefix tree, as [`drain_events`](dsv4_kv::events::EventSource::drain_events).
    fn drain(&mut self, batch: &mut EventBatch) -> Drained;

    /// All blocks of the prefix tree, as [`snapshot_events`](dsv4_kv::events::EventSource::snapshot_events).
    fn snapshot(&mut self) -> EventBatch;

    /// As `Self::snapshot`, without an effect on the event log.
    fn resident(&self) -> EventBatch;

    /// Counts all blocks and checkpoints again, and compares.
    ///
    /// # Errors
    /// The first inconsistency.
    fn audit(&self) -> Result<(), String>;
}
