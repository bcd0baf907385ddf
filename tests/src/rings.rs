//! Sliding-window rings, compared with token histories.

use dsv4_kv::device::{Backend, Stream, View};
use dsv4_kv::{KvCacheManager, LayerId, PoolKind, RequestId};
use dsv4_kv_oracle::swa::Ring;
use kv_layout::main_row::DATA_BYTES;

use crate::inputs::{assert_same, download, oracle};

/// A pool of a layer, as a view that cannot be written.
///
/// # Panics
/// If the layer has no pool of that kind.
pub fn pool<B: Backend>(
    manager: &KvCacheManager<B>,
    layer: LayerId,
    kind: PoolKind,
) -> View<B, u8> {
    let mut pools = manager.pools(layer).unwrap();
    pools.find(|(found, _)| *found == kind).expect("the layer has the pool").1
}

/// The rows of the request's ring in ring order: (data, scale).
fn ring<B: Backend>(
    manager: &KvCacheManager<B>,
    stream: &Stream<B>,
    layer: LayerId,
    id: RequestId,
) -> Vec<(Vec<u8>, Vec<u8>)> {
    let part = |kind: PoolKind, row_bytes: u64| {
        let schema = &manager.schema().layers[layer.0 as usize];
        let bytes = schema.pool(kind).expect("every layer has a window").unit_bytes();
        let plane = pool(manager, layer, kind);
        let slot = plane.slice(u64::from(id.slot().0) * bytes, bytes).unwrap();
        let rows = download(stream, &slot);
        rows.chunks_exact(row_bytes as usize).map(<[u8]>::to_vec).collect::<Vec<_>>()
    };
    let scales = part(PoolKind::SwaScale, manager.config().main_format.scale_bytes());
    part(PoolKind::SwaData, DATA_BYTES).into_iter().zip(scales).collect()
}

/// Asserts that the layer's ring holds the last 128 tokens of `history`, whatever was written before.
///
/// # Panics
/// If a byte differs.
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
        assert_same(data, &want.data, &format!("{layer:?}, {id}: position {position}"));
        assert_same(scale, &want.scale, &format!("{layer:?}, {id}: scale of {position}"));
    }
}

/// Asserts that the layer's ring is zero. That is so after a restore from a checkpoint without these rows.
///
/// # Panics
/// If a byte is not zero.
pub fn assert_ring_is_zero<B: Backend>(
    manager: &KvCacheManager<B>,
    stream: &Stream<B>,
    layer: LayerId,
    id: RequestId,
) {
    for (row, (data, scale)) in ring(manager, stream, layer, id).iter().enumerate() {
        let is_zero = data.iter().chain(scale).all(|&byte| byte == 0);
        assert!(is_zero, "{layer:?}, {id}: row {row} is not zero");
    }
}
