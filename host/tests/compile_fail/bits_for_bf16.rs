//! BF16 tensors have elements of type `bf16`: buffers of 16-bit integers are refused.

use dsv4_kv::device::{Buffer, Emulator, View};
use dsv4_kv::ops::WindowAppend;
use dsv4_kv::step::Layers;
use dsv4_kv::{KvError, LayerId};

fn update(layers: &mut Layers<'_, Emulator>, kv: &Buffer<Emulator, u16>) -> Result<(), KvError> {
    layers.swa(LayerId(0))?.update(kv)?.append() //~ E0308
}

fn append(whole: &WindowAppend<'_, Emulator>, kv: &View<Emulator, u16>) {
    let _ = WindowAppend { kv, ..*whole }; //~ E0308
}

fn main() {}
