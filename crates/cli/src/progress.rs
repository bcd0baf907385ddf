//! How far long work is, and how much time is left: a bar on the terminal's error stream, and nothing where that is no
//! terminal.

use std::fmt::Write;

use indicatif::{HumanDuration, ProgressBar, ProgressState, ProgressStyle};

/// A bar for work of so much. `template`: as of indicatif, with `{left}` for the time that is left by the mean so far.
pub fn bar(length: u64, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar()).with_key("left", left);
    let bar = ProgressBar::new(length).with_style(style);
    // Of unknown work a bar would look full.
    if length > 0 {
        bar.tick();
    }
    bar
}

/// A bar for work that is counted in tokens.
pub fn tokens(length: u64) -> ProgressBar {
    bar(length, "{bar:40} {percent:>3} % of {len} tokens, {left}")
}

/// Before anything is done nobody knows how long it takes.
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

    /// A terminal that keeps all that was written.
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

    /// What a terminal shows of a bar of ten, at that position.
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
