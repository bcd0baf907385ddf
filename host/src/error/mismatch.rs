//! Tokens, tensors and lists that do not match what the caller passed before.

use std::ops::Range;

use crate::ids::{LayerId, RequestId};

/// A token id in a commit that differs from the prompt's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{request}: token {token} at position {position}, where its prompt has {expected}; name the tokens that the step ran"
)]
pub struct TokenMismatch {
    /// The request.
    pub request: RequestId,
    /// Position of the first token that differs.
    pub position: u32,
    /// The token that the commit names.
    pub token: u32,
    /// The token of the prompt.
    pub expected: u32,
}

/// Window rows in other memory than those of the layer's update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "layer {} was updated with window rows at {updated:#x}, not at {found:#x}; give the same tensor", layer.0
)]
pub struct RowsMismatch {
    /// The layer.
    pub layer: LayerId,
    /// Address of the rows of the update.
    pub updated: u64,
    /// Address of the rows that were passed.
    pub found: u64,
}

/// Lists that do not cover all queries that read them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "queries {queries:?} were asked for, and the lists are of {lists:?}; give lists of all of them"
)]
pub struct ListsMismatch {
    /// The queries asked for.
    pub queries: Range<u32>,
    /// The queries that have lists.
    pub lists: Range<u32>,
}
