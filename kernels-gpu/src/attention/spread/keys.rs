//! Keys and values: where their rows lie, and from there into BF16 in shared memory.

use kv_layout::geometry::NOPE_DIM;
use kv_layout::main_row::{UE8M0_GROUP, data_offset};
use simt::cluster::cluster_arrive;
use simt::warpgroup::{Rows, fence_shared};
use simt::{copy, thread, warp};

use super::super::source::{Keys, Listed, Located, Row, Source, Which};
use super::super::unpack::KeyFormat;
use super::memory::{
    Arrays, BLOCK, FIRST_SCORED, FREE, GROUP, SCORED, THIRD_UNPACKED, TILE, TILES, UNPACKED,
    VALUES_UNPACKED, may_score_three, wait_for_cluster,
};
use super::scores::{are_far, pass_barriers};
use super::sums::store_turns;
use super::task::Task;
use crate::fault_injection;
use crate::row::StoredScales;
use crate::unroll::{array_from_fn, unroll};

/// Tiles of values whose loads begin together.
const STAGE: u32 = 4;
/// Panels of E4M3 channels; the one behind them is rotary.
const CODED: u32 = NOPE_DIM / UE8M0_GROUP;

/// Finds the rows of the part's keys, of one tile at least; how many of the warp's keys are listed and cannot be read.
///
/// # Safety
/// `keys` are a live query's; the pointers have the shapes of the kernel table; all threads of the block call it, and a barrier
/// follows.
#[inline(always)]
pub unsafe fn find<W: Which>(source: Source<'_>, keys: Keys, task: Task, arrays: Arrays) -> u32 {
    // SAFETY: by this function's own contract.
    unsafe {
        match (W::SPREAD_TILES * TILE).div_ceil(BLOCK) {
            1 => find_some::<W, 1>(source, keys, task, arrays),
            2 => find_some::<W, 2>(source, keys, task, arrays),
            _ => find_some::<W, { (TILES * TILE).div_ceil(BLOCK) as usize }>(
                source, keys, task, arrays,
            ),
        }
    }
}

/// The same, of `N` keys a thread.
///
/// # Safety
/// As [`find`].
#[inline(always)]
unsafe fn find_some<W: Which, const N: usize>(
    source: Source<'_>,
    keys: Keys,
    task: Task,
    arrays: Arrays,
) -> u32 {
    let thread = thread::thread_idx_x();
    let tile = |i: usize| thread / TILE + BLOCK / TILE * i as u32;
    let end = keys.first_tile + task.tiles;
    // Each step of all keys before the next, which waits for what it loaded.
    // SAFETY: by this function's own contract; words by one thread each.
    unsafe {
        let (mut listed, mut located) = ([Listed::NONE; N], [Located::NONE; N]);
        unroll::<N>(|i| {
            let key = (keys.first_tile + tile(i), thread % TILE);
            listed[i] = keys.list::<W>(source, key, end);
        });
        unroll::<N>(|i| located[i] = keys.locate::<W>(source, listed[i]));
        let mut refused = 0;
        unroll::<N>(|i| {
            if tile(i) < task.tiles.max(1) {
                let words = keys.row::<W>(source, located[i]);
                arrays.found.store_u32x2(2 * (thread + BLOCK * i as u32), words);
                if W::HAS_ENTRIES {
                    let is_refused = keys.is_refused::<W>(source, located[i]);
                    refused += warp::ballot(is_refused).count_ones();
                }
            }
        });
        refused
    }
}

/// The row of key `key` of tile `tile`.
///
/// # Safety
/// It was found, and a barrier has passed.
#[inline(always)]
unsafe fn row_of(source: Source<'_>, arrays: Arrays, (tile, key): (u32, u32)) -> Row {
    // SAFETY: by this function's own contract.
    source.row(unsafe { arrays.found.load_u32x2(2 * (TILE * tile + key)) })
}

/// Starts the loads of the lane's 16 channels of panel `panel` of a row, below [`CODED`].
///
/// # Safety
/// The planes hold the row.
#[inline(always)]
unsafe fn load_codes(row: Row, panel: u32) -> [u32; 4] {
    let at = u64::from(UE8M0_GROUP * panel + 16 * (thread::lane_id() % 4));
    // SAFETY: 16 bytes inside the row, whose address is a multiple of 64.
    unsafe { row.planes.data.load_u32x4_in_order(data_offset(row.row) + at) }
}

