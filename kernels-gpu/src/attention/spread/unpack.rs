//! Finds the rows of keys and values, and unpacks them to BF16 in shared memory.

use kv_layout::geometry::NOPE_DIM;
use kv_layout::main_row::UE8M0_GROUP;
use simt::cluster::cluster_arrive;
use simt::warpgroup::{Panels, Rows, fence_proxy_async};
use simt::{copy, thread, warp};

use super::super::keys::{KeySet, Keys, Listed, Located};
use super::super::rows::{Planes, Source};
use super::super::unpack::KeyFormat;
use super::memory::{
    Arrays, BLOCK_THREADS, FIRST_SCORED, FREE, PANEL, PLACES, SCORED, THIRD_UNPACKED, TILE, TILES,
    UNPACKED, VALUES_UNPACKED, WARPGROUP, WORDS, may_score_three, wait_for_cluster,
};
use super::scores::{needs_rescale, pass_barriers};
use super::sums::store_rotations;
use super::task::Task;
use crate::fault_injection;
use crate::row::StoredScales;
use crate::unroll::{array_from_fn, unroll};

/// Number of tiles of values whose loads begin together.
const STAGE: u32 = 4;
const _: () =
    assert!(PLACES.is_multiple_of(STAGE) && FREE.is_multiple_of(STAGE), "a stage lies in a row");
/// Number of panels of E4M3 channels; the panel after them is rotary.
const CODED: u32 = NOPE_DIM / UE8M0_GROUP;

/// Finds the rows of the cluster's keys, of at least one tile. Returns how many of the warp's keys are listed and
/// cannot be read.
///
/// # Safety
/// `keys` are a live query's; the pointers have the shapes of the kernel table; all threads of the block call it, and a
/// barrier follows.
#[inline(always)]
pub unsafe fn find<F: KeyFormat, W: KeySet>(
    source: Source<'_>,
    keys: Keys,
    task: Task,
    arrays: Arrays,
) -> u32 {
    // SAFETY: by this function's own contract.
    unsafe {
        match (W::SPREAD_TILES * TILE).div_ceil(BLOCK_THREADS) {
            1 => find_some::<F, W, 1>(source, keys, task, arrays),
            2 => find_some::<F, W, 2>(source, keys, task, arrays),
            _ => find_some::<F, W, { (TILES * TILE).div_ceil(BLOCK_THREADS) as usize }>(
                source, keys, task, arrays,
            ),
        }
    }
}

/// As [`find`], for `N` keys a thread.
///
/// # Safety
/// As [`find`].
#[inline(always)]
unsafe fn find_some<F: KeyFormat, W: KeySet, const N: usize>(
    source: Source<'_>,
    keys: Keys,
    task: Task,
    arrays: Arrays,
) -> u32 {
    let thread = thread::thread_idx_x();
    let tile = |i: usize| thread / TILE + BLOCK_THREADS / TILE * i as u32;
    let end = keys.first_tile + task.tiles;
    // Each step runs for all keys before the next step, which waits for its loads.
    // SAFETY: by this function's own contract; words by one thread each.
    unsafe {
        let (mut listed, mut located) = ([Listed::NONE; N], [Located::NONE; N]);
        unroll::<N>(|i| {
            let key = (keys.first_tile + tile(i), thread % TILE);
            listed[i] = keys.list::<W>(source, key, end).opt_barrier();
        });
        unroll::<N>(|i| located[i] = keys.locate::<W>(source, listed[i]).opt_barrier());
        let mut refused = 0;
        unroll::<N>(|i| {
            if tile(i) < task.tiles.max(1) {
                let (places, is_there) = source.places::<F>(keys.row::<W>(source, located[i]));
                let key = thread + BLOCK_THREADS * i as u32;
                arrays.found.store_u32x4(4 * key, places);
                let missing = !warp::ballot(is_there);
                if thread::lane_id() == 0 {
                    arrays.missing.store(key / 32, missing);
                }
                if W::HAS_ENTRIES {
                    let is_refused = keys.is_unreadable::<W>(source, located[i]);
                    refused += warp::ballot(is_refused).count_ones();
                }
            }
        });
        refused
    }
}

