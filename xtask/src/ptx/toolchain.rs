//! Finds a compiler that can make PTX: a rustc of 1.96 or later with the source of `core`.
//!
//! The order is: the toolchain in use, Debian's `rustc-web`, a copy of that fetched into `target/`. Cargo is always the
//! one that runs this task; only the compiler differs.

use anyhow::{Result, anyhow};
use dsv4_kv_device_compiler::Compiler;

use super::debian;
use crate::workspace;

/// The compiler, fetched if none is installed.
///
/// # Errors
/// None is installed and none could be fetched; the error says why for each, and what to do.
pub fn find_or_fetch() -> Result<Compiler> {
    let refused = match find_installed() {
        Ok(compiler) => return Ok(compiler),
        Err(refused) => refused,
    };
    debian::fetch().map_err(|fetching| no_compiler(&refused, &fetching))
}

/// A compiler that is already on this machine; a copy that was fetched earlier counts.
///
/// # Errors
/// There is none; the error says why each candidate was refused.
pub fn find_installed() -> Result<Compiler> {
    let in_use = match Compiler::in_use(workspace::root()) {
        Ok(compiler) => return Ok(compiler),
        Err(refused) => refused,
    };
    let debian = match Compiler::of_debian() {
        Ok(compiler) => return Ok(compiler),
        Err(refused) => refused,
    };
    debian::fetched().map_err(|fetched| {
        anyhow!(
            "- the toolchain in use: {in_use:#}\n- Debian's rustc-web: {debian:#}\n- the fetched \
             copy: {fetched:#}"
        )
    })
}

fn no_compiler(refused: &anyhow::Error, fetching: &anyhow::Error) -> anyhow::Error {
    anyhow!(
        "no compiler that can make PTX (rustc 1.96 or later with rust-src):\n{refused}\n- fetching \
         one: {fetching:#}\n\nEither install a toolchain with rust-src and use it:\n    rustup \
         toolchain install 1.96.0 --component rust-src\n    RUSTUP_TOOLCHAIN=1.96.0 cargo xtask \
         build-ptx\nor, on Debian 12:\n    sudo apt-get install rustc-web rust-web-src"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_names_both_remedies() {
        let text = no_compiler(&anyhow!("- a"), &anyhow!("b")).to_string();
        assert!(text.contains("rustup toolchain install 1.96.0 --component rust-src"), "{text}");
        assert!(text.contains("apt-get install rustc-web rust-web-src"), "{text}");
    }
}
