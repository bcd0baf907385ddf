//! Attention of many queries to their windows: a block takes several queries in turn. The results have the same bits as
//! those of [`super::attend`].
//!
//! Consecutive queries of a request have the same window rows but one, and a row is the same key in each window. So the
//! rows stay in shared memory as BF16, and one row is replaced between two queries: a chunk of a prompt loads and
//! unpacks one row for each query instead of 128. Where the next query belongs to another request, all rows are loaded
//! anew.
//!
//! The first warpgroup multiplies a query by its keys and computes the weights. The other two multiply these by the
//! values, half of the channels each, and write their results while the first continues with the next query.

mod memory;
mod output;
mod queries;
mod row;

use simt::warpgroup::{
    FragmentsN256, InFlight, fence_proxy_async, setmaxnreg_dec, setmaxnreg_inc,
    start_bf16_m64n64k512,
};
use simt::{copy, thread, warp};

use super::memory::{Arrays as CommonArrays, HEADS, QUERIES, TILE, WARPGROUP, keys_of, panels};
use super::output::load_sinks;
use super::rows::Source;
use super::softmax::{Softmax, first_keys, first_row, rescale};
use super::unpack::KeyFormat;
use super::{AT_START, HALF, start_values};
use crate::args::Attend;
use crate::fault;
use crate::math::cos_sin;
use memory::{Arrays, LOADED, MULTIPLIED, READY, SCALED, WEIGHED};
use queries::{Queries, Query};
use row::{WarpRow, own_key};

/// Registers of a thread of the first warpgroup (scorer), and of the others (multipliers).
const SCORER: u32 = 136;
const MULTIPLIER: u32 = 184;
const _: () = assert!(SCORER + 2 * MULTIPLIER <= 3 * AT_START);

/// Computes attention of up to 64 heads of several queries, which are normed and rotated, to their windows.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(tokens / queries, heads / 64)`,
/// rounded up, with 384 threads a block call it. `queries` is 1 to
/// [`MAX_CONSECUTIVE`](kv_layout::attention::MAX_CONSECUTIVE), or counts as the next of those.
#[inline(always)]
pub unsafe fn attend<F: KeyFormat>(args: Attend) {
    // SAFETY: all threads of the block; by this function's own contract. What branches on a query is the same in all
    // threads of the block; what branches on the warpgroup has the same barriers in the same order.
    unsafe {
        let arrays = Arrays::new();
        let queries = Queries::of_block(&args, arrays);
        // The shuffle shows the compiler that the value is the same in all lanes, so that descriptors stay in uniform
        // registers.
        let group = warp::shuffle_idx_u32(thread::warp_id() / 4, 0);
        if group == 0 {
            setmaxnreg_dec::<SCORER>();
            score(queries, arrays);
        } else {
            setmaxnreg_inc::<MULTIPLIER>();
            multiply::<F>(queries, arrays, HALF * (group - 1));
        }
    }
}

/// Runs through the block's queries: computes scores and weights.
///
/// # Safety
/// As [`attend`], in the first warpgroup; the others call [`multiply`].
#[inline(always)]
unsafe fn score(queries: Queries<'_>, arrays: Arrays) {
    let args = queries.args;
    // SAFETY: by this function's own contract; words of shared memory are written before a barrier that their readers
    // come after.
    unsafe {
        start_copies(queries, 0);
        let sinks = load_sinks(args, queries.heads(0));
        let is_first_warp = warp::all(thread::warp_id() == 0);
        let mut has_keys = false;
        let mut i = 0;
        while i < queries.count {
            let query = queries.get(i);
            if query.is_live {
                if has_keys {
                    MULTIPLIED.sync();
                }
                has_keys = true;
                if !query.follows {
                    LOADED.sync();
                }
                copy::wait_for_groups::<0>();
                fence_proxy_async();
                READY.sync();
                let softmax = weigh(query, arrays.common);
                fence_proxy_async();
                WEIGHED[1].arrive();
                start_copies(queries, i + 1);
                output::store_output_scales(args, query.heads, arrays, (softmax, sinks));
                SCALED.arrive();
            } else {
                let reports = query.heads.first == 0 && is_first_warp && query.is_refused;
                fault::count(args.faults, thread::lane_id(), u32::from(reports));
                // The copies of this query, whose data are not used.
                copy::wait_for_groups::<0>();
                start_copies(queries, i + 1);
            }
            i += 1;
        }
        if has_keys {
            MULTIPLIED.sync();
        }
    }
}

