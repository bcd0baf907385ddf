//! The kernel table: every kernel once. What it becomes: [`crate::kernels`].
//!
//! A row is an operation: its name and the format that chooses among its kernels, documentation,
//! pointers, scalars, launch shape, and a body per format. Rows stand in one file a topic, each a
//! macro that adds its rows to those before it and hands all to the next.

mod compress;
mod decode;
mod flush;
mod gather;
mod index_list;
mod indexer;
mod poison;
mod router;
mod state;
mod step;
mod window;

/// The table. `$to! { $extra.. row.. }` is what it becomes.
#[doc(hidden)]
#[macro_export]
macro_rules! kernel_table {
    ([$($to:tt)*] $($extra:tt)*) => {
        $crate::window_rows! {
            [step_rows compress_rows state_rows flush_rows decode_rows gather_rows
             indexer_rows index_list_rows poison_rows router_rows end_of_rows [$($to)*] $($extra)*] {}
        }
    };
}

/// Hands all rows to where they go; the last link of the chain.
#[doc(hidden)]
#[macro_export]
macro_rules! end_of_rows {
    ([[$($to:tt)*] $($extra:tt)*] { $($rows:tt)* }) => {
        $($to)*! { $($extra)* $($rows)* }
    };
}
