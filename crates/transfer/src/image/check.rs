//! What an image must be for a target to take it.

use std::ops::Range;

use dsv4_kv::checkpoints::is_boundary;
use dsv4_kv::transfer::{PartLayout, Positions};

use super::{
    Fact, Fingerprint, ImageError, ImageKind, Manifest, Section, decode_manifest, digests, places,
};
use crate::mistake::{Mistake, made};

/// What the target knows of an image before it sees one.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'e> {
    /// Its own.
    pub fingerprint: &'e Fingerprint,
    /// The parts that requests and prefixes of its cache have.
    pub layout: &'e PartLayout,
    /// The request's tokens, if it knows them.
    pub tokens: Option<&'e [u32]>,
    /// The longest request that its cache takes ([`CacheConfig::max_context`](dsv4_kv::CacheConfig::max_context)).
    pub max_context: u32,
}

impl Manifest {
    /// Refuses what the target cannot take: another model, format, weights, salt or adapter, other tokens, too many of them,
    /// or a section that a request that is as far does not have, of that size, at that place.
    ///
    /// # Errors
    /// [`ImageError::Foreign`], [`ImageError::Tokens`], [`ImageError::Drafts`], [`ImageError::NoDraftLayers`],
    /// [`ImageError::NoBoundary`], [`ImageError::TooLong`], [`ImageError::OtherTokens`], [`ImageError::Section`].
    pub fn check(&self, expected: &Expected<'_>) -> Result<(), ImageError> {
        let (own, wanted) = (self.fingerprint, expected.fingerprint);
        let facts = [
            (Fact::Shape, own.shape == wanted.shape),
            (Fact::Weights, own.weights == wanted.weights),
            (Fact::Owner, own.owner == wanted.owner || made(Mistake::OwnerIgnored)),
        ];
        if let Some(&(fact, _)) = facts.iter().find(|(_, equal)| !equal) {
            return Err(ImageError::Foreign(fact));
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

/// Whether a prefix can end there.
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

/// Digests of the bytes that came, of whole sections from the first one on.
#[derive(Debug, Default)]
pub(crate) struct Digests {
    sections: Vec<Section>,
    /// Bytes of these sections.
    bytes: usize,
}

impl Digests {
    /// Goes on with the sections that are whole in these first bytes of a payload.
    pub fn extend(&mut self, sections: &[Section], payload: &[u8]) {
        let rest = sections.get(self.sections.len()..).unwrap_or_default();
        let whole = places(rest, self.bytes).take_while(|place| place.end <= payload.len());
        let whole: Vec<_> = whole.collect();
        self.add(rest, &whole, digests(payload, &whole));
    }

    /// Those of a whole payload, which were computed where it is.
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

    /// Compares them with those of a manifest.
    ///
    /// # Errors
    /// [`ImageError::Digest`], also for a section that has not come.
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

/// A whole image that its target can take: manifest and payload agree with each other and with what was expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image<'b> {
    manifest: Manifest,
    payload: &'b [u8],
}

impl<'b> Image<'b> {
    /// Reads an image with its payload behind its manifest, and nothing behind that.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn decode(bytes: &'b [u8], expected: &Expected<'_>) -> Result<Self, ImageError> {
        let (manifest, payload) = decode_manifest(bytes)?;
        Self::new(manifest, payload, expected)
    }

    /// The image of a manifest and a payload that came by different ways.
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

    /// What it says of itself.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The bytes of its parts, one behind the other, in the order of [`PartLayout::parts`].
    #[must_use]
    pub fn payload(&self) -> &'b [u8] {
        self.payload
    }
}
