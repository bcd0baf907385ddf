//! The ledger: blocks and requests, without a device. `KvCacheManager` keeps one; a scheduler that
//! only wants to know what would fit can keep one by itself.

use kv_layout::geometry::{LayerKind, swa_ring_rows};
use serde::Serialize;

use crate::block::{self, BlockPool};
use crate::config::CacheConfig;
use crate::error::KvError;
use crate::ids::{BlockId, RequestId, SlotId};
use crate::plan::{self, Chunk, Section, StepLayout};
use crate::requests::{Request, Requests};

/// What one request does in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRequest {
    /// The request.
    pub id: RequestId,
    /// Tokens it has before the step; must be what it has.
    pub start: u32,
    /// Tokens it adds: 1 in decode, a chunk in prefill, drafts + 1 in verification.
    pub tokens: u32,
}

/// A prepared step, in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepPlan {
    /// Tokens of all requests.
    pub tokens: u32,
    /// Requests that take part.
    pub requests: u32,
    /// Blocks taken for the step.
    pub new_blocks: u32,
}

/// Who holds what. Serialised it is all of that, to be stored in a report or compared.
#[derive(Debug, Serialize)]
pub struct Ledger {
    blocks: BlockPool,
    requests: Requests,
    layout: StepLayout,
    /// Rows of a slot's sliding-window ring.
    ring: u32,
    /// Whether any layer stores entries, that is, whether requests need blocks.
    has_entries: bool,
    /// One bit a slot: seen in the step being checked. Scratch, so that checking allocates nothing.
    #[serde(skip)]
    seen: Vec<u64>,
    /// Blocks in a request's row of the block table.
    max_blocks: u32,
    max_context: u32,
    max_requests: u32,
    max_step_tokens: u32,
    rollback_tokens: u32,
}

impl Ledger {
    /// An empty ledger.
    ///
    /// # Errors
    /// [`KvError::Config`] if a setting is out of range.
    pub fn new(config: &CacheConfig) -> Result<Self, KvError> {
        config.validate()?;
        Ok(Self {
            blocks: BlockPool::new(config.num_blocks),
            requests: Requests::new(config.max_requests),
            layout: StepLayout::new(config.max_step_tokens, config.max_requests),
            max_blocks: config.max_blocks_per_request(),
            ring: swa_ring_rows(config.step_tokens_with_rollback()),
            has_entries: config.model.layers.iter().any(|&kind| kind != LayerKind::Swa),
            seen: vec![0; config.max_requests.div_ceil(u64::BITS) as usize],
            max_context: config.max_context,
            max_requests: config.max_requests,
            max_step_tokens: config.max_step_tokens,
            rollback_tokens: config.step_tokens_with_rollback(),
        })
    }

    /// Admits a request with no tokens.
    ///
    /// # Errors
    /// [`KvError::NoFreeSlot`].
    pub fn admit(&mut self) -> Result<RequestId, KvError> {
        self.requests.admit().ok_or(KvError::NoFreeSlot { slots: self.max_requests })
    }

    /// Ends a request and frees what it held.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`].
    pub fn release(&mut self, id: RequestId) -> Result<(), KvError> {
        let request = self.requests.release(id).ok_or(KvError::UnknownRequest { request: id })?;
        // In reverse, so that the block taken last is the one taken next.
        request.blocks.into_iter().rev().for_each(|block| self.blocks.give_back(block));
        Ok(())
    }

    /// Takes the blocks a step needs and writes its StepMeta into `array`.
    ///
    /// All or nothing: on an error no block is taken, no request changes, and `array` is as it was.
    ///
    /// A request whose last step was not committed starts again where that step did, as if all of it
    /// had been rejected.
    ///
    /// # Errors
    /// The [`KvError`] of the first request that cannot take part, among them
    /// [`KvError::NotRollbackable`] after an uncommitted step of too many tokens; or
    /// [`KvError::OutOfBlocks`] with the shortfall of the whole step.
    ///
    /// # Panics
    /// If `array` is shorter than [`Self::layout`] says.
    pub fn prepare_forward(
        &mut self,
        step: &[StepRequest],
        array: &mut [i32],
    ) -> Result<StepPlan, KvError> {
        let new_blocks = self.check(step)?;
        if new_blocks > self.blocks.free() {
            return Err(KvError::OutOfBlocks { needed: new_blocks, free: self.blocks.free() });
        }
        let updates = array[self.layout.range(Section::TableIndex).start..]
            .split_at_mut(self.layout.capacity(Section::TableIndex) as usize);
        let mut entered = updates.0.iter_mut().zip(updates.1);
        for part in step {
            let needed = self.blocks_of(part.start + part.tokens);
            let Some(request) = self.requests.get_mut(part.id) else {
                unreachable!("checked above, and nothing was released since")
            };
            request.written = part.tokens;
            while (request.blocks.len() as u32) < needed {
                let Some((block, (index, entry))) = self.blocks.take().zip(entered.next()) else {
                    unreachable!("counted above, and the layout has room for every new block")
                };
                *index = (part.id.slot.0 * self.max_blocks) as i32 + request.blocks.len() as i32;
                *entry = block.id().0 as i32;
                request.blocks.push(block);
            }
        }
        let chunks = step.iter().map(|part| Chunk {
            slot: part.id.slot,
            start: part.start,
            end: part.start + part.tokens,
        });
        let tokens = plan::fill(array, self.layout, self.ring, chunks);
        Ok(StepPlan { tokens, requests: step.len() as u32, new_blocks })
    }

