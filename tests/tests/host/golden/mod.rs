//! The oracle against golden vectors.

mod compressor;
mod files;
mod indexer;
mod rope;
mod router;
mod rows;
mod semantics;
