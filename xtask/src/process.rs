//! Runs a program with a progress line: the last line that it printed, and the time since it began.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::{LazyLock, mpsc};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// The progress lines of all programs that run at the same time.
static LINES: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Adds a progress line on standard error, below the present ones. It is invisible if standard error is not a terminal.
pub fn progress(what: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {prefix} [{elapsed}] {wide_msg:.dim}")
        .expect("the template is valid");
    let bar = LINES.add(ProgressBar::new_spinner()).with_style(style).with_prefix(what.to_owned());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Runs `command` under a progress line named `what`, and returns its output.
///
/// # Errors
/// It could not be started, or it failed; then the error contains its output.
pub fn run(what: &str, command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{what}: cannot start {program}"))?;
    let bar = progress(what);
    let (sender, lines) = mpsc::channel();
    let readers = [
        read_lines(child.stdout.take().expect("piped"), sender.clone()),
        read_lines(child.stderr.take().expect("piped"), sender),
    ];
    let mut printed = String::new();
    for line in lines {
        bar.set_message(line.trim().to_owned());
        printed.push_str(&line);
        printed.push('\n');
    }
    for reader in readers {
        reader.join().expect("a reader of lines does not panic");
    }
    let status = child.wait()?;
    bar.finish_and_clear();
    if !status.success() {
        bail!("{what}: {program} failed ({status}):\n{printed}");
    }
    Ok(printed)
}

fn read_lines(
    pipe: impl Read + Send + 'static,
    lines: mpsc::Sender<String>,
) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n').map_while(std::io::Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            if lines.send(line).is_err() {
                return;
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_streams_are_returned() {
        let printed = run("test", Command::new("sh").args(["-c", "echo out; echo err >&2"]));
        let printed = printed.expect("sh runs");
        assert!(printed.contains("out\n") && printed.contains("err\n"), "{printed}");
    }

    #[test]
    fn a_failure_says_what_was_printed() {
        let failed = run("test", Command::new("sh").args(["-c", "echo reason; exit 3"]));
        let text = failed.expect_err("exit 3 is a failure").to_string();
        assert!(text.contains("reason"), "{text}");
    }
}
