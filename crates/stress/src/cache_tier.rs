//! The host tier of a cache with its kernels.

use dsv4_kv::device::Backend;
use dsv4_kv::{Admission, KvError};

use super::cache::Cache;
use super::op::Name;
use super::subject::told;
use super::text::Text;
use super::tier::{HostTier, Seen};
use dsv4_kv_tests::fed::Fed;

impl<B: Backend> HostTier for Cache<B> {
    fn prefetch(&mut self, name: Name, text: &Text) -> Result<bool, KvError> {
        let Fed { manager, stream, .. } = &mut self.fed;
        let wanted = told(text, |prompt| manager.prefetch(stream, prompt))?;
        self.wanted.extend(wanted.map(|id| (name, id)));
        Ok(wanted.is_some())
    }

    fn cancel(&mut self, name: Name) -> bool {
        let manager = &mut self.fed.manager;
        match self.wanted.remove(&name) {
            Some(id) => {
                self.cancelled = Some(id);
                manager.cancel_prefetch(id)
            }
            // Cancels the last cancelled prompt once more, unless another request still waits for it. This must not
            // succeed, as the first caller has cancelled it already.
            None => {
                let again = self.cancelled.filter(|&id| !manager.is_prefetching(id));
                again.is_some_and(|id| manager.cancel_prefetch(id))
            }
        }
    }

    fn admit_waiting(&mut self, text: &Text) -> Result<Admission, KvError> {
        let Fed { manager, stream, .. } = &mut self.fed;
        told(text, |prompt| manager.admit_waiting(stream, prompt))
    }

    fn advance(&mut self) -> Result<(), KvError> {
        let Fed { manager, stream, .. } = &mut self.fed;
        manager.advance_tier(stream)
    }

    fn settle(&mut self) -> Result<(), KvError> {
        let Fed { manager, stream, .. } = &mut self.fed;
        manager.settle_tier(stream)
    }

    fn catch_up(&mut self) {
        // Freeing memory waits for the work of all streams.
        let device = self.fed.stream.device();
        drop(device.allocate::<u8>("what is freed at once", 1).expect("there is a byte left"));
    }

    fn there(&self, text: &Text) -> u32 {
        let found = told(text, |prompt| Some(self.fed.manager.host_prompt(prompt)?.reusable));
        found.unwrap_or(0)
    }

    fn seen(&mut self) -> Seen {
        let manager = &mut self.fed.manager;
        self.wanted.retain(|_, id| manager.is_prefetching(*id));
        Seen {
            events: manager.take_tier_events(),
            wanted: self.wanted.keys().copied().collect(),
            is_moving: manager.has_tier_transfers(),
            evicted: manager.tier_stats().evicted_checkpoints,
        }
    }

    fn audit(&self) -> Result<(), String> {
        self.fed.manager.audit_tier()
    }
}
