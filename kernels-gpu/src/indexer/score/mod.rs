//! Scores of the entries that a query sees.
//!
//! | module | what it holds |
//! |---|---|
//! | [`query`] | rotation, Hadamard transform and quantisation of a query |
//! | [`query_rows`] | the same for several queries at once, in the row layout of a product |
//! | [`keys`] | indexer keys as operands of a matrix product, by format |
//! | [`warpgroup`] | the four warps that multiply together |
//! | [`weights`] | the heads' weights, and the weighted sums of products |
//! | [`blocks`] | the cache blocks of a request, and their copies to shared memory |
//! | [`tiles`] | tiles of 32 entries, scored by four warps for one query |
//! | [`rows`] | the kernel that does so, and writes rows of scores and of group maxima |
//! | [`chunk`] | the kernel for chunks: consecutive queries of one request, which share each tile |

pub mod blocks;
pub mod chunk;
pub mod keys;
pub mod query;
pub mod query_rows;
pub mod rows;
pub mod tiles;
pub mod warpgroup;
pub mod weights;
