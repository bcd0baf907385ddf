//! Lists of compressed entries: what the indexer writes, and attention and gathers read.

use std::ops::Range;

use crate::device::shape::check_length;
use crate::device::{Backend, Buffer};
use crate::error::{KvError, ListsMismatch};

/// One list of entries for each query in a range of a step.
///
/// Pass the same value to `select`, which writes the lists, and to `attend` and `gather_entries`, which read them. Then
/// writer and readers agree on the queries and on `k`.
pub struct EntryLists<'i, B: Backend> {
    /// The queries that have a list, by the index of their tokens in the step.
    pub queries: Range<u32>,
    /// Elements per list, and the stride between lists. `select` takes at most 2,048.
    pub k: u32,
    /// `[queries, k]` i32: numbers of entries of the query's request; -1 = none.
    pub indices: &'i Buffer<B, i32>,
}

impl<B: Backend> EntryLists<'_, B> {
    /// The part of `indices` from the list of `queries.start` to the end of the buffer: i32, `k` per list.
    pub(super) fn of(&self, queries: Range<u32>) -> Result<Buffer<B, i32>, KvError> {
        let Self { queries: all, k, indices } = self;
        if queries.start < all.start || queries.end > all.end {
            let lists = all.clone();
            return Err(KvError::ListsMismatch(ListsMismatch { queries, lists }));
        }
        let (start, len) = (u64::from(queries.start - all.start) * u64::from(*k), indices.len());
        check_length("selected", len, start)?;
        let Some(rows) = indices.slice(start, len - start) else {
            unreachable!("the length was checked")
        };
        Ok(rows)
    }
}
