//! The layers of a capture cannot be committed: they run only when the graph is replayed.

use dsv4_kv::device::Emulator;
use dsv4_kv::step::Layers;
use dsv4_kv::KvError;

fn record(layers: &mut Layers<'_, Emulator>) -> Result<(), KvError> {
    layers.commit(&[]) //~ E0599
}

fn main() {}
