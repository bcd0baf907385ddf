//! The KV cache of a DeepSeek-V4 server: schema, block allocator, per-request state, step planner
//! and the kernels that fill and read the cache, on a GPU or on the CPU.
//!
//! | module | what it holds |
//! |---|---|
//! | [`config`] | every choice that shapes a cache |
//! | [`schema`], [`pool_kind`] | which pools a layer has, and their sizes |
//! | [`capacity`] | capacity planning: which requests fit at once, in how many bytes |
//! | [`block`] | the block pool |
//! | [`checkpoints`] | saved request state at block boundaries, for prefix reuse |
//! | [`suspended`] | suspended requests: blocks kept, slot released |
//! | [`ledger`] | bookkeeping without a device: the blocks and slots of each request, and which steps are allowed |
//! | [`step_meta`] | StepMeta: the per-step metadata array that kernels read |
//! | `manager` | [`KvCacheManager`]: the ledger and the device memory |
//! | [`step`] | [`Step`]: its layers, commit, capture and replay |
//! | [`bucket`] | [`Bucket`]: the largest step that a captured graph serves |
//! | [`indexer`] | [`CsaIndexer`]: which entries a query attends to |
//! | [`device`] | memory, streams, launches, capture: emulated and CUDA |
//! | [`host_tier`], `tier` | KV offloading to pinned host memory |
//! | [`layer_progress`] | progress of a layer in a step |
//! | [`ops`] | single operations, for programs with memory of their own; a cache's steps call them |
//! | [`state`] | `StateView`: a compressor's state for inspection |
//! | [`poison`] | debug mode: unowned memory is filled with NaN, and reads of it are reported |
//! | [`reuse`] | prefix caching: admission with a prompt, pins, statistics |
//! | [`transfer`] | export and import of requests and prefixes between caches |
//! | [`events`] | log of stored and removed blocks, for KV-aware routers |
//! | [`trace`] | spans and events for a `tracing` subscriber |
//! | `metrics` | gauges and counters of a cache, through the `metrics` facade (feature `metrics`) |
//! | [`rope`] | the rotary frequencies |
//! | [`ptx`] | the embedded PTX, and the choice for a GPU |
//! | `identity` | the identity of the byte layout: equal for caches that can exchange bytes |
//! | `weights` | [`CompressorWeights`]: weights of a compressor on a device |
//! | `testing` | access that only tests need (feature `testing`) |
//! | [`error`], [`ids`] | typed refusals, typed indices |
//!
//! # A step
//!
//! A prompt of five tokens in a model of two layers. The types enforce the order: a layer is read
//! after its update, and ends with its append. `crates/model` is a whole model that uses this cache.
//!
//! ```
//! use dsv4_kv::device::{EmuDevice, EmuOptions};
//! use dsv4_kv::indexer::ProjectedQueries;
//! use dsv4_kv::kv_layout::config::ModelConfig;
//! use dsv4_kv::kv_layout::geometry::LayerKind;
//! use dsv4_kv::step::{CompressorInputs, CsaInputs, EntryLists};
//! use dsv4_kv::{Accepted, CacheConfig, KvCacheManager, Launches, StepRequest};
//! # use dsv4_kv::{IndexerWorkspace, WorkspaceLimits};
//!
//! # let layers = vec![LayerKind::Swa, LayerKind::Csa];
//! # let tiny = ModelConfig::preset("tiny").expect("a preset");
//! # let model = ModelConfig { layers, mtp_layers: 0, ..tiny };
//! // On a GPU: dsv4_kv::open_cuda(CudaOptions::default())?
//! let device = EmuDevice::new(EmuOptions::default());
//! let stream = device.stream()?;
//! # let (heads, k) = (u64::from(model.index_heads), model.index_topk);
//! # let floats = |elements| device.allocate::<f32>("projections", elements);
//! # let (kv, window) = (device.allocate("rows", 5 * 512)?, device.allocate("window", 5 * 128 * 512)?);
//! # let (main_kv, main_gate) = (floats(5 * 1024)?, floats(5 * 1024)?);
//! # let (main_ape, main_norm) = (floats(4 * 1024)?, floats(512)?);
//! # let (index_kv, index_gate) = (floats(5 * 256)?, floats(5 * 256)?);
//! # let (index_ape, index_norm) = (floats(4 * 256)?, floats(128)?);
//! # let (index_queries, head_weights) = (floats(5 * heads * 128)?, floats(5 * heads)?);
//! # let main = || CompressorInputs { kv: &main_kv, gate: &main_gate, ape: &main_ape, norm: &main_norm };
//! # let index =
//! #     || CompressorInputs { kv: &index_kv, gate: &index_gate, ape: &index_ape, norm: &index_norm };
//! # let projected = ProjectedQueries { queries: &index_queries, weights: &head_weights };
//! # let (lengths, lists) = (device.allocate("lengths", 5)?, device.allocate("lists", 5 * u64::from(k))?);
//! # let entries = device.allocate("entries", 5 * u64::from(k) * 512)?;
//! # let limits = WorkspaceLimits { context: 512, queries: 5, bytes: u64::MAX };
//! # let workspace = IndexerWorkspace::new(&device, &model, limits)?;
//! let smallest = CacheConfig::new(model);
//! let config = CacheConfig { num_blocks: 16, max_context: 512, max_step_tokens: 64, ..smallest };
//! let mut cache = KvCacheManager::new(device, config)?;
//! let id = cache.admit()?;
//!
//! let requests = [StepRequest { id, start: 0, tokens: 5 }];
//! let mut step = cache.begin_step(&stream, Launches::Eager, &requests)?;
//! for (layer, kind) in step.layer_kinds() {
//!     // The model's projections for the layer are in `kv`, `main()`, `index()` and `projected`.
//!     match kind {
//!         LayerKind::Swa => {
//!             let updated = step.swa(layer)?.update(&kv)?;
//!             updated.gather_window(.., &window, &lengths)?;
//!             updated.append()?;
//!         }
//!         LayerKind::Csa => {
//!             let inputs = CsaInputs { kv: &kv, main: main(), index: index() };
//!             let updated = step.csa(layer)?.update(&inputs)?;
//!             updated.gather_window(.., &window, &lengths)?;
//!             let lists = EntryLists { queries: 0..5, k, indices: &lists };
//!             updated.select_projected(&projected, &workspace, &lists)?;
//!             updated.gather_entries(.., &lists, &entries)?;
//!             updated.append()?;
//!         }
//!         // As CSA, but with `gather_all` in place of an indexer. This model has none.
//!         LayerKind::Hca => {}
//!     }
//!     // Attention reads `window` and `entries`.
//! }
//! step.commit(&[Accepted::count(id, 5)])?;
//! assert_eq!(cache.ledger().committed(id)?, 5);
//! cache.release(id)?;
//! # Ok::<(), dsv4_kv::KvError>(())
//! ```

