//! The prefix on which a token's rows depend, and the place at which rows are compared.

use dsv4_kv::LayerId;

use crate::texts::then;

/// A hash of a token and all tokens before it. As in a model, the cache's inputs depend on this and on nothing else:
/// requests with the same first tokens have the same rows for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix(pub u64);

impl Prefix {
    /// The empty prefix.
    pub const EMPTY: Self = Self(0);

    /// The prefix with one more token.
    #[must_use]
    pub fn then(self, token: u32) -> Self {
        Self(then(self.0, token))
    }

    /// The prefixes after each of `tokens`.
    pub fn each(self, tokens: &[u32]) -> impl Iterator<Item = Self> {
        tokens.iter().scan(self, |prefix, &token| {
            *prefix = prefix.then(token);
            Some(*prefix)
        })
    }
}

/// The request and layer whose rows are compared.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The request's index in the load.
    pub request: usize,
    /// The layer.
    pub layer: LayerId,
    /// The prefixes of its tokens so far, by position.
    pub history: &'a [Prefix],
    /// Number of first tokens whose window rows may be zero: the tokens that a request reuses have no rows in draft
    /// layers.
    pub without_rows: usize,
}
