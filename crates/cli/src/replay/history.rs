//! What a request's rows depend on, and of which request rows are compared.

use dsv4_kv::LayerId;

use crate::texts::then;

/// A token and all that come before it, in a number. As in a model, what the cache is fed with depends on that and on
/// nothing else: requests with the same first tokens have the same rows there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix(pub u64);

impl Prefix {
    /// No token.
    pub const EMPTY: Self = Self(0);

    /// One token more.
    #[must_use]
    pub fn then(self, token: u32) -> Self {
        Self(then(self.0, token))
    }

    /// The prefixes that `tokens` make one after the other.
    pub fn each(self, tokens: &[u32]) -> impl Iterator<Item = Self> {
        tokens.iter().scan(self, |prefix, &token| {
            *prefix = prefix.then(token);
            Some(*prefix)
        })
    }
}

/// Whose rows are compared.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The request's place in the load.
    pub request: usize,
    /// The layer.
    pub layer: LayerId,
    /// Its tokens so far, by position.
    pub history: &'a [Prefix],
    /// Tokens at its beginning whose window rows may be zero: those that a request reuses have none in a draft layer.
    pub without_rows: usize,
}
