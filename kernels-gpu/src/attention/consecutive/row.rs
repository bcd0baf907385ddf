//! Brings rows of the cache into shared memory as BF16, one row a warp, and queries as they are.

use kv_layout::geometry::{HEAD_DIM, NOPE_DIM, WINDOW};
use kv_layout::main_row::{UE8M0_GROUP, data_offset};
use simt::{thread, warp};

use super::super::keys::Keys;
use super::super::memory::{
    HEAD_VECTORS, HEADS, Memory, QUERIES, TILE, WARPGROUP, keys_of, panels,
};
use super::super::rows::{Row, Source};
use super::super::unpack::{KeyFormat, RawKeys};
use crate::args::Attend;
use crate::fault_injection;
use crate::row::StoredScales;
use crate::unroll::{array_from_fn, unroll};

/// Number of channels of a lane.
const CHANNELS: u32 = HEAD_DIM / 32;
/// Number of lanes that have E4M3 channels; the others have rotary ones.
const CODED: u32 = NOPE_DIM / CHANNELS;

/// A lane's 16 channels of a row, as they are stored: codes, or 16 BF16.
#[derive(Clone, Copy, Default)]
pub struct WarpRow {
    pieces: [[u32; 4]; 2],
    scales: StoredScales,
    is_there: bool,
}

impl WarpRow {
    /// Starts the loads of the lane's channels of a row.
    ///
    /// # Safety
    /// The planes hold the row.
    #[inline(always)]
    pub unsafe fn load<F: KeyFormat>(at: Row) -> Self {
        let lane = thread::lane_id();
        let byte = |piece: u32| {
            if lane < CODED {
                return CHANNELS * lane;
            }
            NOPE_DIM + 16 * fault_injection::rotary_eighth(2 * (lane - CODED) + piece)
        };
        let from = data_offset(at.row);
        // SAFETY: 16 bytes inside the row; planes are aligned to 16 bytes, and so are rows of 576 and pieces of 16.
        unsafe {
            let load =
                |piece: u32| at.planes.data.load_u32x4_volatile(from + u64::from(byte(piece)));
            Self {
                pieces: [load(0), load(1)],
                scales: F::load_scales(at.planes.scale, at.row),
                is_there: at.is_there,
            }
        }
    }

    /// Unpacks the lane's channels to BF16; zeros if the row is not that of a key.
    ///
    /// # Safety
    /// All lanes of the warp call it together, with one row.
    #[inline(always)]
    pub unsafe fn unpack<F: KeyFormat>(self) -> UnpackedRow {
        let lane = thread::lane_id();
        let is_coded = lane < CODED;
        let [codes, _] = self.pieces;
        // SAFETY: by this function's own contract.
        let has_nan = unsafe { warp::any(is_coded && self.is_there && F::has_nan(&[codes])) };
        let scales = F::scales_of_panel(self.scales, panel());
        let unpacked = if self.is_there && !has_nan && F::is_plain(self.scales) {
            F::unpack::<true>(codes, scales, 0, false)
        } else {
            let values = F::unpack::<false>(codes, scales, 0, has_nan);
            if self.is_there { values } else { [[0; 4]; 2] }
        };
        let is_raw = !is_coded && self.is_there;
        UnpackedRow(array_from_fn(|i| if is_raw { self.pieces[i] } else { unpacked[i] }))
    }
}

/// The panel of the lane's channels.
#[inline(always)]
fn panel() -> u32 {
    thread::lane_id() * CHANNELS / UE8M0_GROUP
}

/// A lane's 16 channels of a row as BF16.
#[derive(Clone, Copy)]
pub struct UnpackedRow([[u32; 4]; 2]);

impl UnpackedRow {
    /// Writes the row as that of key `key`.
    ///
    /// # Safety
    /// All lanes of the warp call it together; no thread reads the key without a barrier between.
    #[inline(always)]
    pub unsafe fn store(self, key: u32) {
        let to = keys_of(key / TILE).panel(panel());
        let two = 2 * (thread::lane_id() % 4);
        let Self([low, high]) = self;
        // SAFETY: by this function's own contract; each word by one thread.
        unsafe {
            Memory::at(0).store_u32x4(to.word(two, key % TILE), low);
            Memory::at(0).store_u32x4(to.word(two + 1, key % TILE), high);
        }
    }
}

/// Loads all keys of a query, four lanes a row.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the second and third warpgroup call it; nobody reads
/// keys without a barrier between.
#[inline(always)]
pub unsafe fn load_all<F: KeyFormat>(source: Source<'_>, keys: Keys) {
    let row = (thread::thread_idx_x() - WARPGROUP) / 4;
    // SAFETY: by this function's own contract.
    unsafe {
        let [low, high] = [row, row + TILE].map(|key| source.row(keys.window_row(source.0, key)));
        let (low, high) = (RawKeys::load::<F>(low), RawKeys::load::<F>(high));
        low.unpack::<F>(low.has_nan::<F>(), 0, row);
        high.unpack::<F>(high.has_nan::<F>(), 1, row);
    }
}

/// The key whose row is that of the token at `position`.
#[inline(always)]
pub const fn own_key(position: u32) -> u32 {
    position % WINDOW
}

/// Starts copies (`cp.async`) of `heads` rows of `args.query`, `[rows, 512]` BF16, from row `row` on; heads past the
/// last are zero. Each warp of the first warpgroup copies the 16 heads whose scores it computes, so that it need not
/// wait for the other warps.
///
/// # Safety
/// The rows exist; the warp reads the last query no more.
#[inline(always)]
pub unsafe fn copy_heads(args: &Attend, (row, heads): (u64, u32)) {
    const OF_WARP: u32 = HEADS / 4;
    let lane = thread::lane_id();
    let first = OF_WARP * thread::warp_id();
    let mut head = first;
    // SAFETY: by this function's own contract; 16 bytes of the matrix once.
    unsafe {
        let memory = Memory::at(0);
        while head < first + OF_WARP {
            let from = (row + u64::from(head)) * u64::from(HEAD_DIM);
            unroll::<2>(|half| {
                let vector = HEAD_VECTORS / 2 * half as u32 + lane;
                let to = panels(QUERIES).panel(vector / 8).word(vector % 8, head);
                if head < heads {
                    memory.copy_from(to, args.query, from + u64::from(8 * vector));
                } else {
                    memory.store_u32x4(to, [0; 4]);
                }
            });
            head += 1;
        }
    }
}
