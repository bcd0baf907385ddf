//! What a cache tells a `tracing` subscriber, all at level `DEBUG`, with the target `dsv4_kv` (feature `tracing`).
//!
//! | span | from, to | fields |
//! |---|---|---|
//! | `admission` | a request that is admitted, or asks to be | `prompt_tokens`, `reused`, `matched` |
//! | `prefill` | the begin of a step, its end; a request has more than `max_draft` + 1 tokens in it | `group`, `requests`, `tokens`, `new_blocks` |
//! | `decode` | the same; no request has more | `group`, `requests`, `tokens`, `new_blocks` |
//! | `commit` | inside of these, the step's commit | `accepted` |
//! | `tier` | a call that moves prefixes from or to host memory | `call` |
//!
//! | event | when | fields |
//! |---|---|---|
//! | `refused` | an admission, a step or a commit returns an error | `error` |
//! | `rejected` | a step is dropped | |
//! | `moved` | something has arrived, or could not be moved: in `tier`, or where an admission finds it | `what` |
//!
//! They time the host: a step's kernels may still run when it is committed. A step's span is open from its begin to its
//! end, and entered in its begin; `Layers::span` hands it out, to be entered around the layers' calls and the model.
//!
//! Without the feature there is no code for them. With it, and without a subscriber that wants them, they cost a load
//! and a branch each and allocate nothing.

#[cfg(not(feature = "tracing"))]
mod off;
#[cfg(feature = "tracing")]
mod on;

#[cfg(not(feature = "tracing"))]
pub(crate) use off::*;
#[cfg(feature = "tracing")]
pub(crate) use on::*;
