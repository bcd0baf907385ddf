//! What comparisons with the reference found.

use serde::{Deserialize, Serialize};

/// What a comparison found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verification {
    /// Requests that were followed to their end.
    pub requests: u64,
    /// Tokens that followed requests reused, whose rows and entries were compared when they were admitted.
    pub reused: u64,
    /// Rows of rings, of gathered tiles and, at the end of a request, of its blocks that were
    /// compared.
    pub rows: u64,
    /// Entries and indexer keys that were recomputed from their tokens.
    pub entries: u64,
    /// Lists of the indexer that were compared, one of each request and step.
    pub lists: u64,
    /// Those of them whose scores were recomputed: the query sees more than the list has room for.
    pub scored: u64,
    /// Those of them that differ from the reference's by scores too near to tell.
    pub near: u64,
    /// Results of attention, each of one head of a query, that were recomputed in `f64`.
    pub attended: u64,
    /// Rows, lengths of tiles, lists, and results of attention that were not as expected.
    pub mismatches: u64,
    /// The first of them, in words.
    pub examples: Vec<String>,
}

impl Verification {
    /// Adds what was found elsewhere of the same requests.
    pub fn add(&mut self, other: Self) {
        let Self { requests: _, reused, rows, entries, lists, scored, near, attended, .. } = other;
        self.reused += reused;
        self.rows += rows;
        self.entries += entries;
        self.lists += lists;
        self.scored += scored;
        self.near += near;
        self.attended += attended;
        self.mismatches += other.mismatches;
        self.examples.extend(other.examples);
    }
}
