//! An HCA layer has one compressor.

use dsv4_kv::device::Emulator;
use dsv4_kv::step::{CsaInputs, Layers};
use dsv4_kv::{KvError, LayerId};

fn layer(
    layers: &mut Layers<'_, Emulator>,
    inputs: &CsaInputs<'_, Emulator>,
) -> Result<(), KvError> {
    layers.hca(LayerId(0))?.update(inputs)?.append() //~ E0308
}

fn main() {}
