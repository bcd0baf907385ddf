//! Code that the tests of `dsv4-kv` share.
//!
//! [`golden`] reads vectors that other software made (`golden/README.md`). The slow reference code
//! is a crate of its own, `dsv4-kv-oracle`, itself tested against the vectors.
//!
//! | module | what it holds |
//! |---|---|
//! | [`model_files`] | model files made by a test |
//! | [`environment`] | environment variables that switch something on |
//! | [`failing`] | a device that fails on demand |
//! | [`fuzz`] | the bodies of the fuzz targets |
//! | [`golden`] | vectors that other software made |
//! | [`history`] | input of a compressor |
//! | [`hca`] | HCA entries and running sums by the f32 operations of the kernels |
//! | [`inputs`] | seeded rows, and copies to and from a device |
//! | [`lazy`] | a device that defers its work |
//! | [`model`] | one compressor on a device, fed with a history by single operations |
//! | [`stories`] | stories: random tokens of a request in all layers, and what a cache must store for them |
//! | [`fed`] | a cache with layers of every kind, fed with stories |
//! | [`refused`] | names in refusals |
//! | [`updated`] | a layer of any kind, after its update |
//! | [`rings`] | sliding-window rings |
#![deny(unsafe_code)]

pub mod environment;
#[expect(unsafe_code, reason = "a device trusts its backend, this one too")]
pub mod failing;
pub mod fed;
pub mod fuzz;
pub mod golden;
pub mod hca;
pub mod history;
pub mod inputs;
#[expect(unsafe_code, reason = "a device trusts its backend, this one too")]
pub mod lazy;
#[expect(unsafe_code, reason = "operations on arrays that nothing else writes")]
pub mod model;
pub mod model_files;
pub mod refused;
pub mod rings;
pub mod stories;
pub mod updated;
