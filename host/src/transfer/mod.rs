//! Requests that move from one cache to another, and prefixes that are copied. A cache exports their parts to
//! host or device memory, and imports them from there.
//!
//! A cache may differ from the other in `max_draft`, in the number of blocks and in which of them are free: blocks are
//! numbered from the request's first, and rows of rings by position. [`PartLayout`], the weights, and salt and adapter
//! must be equal; `dsv4-kv-transfer` checks these, and the bytes.
//!
//! Blocks and slots are packed and unpacked on the device by the kernel `copy_state`, through the memory of a
//! [`TransferStaging`], or directly to and from the caller's device memory. Rings are put in order of position in host
//! memory, or by copies of runs of rows on the device, since no kernel copies between rings of different sizes.
//!
//! | file | what it holds |
//! |---|---|
//! | `parts.rs` | which parts a request has |
//! | `rows.rs` | rows between images of slots and parts |
//! | `reservation.rs` | a slot and blocks for a request from another cache |
//! | `staging.rs` | device staging memory for parts |
//! | `memory.rs` | memory outside of the cache: the host's or the device's |
//! | `export.rs` | requests to such memory |
//! | `import.rs` | requests from such memory |
//! | `prefix.rs` | prefixes, from tree to tree |
//! | `error.rs` | errors of exports and imports |

mod error;
mod export;
mod import;
mod memory;
mod parts;
mod prefix;
mod reservation;
mod rows;
mod staging;

pub use error::MoveError;
pub use export::Export;
pub use memory::{Parts, PartsMut};
pub use parts::{Part, PartKind, PartLayout, Positions};
pub use prefix::{PrefixExport, PrefixImport};
pub(crate) use reservation::RequestReservation;
pub use reservation::{Loaded, Reserved};
pub use staging::{TransferStaging, transfer_staging_bytes};
