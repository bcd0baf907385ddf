//! DeepSeek-V4, from token ids to logits.
//!
//! ```text
//! streams = the token's embedding, in each of 4 streams
//! for each layer:
//!     x       = norm(weighted sum of the streams)                 hyper.rs, norm.rs
//!     streams = mixed streams + attention(x)                      attention.rs, engine/
//!     x       = norm(weighted sum of the streams)
//!     streams = mixed streams + experts(x)                        experts.rs
//! logits = head(norm(weighted sum of the streams))                model.rs
//!
//! attention(x):
//!     latent  = norm(Wqa x)                                       [q_lora_rank]
//!     queries = rotate(norm of each head(Wqb latent))             [heads, 512]
//!     row     = rotate(norm(Wkv x))                               [512], key and value in one, to the cache
//!     keys    = the rows of the last 128 tokens, and
//!               in a CSA layer the entries that the indexer picks, of one for every 4 tokens
//!               in an HCA layer all entries, one for every 128 tokens
//!     sums    = softmax(queries . keys / sqrt(512), sink) keys    one softmax over all
//!     result  = Wob (Woa of each group of heads (rotate back(sums)))
//!
//! experts(x):
//!     6 of the routed experts, chosen by a table (the first layers) or by score, and the shared one
//! ```
//!
//! The cache ([`dsv4_kv`]) stores rows and entries, and it pools, quantises, scores and gathers them. The router
//! ([`dsv4_kv_router`]) chooses experts. Both run on a GPU or on the CPU. Attention runs there too, in BF16 over the
//! stored rows, or in this crate over gathered rows ([`AttentionPlace`]). All dense mathematics is in this crate, in
//! f32 on the host, written to be exact and readable rather than fast.
//!
//! | module | what it holds |
//! |---|---|
//! | [`model`], [`layer`], [`load`] | the weights, and how they are read from a model's files |
//! | `left_over` | which tensors of a model need not be read |
//! | [`hyper`] | the residual streams |
//! | [`attention`], [`rotary`] | the parts of attention outside of the cache |
//! | [`experts`] | the experts |
//! | [`linear`], [`norm`] | matrix products and norms |
//! | [`engine`] | the model on a device: requests, steps, graphs |
//! | [`generate`], [`sequence`] | one request from prompt to end; its tokens and what it runs next |
//! | [`sample`], [`prompt_lookup`] | sampling of the next token, and drafts of those after it |
//! | [`text`] | text to tokens and back |
//! | [`probe`] | observes the activations of a forward pass |
//! | [`error`] | typed errors |

pub mod attention;
pub mod engine;
pub mod error;
pub mod experts;
pub mod generate;
pub mod hyper;
pub mod layer;
mod left_over;
pub mod linear;
pub mod load;
pub mod model;
pub mod norm;
pub mod probe;
pub mod prompt_lookup;
pub mod rotary;
pub mod sample;
pub mod sequence;
pub mod text;

pub use engine::{AttentionPlace, Chunk, Engine, EngineLimits, Forward, Logits};
pub use error::ModelError;
pub use model::Model;
