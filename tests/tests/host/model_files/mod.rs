//! `ModelFiles`: weights in every spelling and type, and malformed files.

mod damaged;
mod quantised;
mod spellings;
