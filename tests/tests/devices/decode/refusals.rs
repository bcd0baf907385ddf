//! Inconsistent numbers in a decode step.

use dsv4_kv::device::{Backend, Device, DeviceError, bf16};
use dsv4_kv::ops::{
    self, BlockTable, CsaDecode, DecodeCompressor, DecodeStep, Entries, HcaDecode, IndexKeys,
    PoolingWeights, StateRing, StepProjections, StepTokens, SwaRing,
};
use kv_layout::geometry::{csa_own_rows, hca_state_rows};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

use crate::inputs::{filled, upload};
use crate::refused::named;

/// The numbers of a step with one token.
#[derive(Clone, Copy)]
struct Numbers {
    /// Rows per ring, and number of rings: of the window, of the state, of the state of the indexer's compressor.
    window: [u32; 2],
    state: [u32; 2],
    index: [u32; 2],
    /// The formats of window rows and of entries.
    formats: [MainFormat; 2],
    entries_per_block: u32,
    /// Whether indexer keys get the Hadamard transform.
    hadamard: bool,
}

const UE8M0: MainFormat = MainFormat::Ue8m0;

/// Runs the decode launch of a CSA layer, if `has_indexer`, or of an HCA layer. Blocks have 32 entries, or one.
fn decode<B: Backend>(
    device: &Device<B>,
    has_indexer: bool,
    numbers: Numbers,
) -> Result<(), DeviceError> {
    let Numbers { window, state, index, formats, entries_per_block, hadamard } = numbers;
    let stream = &device.stream().unwrap();
    // Memory for everything that is read and written. The contents do not matter; there is more than any argument
    // needs.
    let (floats, words) = (filled::<B, f32>(stream, 1 << 16), upload(stream, &[0_i32; 2]));
    let [states, index_states] = [0; 2].map(|_| filled::<B, f32>(stream, 1 << 16));
    let planes = [0; 6].map(|_| filled::<B, u8>(stream, 1 << 18));
    let [ring_data, ring_scale, data, scale, code, code_scale] = &planes;
    let compressor = |rows, [ring, slots]: [u32; 2]| DecodeCompressor {
        projections: StepProjections { kv: &floats, gate: &floats },
        weights: PoolingWeights { ape: &floats, norm: &floats, frequencies: &floats },
        state: StateRing { rows, ring, slots },
    };
    let step = DecodeStep {
        tokens: &StepTokens {
            position: &words,
            slot: &words,
            index: &words,
            remaining: &words,
            count: 1,
        },
        ring_row: &words,
        window_kv: &filled::<B, bf16>(stream, 512),
        window: SwaRing {
            data: ring_data,
            scale: ring_scale,
            format: formats[0],
            ring: window[0],
            slots: window[1],
        },
        table: BlockTable { table: &words, slots: 1, max_blocks: 1 },
        entries: Entries { data, scale, format: formats[1], entries_per_block, num_blocks: 1 },
        faults: &upload(stream, &[0_u32]),
    };
    let (step, main) = (&step, &compressor(&states, state));
    if !has_indexer {
        // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
        return unsafe { ops::decode_hca(stream, &HcaDecode { step, main }) };
    }
    let format = IndexFormat::Mxfp4;
    let keys = &IndexKeys { code, scale: code_scale, format, hadamard, num_blocks: 1 };
    let index = &compressor(&index_states, index);
    // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
    unsafe { ops::decode_csa(stream, &CsaDecode { step, main, index, keys }) }
}

/// A step of consistent numbers runs, and each inconsistent number is refused by its name.
pub fn what_does_not_fit_is_refused_by_name<B: Backend>(device: &Device<B>) {
    for has_indexer in [true, false] {
        let rows = if has_indexer { csa_own_rows(1) } else { hca_state_rows(1) };
        let (ring, entries_per_block) = ([rows, 1], if has_indexer { 32 } else { 1 });
        let (window, formats) = ([128, 1], [UE8M0; 2]);
        let (state, index, hadamard) = (ring, ring, true);
        let fitting = Numbers { window, state, index, formats, entries_per_block, hadamard };
        decode(device, has_indexer, fitting).unwrap();
        let [state, index] = [[rows - 1, 1]; 2];
        let of_both = [
            (Numbers { window: [1 << 30, 2], ..fitting }, "ring rows"),
            (Numbers { state, index, ..fitting }, "rows of a state ring"),
            (Numbers { state: [0, 1], index: [0, 1], ..fitting }, "rows of a state ring"),
            (Numbers { entries_per_block: 4, ..fitting }, "entries of a block"),
            (Numbers { entries_per_block: 5, ..fitting }, "entries of a block"),
            (
                Numbers { formats: [UE8M0, MainFormat::F32], ..fitting },
                "scale bytes of a row of the window",
            ),
            (
                Numbers { formats: [MainFormat::F32, UE8M0], ..fitting },
                "scale bytes of a row of the window",
            ),
        ];
        let of_indexer = [
            (Numbers { index: [rows, 0], ..fitting }, "indexer state"),
            (Numbers { index: [rows + 1, 1], ..fitting }, "rows of the indexer's ring"),
            (Numbers { index: [rows - 1, 1], ..fitting }, "rows of the indexer's ring"),
            (Numbers { hadamard: false, ..fitting }, "hadamard of the indexer keys"),
        ];
        let of_indexer = of_indexer.into_iter().filter(|_| has_indexer);
        for (wrong, what) in of_both.into_iter().chain(of_indexer) {
            assert_eq!(named(decode(device, has_indexer, wrong)), what, "indexer: {has_indexer}");
        }
    }
}
