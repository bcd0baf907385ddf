//! Scratch whose launches must not overlap.

use dsv4_kv::device::{Backend, Device, DeviceError};
use dsv4_kv::ops::{
    self, Compression, CompressorWeights, HcaScratch, StateRing, StepProjections, StepTokens,
    WorkList,
};

use crate::inputs::upload;

/// Two launches that share it would wait for each other's blocks: a second stream is refused, but while it is
/// captured, since nothing runs then.
pub fn scratch_serves_one_stream<B: Backend>(device: &Device<B>) {
    let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
    let scratch = HcaScratch::new(&stream, 1).unwrap();
    let floats = device.allocate::<f32>("floats", 128 * 1024).unwrap();
    let state = device.allocate("state", 128 * 1024).unwrap();
    let (word, closing) = (upload(&stream, &[0]), upload(&stream, &[-1]));
    let word = || word.view();
    let tokens =
        StepTokens { position: word(), slot: word(), index: word(), remaining: word(), count: 1 };
    let windows = Compression {
        tokens: &tokens,
        projections: &StepProjections { kv: &floats, gate: &floats },
        weights: &CompressorWeights { ape: &floats, norm: &floats, frequencies: &floats },
        state: &StateRing { rows: state, ring: 128, slots: 1 },
        closing: &WorkList { records: &closing, capacity: 1 },
        entries: &device.allocate("entries", 512).unwrap(),
    };
    let retained = vec![
        floats.memory(),
        windows.state.rows.memory(),
        word().memory(),
        closing.memory(),
        windows.entries.memory(),
        scratch.pooled().memory(),
    ];
    ops::compress_hca(&stream, &scratch, &windows).unwrap();
    let refused = ops::compress_hca(&other, &scratch, &windows).unwrap_err();
    let named = matches!(refused, DeviceError::ForeignStream { found, used, .. }
        if (found, used) == (stream.id(), other.id()));
    assert!(named, "{refused}");
    other.capture(retained, || ops::compress_hca(&other, &scratch, &windows)).unwrap();
    stream.synchronize().unwrap();
}
