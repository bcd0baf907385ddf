//! Fuzz target: a model's `config.json`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dsv4_kv_tests::fuzz::config(bytes));