/// The row of key `key` of tile `tile`; if there is no such key, a row whose bytes do not count.
///
/// # Safety
/// It was found, and a barrier has passed.
#[inline(always)]
unsafe fn row_of(source: Source<'_>, arrays: Arrays, (tile, key): (u32, u32)) -> Planes {
    // SAFETY: by this function's own contract.
    unsafe { source.at(arrays.found.load_u32x4(4 * (TILE * tile + key))) }
}

/// Whether there is such a key.
///
/// # Safety
/// As [`row_of`].
#[inline(always)]
unsafe fn is_there(arrays: Arrays, (tile, key): (u32, u32)) -> bool {
    let key = TILE * tile + key;
    // SAFETY: by this function's own contract.
    unsafe { arrays.missing.load(key / 32) >> (key % 32) & 1 == 0 }
}

/// Starts the load of the lane's 16 channels of panel `panel` of a row; `panel` is below [`CODED`].
///
/// # Safety
/// The planes hold the row.
#[inline(always)]
unsafe fn load_codes(row: Planes, panel: u32) -> [u32; 4] {
    let at = u64::from(UE8M0_GROUP * panel + 16 * (thread::lane_id() % 4));
    // SAFETY: 16 bytes inside the row; planes are aligned to 16 bytes, and so are rows of 576 and pieces of 16.
    unsafe { row.data.load_u32x4_volatile(at) }
}

/// A lane's 16 channels of a panel of a row, as they are stored, and the word with the panel's scale.
type Piece = ([u32; 4], u32);

/// Starts the loads of the lane's 16 channels of panel `panel` of a row, and of their scale.
///
/// # Safety
/// As [`load_codes`].
#[inline(always)]
unsafe fn load_piece<F: KeyFormat>(row: Planes, panel: u32) -> Piece {
    // SAFETY: by this function's own contract.
    unsafe { (load_codes(row, panel), F::scale_at(row.scale, panel)) }
}

/// The words at which the lane's two times 16 bytes of row `key` of a panel start.
#[inline(always)]
fn words_in<const N: usize>((panel, key): (Rows<N>, u32)) -> [u32; 2] {
    let two = 2 * (thread::lane_id() % 4);
    [panel.word(two, key), panel.word(two + 1, key)]
}

/// Writes 16 channels as BF16 to `to`, with the first of the scales. `PLAIN` is for scales for which
/// [`KeyFormat::is_plain`] is true and codes that are not NaN; for others it writes undefined values. Without `PLAIN`,
/// writes zeros if not `is_there`.
///
/// # Safety
/// The words are the thread's; nobody reads them without a barrier between.
#[inline(always)]
unsafe fn unpack_piece<F: KeyFormat, const PLAIN: bool>(
    (codes, scales): ([u32; 4], StoredScales),
    is_there: bool,
    to: [u32; 2],
    arrays: Arrays,
) {
    let is_nan = !PLAIN && F::has_nan(&[codes]);
    let values = F::unpack::<PLAIN>(codes, scales, 0, is_nan);
    let values = if PLAIN || is_there { values } else { [[0; 4]; 2] };
    // SAFETY: by this function's own contract.
    unsafe {
        arrays.memory.store_u32x4(to[0], values[0]);
        arrays.memory.store_u32x4(to[1], values[1]);
    }
}

