//! The result of comparisons with the reference.

use serde::{Deserialize, Serialize};

/// The result of a comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verification {
    /// Sampled requests that were verified to their end.
    pub requests: u64,
    /// Tokens that sampled requests reused, whose rows and entries were compared when the requests were admitted.
    pub reused: u64,
    /// Rows that were compared: of rings, of gathered tiles and, at the end of a request, of its blocks.
    pub rows: u64,
    /// Entries and indexer keys that were recomputed from their tokens.
    pub entries: u64,
    /// Lists of the indexer that were compared, one per request and step.
    pub lists: u64,
    /// Those of them whose scores were recomputed, since the query sees more entries than the list can name.
    pub scored: u64,
    /// Those of them that differ from the reference's only in entries whose scores are too near to tell.
    pub near: u64,
    /// Results of attention that were recomputed in `f64`, each of one head of a query.
    pub attended: u64,
    /// Rows, lengths of tiles, lists, and results of attention that differ from the expected ones.
    pub mismatches: u64,
    /// Descriptions of the first of them.
    pub examples: Vec<String>,
}

impl Verification {
    /// Adds the result of another process for the same requests.
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
