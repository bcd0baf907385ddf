//! Scalars of attention.

use super::{Parameters, Pod, Zeroable};

parameters! {
    /// Scalars of `attend_*`.
    AttendParams {
        /// The first query token of the launch.
        first,
        /// Query tokens that the launch covers, from `first` on.
        tokens,
        /// Rows of queries and results before the launch's first.
        skipped,
        /// Heads of a query.
        heads,
        /// As `heads` if the log-sum-exp is requested, else 0.
        lse_heads,
        /// 0 if queries are already normed and rotated; otherwise the kernel does both.
        raw_queries,
        /// Most splits of a query's keys (split-KV).
        num_splits,
        /// Rows of one request's ring.
        ring,
        /// Request slots of the ring planes and the block table; a slot beyond them is a fault, not a read.
        slots,
        /// The step's own rows, if they are not in the ring yet, else 0.
        own_rows,
        /// Most entries that a query attends to: its list's length, or the most that a query may see. 0 in a layer
        /// without entries.
        entry_rows,
        /// log2 of the tokens of an entry.
        ratio_log2,
        /// log2 of the entries of a block.
        entries_log2,
        /// Blocks in a row of the block table.
        max_blocks,
        /// Blocks of the entry planes; one beyond them is a fault, not a read. 0 in a layer without entries.
        num_blocks,
        /// Thread blocks that share the keys of a split: 2, which are a cluster, or 1.
        blocks_per_split,
        /// 2 if two clusters (blocks, where a work item has one block) share the keys of a split and each has half of
        /// the channels of the values, else 1. Always 1 where queries are spread or consecutive.
        channel_halves,
        /// 2 if two clusters of `attend_spread_splits_*` have half of the keys of a split each, else 1.
        key_halves,
        /// Queries that a block takes in turn, 1 to 32, in the kernel for consecutive queries.
        queries_per_block,
    }
}
