//! A step: begun, run layer by layer or by a captured graph, then committed or dropped.
//!
//! | file | what it holds |
//! |---|---|
//! | `begin.rs` | [`Group`]: how a step begins |
//! | `open_step.rs` | [`Step`]: commit, or rejection when it is dropped |
//! | `layers.rs` | [`Layers`]: the layers of a step, or of a capture |
//! | `layer.rs` | [`Layer`], [`UpdatedLayer`]: one layer, before and after its update |
//! | `window.rs`, `csa.rs`, `hca.rs`, `entries.rs` | the update of each kind of layer, and the gathers |
//! | `attend.rs` | attention in place: over the rows as the cache stores them |
//! | `entry_lists.rs` | [`EntryLists`]: which entries each query reads |
//! | `record.rs`, `capture.rs` | a step as a graph: [`Group::capture`], [`CapturedStep`] |
//! | `recorded_reads.rs` | the reads of one open step as a graph: [`Layers::record_reads`] |
//! | `shape.rs`, `tracker.rs` | the sizes that launches cover; which launches were queued |

mod attend;
mod begin;
mod capture;
mod csa;
mod entries;
mod entry_lists;
mod hca;
mod layer;
mod layers;
mod open_step;
mod record;
mod recorded_reads;
mod shape;
mod tracker;
mod window;

pub use attend::AttentionTensors;

pub use crate::ops::QueryForm;
pub use begin::{Group, Launches};
pub use capture::CapturedStep;
pub use csa::CsaInputs;
pub use entry_lists::EntryLists;
pub use hca::HcaInputs;
pub use layer::{CompressorInputs, Csa, Hca, Layer, Swa, UpdatedLayer};
pub use layers::Layers;
pub use open_step::{CommitRefused, Step};
pub use recorded_reads::RecordedReads;
