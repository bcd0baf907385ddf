//! Fuzz target: a trace of requests.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dsv4_kv_tests::fuzz::trace(bytes));