/// Starts copies of the heads of query `i`, if that query exists. Each warp copies the heads whose scores it computes.
///
/// # Safety
/// All threads of the first warpgroup call it; pointers and shapes as in the kernel table; the warp's earlier copies
/// and products have been waited for.
#[inline(always)]
unsafe fn start_copies(queries: Queries<'_>, i: u32) {
    if i < queries.count {
        let (args, heads) = (queries.args, queries.heads(i));
        // SAFETY: by this function's own contract.
        unsafe { row::copy_heads(args, (heads.row(args), heads.count(args))) }
        copy::commit_group();
    }
}

/// Starts the loads of the own row of query `i`, if that query exists and follows the one before it
/// (`Query::follows`).
///
/// # Safety
/// All lanes of the warp call it together; pointers and shapes as in the kernel table.
#[inline(always)]
unsafe fn load_own<F: KeyFormat>(queries: Queries<'_>, i: u32) -> Option<WarpRow> {
    if i >= queries.count {
        return None;
    }
    // SAFETY: by this function's own contract.
    unsafe {
        let query = queries.get(i);
        let row = Source(queries.args).row(query.row);
        if query.follows { Some(WarpRow::load::<F>(row)) } else { None }
    }
}

/// Computes the scores and weights of a query.
///
/// # Safety
/// All threads of the first warpgroup call it together; queries and keys are there, weights read no more.
#[inline(always)]
unsafe fn weigh(query: Query, common: CommonArrays) -> Softmax {
    // SAFETY: by this function's own contract.
    unsafe {
        let mut softmax = Softmax::new();
        // One product at a time: with two in flight `ptxas` keeps descriptors in ordinary registers.
        let low = start_bf16_m64n64k512(panels(QUERIES), keys_of(0)).wait::<0>();
        softmax.weigh_first(first_keys(low, query.window()), common);
        fence_proxy_async();
        WEIGHED[0].arrive();
        if query.has_two_tiles() {
            let high = start_bf16_m64n64k512(panels(QUERIES), keys_of(1)).wait::<0>();
            softmax.weigh(first_keys(high, query.window() - TILE), common, 1);
        }
        softmax
    }
}

/// Runs through the block's queries: loads all keys where a query does not follow the one before it, multiplies the
/// weights by half of the channels of the values, from panel `panel` on, and writes the results.
///
/// # Safety
/// As [`attend`], in the second and third warpgroup; the first calls [`score`].
#[inline(always)]
unsafe fn multiply<F: KeyFormat>(queries: Queries<'_>, arrays: Arrays, panel: u32) {
    let args = queries.args;
    let factor = arrays.common.factor;
    let row = first_row();
    // SAFETY: as in `score`.
    unsafe {
        let frequency = args.frequencies.load(u64::from(thread::lane_id()));
        // One warp loads the row by which the next query's keys differ.
        let has_own = warp::all(thread::warp_id() == WARPGROUP / 32);
        let mut own_row = if has_own { load_own::<F>(queries, 1) } else { None };
        let mut i = 0;
        while i < queries.count {
            let query = queries.get(i);
            i += 1;
            let own = own_row;
            if !query.is_live {
                own_row = if has_own { load_own::<F>(queries, i + 1) } else { None };
                continue;
            }
            if !query.follows {
                row::load_all::<F>(Source(args), queries.keys(i - 1));
                LOADED.arrive();
            }
            let own = own.map(|own| own.unpack::<F>());
            let (cos, sin) = cos_sin(query.position as f32 * frequency);
            let zeros: FragmentsN256 = [[[0.0; 4]; 16]; 2];
            WEIGHED[0].sync();
            let low = start_values((0, 0), panel, InFlight::idle(zeros));
            let mut values = start_values((0, 1), panel, low).wait::<0>();
            WEIGHED[1].sync();
            if query.has_two_tiles() {
                values = rescale(values, [0, 8].map(|i| factor.load(HEADS + row + i)));
                let low = start_values((1, 0), panel, InFlight::idle(values));
                values = start_values((1, 1), panel, low).wait::<0>();
            }
            // After this barrier both warpgroups have finished their products, and the keys may change.
            SCALED.sync();
            let scales = [0, 8].map(|i| arrays.output_scales.load(row + i));
            if let Some(own) = own {
                own.store(own_key(query.position + 1));
            }
            MULTIPLIED.arrive();
            // The row for the query after the next: its loads overlap with the writing of results.
            own_row = if has_own { load_own::<F>(queries, i + 1) } else { None };
            output::write(args, query.heads, (values, scales), (panel, [cos, sin]));
        }
    }
}
