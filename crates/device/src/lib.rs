//! Devices: memory, streams, events, launches, capture and replay, on an NVIDIA GPU or on the CPU.
//!
//! [`Device`] is one set of rules over a [`Backend`] of raw calls: [`Cuda`], or the [`Emulator`], which
//! runs kernels on the CPU. What the rules forbid is refused before a backend is asked:
//!
//! - Objects of two devices are not mixed ([`DeviceError::ForeignDevice`]).
//! - A launch takes aligned pointers, and what a kernel writes overlaps nothing else that it takes
//!   ([`DeviceError::Misaligned`], [`DeviceError::Aliased`]).
//! - While a graph is captured nothing allocates and nothing waits; what the graph touches is memory that
//!   it keeps alive ([`DeviceError::ForbiddenInCapture`], [`DeviceError::NotRetained`]). What is dropped
//!   meanwhile is freed after the capture.
//! - A copy that borrows host memory has ended when the call returns, with whatever result.
//!
//! | module | what it holds |
//! |---|---|
//! | `backend` | the trait of raw calls |
//! | `cuda`, `emulator` | the two backends |
//! | `device` | [`Device`]: allocation, streams, events |
//! | `buffer`, `pinned` | memory: [`Buffer`], [`View`], [`Pinned`] |
//! | `pointer` | launch pointers: [`DevicePtr`], [`DevicePtrMut`] |
//! | `operation` | [`Operation`]: a kernel with its arguments, and what a launch checks of it |
//! | `stream`, `transfer` | [`Stream`], [`Event`]; copies |
//! | `capture`, `graph` | what a capture forbids; [`Graph`] |
//! | `staged` | [`Staged`]: a buffer that the host rewrites without waiting |
//! | `error` | [`DeviceError`] |
//!
//! The crate knows no kernel: the list of kernels and their PTX are handed in ([`Kernels`]).

mod backend;
mod buffer;
mod capture;
mod cuda;
mod device;
mod emulator;
mod error;
mod graph;
mod operation;
mod pinned;
mod pointer;
mod staged;
mod stream;
mod transfer;

pub use backend::{Backend, RawMemory, RawPinned};
pub use buffer::{Buffer, Memory, View};
pub use cuda::{Cuda, CudaDevice, CudaOptions, Kernels};
pub use device::{Device, DeviceId, DeviceInfo};
pub use emulator::{EmuDevice, EmuOptions, Emulator};
pub use error::{CudaStatus, DeviceError};
pub use graph::Graph;
pub use operation::Operation;
pub use pinned::Pinned;
pub use pointer::{DevicePtr, DevicePtrMut, Span};
pub use staged::Staged;
pub use stream::{Event, Stream};
