//! Fuzz target: arguments of kernel launches.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dsv4_kv_tests::fuzz::arguments(bytes));
