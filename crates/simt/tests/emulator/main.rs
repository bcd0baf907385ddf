//! Tests of the emulator: every collective is compared with a plain model, and every detector is given its fault.

mod barrier;
mod cluster;
mod collectives;
mod copy;
mod device;
mod divergence;
mod global;
mod global_race;
mod global_race_model;
mod granules;
mod grid;
mod in_flight;
mod operands;
mod process;
mod product;
mod proxy;
mod random;
mod schedule;
mod shared;
mod warpgroup;
