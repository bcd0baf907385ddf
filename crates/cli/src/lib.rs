//! What the program `dsv4-kv` reads and others may want to: traces of requests.

pub mod trace;
