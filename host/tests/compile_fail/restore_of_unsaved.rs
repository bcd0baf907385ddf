//! A request continues only from a saved checkpoint: storage in which nothing is saved is refused.

use dsv4_kv::device::{Emulator, Stream};
use dsv4_kv::{KvCacheManager, KvError, RequestId, SavedCheckpoint, StateCheckpoint};

fn restore(
    cache: &mut KvCacheManager<Emulator>,
    stream: &Stream<Emulator>,
    id: RequestId,
    storage: &StateCheckpoint,
) -> Result<(), KvError> {
    cache.restore_checkpoint(stream, id, storage) //~ E0308
}

fn saved_twice(saved: &SavedCheckpoint) -> SavedCheckpoint {
    *saved //~ E0507
}

fn main() {}
