//! The program, as tests run it: to its end, or beside the test.

use std::process::{Child, Output, Stdio};
use std::time::Duration;

use assert_cmd::Command;

/// A command that takes longer is considered to hang; a refusal takes milliseconds.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// `dsv4-kv` with these options, separated by blanks.
pub fn kv(options: &str) -> Command {
    let mut command = Command::cargo_bin("dsv4-kv").expect("the program is built with its tests");
    command.args(options.split_whitespace()).timeout(TIMEOUT);
    command
}

/// As `kv`, as a process that runs beside the test.
pub fn process(options: &str) -> std::process::Command {
    let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin!("dsv4-kv"));
    command.args(options.split_whitespace()).stdin(Stdio::null());
    command
}

/// Messages as text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("messages are UTF-8")
}

/// The message of a refused command: exit code 2, no result, and one line of error without a backtrace.
pub fn refusal(command: &mut Command) -> String {
    let output = command.assert().code(2).get_output().clone();
    assert!(output.stdout.is_empty(), "a refused command has no result");
    let message = text(&output.stderr);
    assert!(message.starts_with("error: ") && !message.contains("panicked"), "{message}");
    message
}

/// The output of a process that ends by itself.
pub fn end(child: Child) -> Output {
    child.wait_with_output().expect("it was started")
}
