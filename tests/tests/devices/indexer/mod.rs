//! The indexer: queries, scores and lists, kernel by kernel and through the cache.

pub mod batches;
pub mod extremes;
pub mod loaded;
pub mod query;
pub mod query_product;
pub mod refusals;
pub mod score_topk;
pub mod scores;
pub mod select;
pub mod topk;
