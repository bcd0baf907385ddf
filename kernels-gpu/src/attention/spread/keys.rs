//! Keys and values: where their rows lie, and from there into BF16 in shared memory.

use kv_layout::geometry::NOPE_DIM;
use kv_layout::main_row::{UE8M0_GROUP, data_offset};
use simt::cluster::cluster_arrive;
use simt::warpgroup::{Panels, Rows, fence_shared};
use simt::{copy, thread, warp};

use super::super::source::{AllPlanes, Keys, Listed, Located, NO_ROW, Row, Source, Which};
use super::super::unpack::KeyFormat;
use super::memory::{
    Arrays, BLOCK, FIRST_SCORED, FREE, GROUP, PANEL, PLACES, SCORED, THIRD_UNPACKED, TILE, TILES,
    UNPACKED, VALUES_UNPACKED, WORDS, may_score_three, wait_for_cluster,
};
use super::scores::{are_far, pass_barriers};
use super::sums::store_turns;
use super::task::Task;
use crate::fault_injection;
use crate::row::StoredScales;
use crate::unroll::{array_from_fn, unroll};

/// Tiles of values whose loads begin together.
const STAGE: u32 = 4;
const _: () =
    assert!(PLACES.is_multiple_of(STAGE) && FREE.is_multiple_of(STAGE), "one behind the other");
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
            listed[i] = keys.list::<W>(source, key, end).held();
        });
        unroll::<N>(|i| located[i] = keys.locate::<W>(source, listed[i]).held());
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

/// The words that name the row of key `key` of tile `tile`.
///
/// # Safety
/// It was found, and a barrier has passed.
#[inline(always)]
unsafe fn words_of(arrays: Arrays, (tile, key): (u32, u32)) -> [u32; 2] {
    // SAFETY: by this function's own contract.
    unsafe { arrays.found.load_u32x2(2 * (TILE * tile + key)) }
}

/// Starts the loads of the lane's 16 channels of panel `panel` of a row, below [`CODED`]; zeros if there is no row.
///
/// # Safety
/// The planes hold the row.
#[inline(always)]
unsafe fn load_codes(row: Row, panel: u32) -> [u32; 4] {
    let at = u64::from(UE8M0_GROUP * panel + 16 * (thread::lane_id() % 4));
    if row.is_there {
        // SAFETY: 16 bytes inside the row, whose address is a multiple of 64.
        unsafe { row.planes.data.load_u32x4_in_order(data_offset(row.row) + at) }
    } else {
        [0; 4]
    }
}

/// Starts the load of a row's scales; zeros if there is no row.
///
/// # Safety
/// The planes hold the row.
#[inline(always)]
unsafe fn load_scales<F: KeyFormat>(row: Row) -> StoredScales {
    // SAFETY: by this function's own contract.
    if row.is_there { unsafe { F::load_scales(row.planes.scale, row.row) } } else { [0; 2] }
}

/// Where the lane's two times 16 bytes of row `key` of a panel lie.
#[inline(always)]
fn words_in<const N: usize>((panel, key): (Rows<N>, u32)) -> [u32; 2] {
    let two = 2 * (thread::lane_id() % 4);
    [panel.word(two, key), panel.word(two + 1, key)]
}

