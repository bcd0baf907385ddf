//! The kernels. One source, two backends: PTX for a GPU, fibers on a CPU (see `simt`).
//!
//! | module | what it holds |
//! |---|---|
//! | [`table`], [`params`] | the kernel table, and the scalars each kernel takes |
//! | `args` | the arguments of a kernel body, expanded from the kernel table |
//! | `launch` | typed launch arguments for the host (feature `launch`), expanded from the kernel table |
//! | `entry` | the PTX entries, or the emulator's launchers, expanded from the kernel table |
//! | `closing_tokens` | the work lists of a step: which tokens close a window |
//! | `block_table` | finds an entry of a request through the block table; enters new blocks |
//! | `swa` | the sliding-window ring: append, gather |
//! | `compress` | the compressors: entries and indexer keys of the windows that close; the state rings |
//! | `flush` | stores entries and indexer keys in their blocks |
//! | [`state_copy`] | copies slots or blocks: to a checkpoint or another image, back, and to another slot or block |
//! | [`digest`] | digests of sections of a payload |
//! | `decode` | all cache writes of a layer in a decode step, in one launch |
//! | `gather` | compressed entries: gathers by list, gathers of all, and the number that a query sees |
//! | [`attention`] | attention in place, over the stored rows of the cache |
//! | [`indexer`] | queries (RoPE, Hadamard transform, quantisation), scores, and the largest of them |
//! | [`router`] | the MoE router: activation, top-k, hash |
//! | [`linear`] | products of activations with weights in NVFP4 or BF16 |
//! | `fragment` | fragments of matrix products of a warp |
//! | `row`, `index_row` | main rows and indexer keys in a warp's registers: quantise, store, load, dequantise |
//! | `convert` | number conversions: hardware on the GPU, the codecs of `kv-layout` on the CPU |
//! | [`math`] | exp, sine and cosine with equal bits on both devices |
//! | `rank` | the order of scores in all selections |
//! | `fault` | the fault word, which counts the inputs that a kernel refused |
//! | `poison`, `poison_keys` | find rows, and scores of keys, that were never written |
//! | `unroll` | short loops unrolled in the source |
//! | [`fault_injection`] | mistakes that tests make on purpose, to see that they are found |
//!
//! Kernels `decode_*` write the cache of a decode step; attention is `attend_*`.
//!
//! Bodies are generic over the row format and know nothing of launches; the kernel table (`crate::table`) states the
//! shapes and element types of their pointers.
#![cfg_attr(not(feature = "launch"), no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]
// Without entries and without `launch` nothing calls a kernel.
#![cfg_attr(not(any(target_arch = "nvptx64", feature = "launch")), allow(dead_code))]

mod args;
pub mod attention;
mod block_table;
mod closing_tokens;
mod compress;
mod convert;
mod decode;
pub mod digest;
#[cfg(any(target_arch = "nvptx64", feature = "launch"))]
mod entry;
mod fault;
pub mod fault_injection;
mod flush;
mod fragment;
mod gather;
mod index_row;
pub mod indexer;
#[cfg(feature = "launch")]
pub mod launch;
pub mod linear;
pub mod math;
pub mod params;
mod poison;
mod poison_keys;
mod rank;
pub mod router;
mod row;
pub mod state_copy;
mod swa;
pub mod table;
mod unroll;

#[cfg(all(feature = "launch", not(target_arch = "nvptx64")))]
pub use entry::emulated;

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // Never reached: the device build panics by trap (`-Cpanic=immediate-abort`).
    loop {}
}
