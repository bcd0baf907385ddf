//! `Checkpoint`: weights in every spelling and type, and files that are not what they should be.

mod damaged;
mod quantised;
mod spellings;
