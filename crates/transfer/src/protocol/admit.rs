//! Admission: from verified bytes to a request in the cache.

use std::time::Duration;

use dsv4_kv::KvCacheManager;
use dsv4_kv::device::{Backend, Stream};
use dsv4_kv::transfer::{Loaded, MoveError, Reserved, TransferStaging};
use scopeguard::ScopeGuard;

use super::claim::{Claim, Claimed};
use super::error::TransferError;
use super::offer::Control;
use super::verified::Verified;
use crate::image::{Fact, Fingerprint, ImageKind, Manifest, Source};
use crate::mistake::{Mistake, made};

/// The cache that receives requests and prefixes.
pub struct Target<'t, B: Backend> {
    /// The cache.
    pub cache: &'t mut KvCacheManager<B>,
    /// The stream of its steps.
    pub stream: &'t Stream<B>,
    /// The transfer staging of the cache ([`KvCacheManager::new_transfer_staging`]).
    pub staging: &'t mut TransferStaging<B>,
    /// [`Fingerprint::weights`] of the weights that this cache serves: caches of the same shape may serve other
    /// weights.
    pub weights: [u8; 32],
}

impl<B: Backend> Target<'_, B> {
    /// Copies a verified payload to the memory that was reserved for it, and asks the source for the request. The
    /// source can answer until `until`; [`Self::settle`], called between steps, looks for the answer. This call does
    /// not wait for the source.
    ///
    /// # Errors
    /// [`TransferError::Image`] for a payload that was verified for another model, weights, formats or layout than this
    /// cache's, [`TransferError::OtherKind`] for the payload of a prefix, [`TransferError::OtherReservation`],
    /// [`TransferError::Cache`], [`TransferError::Unreachable`]. The reservation is ended, and the source was told.
    /// [`TransferError::AskedBefore`] for a payload that was loaded before: a late answer to the first question would
    /// be taken for the answer to the second. The reservation is ended, and the source is not told.
    /// [`MoveError::ForeignReservation`] returns a reservation of another cache.
    pub fn load(
        &mut self,
        verified: &Verified,
        reserved: Reserved,
        until: Duration,
        control: &mut impl Control,
    ) -> Result<Claim, TransferError> {
        let source = verified.manifest.source;
        if let Err(error) = self.check(&reserved, &verified.manifest) {
            verified.taken.given_up();
            return Err(self.refuse((reserved, source), error, control));
        }
        // Before the bytes are loaded, so that only one of two threads asks the source.
        if verified.taken.was_asked() && !made(Mistake::AsksAgain) {
            return Err(self.give_back(reserved, TransferError::AskedBefore { source_of: source }));
        }
        let Self { cache, stream, staging, .. } = self;
        let loaded = match verified.parts(cache.device()) {
            Ok(parts) => cache.load_from(stream, staging, reserved, parts.as_parts()),
            Err(error) => return Err(self.refuse((reserved, source), error.into(), control)),
        };
        let loaded = match loaded {
            Ok(loaded) => loaded,
            Err(error) => {
                give_up(control, source);
                return Err(error.into());
            }
        };
        let ask = || if made(Mistake::EpochIgnored) { Ok(()) } else { control.ask(source) };
        let (loaded, asked) = holding(self.cache, loaded, ask);
        match asked {
            Ok(()) => Ok(Claim { cache: self.cache.id(), loaded, source, until }),
            Err(why) => {
                let error = TransferError::Unreachable { why };
                Err(self.refuse((loaded, source), error, control))
            }
        }
    }

    /// Enters the request if its source has said yes. So a request is never in both caches.
    ///
    /// # Errors
    /// [`TransferError::NotHeld`] if the source says no. [`TransferError::NotAnswered`] after the deadline, and
    /// [`TransferError::Unreachable`]: the source may have released the request by then, so it has to be computed
    /// again. The reservation is ended, and the source was told. [`TransferError::ForeignClaim`] returns the claim of
    /// another cache, before an answer is looked for.
    pub fn settle(
        &mut self,
        now: Duration,
        claim: Claim,
        control: &mut impl Control,
    ) -> Result<Claimed, TransferError> {
        if claim.cache != self.cache.id() {
            return Err(TransferError::ForeignClaim(Box::new(claim)));
        }
        let Claim { cache, loaded, source, until } = claim;
        let is_over = now >= until && !made(Mistake::ClaimWithoutEnd);
        let answer = || match made(Mistake::EpochIgnored) {
            true => Ok(Some(true)),
            false => control.answer(source),
        };
        let (loaded, answer) = holding(self.cache, loaded, answer);
        let error = match answer {
            Ok(Some(true)) => {
                // Not foreign: the cache was compared before the question.
                let entered = self.cache.enter(loaded);
                let foreign = |loaded: Loaded| MoveError::ForeignReservation(loaded.into());
                return Ok(Claimed::Admitted(entered.map_err(foreign)?));
            }
            Ok(None) if !is_over => {
                return Ok(Claimed::Waits(Claim { cache, loaded, source, until }));
            }
            Ok(None) => TransferError::NotAnswered { source_of: source, until },
            Ok(Some(false)) => TransferError::NotHeld { source_of: source },
            Err(why) => TransferError::Unreachable { why },
        };
        Err(self.refuse((loaded, source), error, control))
    }

    /// Gives a claim up: ends its reservation, and tells the source. If the source has said yes meanwhile, it has
    /// released the request too.
    ///
    /// # Errors
    /// The reservation, if the claim belongs to another cache. The source was told.
    pub fn give_up(&mut self, claim: Claim, control: &mut impl Control) -> Result<(), Reserved> {
        let given_back = self.cache.give_back(claim.loaded);
        give_up(control, claim.source);
        given_back
    }

    /// Refuses a payload that was verified for another cache, and a reservation for another position.
    fn check(&self, reserved: &Reserved, manifest: &Manifest) -> Result<(), TransferError> {
        self.check_own(manifest, ImageKind::Request)?;
        let (reserved, request) = (reserved.positions(), manifest.at);
        let is_its = reserved == request || made(Mistake::ReservationIgnored);
        if is_its { Ok(()) } else { Err(TransferError::OtherReservation { reserved, request }) }
    }

    /// Refuses a payload that was verified for another cache, and an image of another kind than `needed`.
    pub(super) fn check_own(
        &self,
        manifest: &Manifest,
        needed: ImageKind,
    ) -> Result<(), TransferError> {
        let Fingerprint { shape, weights, .. } = manifest.fingerprint;
        if !made(Mistake::ShapeIgnored) {
            let needed = Fingerprint::shape_of(self.cache.config());
            Fingerprint::compare(Fact::Shape, &needed, &shape)?;
        }
        if !made(Mistake::WeightsIgnored) {
            Fingerprint::compare(Fact::Weights, &self.weights, &weights)?;
        }
        let found = manifest.kind;
        if found != needed {
            return Err(TransferError::OtherKind { needed, found });
        }
        if !made(Mistake::SectionsIgnored) {
            manifest.check_sections(self.staging.layout())?;
        }
        Ok(())
    }

    fn refuse(
        &mut self,
        (reserved, source): (impl Into<Reserved>, Source),
        error: TransferError,
        control: &mut impl Control,
    ) -> TransferError {
        // First, so that a panic of the embedder's code loses no slot.
        let error = self.give_back(reserved, error);
        give_up(control, source);
        error
    }

    /// Ends the reservation. Returns `error`, or if it belongs to another cache, the error that returns it.
    fn give_back(&mut self, reserved: impl Into<Reserved>, error: TransferError) -> TransferError {
        match self.cache.give_back(reserved) {
            Ok(()) => error,
            Err(reserved) => MoveError::ForeignReservation(reserved).into(),
        }
    }
}

/// Calls `ask`, code of the embedder. If it panics, the reservation goes back to its cache.
fn holding<B: Backend, R: Into<Reserved>, T>(
    cache: &mut KvCacheManager<B>,
    reserved: R,
    ask: impl FnOnce() -> T,
) -> (R, T) {
    let reserved = scopeguard::guard(reserved, |reserved| drop(cache.give_back(reserved)));
    let answer = ask();
    (ScopeGuard::into_inner(reserved), answer)
}

/// Tells the source that the target does not want its offer.
pub(super) fn give_up(control: &mut impl Control, source: Source) {
    if !made(Mistake::GivesUpSilently) {
        control.give_up(source);
    }
}

impl<B: Backend> std::fmt::Debug for Target<'_, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target").finish_non_exhaustive()
    }
}
