//! StepMeta is read-only outside the cache.

use dsv4_kv::device::Emulator;
use dsv4_kv::step::Layers;
use dsv4_kv::step_meta::Section;
use dsv4_kv::KvError;

fn write(layers: &Layers<'_, Emulator>) -> Result<(), KvError> {
    let positions = layers.section(Section::Position);
    Ok(layers.stream().upload(&[7], &positions, 0)?) //~ E0308
}

fn main() {}
