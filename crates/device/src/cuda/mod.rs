//! An NVIDIA GPU through `cust`; capture and graphs through its `sys`.
//!
//! | module | what it holds |
//! |---|---|
//! | `context` | [`Cuda`]: the state that its objects share |
//! | `open` | opening a GPU, loading kernels |
//! | `handles` | handles of the driver: memory, streams, events, graphs |
//! | `launched` | the kernels that may still be running |
//! | `backend` | the raw calls |
//! | `survey` | the driver and the GPUs of a machine, without opening a GPU |

mod backend;
mod context;
mod handles;
mod launched;
mod open;
mod survey;

pub use context::Cuda;
pub use open::CudaDevice;
