//! The cache: its ledger, and its guarantees when memory runs out, devices fail, or threads share a device.

mod all_or_nothing;
mod attention;
mod capacity;
mod conversations;
mod copies_do_not_wait;
mod copies_fail;
mod device_failures;
mod exhausted;
mod failed_admission;
mod faults;
mod half_appended;
mod host_memory;
mod identity;
mod ledger;
mod moved;
mod planned_checkpoints;
pub(crate) mod recorded;
mod salts;
mod selection;
mod sent;
mod sharing;
mod spans;
mod streams;
mod threads;
mod tier;
mod told;
mod transfer_waits;
