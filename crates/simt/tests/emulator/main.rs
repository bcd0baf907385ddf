//! The emulator: every collective against a plain model, and every detector shown its fault.

mod barrier;
mod cluster;
mod collectives;
mod copy;
mod device;
mod divergence;
mod global;
mod global_race;
mod global_race_model;
mod grid;
mod in_flight;
mod process;
mod product;
mod proxy;
mod schedule;
mod shared;
mod warpgroup;
