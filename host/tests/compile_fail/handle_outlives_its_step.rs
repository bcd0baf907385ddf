//! A layer's handle does not outlive the step that it was made for.

use dsv4_kv::device::{Buffer, Emulator, Stream, bf16};
use dsv4_kv::{KvCacheManager, KvError, Launches, LayerId};

fn step(
    cache: &mut KvCacheManager<Emulator>,
    stream: &Stream<Emulator>,
    kv: &Buffer<Emulator, bf16>,
) -> Result<(), KvError> {
    let mut step = cache.begin_step(stream, Launches::Eager, &[])?;
    let layer = step.swa(LayerId(0))?.update(kv)?;
    step.commit(&[])?; //~ E0505
    layer.append()
}

fn main() {}
