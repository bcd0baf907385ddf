//! The cold tier of a server: prefixes that outlive it. What the store has of a prompt is in host memory before the prompt is
//! admitted; what comes to host memory is stored.

use dsv4_kv::Prompt;
use dsv4_kv_device::Backend;
use dsv4_kv_model::Engine;
use dsv4_kv_tier::{ColdError, ColdOptions, ColdStats, ColdTier};

use crate::queue::{Fetch, Request};

/// Where prefixes are stored.
#[derive(Clone, Debug)]
pub struct ColdCache {
    /// A local directory, or the URL of a store.
    pub url: String,
    /// What tells the bytes of this engine from those of others: a digest of the model's weights, and of whatever else makes
    /// other bytes.
    pub identity: Vec<u8>,
}

/// The cold tier, if there is one.
pub(crate) struct Cold<B: Backend>(Option<ColdTier<B>>);

impl<B: Backend> Cold<B> {
    /// None.
    pub fn none() -> Self {
        Self(None)
    }

    /// That of an engine.
    pub fn open(engine: &mut Engine<B>, cache: &ColdCache) -> Result<Self, ColdError> {
        let ColdCache { url, identity } = cache;
        ColdTier::open(engine.cache_mut(), url, identity, &ColdOptions::default())
            .map(Some)
            .map(Self)
    }

    /// Between steps: takes what the store has brought, and hands it what is to be stored. Waits for nothing.
    pub fn advance(&mut self, engine: &mut Engine<B>) {
        if let Some(tier) = &mut self.0 {
            tier.advance(engine.cache_mut());
        }
    }

    /// As [`Self::advance`], once the store has done something. `false`, at once, if no prompt is on its way.
    pub fn wait(&mut self, engine: &mut Engine<B>) -> bool {
        let Some(tier) = self.0.as_mut().filter(|tier| tier.fetching() > 0) else { return false };
        tier.wait(engine.cache_mut());
        true
    }

    /// Asks for a request's prompt, unless it was asked for; if too many are on their way, later.
    pub fn ask(&mut self, engine: &Engine<B>, request: &mut Request) {
        let Some(tier) = self.0.as_mut().filter(|_| request.fetch == Fetch::New) else { return };
        if !request.sequence.may_reuse() {
            request.fetch = Fetch::Done;
            return;
        }
        let prompt =
            Prompt { tokens: request.sequence.tokens(), salt: &request.salt, adapter: b"" };
        request.fetch = match tier.fetch(engine.cache(), &prompt) {
            Ok(Some(id)) => Fetch::Asked(id),
            Err(ColdError::TooManyFetches { .. }) => Fetch::New,
            // It is computed, as without a store.
            Ok(None) | Err(_) => Fetch::Done,
        };
    }

    /// Whether what the store has of a request's prompt is there.
    pub fn is_ready(&self, request: &Request) -> bool {
        match (&self.0, request.fetch) {
            (None, _) | (_, Fetch::Done) => true,
            (_, Fetch::New) => false,
            (Some(tier), Fetch::Asked(id)) => !tier.is_fetching(id),
        }
    }

    /// What it has done.
    pub fn stats(&self) -> ColdStats {
        self.0.as_ref().map_or(ColdStats::default(), ColdTier::stats)
    }
}
