//! `ModelFiles`: weights in every spelling and type, and malformed files.

mod damaged;
mod ends;
mod left_over;
mod listed;
mod quantised;
mod spellings;
