//! Prefixes: one cache offers a prefix, and another enters it in its prefix tree.
//!
//! Both caches have the prefix afterwards, so there is no claim: matching digests are enough to show that the bytes are
//! the source's. When the target has the prefix, or does not want it, it tells the source, which then frees its memory.

use std::time::Duration;

use dsv4_kv::Prompt;
use dsv4_kv::device::Backend;
use dsv4_kv::transfer::{PrefixExport, PrefixImport};

use super::admit::{Target, give_up};
use super::error::TransferError;
use super::offer::{Control, Offer};
use super::sender::{Sender, fill};
use super::verified::Verified;
use crate::image::{Fact, Fingerprint, ImageKind, Manifest, Section};
use crate::mistake::{Mistake, made};
use crate::transport::{RegionMut, Registered, Transport};

impl<T: Transport> Sender<T> {
    /// Copies a prefix to memory that targets can read, and offers it to one of them. Its salt and adapter are those of
    /// the prompt that it was exported for; `identity` is as of [`Fingerprint::new`]. The sender holds it until a target
    /// gives it up ([`Self::give_up`]), or until [`Self::expire`] is called with a time later than `until`.
    ///
    /// # Errors
    /// [`TransferError::Image`] if `identity` is empty; [`TransferError::SenderFull`], [`TransferError::Cache`],
    /// [`TransferError::Transport`]. Nothing is offered then.
    pub fn offer_prefix<B: Backend>(
        &mut self,
        export: &mut PrefixExport<'_, '_, B>,
        identity: &[u8],
        until: Duration,
    ) -> Result<Offer, TransferError> {
        let (at, Prompt { tokens, salt, adapter }) = (export.positions(), export.prompt());
        let fingerprint = Fingerprint::new(export.config(), identity, salt, adapter)?;
        let parts = export.layout().prefix_parts(at).into_iter();
        let sections: Vec<_> = parts.map(|part| Section { part, digest: 0 }).collect();
        let (kind, source) = (ImageKind::Prefix, self.next_source());
        let tokens = tokens.to_vec();
        let mut manifest = Manifest { kind, fingerprint, at, source, tokens, sections };
        let (mut memory, payload) = self.take_memory(manifest.payload_bytes())?;
        match self.fill(&mut memory, export, &manifest) {
            Ok(sections) => {
                manifest.sections = sections;
                Ok(self.hold((memory, payload), &manifest, until))
            }
            Err(error) => {
                // If this fails, the transport keeps the memory.
                let _ = self.free(memory);
                Err(error)
            }
        }
    }

    fn fill<B: Backend>(
        &mut self,
        memory: &mut Registered,
        export: &mut PrefixExport<'_, '_, B>,
        manifest: &Manifest,
    ) -> Result<Vec<Section>, TransferError> {
        let bytes = 0..manifest.payload_bytes() as usize;
        let device = export.device().clone();
        let work = |payload: RegionMut<'_>| {
            let (part, of) = ((payload, bytes.clone()), (&manifest.sections[..], &device));
            fill(part, of, |into| export.all_to(into))
        };
        let transport = self.transport();
        let sections = transport.with_region(memory, work)??;
        transport.flush(memory, bytes)?;
        Ok(sections)
    }
}

impl<B: Backend> Target<'_, B> {
    /// Enters a prefix that was read in the cache's prefix tree, for prompts of this salt and adapter. Takes room for
    /// the checkpoint and the blocks that the cache lacks, all or nothing. `None` if the cache has all of it. Tells the
    /// source that it may free its memory.
    ///
    /// # Errors
    /// [`TransferError::Image`] for a payload that was verified for another model, weights, formats, layout, salt or
    /// adapter; [`TransferError::OtherKind`] for the payload of a request; [`TransferError::Cache`]. Nothing has
    /// changed then, and the source was told.
    pub fn admit_prefix(
        &mut self,
        verified: &Verified,
        (salt, adapter): (&[u8], &[u8]),
        control: &mut impl Control,
    ) -> Result<Option<PrefixImport>, TransferError> {
        let Manifest { source, .. } = *verified.manifest();
        let entered = self.enter_prefix(verified, (salt, adapter));
        verified.taken.given_up();
        give_up(control, source);
        entered
    }

    fn enter_prefix(
        &mut self,
        verified: &Verified,
        (salt, adapter): (&[u8], &[u8]),
    ) -> Result<Option<PrefixImport>, TransferError> {
        let Manifest { fingerprint, at, tokens, .. } = verified.manifest();
        self.check_own(verified.manifest(), ImageKind::Prefix)?;
        let Self { cache, stream, staging, .. } = self;
        if !made(Mistake::OwnerIgnored) {
            let needed = Fingerprint::owner_of(salt, adapter);
            Fingerprint::compare(Fact::Owner, &needed, &fingerprint.owner)?;
        }
        let prompt = Prompt { tokens, salt, adapter };
        let parts = verified.parts(cache.device())?;
        Ok(cache.import_prefix_from(stream, staging, &prompt, (*at, parts.as_parts()))?)
    }
}
