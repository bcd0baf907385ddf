//! Environment variables that switch something on.

use std::ffi::OsStr;

/// Whether the environment variable `name` is `1`; off if it is `0`, empty or not set.
///
/// # Panics
/// For any other value, which would otherwise switch nothing on without a word.
#[must_use]
pub fn flag(name: &str) -> bool {
    is_on(name, std::env::var_os(name).as_deref())
}

/// As [`flag`], for a given value of the variable.
///
/// # Panics
/// As [`flag`].
#[must_use]
pub fn is_on(name: &str, value: Option<&OsStr>) -> bool {
    let value = value.unwrap_or_default();
    match value.to_str() {
        Some("" | "0") => false,
        Some("1") => true,
        _ => panic!("{name} is {value:?}; it has to be 1, or for off 0 or empty"),
    }
}
