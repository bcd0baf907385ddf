//! Why bytes are not the image that was asked for.

use dsv4_kv::transfer::{Part, Positions};

/// The version that is written, and the only one that is read.
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

/// Why bytes are not the image that was asked for. Nothing of them was used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// It does not begin as an image.
    #[error("this is no image of a request or prefix")]
    Magic,
    /// Another version wrote it.
    #[error("this is an image of version {found}; version {VERSION} is read")]
    Version {
        /// Its version.
        found: u32,
    },
    /// It is shorter, or longer, than it says.
    #[error("the image has {found} bytes, and must have {needed}")]
    Length {
        /// Bytes that it must have.
        needed: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// The manifest has not the bytes that were written.
    #[error("the manifest is damaged: its digest is that of other bytes")]
    Damaged,
    /// A flag that this version does not know, or an opening where an offer is due, or the other way round.
    #[error("the manifest has flags {found:#x}; here they must be {needed:#x}")]
    Flags {
        /// All flags.
        found: u16,
        /// What they must be: 1 of an opening, else 0.
        needed: u16,
    },
    /// It is of something that this version does not know.
    #[error("the image is of kind {found}, which this version does not know")]
    UnknownKind {
        /// Its kind.
        found: u16,
    },
    /// A prefix that ends where none does.
    #[error(
        "the prefix ends at {at:?}; prefixes end at a multiple of 128 in the trunk, and there or at 0 in draft layers"
    )]
    NoBoundary {
        /// Where it says to end.
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
    /// It is of another model, other weights, or another owner.
    #[error("the image is of another {0:?}; only a cache of the same may take it")]
    Foreign(Fact),
    /// It has more or fewer tokens than positions.
    #[error("the image has {tokens} tokens of {at:?}")]
    Tokens {
        /// Tokens that it has.
        tokens: usize,
        /// How far it says to be.
        at: Positions,
    },
    /// It is longer than requests of the target's cache.
    #[error("the image is at {at:?}; requests of this cache have up to {limit} tokens")]
    TooLong {
        /// How far it says to be.
        at: Positions,
        /// Most tokens.
        limit: u32,
    },
    /// What was offered in the end is of another request, source or position than what was opened.
    #[error(
        "the offer is not of the request that was opened: it is at {found:?}, not {opened:?}, or another's"
    )]
    OtherThanOpened {
        /// How far that was to be.
        opened: Positions,
        /// How far this is.
        found: Positions,
    },
    /// Its draft layers are ahead of the trunk: with tokens that are not final.
    #[error("the image is at {at:?}: what draft layers have behind the trunk is not final")]
    Drafts {
        /// How far it says to be.
        at: Positions,
    },
    /// It is that far in draft layers, of which the model has none.
    #[error("the image is at {found} in draft layers, and the model has none")]
    NoDraftLayers {
        /// Its position in them.
        found: u32,
    },
    /// It is of other tokens.
    #[error("the image is of other tokens, from position {position} on")]
    OtherTokens {
        /// The first position with another token.
        position: usize,
    },
    /// A request that is as far has other sections.
    #[error("section {section} is {found:?}; a request that is as far has {needed:?} there")]
    Section {
        /// The section, counted from 0.
        section: usize,
        /// What it must be; `None` if it must not be there.
        needed: Option<Part>,
        /// What it is; `None` if it is not there.
        found: Option<Part>,
    },
    /// The bytes of a section are not those that were written.
    #[error("the bytes of section {section}, {part:?}, are not those that its digest is of")]
    Digest {
        /// The section, counted from 0.
        section: usize,
        /// Which part.
        part: Part,
    },
}