/// Writes the lane's 16 channels of panel `from` of a row as BF16 into row `key` of `panel`; zeros if there is no row. `PLAIN` where
/// [`KeyFormat::is_plain`] is true and no code is NaN; else anything is written then.
///
/// # Safety
/// No thread reads the row of the panel without a barrier between.
#[inline(always)]
unsafe fn unpack_piece<F: KeyFormat, const PLAIN: bool, const N: usize>(
    (codes, scales, is_there): ([u32; 4], StoredScales, bool),
    from: u32,
    (panel, key): (Rows<N>, u32),
    arrays: Arrays,
) {
    let is_nan = !PLAIN && F::has_nan(&[codes]);
    let values = F::unpack::<PLAIN>(codes, F::scales_of_panel(scales, from), 0, is_nan);
    let values = if is_there { values } else { [[0; 4]; 2] };
    let two = 2 * (thread::lane_id() % 4);
    // SAFETY: by this function's own contract; each word by one thread.
    unsafe {
        arrays.memory.store_u32x4(panel.word(two, key), values[0]);
        arrays.memory.store_u32x4(panel.word(two + 1, key), values[1]);
    }
}

/// Starts copies of the lane's 16 rotary channels of a row into row `key` of `panel`; writes zeros if there is no row.
///
/// # Safety
/// The planes hold the row; no thread reads the row of the panel before the copies' group is waited for and a barrier.
#[inline(always)]
unsafe fn copy_rotary<const N: usize>(row: Row, (panel, key): (Rows<N>, u32), arrays: Arrays) {
    let two = 2 * (thread::lane_id() % 4);
    unroll::<2>(|i| {
        let eighth = two + i as u32;
        let from = NOPE_DIM + 16 * fault_injection::rotary_eighth(eighth);
        let to = panel.word(eighth, key);
        // SAFETY: by this function's own contract.
        unsafe {
            if row.is_there {
                arrays.memory.copy_from(
                    to,
                    row.planes.data,
                    data_offset(row.row) + u64::from(from),
                );
            } else {
                arrays.memory.store_u32x4(to, [0; 4]);
            }
        }
    });
}

/// Unpacks the rows of the keys that the block scores, four lanes a row: all threads those of the first two tiles, and the unpacking
/// warpgroups those of the third, once the first is not read any more. If the block scores one tile, half of it has four panels of each row,
/// and half the others.
///
/// # Safety
/// Rows are found, and a barrier has passed; all threads of the block call it, and have arrived at a barrier of the cluster; the multiplying
/// warpgroups then wait at [`UNPACKED`] and for the cluster, and call [`super::scores::multiply`], the others [`unpack_values`].
#[inline(always)]
pub unsafe fn unpack<F: KeyFormat, W: Which>(
    source: Source<'_>,
    task: Task,
    group: u32,
    arrays: Arrays,
) {
    let (key, half) = (thread::thread_idx_x() / 4 % TILE, thread::thread_idx_x() / (4 * TILE));
    let (mut tile, mut panels) =
        if task.own >= 2 { (half, [0, 8]) } else { (0, [4 * half, 4 * half + 4]) };
    // In a loop, so that the third tile is no more code.
    // SAFETY: by this function's own contract.
    unsafe {
        loop {
            if tile < task.own {
                unpack_panels::<F>(source, task, (tile, key, panels), arrays);
            }
            copy::commit_group();
            copy::wait_for_groups::<0>();
            fence_shared();
            if group < 2 {
                return;
            }
            if tile == 2 {
                THIRD_UNPACKED.arrive();
                return;
            }
            UNPACKED.arrive();
            wait_for_cluster();
            if !may_score_three::<W>() || task.own <= 2 {
                return;
            }
            FIRST_SCORED.sync();
            (tile, panels) = (2, [0, 8]);
        }
    }
}

/// Unpacks the lane's channels of some panels of row `key` of the block's tile `tile`.
///
/// # Safety
/// As [`unpack`]; nobody reads the tile's place any more.
#[inline(always)]
unsafe fn unpack_panels<F: KeyFormat>(
    source: Source<'_>,
    task: Task,
    (tile, key, [first, end]): (u32, u32, [u32; 2]),
    arrays: Arrays,
) {
    // SAFETY: by this function's own contract.
    unsafe {
        let row = row_of(source, arrays, (task.first + tile, key));
        let coded = if end < CODED { end } else { CODED };
        let to = arrays.keys(tile);
        // All loads before any of them is waited for.
        let codes: [[u32; 4]; CODED as usize] = array_from_fn(|i| {
            let panel = first + i as u32;
            if panel < coded { load_codes(row, panel) } else { [0; 4] }
        });
        let scales = F::load_scales(row.planes.scale, row.row);
        if end > CODED {
            copy_rotary(row, (to.panel(CODED), key), arrays);
        }
        unroll::<{ CODED as usize }>(|i| {
            let panel = first + i as u32;
            if panel < coded {
                let piece = (codes[i], scales, row.is_there);
                unpack_piece::<F, true, _>(piece, panel, (to.panel(panel), key), arrays);
            }
        });
        if row.is_there && (!F::is_plain(scales) || F::has_nan(&codes)) {
            // Once more, which is seldom: in a loop, so that it is little code.
            let mut panel = first;
            while panel < coded {
                let piece = (load_codes(row, panel), scales, true);
                unpack_piece::<F, false, _>(piece, panel, (to.panel(panel), key), arrays);
                panel += 1;
            }
        }
    }
}

