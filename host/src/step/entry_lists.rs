//! Lists of compressed entries: what the indexer writes, and attention and gathers read.

use std::ops::Range;

use crate::device::shape::check_length;
use crate::device::{Backend, Buffer};
use crate::error::{KvError, ListsMismatch};

/// A list of entries for each of some queries of a step.
///
/// Give the same value to `select`, which writes the lists, and to `attend` and `gather_entries`, which read those of their
/// queries: then writer and readers agree on the queries and on `k`.
pub struct EntryLists<'i, B: Backend> {
    /// The queries that have a list, by their tokens' places in the step.
    pub queries: Range<u32>,
    /// Elements of a list, and so the distance from one list to the next. `select` takes at most 2,048.
    pub k: u32,
    /// `[queries, k]` i32: entries of the query's request, -1 where there is none.
    pub entries: &'i Buffer<B, i32>,
}

impl<B: Backend> EntryLists<'_, B> {
    /// `[queries, k]` i32, and what lies behind: the lists from that of the first of `queries` on.
    pub(super) fn of(&self, queries: Range<u32>) -> Result<Buffer<B, i32>, KvError> {
        let Self { queries: all, k, entries } = self;
        if queries.start < all.start || queries.end > all.end {
            let lists = all.clone();
            return Err(KvError::ListsMismatch(ListsMismatch { queries, lists }));
        }
        let (start, len) = (u64::from(queries.start - all.start) * u64::from(*k), entries.len());
        check_length("selected", len, start)?;
        let Some(rows) = entries.slice(start, len - start) else {
            unreachable!("the length was checked")
        };
        Ok(rows)
    }
}
