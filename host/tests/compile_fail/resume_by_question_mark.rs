//! A refusal returns the suspended request, or the checkpoint: `?` cannot drop it.

use dsv4_kv::device::{Emulator, Stream};
use dsv4_kv::{KvCacheManager, KvError, RequestId, SavedCheckpoint, Suspended};

fn resume(
    cache: &mut KvCacheManager<Emulator>,
    stream: &Stream<Emulator>,
    suspended: Suspended,
) -> Result<RequestId, KvError> {
    let id = cache.resume(stream, suspended)?; //~ E0277
    Ok(id)
}

fn discard(
    cache: &mut KvCacheManager<Emulator>,
    saved: SavedCheckpoint,
) -> Result<(), KvError> {
    cache.discard_checkpoint(saved)?; //~ E0277
    Ok(())
}

fn main() {}
