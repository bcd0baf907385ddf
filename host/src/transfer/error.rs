//! Why a request does not move.

use super::parts::Positions;
use super::reservation::Reserved;
use crate::device::DeviceError;
use crate::error::KvError;
use crate::ids::RequestId;

/// Why a request or prefix was not moved. No request has changed, in either cache; prefixes that an import evicted to
/// make room stay evicted.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    /// The cache refused, or the device failed.
    #[error(transparent)]
    Cache(#[from] KvError),
    /// Memory whose size is not that of the parts.
    #[error("the parts have {needed} bytes, and there are {found}")]
    Length {
        /// Bytes of the parts.
        needed: u64,
        /// Bytes of the memory.
        found: u64,
    },
    /// A block without an entry of a final token of the request.
    #[error("{request} has {blocks} blocks with final entries; block {block} is not one of them")]
    NoSuchBlock {
        /// The request.
        request: RequestId,
        /// The block, counted from its first.
        block: u32,
        /// Blocks that it has.
        blocks: u32,
    },
    /// A range of blocks that ends before it begins.
    #[error("blocks {first} to {end} of {request} end before they begin")]
    Backward {
        /// The request.
        request: RequestId,
        /// The first block.
        first: u32,
        /// One past the last.
        end: u32,
    },
    /// Staging memory of another cache.
    #[error("the staging memory is of another cache; allocate it for this one")]
    ForeignStaging,
    /// A reservation of another cache, which is returned: only that cache can take it.
    #[error("the reservation is of another cache; give it to that one")]
    ForeignReservation(Reserved),
    /// A cache whose prompts share nothing.
    #[error("prompts of this cache share nothing; give it checkpoints (`num_checkpoints`)")]
    NothingShared,
    /// Positions and tokens that do not describe a prefix.
    #[error(
        "{tokens} tokens at {at:?} are no prefix: it has as many as positions in the trunk, a multiple of 128, and none or as many in draft layers"
    )]
    NoPrefix {
        /// Positions at its end.
        at: Positions,
        /// Tokens that were given.
        tokens: usize,
    },
    /// Draft layers that are ahead of the trunk: their last tokens are not final.
    #[error(
        "the request is at {at:?}: draft layers cannot be ahead of the trunk; give as many tokens there, or fewer"
    )]
    DraftAhead {
        /// Its positions.
        at: Positions,
    },
    /// A request longer than those of the cache.
    #[error("the request is at {at:?}; requests of this cache have up to {limit} tokens")]
    TooLong {
        /// Its positions.
        at: Positions,
        /// Most tokens.
        limit: u32,
    },
}

impl From<DeviceError> for MoveError {
    fn from(error: DeviceError) -> Self {
        Self::Cache(error.into())
    }
}
