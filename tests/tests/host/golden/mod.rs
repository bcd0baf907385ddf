//! The oracle compared with golden vectors.

mod compressor;
mod files;
mod indexer;
mod rope;
mod router;
mod rows;
mod semantics;
