//! State rings that are too short even for a step of one token.

use dsv4_kv::device::{Backend, Device, DeviceError, bf16};
use dsv4_kv::ops::{
    self, Compression, HcaCompression, PoolingWeights, StateRing, StateUpdate, StepProjections,
    StepTokens, WorkList,
};
use kv_layout::geometry::{CsaCompressor, csa_own_rows, hca_state_rows};

use crate::inputs::{filled, upload};
use crate::refused::named;

/// The operations that take a state ring.
#[derive(Clone, Copy, Debug)]
enum Op {
    Compress(CsaCompressor),
    WriteState(CsaCompressor),
    CompressHca,
}

fn run<B: Backend>(
    device: &Device<B>,
    op: Op,
    (ring, capacity): (u32, u32),
) -> Result<(), DeviceError> {
    let stream = &device.stream().unwrap();
    // Memory for everything that is read and written. The contents do not matter; there is more than any argument
    // needs.
    let (floats, words) = (filled::<B, f32>(stream, 1 << 16), upload(stream, &[0_i32]));
    let tokens =
        &StepTokens { position: &words, slot: &words, index: &words, remaining: &words, count: 1 };
    let projections = &StepProjections { kv: &floats, gate: &floats };
    let state = &StateRing { rows: &filled(stream, 1 << 16), ring, slots: 1 };
    let list = &WorkList { records: &words, capacity };
    match op {
        Op::Compress(which) => {
            let (entries, ape) = (&filled::<B, bf16>(stream, 512), &floats);
            let weights = &PoolingWeights { ape, norm: &floats, frequencies: &floats };
            let windows =
                Compression { tokens, projections, weights, state, closing: list, entries };

            // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
            unsafe { ops::compress(stream, which, &windows) }
        }
        Op::WriteState(which) => {
            let update = StateUpdate { tokens, projections, ape: &floats, state };
            ops::write_state(stream, which, &update)
        }
        Op::CompressHca => {
            let (ape, pooled) = (&floats, &filled(stream, 512));
            let windows = HcaCompression { tokens, projections, ape, state, runs: list, pooled };
            ops::compress_hca(stream, &windows)
        }
    }
}

/// Every operation that takes a state ring refuses one that is too short.
pub fn short_rings_are_refused<B: Backend>(device: &Device<B>) {
    let of_csa =
        |which| [Op::Compress(which), Op::WriteState(which)].map(|op| (op, csa_own_rows(1)));
    let all = [CsaCompressor::Main, CsaCompressor::Index].into_iter().flat_map(of_csa);
    for (op, needed) in all.chain([(Op::CompressHca, hca_state_rows(1))]) {
        run(device, op, (needed, 1)).unwrap();
        // With an empty list there is nothing to do.
        run(device, op, (needed, 0)).unwrap();
        for ring in [0, needed - 1] {
            let refused = run(device, op, (ring, 1));
            assert_eq!(named(refused), "rows of a state ring", "{op:?}, {ring} rows");
        }
    }
}
