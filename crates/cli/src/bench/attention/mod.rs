//! Attention over the rows of the cache where they lie: decode steps, chunks of prompts, and graphs that are for more
//! than there is.
//!
//! | file | what it holds |
//! |---|---|
//! | `case.rs` | what is measured |
//! | `layers.rs` | as many layers as a graph has nodes |
//! | `row.rs` | the result, and as a table |

mod case;
mod layers;
mod row;

use anyhow::Result;
use dsv4_kv::device::{Backend, Device};

use super::prefill::bf16_microseconds;
#[cfg(test)]
pub use case::Queries;
pub use case::{Case, cases};
use layers::Layers;
pub use row::{Row, table};

/// One case.
pub(super) fn measure_case<B: Backend>(device: &Device<B>, case: &Case) -> Result<Row> {
    let (operations, peer_microseconds) = (case.operations(), case.peer);
    let measured = Layers::new(device, case.clone())?.measure()?;
    Ok(Row {
        teraflops: operations / measured.microseconds / 1e6,
        products_microseconds: bf16_microseconds(operations),
        peer_microseconds,
        measured,
    })
}
