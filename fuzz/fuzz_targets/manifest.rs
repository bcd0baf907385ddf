//! Fuzz target: the manifest of the PTX.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dsv4_kv_tests::fuzz::manifest(bytes));
