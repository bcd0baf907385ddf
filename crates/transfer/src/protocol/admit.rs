//! From verified bytes to a request.

use dsv4_kv::device::{Backend, Stream};
use dsv4_kv::transfer::{MoveError, Port, Reserved};
use dsv4_kv::{KvCacheManager, RequestId};

use super::error::TransferError;
use super::offer::Control;
use super::receiver::Verified;
use crate::image::{Fact, Fingerprint, ImageError, Manifest};
use crate::mistake::{Mistake, made};

/// The cache that takes a request.
pub struct Target<'t, B: Backend> {
    /// The cache.
    pub cache: &'t mut KvCacheManager<B>,
    /// The stream of its steps.
    pub stream: &'t Stream<B>,
    /// Its port.
    pub port: &'t mut Port<B>,
}

impl<B: Backend> Target<'_, B> {
    /// Lets a request that came go on here. Its bytes are copied to the room that was reserved for it, then the source is
    /// asked whether the request is the target's, and only then it is entered: at no time is it both here and there. On
    /// an error the room is free again.
    ///
    /// # Errors
    /// [`TransferError::Image`] for a payload that was verified for another model, formats or layout than this cache's,
    /// [`TransferError::OtherRoom`], [`TransferError::Cache`], [`TransferError::NotHeld`],
    /// [`TransferError::Unreachable`].
    pub fn admit(
        &mut self,
        verified: &Verified,
        room: Reserved,
        control: &mut impl Control,
    ) -> Result<RequestId, TransferError> {
        let Self { cache, stream, port } = self;
        let source = verified.manifest.source;
        if let Err(error) = check(cache, port, &room, &verified.manifest) {
            self.give_back(room);
            return Err(error);
        }
        let loaded = cache.load(stream, port, room, verified.payload())?;
        let claimed = match made(Mistake::EpochIgnored) {
            true => Ok(true),
            false => control.claim(source),
        };
        let refused = match claimed {
            Ok(true) => {
                let entered = self.cache.enter(loaded);
                return Ok(entered.map_err(|loaded| MoveError::ForeignRoom(loaded.into()))?);
            }
            Ok(false) => TransferError::NotHeld { source_of: source },
            Err(why) => TransferError::Unreachable { why },
        };
        self.give_back(loaded);
        Err(refused)
    }

    fn give_back(&mut self, room: impl Into<Reserved>) {
        // Room of another cache is not this one's to free.
        let _ = self.cache.give_back(room);
    }
}

/// Refuses what was verified for another cache, and room for another position.
fn check<B: Backend>(
    cache: &KvCacheManager<B>,
    port: &Port<B>,
    room: &Reserved,
    manifest: &Manifest,
) -> Result<(), TransferError> {
    let is_own = manifest.fingerprint.shape == Fingerprint::shape_of(cache.config());
    if !is_own && !made(Mistake::ShapeIgnored) {
        return Err(ImageError::Foreign(Fact::Shape).into());
    }
    if !made(Mistake::SectionsIgnored) {
        manifest.check_sections(port.layout())?;
    }
    let (room, request) = (room.positions(), manifest.at);
    let is_its = room == request || made(Mistake::RoomIgnored);
    if is_its { Ok(()) } else { Err(TransferError::OtherRoom { room, request }) }
}

impl<B: Backend> std::fmt::Debug for Target<'_, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target").finish_non_exhaustive()
    }
}
