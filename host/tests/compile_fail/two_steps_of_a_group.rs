//! A layer group has one open step, which uses the group's StepMeta and scratch memory.

use dsv4_kv::device::{Emulator, Stream};
use dsv4_kv::{KvCacheManager, KvError, Launches};

fn steps(cache: &mut KvCacheManager<Emulator>, stream: &Stream<Emulator>) -> Result<(), KvError> {
    let first = cache.begin_step(stream, Launches::Eager, &[])?;
    let second = cache.begin_step(stream, Launches::Eager, &[])?; //~ E0499
    first.commit(&[])?;
    second.commit(&[])?;
    Ok(())
}

fn main() {}
