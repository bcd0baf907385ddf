//! What is put to the test where requests share: a ledger, with what its user keeps of it.

use std::time::Duration;

use dsv4_kv::events::{Drained, EventBatch};
use dsv4_kv::reuse::PinRefused;
use dsv4_kv::{Admission, KvError, RequestId};

use super::answer::{Answer, Counts, Pinned};
use super::op::Name;
use super::text::Text;

/// Something whose requests share like a cache's. Suspended requests and leases stay with it, by name.
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

    /// Takes a request out of its slot, and keeps it under its name.
    ///
    /// # Errors
    /// The cache's refusal.
    fn suspend(&mut self, name: Name, id: RequestId) -> Result<(), KvError>;

    /// Lets the suspended request of that name go on; `None` if there is none.
    fn resume(&mut self, name: Name) -> Option<Answer<RequestId>>;

    /// Ends the suspended request of that name; whether there was one.
    fn discard(&mut self, name: Name) -> bool;

    /// Pins a prompt.
    ///
    /// # Errors
    /// The cache's refusal.
    fn pin(&mut self, lease: Name, text: &Text, until: Duration) -> Result<Pinned, PinRefused>;

    /// Ends a lease; `false` if there is none of that name, or it has ended.
    fn unpin(&mut self, lease: Name) -> bool;

    /// Ends the leases whose time is before `now`; how many.
    fn expire(&mut self, now: Duration) -> usize;

    /// Whether a request alone has each of its blocks.
    fn own_blocks(&self, id: RequestId) -> Option<Vec<bool>>;

    /// What is counted.
    fn counts(&self) -> Counts;

    /// What happened to the prefix tree, as [`drain_events`](dsv4_kv::events::EventSource::drain_events).
    fn drain(&mut self, batch: &mut EventBatch) -> Drained;

    /// All that is there, as [`snapshot_events`](dsv4_kv::events::EventSource::snapshot_events).
    fn snapshot(&mut self) -> EventBatch;

    /// The same to whoever only looks.
    fn resident(&self) -> EventBatch;

    /// Counts everything again.
    ///
    /// # Errors
    /// What is not as it must be.
    fn audit(&self) -> Result<(), String>;
}
