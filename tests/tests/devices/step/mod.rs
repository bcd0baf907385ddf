//! Whole steps through the cache: layers of every kind, several requests, poison.

pub mod capture;
pub mod checkpoints;
pub mod cuts;
pub mod draft;
pub mod exact;
pub mod forks;
pub mod gathered;
pub mod histories;
pub mod layers;
pub mod manager;
pub mod million;
pub mod moved_kinds;
pub mod moved_prefixes;
pub mod moves;
pub mod poison;
pub mod poison_keys;
pub mod pro_step;
pub mod recorded;
pub mod refusals;
pub mod reuse;
pub mod rotary;
pub mod saves;
pub mod small_steps;
pub mod tensors;
pub mod tiers;
pub mod told;
