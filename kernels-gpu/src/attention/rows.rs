//! Where the row of a key lies: in which planes, and there.

use kv_layout::main_row::data_offset;
use simt::mem::{Global, Views};

use crate::args::Attend;
use crate::row::RowFormat;

/// The pointers and sizes that keys are found by: the launch's.
#[derive(Clone, Copy)]
pub struct Source<'a>(pub &'a Attend);

/// Rows of a cache: planes of data and scales; or a row: where its data and its scales begin.
#[derive(Clone, Copy)]
pub struct Planes {
    /// `[rows, 576]` u8.
    pub data: Global<u8>,
    /// `[rows, 8]` UE8M0, or `[rows, 4]` f32.
    pub scale: Global<u8>,
}

/// Planes that a row lies in: those of the rings.
pub const RING: u32 = 0;
/// Those of the step's own rows.
pub const OWN: u32 = 1;
/// Those of compressed entries.
pub const ENTRIES: u32 = 2;
/// None: the row that is named exists, in the ring, and does not count.
pub const NONE: u32 = 3;

/// The row of a key, or one whose bytes do not count.
#[derive(Clone, Copy)]
pub struct Row {
    /// Where it lies.
    pub planes: Planes,
    /// Its number there.
    pub row: u64,
    /// Whether it is the key's.
    pub is_there: bool,
}

impl Source<'_> {
    /// The row that the words of [`super::keys::Keys::row`] name: for the kernels of whole queries, which are no faster with
    /// [`Self::places`], and slower behind other kernels.
    #[inline(always)]
    pub fn row(self, words: [u32; 2]) -> Row {
        let args = self.0;
        let (plane, row) = plane_and_row(words);
        let planes = if plane == ENTRIES {
            Planes { data: args.entry_data, scale: args.entry_scale }
        } else if plane == OWN {
            Planes { data: args.own_data, scale: args.own_scale }
        } else {
            Planes { data: args.ring_data, scale: args.ring_scale }
        };
        Row { planes, row, is_there: plane != NONE }
    }

    /// Where the row lies that the words of [`super::keys::Keys::row`] name, of data and of scales, and whether it is
    /// a key's; of no key in the ring.
    #[inline(always)]
    pub fn places<F: RowFormat>(self, words: [u32; 2]) -> ([u32; 4], bool) {
        let (plane, row) = plane_and_row(words);
        let which = if plane == NONE { RING } else { plane };
        let [a, b] = self.data().place(which, data_offset(row));
        let [c, d] = self.scales().place(which, F::FORMAT.scale_offset(row));
        ([a, b, c, d], plane != NONE)
    }

    /// The row at these places.
    ///
    /// # Safety
    /// [`Self::places`] gave them.
    #[inline(always)]
    pub unsafe fn at(self, [a, b, c, d]: [u32; 4]) -> Planes {
        // SAFETY: by this function's own contract.
        unsafe { Planes { data: self.data().at([a, b]), scale: self.scales().at([c, d]) } }
    }

    /// The planes of data, by number.
    #[inline(always)]
    fn data(self) -> Views<u8, 3> {
        Views([self.0.ring_data, self.0.own_data, self.0.entry_data])
    }

    /// Those of scales.
    #[inline(always)]
    fn scales(self) -> Views<u8, 3> {
        Views([self.0.ring_scale, self.0.own_scale, self.0.entry_scale])
    }
}

/// The planes and the number of the row that the words of [`super::keys::Keys::row`] name.
#[inline(always)]
const fn plane_and_row([low, high]: [u32; 2]) -> (u32, u64) {
    (high >> 30, (high as u64 & 0x3FFF_FFFF) << 32 | low as u64)
}
