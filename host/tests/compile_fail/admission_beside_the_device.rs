//! A cache's ledger is read: what changes it alone would leave the device's memory behind.

use dsv4_kv::device::Emulator;
use dsv4_kv::{KvCacheManager, KvError, Prompt};

fn admit(cache: &mut KvCacheManager<Emulator>) -> Result<(), KvError> {
    cache.ledger().admit_with(&Prompt::default())?; //~ E0596
    cache.ledger().admit()?; //~ E0596
    Ok(())
}

fn main() {}
