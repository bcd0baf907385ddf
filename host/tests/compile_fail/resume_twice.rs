//! A suspended request is resumed once: what it held is then another's.

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
