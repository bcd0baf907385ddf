//! The program `dsv4-kv`; see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    dsv4_kv_cli::main()
}
