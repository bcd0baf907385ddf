//! Copies of prefixes, that is whole blocks and the checkpoint at their end, from the prefix tree of one cache to that
//! of another.

use kv_layout::geometry::BLOCK_TOKENS;

use super::error::MoveError;
use super::memory::{Parts, PartsMut, check_length, part};
use super::parts::{PartLayout, Positions};
use super::staging::TransferStaging;
use crate::block::BLOCK;
use crate::checkpoints::SavedPlace;
use crate::device::{Backend, Stream};
use crate::ids::{BlockId, CheckpointId};
use crate::ledger::{LoadTarget, Prompt};
use crate::manager::KvCacheManager;
use crate::pool_kind::PoolUnit;

/// A prefix to be copied to another cache. It borrows the cache, so that the prefix is not evicted before
/// the copies are done.
pub struct PrefixExport<'c, 'p, B: Backend> {
    cache: &'c mut KvCacheManager<B>,
    stream: &'c Stream<B>,
    staging: &'c mut TransferStaging<B>,
    prompt: Prompt<'p>,
    at: Positions,
    blocks: Vec<BlockId>,
    checkpoint: CheckpointId,
}

/// The parts of an imported prefix that were new to the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixImport {
    /// Number of new blocks. Blocks that the cache already had stay as they are.
    pub blocks: u32,
    /// Whether the checkpoint is new.
    pub checkpoint: bool,
}

impl<B: Backend> KvCacheManager<B> {
    /// The part of a prompt that this cache has, down to the deepest checkpoint, to be copied; `None` without a
    /// checkpoint. All whole blocks of the prompt count, also if the prompt ends with one. The prefix stays in this
    /// cache, and the export does not count as a use.
    ///
    /// # Errors
    /// [`MoveError::ForeignStaging`]; [`MoveError::Cache`] for a stream of another device.
    pub fn export_prefix<'c, 'p>(
        &'c mut self,
        stream: &'c Stream<B>,
        staging: &'c mut TransferStaging<B>,
        prompt: &Prompt<'p>,
    ) -> Result<Option<PrefixExport<'c, 'p, B>>, MoveError> {
        self.core().check_stream(stream)?;
        self.check_staging(staging)?;
        self.reject_leaked_steps();
        let found = self.ledger_mut().prefix_of(prompt);
        Ok(found.map(|(blocks, SavedPlace { checkpoint, boundary, has_draft })| {
            let has_draft = has_draft && staging.layout.has_draft_layers();
            let at = Positions { trunk: boundary, draft: if has_draft { boundary } else { 0 } };
            let prompt = Prompt { tokens: &prompt.tokens[..boundary as usize], ..*prompt };
            PrefixExport { cache: self, stream, staging, prompt, at, blocks, checkpoint }
        }))
    }

    /// Enters a prefix that was exported in the prefix tree: the parts of [`PartLayout::prefix_parts`], one after the
    /// other in `payload`. Later prompts with the same salt, adapter and first tokens continue from it. Reserves memory
    /// for the missing parts, all or nothing, and evicts unreferenced prefixes for it if needed. `None` if the cache
    /// has the whole prefix. The bytes are not checked: the caller must make sure that they belong to these tokens.
    ///
    /// # Errors
    /// [`MoveError::NothingShared`], [`MoveError::NoPrefix`] if the number of tokens is not the trunk's position or not
    /// a multiple of 128, or if the draft position is neither 0 nor the trunk's, [`MoveError::TooLong`],
    /// [`MoveError::ForeignStaging`], [`MoveError::Length`]; [`MoveError::Cache`]:
    /// [`KvError::OutOfBlocks`](crate::KvError::OutOfBlocks),
    /// [`KvError::OutOfCheckpoints`](crate::KvError::OutOfCheckpoints), or if the device fails. What it took is free
    /// again. Nothing was evicted, unless the device failed.
    pub fn import_prefix(
        &mut self,
        stream: &Stream<B>,
        staging: &mut TransferStaging<B>,
        prompt: &Prompt<'_>,
        (at, payload): (Positions, &[u8]),
    ) -> Result<Option<PrefixImport>, MoveError> {
        self.import_prefix_from(stream, staging, prompt, (at, Parts::Host(payload)))
    }

