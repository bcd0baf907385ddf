//! A request is not released while a step that may run it is open.

use dsv4_kv::device::{Emulator, Stream};
use dsv4_kv::{KvCacheManager, KvError, Launches, RequestId};

fn step(
    cache: &mut KvCacheManager<Emulator>,
    stream: &Stream<Emulator>,
    id: RequestId,
) -> Result<(), KvError> {
    let step = cache.begin_step(stream, Launches::Eager, &[])?;
    cache.release(id)?; //~ E0499
    step.commit(&[])?;
    Ok(())
}

fn main() {}
