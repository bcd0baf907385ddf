//! The search for scores of keys that were never written: checks the indexer keys that a query sees.
//!
//! A score alone does not show it: a poisoned FP4 code is -6, and only its scale is NaN. The scales do: no stored scale
//! has a byte (FP4 formats) or word (FP8) whose bits are all ones. A key that was pooled from poison is NaN in all
//! channels when it is quantised, and the bytes that each format gives such a key are known too.

use crate::args::FindPoisonedKeys;
use crate::params::FindPoisonedKeysParams;
use kv_layout::index_row::IndexFormat;
use simt::mem::Global;
use simt::thread;

use crate::index_row::IndexRowFormat;
use crate::indexer::{keys_of, visible};
use crate::poison::record;

/// Threads of a block; each checks one key at a time.
pub const THREADS: u32 = 128;
/// Four scales of a key whose channels are all NaN, in both FP4 formats: the least scales that exist.
const LEAST_SCALES: u32 = 0x0101_0101;
/// Eight E2M1 codes of such a key.
const NAN_E2M1: u32 = 0x7777_7777;
/// Four E4M3 codes of such a key.
const NAN_E4M3: u32 = 0x7F7F_7F7F;

/// Counts and records the keys that were scored for a query but were never written.
///
/// # Safety
/// Pointers and shapes as in the kernel table; called by a launch of grid `(tokens, any)` with 128
/// threads a block.
#[inline(always)]
pub unsafe fn find<R: IndexRowFormat>(args: FindPoisonedKeys) {
    let params = args.params;
    let query = thread::block_idx_x();
    if query >= params.tokens {
        return;
    }
    // SAFETY: `query < tokens`; rows of the planes come out of the table, which refuses blocks that
    // the planes do not have.
    unsafe {
        let token = u64::from(params.first + query);
        let Some((slot, seen)) = visible(args.token_position, args.token_slot, token) else {
            return;
        };
        if slot >= params.slots || seen <= params.skip {
            return;
        }
        let request = keys_of(args.table, slot, params.max_blocks, params.num_blocks);
        let seen = seen.min(params.columns);
        let mut entry = thread::block_idx_y() * THREADS + thread::thread_idx_x();
        while entry < seen {
            // An entry without a block is counted as a fault by the kernel that scores.
            if let Some(row) = request.plane_row(entry, true)
                && is_poison::<R>(args.index_code, args.index_scale, row)
            {
                let position = args.token_position.load(token) as u32;
                let place =
                    params.layer * FindPoisonedKeysParams::LAYER + FindPoisonedKeysParams::KEY;
                record(args.found, [place, slot, position, entry], params.capacity);
            }
            entry += thread::grid_dim_y() * THREADS;
        }
    }
}

/// Whether the key in `row` was never written, or was pooled from rows that were never written.
///
/// # Safety
/// The planes hold the row.
#[inline(always)]
unsafe fn is_poison<R: IndexRowFormat>(code: Global<u8>, scale: Global<u8>, row: u64) -> bool {
    let fp8 = matches!(R::FORMAT, IndexFormat::Fp8);
    let (scale_words, code_words) = (R::FORMAT.scale_bytes() / 4, R::FORMAT.code_bytes() / 4);
    // SAFETY: words of the row.
    let scale = |at| unsafe { scale.cast::<u32>().load(row * scale_words + at) };
    // SAFETY: as above.
    let code = |at| unsafe { code.cast::<u32>().load(row * code_words + at) };
    let unwritten = (0..scale_words).any(|at| scale(at) == u32::MAX);
    let from_nan = || {
        (fp8 || (0..scale_words).all(|at| scale(at) == LEAST_SCALES))
            && (0..code_words).all(|at| code(at) == if fp8 { NAN_E4M3 } else { NAN_E2M1 })
    };
    unwritten || from_nan()
}
