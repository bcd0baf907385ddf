//! Progress of a layer in a step.

use std::fmt;

/// The state of one layer in an open step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LayerProgress {
    /// Nothing was queued for it.
    #[default]
    NotStarted,
    /// Its update was begun and did not finish: a launch failed. The step cannot be committed.
    Failed,
    /// Its entries and state are updated; the window's append is outstanding.
    Updated,
    /// Its append was begun and did not finish: a launch failed. Only the append can be repeated.
    HalfAppended,
    /// All of it was queued.
    Finished,
}

impl fmt::Display for LayerProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotStarted => "not updated",
            Self::Failed => "half updated, since a launch failed",
            Self::Updated => "updated, but its window was not appended to",
            Self::HalfAppended => "half appended to its window, since a launch failed",
            Self::Finished => "finished",
        })
    }
}
