//! Attention in place, over the rows of the cache: decode steps, chunks of prompts, and graphs that are made for more
//! or longer requests than there are.
//!
//! | file | what it holds |
//! |---|---|
//! | `case.rs` | the measured cases |
//! | `eager.rs` | launches outside a graph |
//! | `layers.rs` | one layer per node of a graph |
//! | `row.rs` | the result and its table |

mod case;
mod eager;
mod layers;
mod row;

use anyhow::Result;
use dsv4_kv::device::{Backend, Device};

use super::prefill::bf16_microseconds;
use crate::error::InputError;
#[cfg(test)]
pub use case::Queries;
pub use case::{Case, cases};
use layers::Layers;
pub use row::{Row, table};

/// The cases whose description contains `only`.
///
/// # Errors
/// [`InputError::NoSuchCase`] if there is none.
pub(super) fn chosen(only: &str) -> Result<Vec<Case>, InputError> {
    let (chosen, others): (Vec<_>, Vec<_>) =
        cases().into_iter().partition(|case| case.name().contains(only));
    if chosen.is_empty() {
        let example = others.first().map(Case::name).unwrap_or_default();
        return Err(InputError::NoSuchCase { only: only.into(), example });
    }
    Ok(chosen)
}

/// Measures one case.
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
