//! A suspended request is resumed once: then its memory belongs to the resumed request.

use dsv4_kv::device::{Emulator, Stream};
use dsv4_kv::{KvCacheManager, Suspended};

fn resume(
    cache: &mut KvCacheManager<Emulator>,
    stream: &Stream<Emulator>,
    suspended: Suspended,
) {
    let _ = cache.resume(stream, suspended);
    let _ = cache.discard(suspended); //~ E0382
}

fn main() {}
