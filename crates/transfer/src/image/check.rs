//! The checks that an image must pass before a target takes it.

use std::ops::Range;

use dsv4_kv::checkpoints::is_boundary;
use dsv4_kv::transfer::{PartLayout, Positions};

use super::{
    Fact, Fingerprint, ImageError, ImageKind, Manifest, Section, decode_manifest, digests, places,
};
use crate::mistake::{Mistake, made};

/// What the target requires of an image, known before the image arrives.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'e> {
    /// The target's own fingerprint.
    pub fingerprint: &'e Fingerprint,
    /// The layout of parts in the target's cache.
    pub layout: &'e PartLayout,
    /// The tokens of the request or prefix, if the target knows them.
    pub tokens: Option<&'e [u32]>,
    /// The longest request that its cache takes ([`CacheConfig::max_context`](dsv4_kv::CacheConfig::max_context)).
    pub max_context: u32,
}

impl Manifest {
    /// Refuses an image that the target cannot take: of another model, format, weights, salt or adapter, with other or
    /// too many tokens, or with sections that differ from those of its kind at its positions in the target's layout.
    ///
    /// # Errors
    /// [`ImageError::Foreign`], [`ImageError::Tokens`], [`ImageError::Drafts`], [`ImageError::NoDraftLayers`],
    /// [`ImageError::NoBoundary`], [`ImageError::TooLong`], [`ImageError::OtherTokens`], [`ImageError::Section`].
    pub fn check(&self, expected: &Expected<'_>) -> Result<(), ImageError> {
        let (own, wanted) = (&self.fingerprint, expected.fingerprint);
        Fingerprint::compare(Fact::Shape, &wanted.shape, &own.shape)?;
        Fingerprint::compare(Fact::Weights, &wanted.weights, &own.weights)?;
        if !made(Mistake::OwnerIgnored) {
            Fingerprint::compare(Fact::Owner, &wanted.owner, &own.owner)?;
        }
        let (tokens, at) = (self.tokens.len(), self.at);
        if tokens != at.trunk as usize {
            return Err(ImageError::Tokens { tokens, at });
        }
        if at.draft > at.trunk {
            return Err(ImageError::Drafts { at });
        }
        if self.kind == ImageKind::Prefix && !is_prefix_end(at) {
            return Err(ImageError::NoBoundary { at });
        }
        if at.trunk > expected.max_context {
            return Err(ImageError::TooLong { at, limit: expected.max_context });
        }
        if at.draft > 0 && !expected.layout.has_draft_layers() {
            return Err(ImageError::NoDraftLayers { found: at.draft });
        }
        if let Some(wanted) = expected.tokens {
            let equal = self.tokens.iter().zip(wanted).take_while(|(own, wanted)| own == wanted);
            let position = equal.count();
            if position < tokens.max(wanted.len()) {
                return Err(ImageError::OtherTokens { position });
            }
        }
        self.check_sections(expected.layout)
    }

    pub(crate) fn check_sections(&self, layout: &PartLayout) -> Result<(), ImageError> {
        let mut needed = self.kind.parts(layout, self.at).into_iter();
        let mut found = self.sections.iter().map(|section| section.part);
        for section in 0.. {
            match (needed.next(), found.next()) {
                (None, None) => break,
                (needed, found) if needed == found => (),
                (needed, found) => return Err(ImageError::Section { section, needed, found }),
            }
        }
        Ok(())
    }
}

/// Whether a prefix can end at these positions.
fn is_prefix_end(at: Positions) -> bool {
    is_boundary(at.trunk) && [0, at.trunk].contains(&at.draft)
}

/// Compares a payload with the digests of its manifest.
///
/// # Errors
/// [`ImageError::Length`], [`ImageError::Digest`].
pub fn verify(manifest: &Manifest, payload: &[u8]) -> Result<(), ImageError> {
    let (needed, found) = (manifest.payload_bytes(), payload.len() as u64);
    if needed != found {
        return Err(ImageError::Length { needed, found });
    }
    let mut digests = Digests::default();
    digests.extend(&manifest.sections, payload);
    digests.compare(&manifest.sections)
}

/// Digests of the sections that have arrived completely, from the first section on.
#[derive(Debug, Default)]
pub(crate) struct Digests {
    sections: Vec<Section>,
    /// Bytes of these sections.
    bytes: usize,
}

impl Digests {
    /// Adds the sections that are complete in `payload`, the bytes of the payload that have arrived so far.
    pub fn extend(&mut self, sections: &[Section], payload: &[u8]) {
        let rest = sections.get(self.sections.len()..).unwrap_or_default();
        let whole = places(rest, self.bytes).take_while(|place| place.end <= payload.len());
        let whole: Vec<_> = whole.collect();
        self.add(rest, &whole, digests(payload, &whole));
    }

    /// Digests of a whole payload that were computed elsewhere, for instance on a device.
    pub fn of(sections: &[Section], places: &[Range<usize>], digests: Vec<u128>) -> Self {
        let mut known = Self::default();
        known.add(sections, places, digests);
        known
    }

    fn add(&mut self, sections: &[Section], places: &[Range<usize>], digests: Vec<u128>) {
        let found = sections.iter().zip(digests);
        self.sections.extend(found.map(|(&Section { part, .. }, digest)| Section { part, digest }));
        self.bytes = places.last().map_or(self.bytes, |last| last.end);
    }

    /// Compares the digests with those of a manifest.
    ///
    /// # Errors
    /// [`ImageError::Digest`], also for a section that has not arrived.
    pub fn compare(&self, wanted: &[Section]) -> Result<(), ImageError> {
        if made(Mistake::DigestIgnored) {
            return Ok(());
        }
        for (section, wanted) in wanted.iter().enumerate() {
            if self.sections.get(section) != Some(wanted) {
                return Err(ImageError::Digest { section, part: wanted.part });
            }
        }
        Ok(())
    }
}

/// A complete image that its target can take: manifest and payload agree with each other and with what the target
/// expects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image<'b> {
    manifest: Manifest,
    payload: &'b [u8],
}

impl<'b> Image<'b> {
    /// Reads an image from bytes: the manifest, followed by the payload and nothing else.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn decode(bytes: &'b [u8], expected: &Expected<'_>) -> Result<Self, ImageError> {
        let (manifest, payload) = decode_manifest(bytes)?;
        Self::new(manifest, payload, expected)
    }

    /// The image of a manifest and a payload that arrived separately.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn new(
        manifest: Manifest,
        payload: &'b [u8],
        expected: &Expected<'_>,
    ) -> Result<Self, ImageError> {
        manifest.check(expected)?;
        verify(&manifest, payload)?;
        Ok(Self { manifest, payload })
    }

    /// The manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The bytes of its parts, without gaps, in the order of the manifest's sections.
    #[must_use]
    pub fn payload(&self) -> &'b [u8] {
        self.payload
    }
}
