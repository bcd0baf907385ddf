//! Parts of the messages of errors.

/// From which position on a request's rows are still there.
pub(crate) fn still_there(written: u32, limit: u32) -> String {
    if written == u32::MAX {
        return "it has lost its rows in a restore that failed; restore it again, or release it"
            .to_owned();
    }
    let least = written.saturating_sub(limit);
    format!(
        "at least {least} (up to {written} tokens were written, and rows more than {limit} behind are overwritten)"
    )
}
