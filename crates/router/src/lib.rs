//! The MoE router of DeepSeek-V4: which experts a token goes to, and with what weights.
//!
//! The router does not need the KV cache. A [`Router`] is one layer's gate on a device. It routes a batch from hidden
//! states ([`Router::route`]) or from logits ([`Router::route_logits`]). How it chooses experts is fixed when it is
//! created: by score (`sqrt(softplus(logit)) + bias`), or, in a model's first layers, by token id. See
//! docs/specification.md, section 14.
//!
//! | module | what it holds |
//! |---|---|
//! | `router` | [`Router`], [`Batch`] |
//! | `config` | [`RouterConfig`]: the shape of a model's routers, from its configuration |
//! | `weights` | [`RouterWeights`]: the weights of a layer, as slices or from a model's files |
//! | `selection` | [`Selection`]: the number of experts of a layer and of a token |
//! | `scratch` | memory that one launch at a time uses |
//! | [`ops`] | single launches: shapes checked, kernels launched |
//! | `error` | [`RouterError`] |
//!
//! # A layer, from weights to experts
//!
//! Weights are slices, or come from a model's files ([`Router::of_layer`]). A router allocates the memory of its launches
//! once, for batches of up to `max_tokens` tokens. The result stays on the device, where the experts read it.
//!
//! ```
//! use dsv4_kv_device::{EmuDevice, EmuOptions};
//! use dsv4_kv_router::{Batch, ChoiceWeights, Router, RouterConfig, RouterWeights, Routing, bf16};
//!
//! // On a GPU: dsv4_kv::open_cuda(CudaOptions::default())?
//! let device = EmuDevice::new(EmuOptions::default());
//! let stream = device.stream()?;
//! let config = RouterConfig { routing: vec![Routing::Hash], ..RouterConfig::preset("tiny").expect("a preset") };
//!
//! // A layer that looks experts up: token id `t` goes to the six from `t` on. Their shares are by score all the same.
//! let gate = vec![bf16::ZERO; (config.experts * config.hidden_size) as usize];
//! let row = |id: u32| (0..6).map(move |i| ((id + i) % 64) as i32);
//! let table: Vec<i32> = (0..config.vocabulary).flat_map(row).collect();
//! let weights = RouterWeights { gate: gate.into(), choice: ChoiceWeights::Table(table.into()) };
//! let mut router = Router::new(&stream, &config, &weights, 2)?;
//! assert_eq!(router.mode(), Routing::Hash);
//!
//! // Two tokens, with hidden states of zeros: all logits are equal, and so are the shares.
//! let x = device.allocate::<bf16>("hidden states", 2 * u64::from(config.hidden_size))?;
//! let token = device.allocate("tokens", 2)?;
//! stream.upload(&[3, 60], &token, 0)?;
//! let (ids, shares) = (device.allocate("experts", 12)?, device.allocate("shares", 12)?);
//! router.route(&stream, &x, &Batch { tokens: 2, token: &token, ids: &ids, weights: &shares })?;
//! // Waits, and says what kernels refused: a token id that is not in the table, for instance.
//! router.check_faults(&stream)?;
//!
//! let (mut found, mut share) = ([0; 12], [0.0_f32; 12]);
//! stream.download(&ids, 0, &mut found)?;
//! stream.download(&shares, 0, &mut share)?;
//! assert_eq!(found, [3, 4, 5, 6, 7, 8, 60, 61, 62, 63, 0, 1]);
//! assert!(share.iter().all(|share| (share - config.scaling / 6.0).abs() < 1e-6));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Router::route_logits`] routes from logits of the caller. A graph that captured a call must retain
//! [`Router::memory`]; call [`Router::follow`] before each replay in another stream.

mod config;
mod error;
pub mod ops;
mod router;
mod scratch;
mod selection;
mod weights;

pub use config::RouterConfig;
pub use dsv4_kv_device::bf16;
pub use dsv4_kv_model_files::Routing;
pub use error::RouterError;
pub use router::{Batch, Router};
pub use selection::Selection;
pub use weights::{ChoiceWeights, RouterWeights};