/// Starts copies (`cp.async`) of the lane's 16 rotary channels of key `key` of tile `tile` to row `key` of `panel`;
/// writes zeros if there is no such key.
///
/// # Safety
/// As [`row_of`]; no thread reads the row of the panel before the copies' group is waited for and a barrier.
#[inline(always)]
unsafe fn copy_rotary<const N: usize>(
    source: Source<'_>,
    (tile, key): (u32, u32),
    panel: Rows<N>,
    arrays: Arrays,
) {
    let two = 2 * (thread::lane_id() % 4);
    let to = words_in((panel, key));
    // SAFETY: by this function's own contract.
    unsafe {
        let row = row_of(source, arrays, (tile, key));
        let is_there = is_there(arrays, (tile, key));
        unroll::<2>(|i| {
            let from = NOPE_DIM + 16 * fault_injection::rotary_eighth(two + i as u32);
            if is_there {
                arrays.memory.copy_from(to[i], row.data, u64::from(from));
            } else {
                arrays.memory.store_u32x4(to[i], [0; 4]);
            }
        });
    }
}

/// Unpacks the rows of the keys that the block scores, four lanes a row. All threads unpack the first two tiles; the
/// unpacking warpgroups then unpack the third, once the first is no longer read. If the block scores one tile, half of
/// the threads unpack four panels of each row, and half the others.
///
/// # Safety
/// Rows are found, and a barrier has passed; all threads of the block call it, and have arrived at a barrier of the
/// cluster; the multiplying warpgroups then wait at [`UNPACKED`] and for the cluster, and call
/// [`super::scores::multiply`], the others [`unpack_values`].
#[inline(always)]
pub unsafe fn unpack<F: KeyFormat, W: KeySet>(
    source: Source<'_>,
    task: Task,
    group: u32,
    arrays: Arrays,
) {
    let (key, half) = (thread::thread_idx_x() / 4 % TILE, thread::thread_idx_x() / (4 * TILE));
    let (mut tile, mut fours) =
        if task.scored_tiles >= 2 { (half, [0, 2]) } else { (0, [half, half + 1]) };
    // A loop, so that the third tile adds no code.
    // SAFETY: by this function's own contract.
    unsafe {
        loop {
            if tile < task.scored_tiles {
                let from = (task.first_tile + tile, key);
                unpack_row::<F>(source, from, (arrays.keys(tile), fours), arrays);
            }
            copy::commit_group();
            copy::wait_for_groups::<0>();
            fence_proxy_async();
            if group < 2 {
                return;
            }
            if tile == 2 {
                THIRD_UNPACKED.arrive();
                return;
            }
            UNPACKED.arrive();
            wait_for_cluster();
            if !may_score_three::<W>() || task.scored_tiles <= 2 {
                return;
            }
            FIRST_SCORED.sync();
            (tile, fours) = (2, [0, 2]);
        }
    }
}

/// A lane's codes of four panels of a row: 16 of each.
type FourPanels = [[u32; 4]; 4];

/// Unpacks the lane's channels of key `key` of tile `tile` into row `key` of `to`, for panels `4 * first..4 * end`:
/// `[0, 1]` is the first half, `[1, 2]` the second half, and `[0, 2]` all.
///
/// # Safety
/// As [`unpack`]; nobody reads the row of `to` any more.
#[inline(always)]
unsafe fn unpack_row<F: KeyFormat>(
    source: Source<'_>,
    (tile, key): (u32, u32),
    (to, [first, end]): (Panels<WORDS>, [u32; 2]),
    arrays: Arrays,
) {
    // SAFETY: by this function's own contract.
    unsafe {
        let row = row_of(source, arrays, (tile, key));
        // All loads start before anything waits for one of them.
        let mut codes = load_four(row, first);
        let second = if end - first == 2 { load_four(row, 1) } else { [[0; 4]; 4] };
        let scales = F::scales_at(row.scale);
        if end == 2 {
            copy_rotary(source, (tile, key), to.panel(CODED), arrays);
        }
        let mut four = first;
        loop {
            let to = words_in((to.panel(4 * four), key));
            unpack_four::<F>((codes, scales), four, ((tile, key), to), arrays);
            four += 1;
            if four == end {
                return;
            }
            codes = second;
        }
    }
}

