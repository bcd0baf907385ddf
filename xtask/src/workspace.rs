//! Paths of the workspace, and how a nested cargo is called.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The workspace's root folder.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace root")
}

/// Cargo's target folder. Downloads and builds go there.
pub fn target_dir() -> PathBuf {
    match env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => env::current_dir().expect("a current folder").join(dir),
        None => root().join("target"),
    }
}

/// The folder of the committed PTX and its manifest.
pub fn ptx_dir() -> PathBuf {
    root().join("host/ptx")
}

/// Cargo's home folder, which contains the sources from registries.
pub fn cargo_home() -> PathBuf {
    match env::var_os("CARGO_HOME") {
        Some(home) => PathBuf::from(home),
        None => env::home_dir().unwrap_or_default().join(".cargo"),
    }
}

/// The cargo that runs this task, called from the workspace root.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
    command.current_dir(root());
    command
}

/// [`cargo`] without the settings that it inherits from the outer cargo or from the user, so that the build depends on
/// the command alone. The settings that locate packages are kept.
pub fn clean_cargo() -> Command {
    const KEPT: [&str; 6] = [
        "CARGO_HOME",
        "CARGO_HTTP_",
        "CARGO_NET_",
        "CARGO_REGISTR",
        "CARGO_SOURCE_",
        "RUSTUP_HOME",
    ];
    let mut command = cargo();
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        let of_cargo = name.starts_with("CARGO") || name.starts_with("RUST");
        if of_cargo && !KEPT.iter().any(|kept| name.starts_with(kept)) {
            command.env_remove(name);
        }
    }
    command
}
