//! Reasons why bytes are not the expected image.

use dsv4_kv::transfer::{Part, Positions};

/// The format version that this code writes, and the only one that it reads.
pub const VERSION: u32 = 2;

/// What an image and its target must have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact {
    /// Model and formats.
    Shape,
    /// The identity of the weights.
    Weights,
    /// Salt and adapter.
    Owner,
}

impl Fact {
    /// Why two caches may differ in it.
    const fn of(self) -> &'static str {
        match self {
            Self::Shape => "model, formats, attention cluster and the program's layout version",
            Self::Weights => "the identity of the weights",
            Self::Owner => "salt and adapter",
        }
    }
}

/// Why bytes are not the expected image. None of the bytes was used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// The first bytes are not those of an image.
    #[error("this is no image of a request or prefix")]
    Magic,
    /// The image has another format version.
    #[error("this is an image of version {found}; version {VERSION} is read")]
    Version {
        /// Its version.
        found: u32,
    },
    /// It is shorter or longer than its header says.
    #[error("the image has {found} bytes, and must have {needed}")]
    Length {
        /// Bytes that it must have.
        needed: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// The bytes of the manifest do not match its digest.
    #[error("the manifest is damaged: its digest is that of other bytes")]
    Damaged,
    /// A flag that this version does not know, or an opening where an offer is needed, or the reverse.
    #[error("the manifest has flags {found:#x}; here they must be {needed:#x}")]
    Flags {
        /// All flags.
        found: u16,
        /// The flags that are needed: 1 for an opening, else 0.
        needed: u16,
    },
    /// The kind of the image is unknown to this version.
    #[error("the image is of kind {found}, which this version does not know")]
    UnknownKind {
        /// Its kind.
        found: u16,
    },
    /// A prefix ends at positions where no prefix can end.
    #[error(
        "the prefix ends at {at:?}; prefixes end at a multiple of 128 in the trunk, and there or at 0 in draft layers"
    )]
    NoBoundary {
        /// The positions in its manifest.
        at: Positions,
    },
    /// A kind of section that this version does not know.
    #[error("section {section} is of kind {kind}, which this version does not know")]
    Kind {
        /// The section, counted from 0.
        section: usize,
        /// Its kind.
        kind: u32,
    },
    /// It has another fingerprint: of another model, other weights, or another owner.
    #[error(
        "the image is of another {fact:?}, whose digest begins with {found:08x}, and here it must be {needed:08x}; compare {} on both sides",
        .fact.of()
    )]
    Foreign {
        /// What differs.
        fact: Fact,
        /// The first four bytes of the digest that it must have.
        needed: u32,
        /// Those of the digest that it has.
        found: u32,
    },
    /// The identity of the weights is empty: a fingerprint of it would accept bytes of any weights.
    #[error("the identity of the weights is empty; give a digest of them, or their revision")]
    NoIdentity,
    /// The number of tokens is not the position in the trunk.
    #[error("the image has {tokens} tokens of {at:?}")]
    Tokens {
        /// Number of tokens.
        tokens: usize,
        /// The positions in its manifest.
        at: Positions,
    },
    /// It is longer than the requests of the target's cache can be.
    #[error("the image is at {at:?}; requests of this cache have up to {limit} tokens")]
    TooLong {
        /// The positions in its manifest.
        at: Positions,
        /// Most tokens.
        limit: u32,
    },
    /// The offer has another request, source or position than the opening.
    #[error(
        "the offer is not of the request that was opened: it is at {found:?}, not {opened:?}, or another's"
    )]
    OtherThanOpened {
        /// The positions of the opening.
        opened: Positions,
        /// The positions of the offer.
        found: Positions,
    },
    /// Its draft layers are ahead of the trunk, so they have tokens that are not final.
    #[error("the image is at {at:?}: what draft layers have behind the trunk is not final")]
    Drafts {
        /// The positions in its manifest.
        at: Positions,
    },
    /// It has a position in the draft layers, but the model has none.
    #[error("the image is at {found} in draft layers, and the model has none")]
    NoDraftLayers {
        /// Its position in them.
        found: u32,
    },
    /// It has other tokens than expected.
    #[error("the image is of other tokens, from position {position} on")]
    OtherTokens {
        /// The first position that differs.
        position: usize,
    },
    /// A section is not the one that the target's layout has at this place.
    #[error("section {section} is {found:?}; a request that is as far has {needed:?} there")]
    Section {
        /// The section, counted from 0.
        section: usize,
        /// The part that is needed; `None` if the section must not exist.
        needed: Option<Part>,
        /// The part that was found; `None` if the section is missing.
        found: Option<Part>,
    },
    /// The bytes of a section do not match its digest.
    #[error("the bytes of section {section}, {part:?}, are not those that its digest is of")]
    Digest {
        /// The section, counted from 0.
        section: usize,
        /// The part.
        part: Part,
    },
}
