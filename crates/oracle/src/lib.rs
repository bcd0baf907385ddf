//! The specification in `f64`: slow, plain reference code, written from the formulas of docs/specification.md alone. It
//! shares no code with the code that it checks, and has no dependencies. Tests and `cargo kv replay` compare with it.
//!
//! | module | what it computes |
//! |---|---|
//! | [`attention`] | the attention result of one head |
//! | [`number`] | the value of every code, and the code nearest to a number, found by search |
//! | [`row`] | main rows: BF16 to bytes and back, both formats |
//! | [`index`] | indexer keys: BF16 to bytes and back, three formats |
//! | [`indexer`] | the indexer: queries, scores, selected entries |
//! | [`linear`] | NVFP4 weights, and products with them |
//! | [`swa`] | the sliding window: ring contents and gathered tiles from the token history |
//! | [`router`] | selected experts of a token and their weights |
//! | [`rope`] | frequencies, cosines and sines, rotation forward and back |
//! | [`hadamard`] | the transform of indexer keys and queries |
//! | [`compressor`] | CSA and HCA entries and indexer keys; which entries close, and which are visible |
//! | [`explain`] | whether stored bytes are a correct quantisation of a vector that is known up to f32 arithmetic |
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