/// Unpacks the block's channels of all tiles' values, four lanes a row, once their places are free, and the angles by which rotary ones
/// are turned back; passes the barriers of the cluster that the multiplying warpgroups pass meanwhile.
///
/// # Safety
/// Rows are found, and a barrier has passed; all threads of the unpacking warpgroups call it, the others call
/// [`super::scores::multiply`]; all have passed a barrier of the cluster, and pass another.
#[inline(always)]
pub unsafe fn unpack_values<F: KeyFormat>(
    source: Source<'_>,
    position: u32,
    task: Task,
    arrays: Arrays,
) {
    let key = (thread::thread_idx_x() - 2 * GROUP) / 4;
    // The first stage whose places are free when the block's products are done.
    let blocked = if task.own < 2 { FREE / STAGE } else { 0 };
    // SAFETY: by this function's own contract.
    unsafe {
        // Not before the third tile is unpacked: under compute-sanitizer that would wait for the block's other threads.
        cluster_arrive();
        if task.has_rotary() {
            copy_all_rotary(source, (task, blocked), key, arrays);
            store_turns(source.0, position, arrays);
        } else {
            unpack_all::<F>(source, (task, blocked), key, arrays);
        }
        copy::wait_for_groups::<0>();
        VALUES_UNPACKED.arrive();
        wait_for_cluster();
        if are_far(arrays) {
            pass_barriers();
        }
    }
}

/// The rotary channels of all tiles.
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
                let to = (arrays.values(tile).panel(0), key);
                copy_rotary(row_of(source, arrays, (tile, key)), to, arrays);
            }
            tile += 1;
        }
    }
    copy::commit_group();
}

/// The block's E4M3 channels of all tiles. The loads of two stages are under way together.
///
/// # Safety
/// As [`unpack_values`].
#[inline(always)]
unsafe fn unpack_all<F: KeyFormat>(
    source: Source<'_>,
    (task, blocked): (Task, u32),
    key: u32,
    arrays: Arrays,
) {
    let last = task.tiles.max(1) - 1;
    // SAFETY: by this function's own contract; past the last tile its row again.
    unsafe {
        let mut now = load_stage::<F>(source, (task.rank, 0, last), key, arrays);
        let mut next = load_stage::<F>(source, (task.rank, 1, last), key, arrays);
        let mut stage = 0;
        while STAGE * stage < task.tiles || stage <= blocked {
            if stage == blocked {
                SCORED.sync();
            }
            let place = |tile: u32| (arrays.values(tile).panel(0), key);
            let mut are_plain = true;
            unroll::<{ STAGE as usize }>(|i| {
                let tile = STAGE * stage + i as u32;
                if tile < task.tiles {
                    unpack_piece::<F, true, _>(now[i], task.rank, place(tile), arrays);
                    // A row with a NaN has weights of NaN, whatever its values are.
                    are_plain &= F::is_plain(now[i].1);
                }
            });
            if !are_plain {
                let mut tile = STAGE * stage;
                while tile < task.tiles.min(STAGE * (stage + 1)) {
                    let piece = load_piece::<F>(source, (task.rank, tile), key, arrays);
                    unpack_piece::<F, false, _>(piece, task.rank, place(tile), arrays);
                    tile += 1;
                }
            }
            now = next;
            stage += 1;
            if STAGE * (stage + 1) < task.tiles {
                next = load_stage::<F>(source, (task.rank, stage + 1, last), key, arrays);
            }
        }
    }
}

/// Starts the loads of a stage's tiles, none past tile `last`.
///
/// # Safety
/// As [`unpack_values`].
#[inline(always)]
unsafe fn load_stage<F: KeyFormat>(
    source: Source<'_>,
    (panel, stage, last): (u32, u32, u32),
    key: u32,
    arrays: Arrays,
) -> [([u32; 4], StoredScales, bool); STAGE as usize] {
    array_from_fn(|i| {
        let tile = (STAGE * stage + i as u32).min(last);
        // SAFETY: by this function's own contract.
        unsafe { load_piece::<F>(source, (panel, tile), key, arrays) }
    })
}

/// Starts the loads of the lane's 16 channels of a panel of a tile's row `key`, and of the row's scales.
///
/// # Safety
/// As [`unpack_values`].
#[inline(always)]
unsafe fn load_piece<F: KeyFormat>(
    source: Source<'_>,
    (panel, tile): (u32, u32),
    key: u32,
    arrays: Arrays,
) -> ([u32; 4], StoredScales, bool) {
    // SAFETY: by this function's own contract.
    unsafe {
        let row = row_of(source, arrays, (tile, key));
        (load_codes(row, panel), F::load_scales(row.planes.scale, row.row), row.is_there)
    }
}