/// Starts the loads of four panels of a row: the first four (`four` 0), or the others (1) without the rotary one.
///
/// # Safety
/// As [`load_codes`].
#[inline(always)]
unsafe fn load_four(row: Planes, four: u32) -> FourPanels {
    array_from_fn(|i| {
        let panel = 4 * four + i as u32;
        // SAFETY: by this function's own contract.
        if i < 3 || panel < CODED { unsafe { load_codes(row, panel) } } else { [0; 4] }
    })
}

/// Unpacks the lane's channels of four panels of a key, to `to` and the same words of the next panels.
///
/// # Safety
/// As [`unpack_row`].
#[inline(always)]
unsafe fn unpack_four<F: KeyFormat>(
    (codes, scales): (FourPanels, StoredScales),
    four: u32,
    (from, to): ((u32, u32), [u32; 2]),
    arrays: Arrays,
) {
    let of_four = F::scales_of_panel(scales, 4 * four);
    // SAFETY: by this function's own contract.
    unsafe {
        unroll::<4>(|i| {
            if i < 3 || four == 0 {
                let values = F::unpack::<true>(codes[i], of_four, i, false);
                arrays.memory.store_u32x4(to[0] + PANEL * i as u32, values[0]);
                arrays.memory.store_u32x4(to[1] + PANEL * i as u32, values[1]);
            }
        });
        let is_known = F::IS_FINITE || is_there(arrays, from);
        if !F::is_plain(scales) || F::has_nan(&codes) || !is_known {
            // Unpack again, which is seldom: in a loop, so that it is little code.
            let is_there = is_there(arrays, from);
            let (mut panel, mut i) = (4 * four, 0);
            while panel < CODED.min(4 * four + 4) {
                let piece = (of_panel(codes, i), F::scales_of_panel(scales, panel));
                unpack_piece::<F, false>(piece, is_there, to.map(|word| word + PANEL * i), arrays);
                panel += 1;
                i += 1;
            }
        }
    }
}

/// The codes of panel `i`. An array with a variable index would go to local memory.
#[inline(always)]
const fn of_panel([a, b, c, d]: FourPanels, i: u32) -> [u32; 4] {
    if i == 0 {
        a
    } else if i == 1 {
        b
    } else if i == 2 {
        c
    } else {
        d
    }
}

/// Unpacks the block's channels of all tiles' values, four lanes a row, once their places are free. In the block with
/// the rotary channels, also stores the angles for inverse RoPE. Passes the barriers of the cluster that the
/// multiplying warpgroups pass meanwhile.
///
/// # Safety
/// Rows are found, and a barrier has passed; all threads of the unpacking warpgroups call it, the others call
/// [`super::scores::multiply`]; all have passed a barrier of the cluster, and pass another.
#[inline(always)]
pub unsafe fn unpack_values<F: KeyFormat, W: KeySet>(
    source: Source<'_>,
    position: u32,
    task: Task,
    arrays: Arrays,
) {
    let key = (thread::thread_idx_x() - 2 * WARPGROUP) / 4;
    // The first stage whose places are free only after the block's products with its keys.
    let blocked = if task.scored_tiles < 2 { FREE / STAGE } else { 0 };
    // SAFETY: by this function's own contract.
    unsafe {
        // Not before the third tile is unpacked: under compute-sanitizer, an earlier arrival would wait for the block's
        // other threads.
        cluster_arrive();
        if task.has_rotary() {
            copy_all_rotary(source, (task, blocked), key, arrays);
            store_rotations(source.0, position, arrays);
        } else {
            unpack_all::<F, W>(source, (task, blocked), key, arrays);
        }
        copy::wait_for_groups::<0>();
        VALUES_UNPACKED.arrive();
        wait_for_cluster();
        if needs_rescale(arrays) {
            pass_barriers();
        }
    }
}