    /// As [`Self::import_prefix`], from memory of either kind.
    ///
    /// # Errors
    /// As [`Self::import_prefix`].
    pub fn import_prefix_from(
        &mut self,
        stream: &Stream<B>,
        staging: &mut TransferStaging<B>,
        prompt: &Prompt<'_>,
        (at, payload): (Positions, Parts<'_, B>),
    ) -> Result<Option<PrefixImport>, MoveError> {
        self.reject_leaked_steps();
        self.core().check_stream(stream)?;
        self.check_staging(staging)?;
        self.core().read_ledger().check_positions(at)?;
        let (tokens, behind) = prompt.tokens.as_chunks::<BLOCK>();
        let has_draft = at.draft == at.trunk;
        let is_prefix = prompt.tokens.len() == at.trunk as usize && behind.is_empty();
        if !is_prefix || tokens.is_empty() || !(has_draft || at.draft == 0) {
            return Err(MoveError::NoPrefix { at, tokens: prompt.tokens.len() });
        }
        check_length(staging.layout.prefix_bytes(at), payload.bytes())?;
        let root = self.core().read_ledger().shared_prompt(prompt).map(|(root, _)| root);
        let root = root.ok_or(MoveError::NothingShared)?;
        // Before anything is evicted: it is refused while the stream is captured.
        let _running = stream.running("moving a request or a prefix")?;
        let Some(target) = self.ledger_mut().begin_load(&root, tokens)? else {
            return Ok(None);
        };
        if let Err(error) = self.write_prefix(stream, staging, &target, &payload) {
            // Copies that were queued before the failure must not write the blocks and the checkpoint after they have
            // a new owner. If a device error prevents the wait, no copy runs. If a capture prevents it, the next owner
            // uses them in the order of the cache's steps, after these copies.
            let _ = stream.synchronize();
            self.ledger_mut().drop_load(target);
            return Err(error);
        }
        let has_draft = has_draft || !staging.layout.has_draft_layers();
        let (blocks, checkpoint) = self.ledger_mut().enter_moved(target, tokens, has_draft);
        Ok(Some(PrefixImport { blocks, checkpoint }))
    }

    /// Writes the missing blocks, and the checkpoint. No capture of the stream may begin meanwhile.
    fn write_prefix(
        &mut self,
        stream: &Stream<B>,
        staging: &mut TransferStaging<B>,
        target: &LoadTarget,
        payload: &Parts<'_, B>,
    ) -> Result<(), MoveError> {
        // Pending poison must be written before the rows.
        self.follow_steps(stream)?;
        let bytes = staging.layout.block_bytes() as usize;
        let units: Vec<_> = target.blocks().iter().map(|block| block.0).collect();
        let here = target.above() as usize * bytes;
        let behind = here + units.len() * bytes;
        staging.store(
            self.core(),
            stream,
            (PoolUnit::Block, &units),
            payload.part(here..behind),
        )?;
        let end = payload.bytes() as usize;
        // The windows of draft layers are the last bytes of a checkpoint. The payload may not have them.
        let checkpoint = self.core().memory.state.checkpoint(target.checkpoint());
        let checkpoint = part(&checkpoint, 0..end - behind);
        match payload.part(behind..end) {
            Parts::Host(from) => stream.upload(from, &checkpoint, 0)?,
            Parts::Device(from) => stream.copy(&from.view(), &checkpoint)?,
        }
        // Device errors are reported before any request continues from the prefix.
        Ok(stream.synchronize()?)
    }
}

impl<'p, B: Backend> PrefixExport<'_, 'p, B> {
    /// Its end: in the trunk a multiple of 128 tokens. In the draft layers the same number if its checkpoint has their
    /// windows, else 0.
    #[must_use]
    pub fn positions(&self) -> Positions {
        self.at
    }

    /// Its tokens, salt and adapter.
    #[must_use]
    pub fn prompt(&self) -> Prompt<'p> {
        self.prompt
    }

    /// The device of its cache.
    #[must_use]
    pub fn device(&self) -> &crate::device::Device<B> {
        self.cache.device()
    }

    /// The configuration of its cache.
    #[must_use]
    pub fn config(&self) -> &crate::CacheConfig {
        self.cache.config()
    }

    /// The layout of the parts of prefixes of its cache.
    #[must_use]
    pub fn layout(&self) -> &PartLayout {
        &self.staging.layout
    }

    /// Copies all of it to `into`: its blocks, then the checkpoint, in the order of [`PartLayout::prefix_parts`].
    ///
    /// # Errors
    /// [`MoveError::Length`], [`MoveError::Cache`] if the device fails. The prefix is unchanged.
    pub fn all(&mut self, into: &mut [u8]) -> Result<(), MoveError> {
        self.all_to(PartsMut::Host(into))
    }

    /// As [`Self::all`], to memory of either kind. Waits until the copies are done.
    ///
    /// # Errors
    /// As [`Self::all`].
    pub fn all_to(&mut self, mut into: PartsMut<'_, B>) -> Result<(), MoveError> {
        let Self { cache, stream, staging, at, blocks, checkpoint, .. } = self;
        check_length(staging.layout.prefix_bytes(*at), into.bytes())?;
        let _running = stream.running("moving a request or a prefix")?;
        cache.follow_steps(stream)?;
        let bytes = blocks.len() * staging.layout.block_bytes() as usize;
        let units: Vec<_> = blocks.iter().map(|block| block.0).collect();
        let mut copied =
            staging.fetch(cache.core(), stream, (PoolUnit::Block, &units), into.part(0..bytes));
        // The bytes between the rows of the pools may be left over from an earlier transfer.
        let image = staging.layout.block_bytes() as usize;
        for start in (0..bytes).step_by(image.max(1)) {
            let image = into.part(start..start + image);
            copied = copied.and_then(|()| staging.fill_holes(stream, (BLOCK_TOKENS, 0), image));
        }
        let end = into.bytes() as usize;
        let checkpoint = cache.core().memory.state.checkpoint(*checkpoint);
        let checkpoint = part(&checkpoint, 0..end - bytes);
        let copied = copied.and_then(|()| {
            match into.part(bytes..end) {
                PartsMut::Host(into) => stream.download(&checkpoint.view(), 0, into)?,
                PartsMut::Device(into) => stream.copy(&checkpoint.view(), &into)?,
            }
            Ok(())
        });
        into.settle(stream, copied)
    }
}

impl<B: Backend> std::fmt::Debug for PrefixExport<'_, '_, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrefixExport").field("at", &self.at).finish_non_exhaustive()
    }
}
