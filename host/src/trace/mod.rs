//! Spans and events of a cache for a `tracing` subscriber, all at level `DEBUG`, with the target `dsv4_kv` (feature
//! `tracing`). `docs/reference/metrics.md` has the table of them with their fields, which a test compares with what a
//! subscriber sees.
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
