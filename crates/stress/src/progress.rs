//! The progress of the operations, on standard error; nothing if that is not a terminal.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of operations, or of seconds if the run has a time.
pub struct Progress {
    bar: ProgressBar,
    began: Instant,
    /// The length of the run; 0 if the run has a number of operations.
    seconds: u64,
}

impl Progress {
    /// A bar of the operations announced by [`Self::expect`], or of `seconds` if that is not 0.
    pub fn new(seconds: u64) -> Self {
        let unit = if seconds > 0 { "s" } else { "operations" };
        let template = format!("{{bar:30}} {{pos}} of {{len}} {unit}, {{eta}} left");
        let style = ProgressStyle::with_template(&template);
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::new(seconds).with_style(style);
        Self { bar, began: Instant::now(), seconds }
    }

    /// Adds operations to the length of the bar.
    pub fn expect(&self, operations: u64) {
        if self.seconds == 0 {
            self.bar.inc_length(operations);
        }
    }

    /// Counts one finished operation.
    pub fn done(&self) {
        if self.seconds == 0 {
            self.bar.inc(1);
        } else {
            self.show(self.began.elapsed());
        }
    }

    /// Shows the elapsed time, at most the length of the run: seeds that have begun may end later.
    fn show(&self, elapsed: Duration) {
        let seconds = elapsed.as_secs().min(self.seconds);
        if seconds != self.bar.position() {
            self.bar.set_position(seconds);
        }
    }

    /// Removes the bar.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}
