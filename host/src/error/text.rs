//! Parts of the messages of errors.

use crate::bucket::Bucket;
use crate::ids::LayerGroup;

/// The positions at which a request can still be saved, because its rows are not overwritten.
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

/// The range of a field of a bucket, and what limits it.
pub(super) fn bucket_range(field: &str, most: u32) -> String {
    let limit = match field {
        "requests" => "the cache's max_requests",
        "context" => "the cache's max_context",
        "tokens" => "the least of requests * tokens_per_request and the cache's max_step_tokens",
        _ => "the cache's max_step_tokens",
    };
    format!("it must be between 1 and {most} ({limit})")
}

/// Why a request cannot continue, and what to do.
pub(super) fn overwritten(group: LayerGroup) -> &'static str {
    match group {
        LayerGroup::Trunk => {
            "a rejected trunk step of more than max_draft + 1 tokens, or a restore that failed, has overwritten rows that it \
             needs; release it and prefill again, or restore it"
        }
        LayerGroup::Draft => {
            "the draft layers have written more than max_draft + 1 tokens beyond it, or a restore failed, and rows that they \
             need are overwritten; if they ran ahead of the trunk, run the trunk on, else release the request and prefill \
             again, or restore it"
        }
    }
}

/// Why draft layers that have `committed` tokens cannot be taken back to `to`.
pub(super) fn not_there(to: u32, committed: u32) -> &'static str {
    if to > committed {
        "that is beyond the last one they have, and rewinding only goes back"
    } else {
        "rows that earlier positions need are overwritten, or never were in its slot"
    }
}

/// Why a step of `tokens` tokens has no such queries.
pub(super) fn queries(first: u32, end: u32, tokens: u32) -> String {
    if first > end {
        return format!("the range is reversed: its end must be at least {first}");
    }
    format!("the step covers {tokens} tokens")
}

/// How a step was begun that got a graph of another bucket, and what to do.
pub(super) fn begun_with(step: Option<&Bucket>) -> String {
    let advice = "begin it with Launches::Bucket of the graph's bucket";
    step.map_or_else(
        || format!("Launches::Eager; {advice}"),
        |bucket| format!("{bucket:?}; {advice}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::KvError;
    use crate::ids::{CacheId, RequestId, SlotId};

    /// Each text has the reason of its case, and what to do.
    #[test]
    fn texts_say_which_of_several_reasons_it_is() {
        let bucket = Bucket { tokens: 12, tokens_per_request: 3, requests: 4, context: 512 };
        let request = RequestId::new(CacheId::unique(), SlotId(0), 0);
        let rewound = |to| KvError::CannotRewind { request, to, committed: 6, earliest: 4 };
        let overwritten = |group| KvError::Overwritten { request, group, committed: 6 };
        let asked = |first, end| KvError::NoSuchQueries { first, end, tokens: 3 };
        let replayed = |step| KvError::WrongBucket { captured: bucket, step };
        let limited = |field| KvError::Bucket { field, value: 12, most: 9 };
        for (error, says, says_not) in [
            (replayed(None), "begun with Launches::Eager; begin it with Launches::Bucket", "None"),
            (replayed(Some(bucket)), "begun with Bucket { tokens: 12", "Eager"),
            (limited("tokens"), "9 (the least of requests * tokens_per_request", "max_requests"),
            (limited("requests"), "9 (the cache's max_requests)", "max_step_tokens"),
            (limited("context"), "9 (the cache's max_context)", "max_step_tokens"),
            (limited("tokens_per_request"), "9 (the cache's max_step_tokens)", "least"),
            (asked(3, 1), "reversed: its end must be at least 3", "covers"),
            (asked(0, 4), "the step covers 3 tokens", "reversed"),
            (rewound(9), "beyond the last one they have", "overwritten"),
            (rewound(3), "rows that earlier positions need are overwritten", "beyond"),
            (overwritten(LayerGroup::Draft), "run the trunk on", "rejected"),
            (overwritten(LayerGroup::Trunk), "a rejected trunk step", "draft layers"),
        ] {
            let text = error.to_string();
            assert!(text.contains(says) && !text.contains(says_not), "{text}");
        }
    }
}