/// The example of the package's README, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

pub mod block;
pub mod bucket;
pub mod capacity;
pub mod checkpoints;
pub mod config;
pub mod device;
pub mod error;
pub mod events;
mod identity;
pub mod ids;
pub mod indexer;
pub mod layer_progress;
pub mod ledger;
mod manager;
mod memory;
#[cfg(feature = "metrics")]
pub mod metrics;
pub mod ops;
pub mod poison;
pub mod pool_kind;
pub mod ptx;
pub mod rope;
pub mod schema;
pub mod state;
pub mod step;
pub mod step_meta;
#[cfg(feature = "testing")]
pub mod testing;
mod tier;
pub mod trace;
pub mod transfer;
mod weights;

pub use bucket::Bucket;
pub use capacity::Capacity;
pub use checkpoints::{ForeignCheckpoint, SavedCheckpoint};
pub use config::CacheConfig;
pub use device::{bf16, open_cuda};
pub use error::KvError;
pub use host_tier::{
    CheckpointInfo, HostImage, HostPrompt, HostReservation, PrefetchId, TierEvent, TierMiss,
    TierStats,
};
pub use ids::{BlockId, CacheId, CheckpointId, LayerGroup, LayerId, RequestId, SlotId};
pub use indexer::{
    CsaIndexer, IndexerWeights, IndexerWorkspace, QueryValues, QueryWeight, WorkspaceLimits,
    WorkspaceSize,
};
pub use ledger::{Accepted, Admission, Ledger, Prompt, StepPlan, StepRequest};
pub use manager::{Groups, KvCacheManager};
pub use manager::{host_tier, reuse, suspended};
pub use pool_kind::PoolKind;
pub use step::{CapturedStep, Launches, Layers, Step};
pub use suspended::{StillSuspended, Suspended};
#[doc(hidden)]
pub use tier::mistake as tier_mistake;
pub use weights::CompressorWeights;

pub use dsv4_kv_model_files as model_files;
pub use dsv4_kv_prefix::{Origin, RootKey};
pub use kv_layout;
