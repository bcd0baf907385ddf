//! The tokens that a request has written, and where.

use dsv4_kv::LayerId;

/// A token of a request that is followed: which step wrote it, and its row in that step.
#[derive(Clone, Copy, Debug)]
pub struct Token {
    /// The step, counted from 0.
    pub step: u64,
    /// Its row among the step's tokens.
    pub row: u32,
}

/// Whose rows are compared.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The request's place in the load.
    pub request: usize,
    /// The layer.
    pub layer: LayerId,
    /// Its tokens so far, by position.
    pub history: &'a [Token],
}
