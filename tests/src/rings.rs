//! Sliding-window rings, compared with token histories.

use dsv4_kv::device::{Backend, Buffer, Stream};
use dsv4_kv::{KvCacheManager, LayerId, RequestId};
use dsv4_kv_oracle::swa::Ring;
use kv_layout::main_row::DATA_BYTES;

use crate::inputs::{assert_same, download, oracle};

/// The rows of the request's ring: (data, scale), by ring row.
fn ring<B: Backend>(
    manager: &KvCacheManager<B>,
    stream: &Stream<B>,
    layer: LayerId,
    id: RequestId,
) -> Vec<(Vec<u8>, Vec<u8>)> {
    let handle = manager.layer(layer).unwrap();
    let swa = handle.swa();
    let part = |plane: &Buffer<B, u8>, row_bytes: u64| {
        let bytes = u64::from(swa.ring) * row_bytes;
        let slot = plane.slice(u64::from(id.slot.0) * bytes, bytes).unwrap();
        let rows = download(stream, &slot);
        rows.chunks_exact(row_bytes as usize).map(<[u8]>::to_vec).collect::<Vec<_>>()
    };
    let scales = part(swa.scale, swa.format.scale_bytes());
    part(swa.data, DATA_BYTES).into_iter().zip(scales).collect()
}

/// The layer's ring holds what the token history says, whatever was written on the way.
pub fn assert_ring<B: Backend>(
    manager: &KvCacheManager<B>,
    stream: &Stream<B>,
    layer: LayerId,
    id: RequestId,
    history: &[Vec<u16>],
) {
    let got = ring(manager, stream, layer, id);
    let mut slots = Ring::new(got.len());
    slots.write(0..history.len());
    let needed = history.len().saturating_sub(128)..history.len();
    for position in needed {
        let (data, scale) = &got[slots.slot(position)];
        let want = oracle(manager.config().main_format).encode(&history[position]);
        assert_same(data, &want.data, &format!("{id}: position {position}"));
        assert_same(scale, &want.scale, &format!("{id}: scale of position {position}"));
    }
}