/// Copies the rotary channels of all tiles.
///
/// # Safety
/// As [`unpack_values`].
#[inline(always)]
unsafe fn copy_all_rotary(
    source: Source<'_>,
    (task, blocked): (Task, u32),
    key: u32,
    arrays: Arrays,
) {
    let mut tile = 0;
    // SAFETY: by this function's own contract.
    unsafe {
        while tile < task.tiles || tile <= STAGE * blocked {
            if tile == STAGE * blocked {
                SCORED.sync();
            }
            if tile < task.tiles {
                copy_rotary(source, (tile, key), arrays.values(tile).panel(0), arrays);
            }
            tile += 1;
        }
    }
    copy::commit_group();
}

/// Unpacks the block's E4M3 channels of all tiles. The loads of three stages are under way together.
///
/// # Safety
/// As [`unpack_values`].
#[inline(always)]
unsafe fn unpack_all<F: KeyFormat, W: KeySet>(
    source: Source<'_>,
    (task, blocked): (Task, u32),
    key: u32,
    arrays: Arrays,
) {
    // SAFETY: by this function's own contract.
    unsafe {
        let mut now = load_stage::<F>(source, task, (0, key), arrays);
        let mut second = load_stage::<F>(source, task, (1, key), arrays);
        let mut third = load_stage::<F>(source, task, (2, key), arrays);
        let mut stage = 0;
        while STAGE * stage < task.tiles || stage <= blocked {
            if stage == blocked {
                SCORED.sync();
            }
            let to = words_in((arrays.values(STAGE * stage).panel(0), key));
            let of_tile = |i: u32| to.map(|word| word + PANEL * i);
            let mut are_plain = true;
            unroll::<{ STAGE as usize }>(|i| {
                let tile = STAGE * stage + i as u32;
                if tile < task.tiles {
                    let scales = F::scales_of_panel([now[i].1; 2], task.rank);
                    unpack_piece::<F, true>((now[i].0, scales), true, of_tile(i as u32), arrays);
                    // A row with a NaN code needs no care here: its weights are NaN, whatever its values are.
                    are_plain &= F::is_plain(scales);
                    are_plain &= F::IS_FINITE || is_there(arrays, (tile, key));
                }
            });
            if !are_plain {
                let mut i = 0;
                while i < STAGE && STAGE * stage + i < task.tiles {
                    let from = (STAGE * stage + i, key);
                    let (codes, scale) = load_piece::<F>(row_of(source, arrays, from), task.rank);
                    let piece = (codes, F::scales_of_panel([scale; 2], task.rank));
                    let is_there = is_there(arrays, from);
                    unpack_piece::<F, false>(piece, is_there, of_tile(i), arrays);
                    i += 1;
                }
            }
            (now, second) = (second, third);
            stage += 1;
            if W::SPREAD_TILES > 3 * STAGE {
                third = load_stage::<F>(source, task, (stage + 2, key), arrays);
            }
        }
    }
}

/// Starts the loads of row `key` of each tile of a stage: the lane's 16 channels of the block's panel, and their
/// scales. For tiles past the last, loads a row of the last tile again, or nothing if the whole stage is past it.
///
/// # Safety
/// As [`unpack_values`].
#[inline(always)]
unsafe fn load_stage<F: KeyFormat>(
    source: Source<'_>,
    task: Task,
    (stage, key): (u32, u32),
    arrays: Arrays,
) -> [Piece; STAGE as usize] {
    if STAGE * stage >= task.tiles {
        return [([0; 4], 0); STAGE as usize];
    }
    let last = task.tiles - 1;
    // SAFETY: by this function's own contract.
    unsafe {
        let places: [[u32; 4]; STAGE as usize] = array_from_fn(|i| {
            let tile = (STAGE * stage + i as u32).min(last);
            arrays.found.load_u32x4(4 * (TILE * tile + key))
        });
        places.map(|places| load_piece::<F>(source.at(places), task.rank))
    }
}
