//! Slow, plain reference code, from the formulas alone. It shares no code with what it judges, and
//! depends on nothing: tests compare with it, and so does `replay --verify`.
//!
//! | module | what it answers |
//! |---|---|
//! | [`number`] | value of every code, and the nearest code to a number by search |
//! | [`row`] | main rows: BF16 to bytes and back, both formats |
//! | [`index`] | indexer keys: BF16 to bytes and back, three formats |
//! | [`swa`] | the sliding window: ring contents and gathered tiles from the token history |
#![forbid(unsafe_code)]

pub mod index;
pub mod number;
pub mod row;
pub mod swa;
