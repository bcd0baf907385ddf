//! Number formats and the layout of rows.

mod layouts;
mod numbers;
mod ring;
