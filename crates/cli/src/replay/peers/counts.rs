//! Requests that move in bookkeeping: only their positions move, no bytes.

use std::collections::HashMap;

use anyhow::{Context, Result};
use dsv4_kv::transfer::{PartLayout, Positions};
use dsv4_kv::{CacheConfig, RequestId};

use super::super::execute::{Bookkeeping, Execute};
use super::decode::{Came, Takes};
use super::leave::{Mover, Prompted};
use super::link::Link;
use super::message::{ToDecode, now_ms};

/// The positions of a request that has `tokens` tokens in all layers.
fn positions(layout: &PartLayout, tokens: u32) -> Positions {
    Positions { trunk: tokens, draft: if layout.has_draft_layers() { tokens } else { 0 } }
}

/// The source of requests in bookkeeping.
pub struct CountsOut {
    layout: PartLayout,
    /// Index in the load, and tokens of the prompt.
    leaving: HashMap<RequestId, (usize, u32)>,
}

impl CountsOut {
    /// Requests leave a cache of this configuration.
    pub fn new(config: &CacheConfig) -> Self {
        Self { layout: PartLayout::new(config), leaving: HashMap::new() }
    }
}

impl Mover<Bookkeeping> for CountsOut {
    fn admitted(
        &mut self,
        _cache: &mut Bookkeeping,
        _to: &Link,
        prompted: &Prompted<'_>,
    ) -> Result<()> {
        self.leaving.insert(prompted.id, (prompted.index, prompted.tokens.len() as u32));
        Ok(())
    }

    fn stepped(&mut self, _cache: &mut Bookkeeping, _to: &Link, _id: RequestId) -> Result<()> {
        Ok(())
    }

    fn ended(&mut self, cache: &mut Bookkeeping, to: &Link, id: RequestId) -> Result<bool> {
        let (index, tokens) = self.leaving.remove(&id).context("a prompt was admitted")?;
        let is_whole = cache.ledger().committed(id)? == tokens;
        if is_whole {
            let bytes = self.layout.bytes(positions(&self.layout, tokens));
            to.send(&ToDecode::Counted { index, tokens, bytes, at_ms: now_ms() })?;
        }
        Ok(is_whole)
    }
}

/// The target of requests in bookkeeping.
pub struct CountsIn {
    layout: PartLayout,
    new: Vec<usize>,
    /// Tokens, bytes, and time of the requests that arrived.
    came: HashMap<usize, (u32, u64, f64)>,
}

impl CountsIn {
    /// Requests arrive in a cache of this configuration.
    pub fn new(config: &CacheConfig) -> Self {
        Self { layout: PartLayout::new(config), new: Vec::new(), came: HashMap::new() }
    }
}

impl Takes<Bookkeeping> for CountsIn {
    fn hear(&mut self, message: ToDecode) -> Result<()> {
        let ToDecode::Counted { index, tokens, bytes, at_ms } = message else {
            anyhow::bail!("in bookkeeping no request comes by {message:?}")
        };
        self.came.insert(index, (tokens, bytes, at_ms));
        self.new.push(index);
        Ok(())
    }

    fn poll(&mut self) -> Result<Vec<usize>> {
        Ok(std::mem::take(&mut self.new))
    }

    fn is_idle(&self) -> bool {
        self.came.is_empty()
    }

    fn admit(&mut self, cache: &mut Bookkeeping, index: usize) -> Result<(RequestId, Came)> {
        let came = self.came.remove(&index);
        let (tokens, bytes, at_ms) = came.context("what is admitted has come")?;
        let id = cache.arrive(positions(&self.layout, tokens))?;
        Ok((id, Came { at_ms, entered_ms: now_ms(), bytes, on_device: false }))
    }

    fn early_bytes(&self) -> u64 {
        0
    }
}
