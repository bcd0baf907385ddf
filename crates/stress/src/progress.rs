//! How far the operations are, on the terminal's error stream; nothing where that is no terminal.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of operations, or of seconds where a time was asked for.
pub struct Progress {
    bar: ProgressBar,
    began: Instant,
    /// What was asked for; 0 if nothing was.
    seconds: u64,
}

impl Progress {
    /// Of a run of so many operations as [`Self::expect`] says, or of so many seconds, if these are not 0.
    pub fn new(seconds: u64) -> Self {
        let unit = if seconds > 0 { "s" } else { "operations" };
        let template = format!("{{bar:30}} {{pos}} of {{len}} {unit}, {{eta}} left");
        let style = ProgressStyle::with_template(&template);
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::new(seconds).with_style(style);
        Self { bar, began: Instant::now(), seconds }
    }

    /// So many operations are to come.
    pub fn expect(&self, operations: u64) {
        if self.seconds == 0 {
            self.bar.inc_length(operations);
        }
    }

    /// An operation was done.
    pub fn done(&self) {
        if self.seconds == 0 {
            self.bar.inc(1);
        } else {
            self.show(self.began.elapsed());
        }
    }

    /// Seeds that have begun end, even after the time that was asked for.
    fn show(&self, elapsed: Duration) {
        let seconds = elapsed.as_secs().min(self.seconds);
        if seconds != self.bar.position() {
            self.bar.set_position(seconds);
        }
    }

    /// Takes the bar away.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}
