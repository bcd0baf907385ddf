//! Devices: memory, streams, events, launches, capture and replay, on an NVIDIA GPU or on the CPU.
//!
//! [`Device`] applies one set of rules over a [`Backend`] of raw calls: [`Cuda`], or the [`Emulator`], which runs
//! kernels on the CPU. A call that breaks a rule is refused before the backend is called:
//!
//! - Objects of two devices are not mixed ([`DeviceError::ForeignDevice`]).
//! - Pointers of a launch are aligned, and memory that a kernel writes overlaps none of its other arguments
//!   ([`DeviceError::Misaligned`], [`DeviceError::Aliased`]).
//! - During a capture no call allocates or waits, and the graph touches only memory that it keeps alive
//!   ([`DeviceError::ForbiddenInCapture`], [`DeviceError::NotRetained`]). Objects that are dropped during a capture are
//!   freed after it.
//! - A copy that borrows host memory has ended when the call returns, also with an error.
//!
//! | module | what it holds |
//! |---|---|
//! | `backend` | [`Backend`]: the raw calls |
//! | `cuda`, `emulator` | the two backends; `cuda` with the feature of that name, `no_cuda` without it |
//! | `gpu_options` | [`CudaOptions`], [`CudaSurvey`] |
//! | `null` | [`Null`]: a backend that does nothing, to measure the host's work |
//! | `operation` | [`Operation`]: a kernel with its arguments |
//! | `device`, `identity` | [`Device`], and the identity of the device that each object carries |
//! | `buffer`, `arena`, `pinned` | memory: [`Buffer`], [`View`], several buffers in one allocation, [`Pinned`] |
//! | `span`, `pointer` | ranges of memory; launch pointers: [`DevicePtr`], [`DevicePtrMut`] |
//! | `stream`, `transfer` | [`Stream`], [`Event`]; copies |
//! | `graph` | [`Graph`]: capture and replay |
//! | `host_pool` | [`HostPool`]: pinned memory in units, and copies that hold the units until they are done |
//! | `staged` | [`Staged`]: a buffer that the host rewrites without waiting |
//! | [`shape`] | lengths of tensors, for operations of several launches |
//! | `checks` | checks before a call: identity, grids, alignment, lengths, overlap |
//! | `capture`, `owned` | calls that a capture forbids, and frees that it defers |
//! | `error` | [`DeviceError`] |
//!
//! The crate knows no kernel: the program passes the list of kernels and their PTX ([`Kernels`]).
//!
//! # Memory, streams, and a graph
//!
//! Handles are reference-counted: a buffer keeps its memory alive, a stream its device. A copy between host and device
//! ends before the call returns. Other work runs in the order of its stream, and an [`Event`] orders work of two
//! streams.
//!
//! ```
//! use dsv4_kv_device::{Device, DeviceError, EmuDevice, EmuOptions};
//!
//! // On a GPU: dsv4_kv::open_cuda(CudaOptions::default())?, with the kernels of the cache.
//! let device = EmuDevice::new(EmuOptions::default());
//! let stream = device.stream()?;
//!
//! // Memory has a label, by which errors name it; slices of it are buffers too.
//! let from = device.allocate::<u32>("source", 4)?;
//! let to = device.allocate::<u32>("target", 4)?;
//! stream.upload(&[1, 2, 3, 4], &from, 0)?;
//!
//! // Captured work does not run. The graph retains the memory that it touches.
//! let graph = stream.capture(vec![from.memory(), to.memory()], || stream.copy(&from, &to))?;
//! let mut read = [0; 4];
//! stream.replay(&graph)?;
//! stream.download(&to, 0, &mut read)?;
//! assert_eq!((graph.nodes(), read), (1, [1, 2, 3, 4]));
//!
//! // Each replay reads the contents at that time.
//! stream.upload(&[9], &from.slice(3, 1).expect("it is as long"), 0)?;
//! stream.replay(&graph)?;
//! stream.download(&to, 0, &mut read)?;
//! assert_eq!(read, [1, 2, 3, 9]);
//!
//! // A call that breaks a rule returns an error with the name of the rule.
//! let other = EmuDevice::new(EmuOptions::default()).allocate::<u32>("elsewhere", 4)?;
//! assert!(matches!(stream.copy(&other, &to), Err(DeviceError::ForeignDevice { .. })));
//! # Ok::<(), DeviceError>(())
//! ```
//!
//! | need | type or function |
//! |---|---|
//! | memory that a program has already | `CudaDevice::from_context`, `stream_from_raw`, `buffer_from_raw` |
//! | several buffers in one allocation | [`Arena`] |
//! | small arrays that the host writes every step, without waiting | [`Staged`] |
//! | large ones that leave the device, and come back | [`HostPool`], [`HostCopies`] |
//! | to measure the work of the host alone | [`Null`] |

mod arena;
mod backend;
mod buffer;
mod capture;
mod checks;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod emulator;
mod error;
mod gpu_options;
mod graph;
mod host_pool;
mod identity;
#[cfg(not(feature = "cuda"))]
mod no_cuda;
mod null;
mod operation;
mod owned;
mod pinned;
mod pointer;
pub mod shape;
mod span;
mod staged;
mod stream;
mod transfer;

pub use arena::{ARENA_ALIGN, Arena, arena_bytes};
pub use backend::{Backend, Priority, RawMemory, RawPinned};
pub use buffer::{Buffer, Memory, View};
#[cfg(feature = "cuda")]
pub use cuda::{Cuda, CudaDevice};
pub use device::Device;
pub use emulator::{EmuDevice, EmuOptions, Emulator};
pub use error::{CudaStatus, DeviceError};
pub use gpu_options::{CudaOptions, CudaSurvey, Kernels, PtxOf};
pub use graph::Graph;
/// The element of BF16 tensors. A buffer of `u16` is not a BF16 tensor.
pub use half::bf16;
pub use host_pool::{HostCopies, HostPool, HostUnit, Unsettled};
pub use identity::{DeviceId, DeviceInfo};
#[cfg(not(feature = "cuda"))]
pub use no_cuda::{Cuda, CudaDevice};
pub use null::{Null, NullCalls, NullDevice};
pub use operation::Operation;
pub use pinned::Pinned;
pub use pointer::{DevicePtr, DevicePtrMut};
pub use span::Span;
pub use staged::Staged;
pub use stream::{Event, Running, Stream};
