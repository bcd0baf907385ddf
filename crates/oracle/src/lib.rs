//! The specification in `f64`: slow, plain reference code, from the formulas of
//! docs/specification.md alone. It shares no code with what it judges and depends on nothing. Tests
//! compare with it, and so does `cargo kv replay`.
//!
//! | module | what it answers |
//! |---|---|
//! | [`attention`] | what a head gets from its keys |
//! | [`number`] | value of every code, and the nearest code to a number by search |
//! | [`row`] | main rows: BF16 to bytes and back, both formats |
//! | [`index`] | indexer keys: BF16 to bytes and back, three formats |
//! | [`indexer`] | the indexer: queries, scores, the entries it picks |
//! | [`linear`] | NVFP4 weights, and products with them |
//! | [`swa`] | the sliding window: ring contents and gathered tiles from the token history |
//! | [`router`] | experts and weights of a token |
//! | [`rope`] | frequencies, cosines and sines, rotation forward and back |
//! | [`hadamard`] | the transform of indexer keys and queries |
//! | [`compressor`] | CSA and HCA entries and indexer keys; which entries close, and which are visible |
//! | [`explain`] | whether stored bytes are what a vector known up to f32 arithmetic becomes |
#![forbid(unsafe_code)]

pub mod attention;
pub mod compressor;
pub mod explain;
pub mod hadamard;
pub mod index;
pub mod indexer;
pub mod linear;
pub mod number;
pub mod rope;
pub mod router;
pub mod row;
pub mod swa;
