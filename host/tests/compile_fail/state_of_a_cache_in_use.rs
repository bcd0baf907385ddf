//! Writable memory of all slots and checkpoints is returned only by a call that consumes the cache.

use dsv4_kv::device::{Emulator, Stream};
use dsv4_kv::{KvCacheManager, KvError};

fn clear(
    mut cache: KvCacheManager<Emulator>,
    stream: &Stream<Emulator>,
) -> Result<(), KvError> {
    let id = cache.admit()?;
    cache.into_copied_state(stream, |arena, _, _| stream.fill(arena.units, 0))??;
    cache.release(id) //~ E0382
}

fn main() {}
