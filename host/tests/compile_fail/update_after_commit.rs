//! A committed step is gone.

use dsv4_kv::device::{Buffer, Emulator, Stream, bf16};
use dsv4_kv::{KvCacheManager, KvError, Launches, LayerId};

fn step(
    cache: &mut KvCacheManager<Emulator>,
    stream: &Stream<Emulator>,
    kv: &Buffer<Emulator, bf16>,
) -> Result<(), KvError> {
    let mut step = cache.begin_step(stream, Launches::Eager, &[])?;
    step.commit(&[])?;
    step.swa(LayerId(0))?.update(kv)?.append() //~ E0382
}

fn main() {}
