//! The CUDA driver, found at run time.
//!
//! `cust_raw` declares the driver's functions and links `-lcuda`; without a driver, a program built that way neither
//! links nor starts. This crate *defines* those functions and forwards each call to `libcuda.so.1`, which the first
//! call opens.
//!
//! A build needs two more things. `cust_raw` looks for a folder of CUDA, in `CUDA_LIBRARY_PATH` too, and stops the
//! build if it finds none; any folder that contains a folder `lib64` will do. And the linker needs a library for
//! `-lcuda`: if there is no other, the build script of this crate makes an empty archive, which adds nothing. In this
//! workspace `.cargo/config.toml` points at `link/`, which serves as both.
//!
//! | situation | a driver function returns |
//! |---|---|
//! | driver found | what the driver returns; a code newer than `cust_raw` becomes `CUDA_ERROR_UNKNOWN` |
//! | no driver | `CUDA_ERROR_NO_DEVICE` |
//! | driver too old for the function | `CUDA_ERROR_NOT_FOUND` |
//!
//! [`driver`] returns why there is no driver, which the status code cannot tell.
//!
//! # Linking
//! A program gets these definitions only if some crate in it names this one. A call of [`driver`]
//! does; otherwise write `use cuda_loader as _;`. Exported `#[no_mangle]` functions of a loaded
//! crate are always linked, so the order of libraries does not matter.
//!
//! Only executables are meant. A shared library built with this crate exports the driver's names
//! itself and can shadow a real driver that the same process links.

mod driver;
mod forward;
mod launch;
mod status;

pub use driver::{Driver, DriverError, Tried, driver};
pub use launch::{Launch, launch_kernel};
