//! A layer is updated before it is read: a token that closes a window sees its entry.

use dsv4_kv::device::{Buffer, Emulator, bf16};
use dsv4_kv::step::Layers;
use dsv4_kv::{KvError, LayerId};

fn gather(
    layers: &mut Layers<'_, Emulator>,
    tile: &Buffer<Emulator, bf16>,
    lengths: &Buffer<Emulator, i32>,
) -> Result<(), KvError> {
    layers.csa(LayerId(0))?.gather_all(0..1, 1, tile, lengths) //~ E0599
}

fn main() {}
