//! The progress of long work, and an estimate of the time left: a bar on standard error, or nothing if that is not a
//! terminal.

use std::fmt::Write;

use indicatif::{HumanDuration, ProgressBar, ProgressState, ProgressStyle};

/// A bar of this length. `template` is one of indicatif, plus `{left}` for the time left, estimated from the mean so
/// far.
pub fn bar(length: u64, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar()).with_key("left", left);
    let bar = ProgressBar::new(length).with_style(style);
    // A bar of length 0 (unknown) would look full.
    if length > 0 {
        bar.tick();
    }
    bar
}

/// A bar for work that is counted in tokens.
pub fn tokens(length: u64) -> ProgressBar {
    bar(length, "{bar:40} {percent:>3} % of {len} tokens, {left}")
}

/// Formats the time left. There is no estimate before the first unit of work is done.
fn left(state: &ProgressState, to: &mut dyn Write) {
    let _ = match state.pos() {
        0 => write!(to, "time left unknown"),
        _ => write!(to, "{:#} left", HumanDuration(state.eta())),
    };
}

#[cfg(test)]
mod tests {
    use std::io::Result;
    use std::sync::{Arc, Mutex};

    use indicatif::{ProgressDrawTarget, TermLike};

    use super::*;

    /// A terminal that records everything that is written.
    #[derive(Clone, Debug, Default)]
    struct Written(Arc<Mutex<String>>);

    impl TermLike for Written {
        fn width(&self) -> u16 {
            100
        }
        fn move_cursor_up(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> Result<()> {
            self.write_str(text)
        }
        fn write_str(&self, text: &str) -> Result<()> {
            self.0.lock().expect("one thread").push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> Result<()> {
            Ok(())
        }
        fn flush(&self) -> Result<()> {
            Ok(())
        }
    }

    /// What a terminal shows for a bar of length ten at this position.
    fn shown(position: u64) -> String {
        let terminal = Written::default();
        let bar = tokens(10);
        bar.set_draw_target(ProgressDrawTarget::term_like(Box::new(terminal.clone())));
        terminal.0.lock().expect("one thread").clear();
        bar.set_position(position);
        bar.tick();
        terminal.0.lock().expect("one thread").clone()
    }

    #[test]
    fn a_bar_says_how_far_it_is_and_what_is_left_once_that_is_known() {
        let begin = shown(0);
        assert!(begin.contains("0 % of 10 tokens, time left unknown"), "{begin}");
        let half = shown(5);
        assert!(half.contains("50 % of 10 tokens, ") && half.contains("s left"), "{half}");
    }
}
