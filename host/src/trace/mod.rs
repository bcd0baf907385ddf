//! Spans and events of a cache for a `tracing` subscriber, all at level `DEBUG`, with the target `dsv4_kv` (feature
//! `tracing`).
//!
//! | span | what it covers | fields |
//! |---|---|---|
//! | `admission` | the admission of a request, or the attempt | `prompt_tokens`, `reused`, `matched` |
//! | `prefill` | a step, from its begin to its end, in which a request has more than `max_draft` + 1 tokens | `group`, `requests`, `tokens`, `new_blocks` |
//! | `decode` | a step, from its begin to its end, in which no request has more | `group`, `requests`, `tokens`, `new_blocks` |
//! | `commit` | the commit of a step, inside its `prefill` or `decode` | `accepted` |
//! | `tier` | a call that moves prefixes from or to host memory | `call` |
//!
//! | event | when | fields |
//! |---|---|---|
//! | `refused` | an admission, a step or a commit returns an error | `error` |
//! | `rejected` | a step is dropped | |
//! | `moved` | a transfer of the host tier has ended, or failed: in `tier`, or in an admission that finds it | `what` |
//!
//! Spans measure time of the host: a step's kernels may still run when it is committed. A step's span is open from its
//! begin to its end, and is entered while it begins. `Layers::span` returns it: enter it around the calls of the layers
//! and of the model.
//!
//! Without the feature there is no code for spans and events. With it, and without a subscriber for them, each costs a
//! load and a branch, and allocates nothing.

#[cfg(not(feature = "tracing"))]
mod off;
#[cfg(feature = "tracing")]
mod on;

#[cfg(not(feature = "tracing"))]
pub(crate) use off::*;
#[cfg(feature = "tracing")]
pub(crate) use on::*;