/// Writes 16 channels of panel `from` of a row as BF16 to `to`. `PLAIN` where [`KeyFormat::is_plain`] is true and no code is NaN; else
/// anything is written then.
///
/// # Safety
/// The words are the thread's; nobody reads them without a barrier between.
#[inline(always)]
unsafe fn unpack_piece<F: KeyFormat, const PLAIN: bool>(
    (codes, scales): ([u32; 4], StoredScales),
    from: u32,
    to: [u32; 2],
    arrays: Arrays,
) {
    let is_nan = !PLAIN && F::has_nan(&[codes]);
    let values = F::unpack::<PLAIN>(codes, F::scales_of_panel(scales, from), 0, is_nan);
    // SAFETY: by this function's own contract.
    unsafe {
        arrays.memory.store_u32x4(to[0], values[0]);
        arrays.memory.store_u32x4(to[1], values[1]);
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
    let planes = source.planes_held();
    let (key, half) = (thread::thread_idx_x() / 4 % TILE, thread::thread_idx_x() / (4 * TILE));
    let (mut tile, mut fours) = if task.own >= 2 { (half, [0, 2]) } else { (0, [half, half + 1]) };
    // In a loop, so that the third tile is no more code.
    // SAFETY: by this function's own contract.
    unsafe {
        loop {
            if tile < task.own {
                let row = planes.row(words_of(arrays, (task.first + tile, key)));
                unpack_row::<F>(row, (arrays.keys(tile), key), fours, arrays);
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
            (tile, fours) = (2, [0, 2]);
        }
    }
}

/// Codes of four panels of a row: 16 of each.
type FourPanels = [[u32; 4]; 4];

/// Unpacks the lane's channels of row `key` of a tile of keys: of four panels, the first ones or the others, or of four and the others, by
/// `fours`.
///
/// # Safety
/// As [`unpack`]; nobody reads the tile's place any more.
#[inline(always)]
unsafe fn unpack_row<F: KeyFormat>(
    row: Row,
    (to, key): (Panels<WORDS>, u32),
    [first, end]: [u32; 2],
    arrays: Arrays,
) {
    // SAFETY: by this function's own contract.
    unsafe {
        // All loads before any of them is waited for.
        let mut codes = load_four(row, first);
        let second = if end - first == 2 { load_four(row, 1) } else { [[0; 4]; 4] };
        let scales = load_scales::<F>(row);
        if end == 2 {
            copy_rotary(row, (to.panel(CODED), key), arrays);
        }
        let mut four = first;
        loop {
            unpack_four::<F>(row, (codes, scales), four, (to, key), arrays);
            four += 1;
            if four == end {
                return;
            }
            codes = second;
        }
    }
}

/// Starts the loads of four panels of a row, the first ones or the others, but for the rotary one.
///
/// # Safety
/// As [`load_codes`].
#[inline(always)]
unsafe fn load_four(row: Row, four: u32) -> FourPanels {
    array_from_fn(|i| {
        let panel = 4 * four + i as u32;
        // SAFETY: by this function's own contract.
        if i < 3 || panel < CODED { unsafe { load_codes(row, panel) } } else { [0; 4] }
    })
}

/// Unpacks the lane's channels of four panels of a row.
///
/// # Safety
/// As [`unpack_row`].
#[inline(always)]
unsafe fn unpack_four<F: KeyFormat>(
    row: Row,
    (codes, scales): (FourPanels, StoredScales),
    four: u32,
    (to, key): (Panels<WORDS>, u32),
    arrays: Arrays,
) {
    let of_four = F::scales_of_panel(scales, 4 * four);
    let to = words_in((to.panel(4 * four), key));
    // SAFETY: by this function's own contract.
    unsafe {
        unroll::<4>(|i| {
            if i < 3 || four == 0 {
                let values = F::unpack::<true>(codes[i], of_four, i, false);
                arrays.memory.store_u32x4(to[0] + PANEL * i as u32, values[0]);
                arrays.memory.store_u32x4(to[1] + PANEL * i as u32, values[1]);
            }
        });
        if !F::is_plain(scales) || F::has_nan(&codes) {
            // Once more, which is seldom: in a loop, so that it is little code.
            let (mut panel, mut to) = (4 * four, to);
            while panel < CODED.min(4 * four + 4) {
                let piece = (load_codes(row, panel), scales);
                unpack_piece::<F, false>(piece, panel, to, arrays);
                to = to.map(|word| word + PANEL);
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
            unpack_all::<F>(source.planes_held(), (task, blocked), key, arrays);
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
    let planes = source.planes_held();
    let mut tile = 0;
    // SAFETY: by this function's own contract.
    unsafe {
        while tile < task.tiles || tile <= STAGE * blocked {
            if tile == STAGE * blocked {
                SCORED.sync();
            }
            if tile < task.tiles {
                let to = (arrays.values(tile).panel(0), key);
                copy_rotary(planes.row(words_of(arrays, (tile, key))), to, arrays);
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
    planes: AllPlanes,
    (task, blocked): (Task, u32),
    key: u32,
    arrays: Arrays,
) {
    // SAFETY: by this function's own contract.
    unsafe {
        let mut now = load_stage::<F>(planes, task, (0, key), arrays);
        let mut next = load_stage::<F>(planes, task, (1, key), arrays);
        let mut stage = 0;
        while STAGE * stage < task.tiles || stage <= blocked {
            if stage == blocked {
                SCORED.sync();
            }
            let to = words_in((arrays.values(STAGE * stage).panel(0), key));
            let of_tile = |i: u32| to.map(|word| word + PANEL * i);
            let mut are_plain = true;
            unroll::<{ STAGE as usize }>(|i| {
                if STAGE * stage + (i as u32) < task.tiles {
                    unpack_piece::<F, true>(now[i], task.rank, of_tile(i as u32), arrays);
                    // A row with a NaN has weights of NaN, whatever its values are.
                    are_plain &= F::is_plain(now[i].1);
                }
            });
            if !are_plain {
                let mut i = 0;
                while i < STAGE && STAGE * stage + i < task.tiles {
                    let row = planes.row(words_of(arrays, (STAGE * stage + i, key)));
                    let piece = (load_codes(row, task.rank), load_scales::<F>(row));
                    unpack_piece::<F, false>(piece, task.rank, of_tile(i), arrays);
                    i += 1;
                }
            }
            now = next;
            stage += 1;
            next = load_stage::<F>(planes, task, (stage + 1, key), arrays);
        }
    }
}

/// Starts the loads of the lane's 16 channels of the block's panel of a stage's rows `key`, and of their scales; zeros past the last tile.
///
/// # Safety
/// As [`unpack_values`].
#[inline(always)]
unsafe fn load_stage<F: KeyFormat>(
    planes: AllPlanes,
    task: Task,
    (stage, key): (u32, u32),
    arrays: Arrays,
) -> [([u32; 4], StoredScales); STAGE as usize] {
    // SAFETY: by this function's own contract.
    unsafe {
        let words: [[u32; 2]; STAGE as usize] = array_from_fn(|i| {
            let tile = STAGE * stage + i as u32;
            if tile < task.tiles { words_of(arrays, (tile, key)) } else { NO_ROW }
        });
        array_from_fn(|i| {
            let row = planes.row(words[i]);
            (load_codes(row, task.rank), load_scales::<F>(row))
        })
    }
}
