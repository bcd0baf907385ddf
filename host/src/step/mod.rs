//! A step: begun, run layer by layer or by a captured graph, then committed or dropped.
//!
//! | file | what it holds |
//! |---|---|
//! | `begin.rs` | [`Group`]: how a step begins |
//! | `open_step.rs` | [`Step`]: commit, or rejection when it is dropped |
//! | `layers.rs` | [`Layers`]: the layers of a step, or of a capture |
//! | `layer.rs` | [`Layer`], [`UpdatedLayer`]: one layer, before and after its update |
//! | `window.rs`, `csa.rs`, `hca.rs`, `entries.rs` | what layers of each kind do |
//! | `attend.rs` | attention over the rows where they lie |
//! | `entry_lists.rs` | [`EntryLists`]: which entries each query reads |
//! | `record.rs`, `capture.rs` | a step as a graph: [`Group::capture`], [`CapturedStep`] |
//! | `recorded_reads.rs` | what layers read as a graph, in one step: [`Layers::record_reads`] |
//! | `shape.rs`, `tracker.rs` | what launches cover, and what was queued |

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
