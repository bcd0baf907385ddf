//! The result of `doctor`: one value, printed as lines or as JSON.

use std::fmt;

use anstyle::{AnsiColor, Style};
use schemars::JsonSchema;
use serde::Serialize;

/// Columns of a line before the result of the check.
const INDENT: usize = 24;

/// What a machine has.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// Version of this program.
    pub version: &'static str,
    /// What was looked at, in order.
    pub findings: Vec<Finding>,
}

/// One thing that was looked at.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Finding {
    /// Its name.
    pub what: String,
    /// How it is.
    pub state: State,
    /// What was found, or why it was not.
    pub found: String,
    /// What it is needed for.
    pub needed_for: &'static str,
    /// What to do about it; none if there is nothing to do.
    pub advice: Option<String>,
}

/// How a thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// There, and works as far as was tried.
    Ok,
    /// Not there.
    Missing,
    /// There, and does not work.
    Broken,
}

impl State {
    /// Its name, and its colour on a terminal.
    const fn shown(self) -> (&'static str, AnsiColor) {
        match self {
            Self::Ok => ("ok", AnsiColor::Green),
            Self::Missing => ("missing", AnsiColor::Yellow),
            Self::Broken => ("broken", AnsiColor::Red),
        }
    }
}

impl Report {
    /// Whether something is installed and does not work.
    pub fn is_broken(&self) -> bool {
        self.findings.iter().any(|finding| finding.state == State::Broken)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dsv4-kv {}", self.version)?;
        for Finding { what, state, found, needed_for, advice } in &self.findings {
            let (name, colour) = state.shown();
            let style = Style::new().bold().fg_color(Some(colour.into()));
            write!(f, "\n{style}{name:<8}{style:#}{what:<16}{found}")?;
            write!(f, "\n{:INDENT$}for {needed_for}", "")?;
            if let Some(advice) = advice {
                write!(
                    f,
                    "\n{:INDENT$}{}{advice}{:#}",
                    "",
                    Style::new().bold(),
                    Style::new().bold()
                )?;
            }
        }
        Ok(())
    }
}
