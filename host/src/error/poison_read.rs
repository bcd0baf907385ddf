//! What the search for poison reports: reads of memory that nobody wrote.

use crate::ids::{LayerId, RequestId, SlotId};

/// What a row that nobody wrote was read as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PoisonedRow {
    /// The sliding-window key of the token at this position.
    Window(u32),
    /// The compressed entry of this number, gathered by a list or among all.
    Entry(u32),
    /// The indexer key of this entry, for its score.
    Key(u32),
}

/// A row that nobody wrote, and the query that read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PoisonRead {
    /// The layer.
    pub layer: LayerId,
    /// The slot of the query's request.
    pub slot: SlotId,
    /// The request, unless it was released since.
    pub request: Option<RequestId>,
    /// Position of the query.
    pub position: u32,
    /// The row.
    pub row: PoisonedRow,
}

/// The first of several in words.
pub(super) fn describe_first(rows: &[PoisonRead]) -> String {
    rows.first().map_or_else(String::new, |row| format!("the first: {row:?}"))
}