    /// Makes the first `accepted` tokens of the last step final; the others never were.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::AcceptedTooMany`], [`KvError::NotRollbackable`].
    pub fn commit(&mut self, id: RequestId, accepted: u32) -> Result<(), KvError> {
        let most = self.rollback_tokens;
        let request = self.requests.get_mut(id).ok_or(KvError::UnknownRequest { request: id })?;
        let written = request.written;
        if accepted > written {
            return Err(KvError::AcceptedTooMany { request: id, accepted, written });
        }
        if accepted < written && written > most {
            return Err(KvError::NotRollbackable { request: id, accepted, written, most });
        }
        request.committed += accepted;
        request.written = 0;
        Ok(())
    }

    /// Blocks a request of `end` tokens holds: one for each 128 tokens of which an entry exists.
    #[must_use]
    pub fn blocks_of(&self, end: u32) -> u32 {
        if self.has_entries { block::blocks_of(end) } else { 0 }
    }

    /// Checks a step and counts the blocks it needs; changes nothing but scratch.
    fn check(&mut self, step: &[StepRequest]) -> Result<u32, KvError> {
        if step.len() > self.max_requests as usize {
            let most = self.max_requests;
            return Err(KvError::TooManyRequests { requests: step.len(), most });
        }
        self.seen.fill(0);
        let (mut tokens, mut new_blocks) = (0, 0);
        for part in step {
            let held = self.check_request(part)?;
            let (word, bit) = (part.id.slot.0 / u64::BITS, part.id.slot.0 % u64::BITS);
            let seen = &mut self.seen[word as usize];
            if *seen >> bit & 1 == 1 {
                return Err(KvError::DuplicateRequest { request: part.id });
            }
            *seen |= 1 << bit;
            tokens += u64::from(part.tokens);
            new_blocks += self.blocks_of(part.start + part.tokens).saturating_sub(held);
        }
        if tokens > u64::from(self.max_step_tokens) {
            return Err(KvError::StepTooLong { tokens, most: self.max_step_tokens });
        }
        Ok(new_blocks)
    }

    /// Checks one request's part; the blocks it holds.
    fn check_request(&self, part: &StepRequest) -> Result<u32, KvError> {
        let request = part.id;
        let Request { blocks, committed, written } =
            self.requests.get(request).ok_or(KvError::UnknownRequest { request })?;
        // A step that was never committed counts as rejected, which the rings must allow.
        let (written, most) = (*written, self.rollback_tokens);
        if written > most {
            return Err(KvError::NotRollbackable { request, accepted: 0, written, most });
        }
        if part.start != *committed {
            return Err(KvError::WrongStart { request, committed: *committed, start: part.start });
        }
        if part.tokens == 0 {
            return Err(KvError::NoTokens { request });
        }
        let end = u64::from(part.start) + u64::from(part.tokens);
        if end > u64::from(self.max_context) {
            return Err(KvError::ContextTooLong { request, end, most: self.max_context });
        }
        Ok(blocks.len() as u32)
    }

    /// The layout of the StepMeta array.
    #[must_use]
    pub fn layout(&self) -> StepLayout {
        self.layout
    }

    /// Final tokens of a request.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`].
    pub fn committed(&self, id: RequestId) -> Result<u32, KvError> {
        self.get(id).map(|request| request.committed)
    }

    /// Blocks of a request, in the order of its tokens: its block table.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`].
    pub fn block_table(
        &self,
        id: RequestId,
    ) -> Result<impl ExactSizeIterator<Item = BlockId>, KvError> {
        self.get(id).map(|request| request.blocks.iter().map(block::Block::id))
    }

    /// Blocks that are free.
    #[must_use]
    pub fn free_blocks(&self) -> u32 {
        self.blocks.free()
    }

    /// Blocks there are.
    #[must_use]
    pub fn total_blocks(&self) -> u32 {
        self.blocks.total()
    }

    /// The request that has the slot.
    #[must_use]
    pub fn request_in(&self, slot: SlotId) -> Option<RequestId> {
        self.requests.in_slot(slot)
    }

    /// Requests that are admitted.
    #[must_use]
    pub fn live_requests(&self) -> u32 {
        self.requests.live()
    }

    fn get(&self, id: RequestId) -> Result<&Request, KvError> {
        self.requests.get(id).ok_or(KvError::UnknownRequest { request: id })
    }
}
