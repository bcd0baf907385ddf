//! Fuzz target: every kernel, with garbage in memory.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dsv4_kv_tests::fuzz::kernels(bytes));
