//! Windows are gathered before the step's rows overwrite the oldest ones.

use dsv4_kv::device::{Buffer, Emulator, bf16};
use dsv4_kv::step::Layers;
use dsv4_kv::{KvError, LayerId};

fn gather(
    layers: &mut Layers<'_, Emulator>,
    kv: &Buffer<Emulator, bf16>,
    tile: &Buffer<Emulator, bf16>,
    lengths: &Buffer<Emulator, i32>,
) -> Result<(), KvError> {
    let layer = layers.swa(LayerId(0))?.update(kv)?;
    layer.append()?;
    layer.gather_window(0..1, tile, lengths) //~ E0382
}

fn main() {}
