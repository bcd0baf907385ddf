//! The location of a key's row: its planes, and the row in them.

use kv_layout::main_row::data_offset;
use simt::mem::{Global, Views};

use crate::args::Attend;
use crate::row::RowFormat;

/// The arguments of the launch, as the pointers and sizes by which keys are found.
#[derive(Clone, Copy)]
pub struct Source<'a>(pub &'a Attend);

/// A plane of data and one of scales. `Source::at` returns them from the start of one row on.
#[derive(Clone, Copy)]
pub struct Planes {
    /// `[rows, 576]` u8.
    pub data: Global<u8>,
    /// `[rows, 8]` UE8M0, or `[rows, 4]` f32.
    pub scale: Global<u8>,
}

/// Number of the planes of the rings.
pub const RING: u32 = 0;
/// Number of the planes of the step's own rows.
pub const OWN: u32 = 1;
/// Number of the planes of compressed entries.
pub const ENTRIES: u32 = 2;
/// No key: the location names a row of the ring that exists, but does not count.
pub const NONE: u32 = 3;

/// The row of a key, or a row whose bytes do not count.
#[derive(Clone, Copy)]
pub struct Row {
    /// The planes in which the row lies.
    pub planes: Planes,
    /// The index of the row in the planes.
    pub row: u64,
    /// Whether the row is that of a key, and so counts.
    pub is_there: bool,
}

impl Source<'_> {
    /// The row at a location of [`super::keys::Keys::row`]. The kernels of `super::attend` use this: with
    /// [`Self::places`] they are no faster, and are slower after other kernels.
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

    /// The addresses of the data and of the scales of the row at a location of [`super::keys::Keys::row`], and whether
    /// it is the row of a key. Without a key they are those of a row of the ring.
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

    /// The planes of scales, by number.
    #[inline(always)]
    fn scales(self) -> Views<u8, 3> {
        Views([self.0.ring_scale, self.0.own_scale, self.0.entry_scale])
    }
}

/// Splits a location of [`super::keys::Keys::row`] into the number of the planes and the index of the row.
#[inline(always)]
const fn plane_and_row([low, high]: [u32; 2]) -> (u32, u64) {
    (high >> 30, (high as u64 & 0x3FFF_FFFF) << 32 | low as u64)
}
