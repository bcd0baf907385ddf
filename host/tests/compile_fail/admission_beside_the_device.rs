//! A cache lends its ledger for reading only: a change of the ledger alone would not reach the device's memory.

use dsv4_kv::device::Emulator;
use dsv4_kv::{KvCacheManager, KvError, Prompt};

fn admit(cache: &mut KvCacheManager<Emulator>) -> Result<(), KvError> {
    cache.ledger().admit_with(&Prompt::default())?; //~ E0596
    cache.ledger().admit()?; //~ E0596
    Ok(())
}

fn main() {}
