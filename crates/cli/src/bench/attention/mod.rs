//! Attention over the rows of the cache where they lie: decode steps, chunks of prompts, and graphs that are for more
//! than there is.
//!
//! | file | what it holds |
//! |---|---|
//! | `case.rs` | what is measured |
//! | `eager.rs` | launches that are no nodes of a graph |
//! | `layers.rs` | as many layers as a graph has nodes |
//! | `row.rs` | the result, and as a table |

mod case;
mod eager;
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
    let layers = Layers::new(device, case.clone())?;
    let measured = layers.measure()?;
    let eager = eager::times(device, case, &layers)?;
    Ok(Row {
        teraflops: operations / measured.microseconds / 1e6,
        products_microseconds: bf16_microseconds(operations),
        peer_microseconds,
        in_a_row_microseconds: Some(eager.in_a_row),
        behind_others_microseconds: Some(eager.behind_others),
        measured,
    })
}
