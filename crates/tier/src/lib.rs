//! The cold tier of the KV cache: prefixes that were in host memory once are kept in an object store, a local directory
//! by default, and any store by its URL. What is read is checked before a byte of it is used: version, sizes, model, salt,
//! all tokens of the prefix, and a digest of each section. What is damaged or foreign is a miss, with a reason.
//!
//! | module | what it holds |
//! |---|---|
//! | [`cold`] | [`ColdTier`]: below the host tier of a cache |
//! | [`mod@image`] | the bytes of an object |
//! | `key` | what objects are called |
//! | `store` | the thread that waits for the store |
//!
//! ```no_run
//! # fn example<B: dsv4_kv::device::Backend>(
//! #     mut cache: dsv4_kv::KvCacheManager<B>,
//! #     stream: dsv4_kv::device::Stream<B>,
//! #     prompt: dsv4_kv::Prompt<'_>,
//! # ) -> Result<(), Box<dyn std::error::Error>> {
//! use dsv4_kv_tier::{ColdOptions, ColdTier};
//!
//! let (identity, options) = (b"a digest of the model's weights", ColdOptions::default());
//! let mut cold = ColdTier::open(&mut cache, "/var/cache/prefixes", identity, &options)?;
//! // Between steps, and for prompts that wait for their turn:
//! cache.advance_tier(&stream)?;
//! cold.advance(&mut cache);
//! cold.fetch(&cache, &prompt)?;
//! # Ok(())
//! # }
//! ```

pub mod cold;
pub mod image;
mod key;
#[doc(hidden)]
pub mod mistake;
mod store;

pub use cold::{ColdOptions, ColdStats, ColdTier, FetchId};
pub use image::{ImageError, Section};
pub use store::{ColdError, ColdErrorKind};
