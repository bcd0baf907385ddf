//! What the tests of `dsv4-kv` share.
//!
//! [`golden`] reads vectors that other software made (`golden/README.md`). The slow reference code
//! is a crate of its own, `dsv4-kv-oracle`, itself tested against the vectors.
#![forbid(unsafe_code)]

pub mod golden;
