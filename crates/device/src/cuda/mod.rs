//! An NVIDIA GPU through `cust`; capture and graphs through its `sys`.
//!
//! | module | what it holds |
//! |---|---|
//! | `context` | [`Cuda`]: what its objects share |
//! | `open` | opening a GPU, loading kernels |
//! | `handles` | what the driver hands out |
//! | `launched` | which kernels may still be running |
//! | `backend` | the raw calls |
//! | `survey` | what a machine has, without opening it |

mod backend;
mod context;
mod handles;
mod launched;
mod open;
mod survey;

pub use context::Cuda;
pub use open::CudaDevice;
