//! The kernels as PTX: builds, checks, commits and shows them.
//!
//! | module | what it does |
//! |---|---|
//! | [`recipe`] | targets, and the flags they are compiled with |
//! | [`toolchain`], [`debian`] | find a compiler that can make PTX (`dsv4_kv_device_compiler`), or fetch one into `target/` without root |
//! | [`build`] | compiles, patches, lints, assembles and writes the PTX |
//! | [`patch`] | writes the kernel table's launch bounds into PTX |
//! | [`module`], [`paths`] | read PTX text, and its control flow |
//! | [`lint`] | the rules that PTX must keep |
//! | [`ptxas`] | finds NVIDIA's assembler, reads registers and spills |
//! | [`compressed`] | the form in which PTX is committed |
//! | [`manifest`], [`sources`] | the compiler, flags and hashes from which the PTX was made; committed in `host/ptx/` |
//! | [`fresh`] | reports why committed PTX is stale |
//! | [`verify`] | compiles PTX again and compares it with the committed PTX |
//! | [`show`] | prints the PTX of a kernel |

pub mod build;
pub mod compressed;
pub mod debian;
pub mod fresh;
pub mod lint;
pub mod manifest;
pub mod module;
pub mod patch;
pub mod paths;
pub mod ptxas;
pub mod recipe;
pub mod show;
pub mod sources;
pub mod toolchain;
pub mod verify;
