//! A layer's handle does not outlive the step it was made for.

use dsv4_kv::device::{Emulator, Stream};
use dsv4_kv::{KvCacheManager, LayerId, RequestId, StepRequest};

fn steps(cache: &mut KvCacheManager<Emulator>, id: RequestId, stream: &Stream<Emulator>) {
    let handle = cache.layer(LayerId(0)).unwrap();
    cache.prepare_forward(stream, &[StepRequest { id, start: 0, tokens: 1 }]).unwrap(); //~ E0502
    println!("{}", handle.tokens());
}

fn main() {}
