//! Gives the linker an empty `libcuda.a` where there is no other: `cust_raw` asks for `-lcuda`, and this crate defines what
//! would be in it.
//!
//! A program that links CUDA itself, as one on candle does, needs the library of its toolkit or driver, and an empty one
//! could be found before it. So there is none where one of those is.

use std::path::PathBuf;
use std::{env, fs};

/// An `ar` archive without members.
const EMPTY: &[u8] = b"!<arch>\n";

/// Where a toolkit's folder has the library, as `cust_raw` looks for it.
const IN_TOOLKIT: [&str; 4] = [
    "lib64/libcuda.a",
    "lib64/libcuda.so",
    "lib64/stubs/libcuda.so",
    "targets/x86_64-linux/lib/stubs/libcuda.so",
];

/// Where a driver has it, when it is installed to be linked.
const OF_DRIVER: [&str; 4] = [
    "/usr/lib/x86_64-linux-gnu/libcuda.so",
    "/usr/lib/aarch64-linux-gnu/libcuda.so",
    "/usr/lib64/libcuda.so",
    "/usr/lib/libcuda.so",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CUDA_LIBRARY_PATH");
    let is_there = |folder: &PathBuf| IN_TOOLKIT.iter().any(|file| folder.join(file).exists());
    let is_of_driver = env::var_os("HOST") == env::var_os("TARGET")
        && OF_DRIVER.iter().any(|file| fs::exists(file).unwrap_or(false));
    if is_of_driver || toolkits().iter().any(is_there) {
        return;
    }
    let folder = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    fs::write(folder.join("libcuda.a"), EMPTY).expect("the build's folder can be written");
    println!("cargo::rustc-link-search=native={}", folder.display());
}

/// The folders in which `cust_raw` looks for a toolkit.
fn toolkits() -> Vec<PathBuf> {
    let named = env::var("CUDA_LIBRARY_PATH").unwrap_or_default();
    let named = named.split(':').filter(|path| !path.is_empty()).map(PathBuf::from);
    let installed = fs::read_dir("/usr/local").into_iter().flatten().flatten();
    let installed =
        installed.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"cuda"));
    named.chain(installed.map(|entry| entry.path())).chain([PathBuf::from("/opt/cuda")]).collect()
}
