//! A claim: what a target holds between its question to a source and the answer.

use std::time::Duration;

use dsv4_kv::transfer::Loaded;
use dsv4_kv::{CacheId, RequestId};

use crate::image::Source;

/// A request whose bytes are in their reserved memory in the cache, and whose source was asked for it. The cache can
/// run steps meanwhile.
#[derive(Debug)]
#[must_use = "the slot and blocks of a claim that is dropped are lost to its cache; settle it, or give it up"]
pub struct Claim {
    /// The cache of the reservation.
    pub(super) cache: CacheId,
    pub(super) loaded: Loaded,
    pub(super) source: Source,
    pub(super) until: Duration,
}

impl Claim {
    /// The source that was asked.
    #[must_use]
    pub const fn source(&self) -> Source {
        self.source
    }

    /// The time until which the source can answer.
    #[must_use]
    pub const fn until(&self) -> Duration {
        self.until
    }
}

/// The state of a claim.
#[derive(Debug)]
#[must_use = "a claim that waits holds a slot and blocks"]
pub enum Claimed {
    /// The source has not answered yet.
    Waits(Claim),
    /// The request was entered in this cache.
    Admitted(RequestId),
}
