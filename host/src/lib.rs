//! The KV cache of a DeepSeek-V4 server: schema, block allocator, per-request state, step planner
//! and the kernels that fill and read the cache, on a GPU or on the CPU.
//!
//! | module | what it holds |
//! |---|---|
//! | [`config`] | every choice that shapes a cache |
//! | [`schema`] | which pools a layer has, and their sizes |
//! | [`block`] | the block pool |
//! | [`capacity`] | what fits: which requests at once, in how many bytes |
//! | [`ledger`] | who holds which blocks and slots; `prepare_forward` without a device |
//! | [`plan`] | StepMeta, what the kernels of a step must know |
//! | [`manager`] | `KvCacheManager`: the ledger and the device memory |
//! | [`handle`] | `LayerCacheHandle`: one layer in one step |
//! | [`indexer`] | `CsaIndexer`: which entries a query attends to |
//! | [`graph`] | `CapturedStep`: one graph for every batch up to a bucket |
//! | [`device`] | memory, streams, launches, capture: emulated and CUDA; a GPU opened with the kernels |
//! | [`ops`] | the operations as safe functions: shapes checked, kernels launched |
//! | [`kernels`] | typed launch arguments, from the kernel table |
//! | [`state`] | `StateView`: a compressor's state for inspection |
//! | [`poison`] | memory that nobody owns made unusable, and reads of it reported |
//! | [`router`] | `Router`: which experts a token goes to |
//! | [`rope`] | the rotary frequencies |
//! | [`ptx`] | the embedded PTX, and the choice for a GPU |
//! | [`error`], [`ids`] | typed refusals, typed indices |

pub mod block;
pub mod capacity;
pub mod config;
pub mod device;
pub mod error;
pub mod graph;
pub mod handle;
pub mod ids;
pub mod indexer;
pub mod kernels;
pub mod ledger;
pub mod manager;
pub mod ops;
pub mod plan;
pub mod poison;
pub mod ptx;
mod requests;
pub mod rope;
pub mod router;
pub mod schema;
pub mod state;
mod workspace;

pub use capacity::Capacity;
pub use config::CacheConfig;
pub use device::open_cuda;
pub use error::KvError;
pub use graph::CapturedStep;
pub use handle::LayerCacheHandle;
pub use ids::{BlockId, LayerId, RequestId, SlotId};
pub use indexer::{CsaIndexer, IndexerWorkspace, WorkspaceSize};
pub use ledger::{Ledger, StepPlan, StepRequest};
pub use manager::KvCacheManager;
pub use router::{Router, RouterConfig, RouterError};

pub use kv_layout;
