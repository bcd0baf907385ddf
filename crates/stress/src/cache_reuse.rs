//! Prefix reuse, forks, suspended requests and leases of a cache with its kernels.

use std::time::Duration;

use dsv4_kv::device::Backend;
use dsv4_kv::events::{Drained, EventBatch, EventSource};
use dsv4_kv::reuse::PinRefused;
use dsv4_kv::{Admission, KvError, RequestId};

use super::answer::{Answer, Counts, Pinned};
use super::cache::Cache;
use super::op::Name;
use super::reuse::Reuse;
use super::subject::{counts, told};
use super::text::Text;
use dsv4_kv_tests::fed::Fed;

impl<B: Backend> Reuse for Cache<B> {
    fn admit_with(&mut self, text: &Text) -> Result<Admission, KvError> {
        let Fed { manager, stream, .. } = &mut self.fed;
        told(text, |prompt| manager.admit_with(stream, prompt))
    }

    fn fork(&mut self, of: RequestId) -> Result<RequestId, KvError> {
        self.fed.manager.fork(&self.fed.stream, of)
    }

    fn suspend(&mut self, name: Name, id: RequestId) -> Result<(), KvError> {
        let suspended = self.fed.manager.suspend(&self.fed.stream, id)?;
        self.suspended.insert(name, suspended);
        Ok(())
    }

    fn resume(&mut self, name: Name) -> Option<Answer<RequestId>> {
        let suspended = self.suspended.remove(&name)?;
        let Fed { manager, stream, .. } = &mut self.fed;
        Some(manager.resume(stream, suspended).map_err(|refused| {
            let text = format!("{:?}", refused.error());
            self.suspended.insert(name, refused.into_suspended());
            text
        }))
    }

    fn discard(&mut self, name: Name) -> bool {
        let suspended = self.suspended.remove(&name);
        suspended.is_some_and(|suspended| self.fed.manager.discard(suspended).is_ok())
    }

    fn pin(&mut self, lease: Name, text: &Text, until: Duration) -> Result<Pinned, PinRefused> {
        let pinned = told(text, |prompt| self.fed.manager.pin(prompt, until))?;
        let what = (pinned.tokens(), pinned.bytes());
        self.leases.insert(lease, pinned);
        Ok(what)
    }

    fn unpin(&mut self, lease: Name) -> bool {
        let lease = self.leases.remove(&lease);
        lease.is_some_and(|lease| self.fed.manager.unpin(lease))
    }

    fn expire(&mut self, now: Duration) -> usize {
        self.fed.manager.expire(now)
    }

    fn own_blocks(&self, id: RequestId) -> Option<Vec<bool>> {
        self.fed.manager.ledger().own_blocks(id).ok().map(Iterator::collect)
    }

    fn counts(&self) -> Counts {
        counts(&self.fed.manager.ledger())
    }

    fn drain(&mut self, batch: &mut EventBatch) -> Drained {
        self.fed.manager.drain_events(batch)
    }

    fn snapshot(&mut self) -> EventBatch {
        self.fed.manager.snapshot_events()
    }

    fn resident(&self) -> EventBatch {
        self.fed.manager.resident_events()
    }

    fn audit(&self) -> Result<(), String> {
        self.fed.manager.ledger().audit()
    }
}
