//! The image of a request, or of a prefix: a manifest, which says what everything is, and a payload, which is only bytes.
//!
//! Little-endian. A **manifest**:
//!
//! | bytes | |
//! |---|---|
//! | 0 | `DSV4MOVE` |
//! | 8 | version, u32 |
//! | 12 | flags, u16: 1 of an opening, whose digests are 0, else 0 |
//! | 14 | kind, u16: 0 of a request, 1 of a prefix ([`ImageKind`]) |
//! | 16, 48, 80 | [`Fingerprint`]: shape, weights, owner, 32 bytes each |
//! | 112, 116 | [`Positions`]: final tokens in the trunk and in the draft layers, u32; of a prefix where it ends in both |
//! | 120, 124 | sections, and tokens, u32 |
//! | 128, 136 | the source's epoch and lease, u64 ([`Source`]) |
//! | 144 | bytes of the payload, u64 |
//! | 152 | the table: of each section kind, unit, first row, rows (u32 each), bytes (u64), xxh3-128 |
//! | | all tokens of the request or prefix, u32 |
//! | | BLAKE3 of everything before |
//!
//! The **payload** has the sections one behind the other, in the order of the table. As a file an image is the manifest
//! with the payload behind it. Between machines the manifest goes over the control channel and the payload over a
//! [transport](crate::transport), so that what checks the bytes does not come the way that the bytes come.
//!
//! BLAKE3 binds the manifest, xxh3 finds payload that was damaged, reused or never written. Neither is a signature: who
//! can write to the control channel is believed.

mod check;
mod codec;
mod error;
mod fingerprint;

pub(crate) use check::Digests;
pub use check::{Expected, Image, verify};
pub(crate) use codec::check_end;
pub use codec::{decode_manifest, decode_opening};
pub use error::{Fact, ImageError, VERSION};
pub use fingerprint::Fingerprint;

use std::ops::Range;

use dsv4_kv::transfer::{Part, PartLayout, Positions};
use rayon::prelude::*;
use twox_hash::XxHash3_128;

/// Which memory of the source a payload lies in, as the source said when it offered it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Source {
    /// The sender, by a random number: another one, or the same program started again, has another.
    pub epoch: u64,
    /// What the source holds for this image.
    pub lease: u64,
}

/// What an image is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
    /// A request: blocks, and what its slot holds. It moves: only one cache has it.
    Request,
    /// A prefix: whole blocks, and the checkpoint behind them. It is copied: both caches have it.
    Prefix,
}

impl ImageKind {
    /// All kinds, by their numbers.
    pub const ALL: [Self; 2] = [Self::Request, Self::Prefix];

    /// The parts of an image of this kind, in order.
    #[must_use]
    pub fn parts(self, layout: &PartLayout, at: Positions) -> Vec<Part> {
        match self {
            Self::Request => layout.parts(at),
            Self::Prefix => layout.prefix_parts(at),
        }
    }
}

/// A part of a request, and the digest of its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// Which part.
    pub part: Part,
    /// xxh3-128 of its bytes.
    pub digest: u128,
}

impl Section {
    /// The section of a part whose bytes these are.
    #[must_use]
    pub fn of(part: Part, bytes: &[u8]) -> Self {
        Self { part, digest: XxHash3_128::oneshot(bytes) }
    }
}

/// Where sections lie in a payload, one behind the other from byte `first` on; those whose end is no number are left out.
pub(crate) fn places(sections: &[Section], first: usize) -> impl Iterator<Item = Range<usize>> {
    let mut end = Some(first);
    sections.iter().map_while(move |section| {
        let start = end?;
        end = usize::try_from(section.part.bytes).ok().and_then(|bytes| start.checked_add(bytes));
        Some(start..end?)
    })
}

/// xxh3-128 of ranges of bytes. Where they are many, all cores compute them, if there are more than a few: on two it takes as
/// long to share the work as to do it.
pub(crate) fn digests(bytes: &[u8], places: &[Range<usize>]) -> Vec<u128> {
    // Fewer bytes are digested before other threads have begun.
    const MANY: usize = 1 << 20;
    const CORES: usize = 4;
    let digest = |place: &Range<usize>| XxHash3_128::oneshot(&bytes[place.clone()]);
    let few = places.iter().map(Range::len).sum::<usize>() < MANY;
    if few || rayon::current_num_threads() < CORES {
        return places.iter().map(digest).collect();
    }
    places.par_iter().map(digest).collect()
}

/// What an image says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// What it is of.
    pub kind: ImageKind,
    /// Whose bytes they are.
    pub fingerprint: Fingerprint,
    /// How far the request is; of a prefix, where it ends: in draft layers at 0 if its checkpoint has nothing of them.
    pub at: Positions,
    /// Where they come from.
    pub source: Source,
    /// Its tokens, as many as are final in the trunk.
    pub tokens: Vec<u32>,
    /// Its parts, in the order in which they lie in the payload.
    pub sections: Vec<Section>,
}

impl Manifest {
    /// The same, before the digests of its sections were known.
    #[must_use]
    pub fn without_digests(&self) -> Self {
        let mut manifest = self.clone();
        manifest.sections.iter_mut().for_each(|section| section.digest = 0);
        manifest
    }

    /// Bytes of the payload; `u64::MAX` of sections that are together longer.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.sections.iter().fold(0, |sum, section| section.part.bytes.saturating_add(sum))
    }
}
