//! Reports of the search for poison: reads of rows that were never written.

use crate::ids::{LayerId, RequestId, SlotId};

/// The kind of a row that was read but never written, and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PoisonedRow {
    /// The sliding-window key of the token at this position.
    Window(u32),
    /// The compressed entry with this index in its request, gathered by a list or with all others.
    Entry(u32),
    /// The indexer key of the entry with this index, which was scored.
    Key(u32),
}

/// A row that was never written, and the query that read it.
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

/// The first of the rows as text; empty if there are none.
pub(super) fn describe_first(rows: &[PoisonRead]) -> String {
    rows.first().map_or_else(String::new, |row| format!("the first: {row:?}"))
}
