//! Requests that move from one cache to another, and prefixes that are copied: their parts leave to memory of
//! the host or of the device, and come from there.
//!
//! A cache may differ from the other in `max_draft`, in the number of blocks and in which of them are free: blocks are
//! numbered from the request's first, and rows of rings by position. What must be equal is [`PartLayout`], the weights
//! and whoever may share the request; `dsv4-kv-transfer` checks that, and the bytes.
//!
//! Blocks and slots are packed and unpacked on the device by the kernel that copies slots, through the memory of a
//! [`Port`], or straight into memory of the device that the caller has. Rings are put in order of position in host memory, or
//! by copies of runs of rows on the device, since no kernel copies between rings of different sizes.
//!
//! | file | what it holds |
//! |---|---|
//! | `parts.rs` | which parts a request has |
//! | `rows.rs` | rows between images of slots and parts |
//! | `port.rs` | memory of the device through which parts go |
//! | `room.rs` | room for a request that comes |
//! | `memory.rs` | memory outside of the cache: the host's or the device's |
//! | `export.rs` | to such memory |
//! | `import.rs` | from such memory |
//! | `prefix.rs` | prefixes, from tree to tree |
//! | `error.rs` | why a request does not move |

mod error;
mod export;
mod import;
mod memory;
mod parts;
mod port;
mod prefix;
mod room;
mod rows;

pub use error::MoveError;
pub use export::Export;
pub use memory::{Parts, PartsMut};
pub use parts::{Part, PartKind, PartLayout, Positions};
pub use port::{Port, port_bytes};
pub use prefix::{PrefixExport, PrefixImport};
pub(crate) use room::Room;
pub use room::{Loaded, Reserved};
