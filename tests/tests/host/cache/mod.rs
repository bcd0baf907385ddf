//! The cache's ledger, and what it promises when memory runs out or threads share a device.

mod all_or_nothing;
mod attention;
mod capacity;
mod conversations;
mod copies_fail;
mod device_failures;
mod exhausted;
mod failed_admission;
mod host_memory;
mod identity;
mod ledger;
mod moved;
mod planned_checkpoints;
mod recorded;
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
