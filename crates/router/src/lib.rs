//! The MoE router of DeepSeek-V4: which experts a token goes to, and with what weights.
//!
//! Independent of the KV cache. A [`Router`] is one layer's gate on a device. It routes a batch from hidden
//! states ([`Router::route`]) or from logits ([`Router::route_logits`]). How it chooses is fixed when it is
//! made: by score (`sqrt(softplus(logit)) + bias`), or, in a model's first layers, by token id. See
//! docs/specification.md, section 14.
//!
//! | module | what it holds |
//! |---|---|
//! | `router` | [`Router`], [`Batch`] |
//! | `config` | [`RouterConfig`]: the shape of a model's routers, from its configuration |
//! | `weights` | [`RouterWeights`]: the weights of a layer, as slices or from a checkpoint |
//! | `selection` | [`Selection`]: how many experts there are and a token gets |
//! | `scratch` | memory that launches share, one at a time |
//! | [`ops`] | single launches: shapes checked, kernels launched |
//! | `error` | [`RouterError`] |

mod config;
mod error;
pub mod ops;
mod router;
mod scratch;
mod selection;
mod weights;

pub use config::RouterConfig;
pub use dsv4_kv_checkpoint::Routing;
pub use dsv4_kv_device::bf16;
pub use error::RouterError;
pub use router::{Batch, Router};
pub use selection::Selection;
pub use weights::{ChoiceWeights, RouterWeights};
