//! Layouts of a product's operands in shared memory, and of its result in registers.

use crate::shared::Shared;

/// An operand of a product in shared memory, as a matrix descriptor gives it.
#[cfg(not(target_feature = "sm_90a"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Address of its first byte.
    pub address: u32,
    /// What the address is a multiple of, in bytes.
    pub align: u32,
    /// Bytes from there to the first column.
    pub column: u32,
}

#[cfg(not(target_feature = "sm_90a"))]
impl Operand {
    /// An operand without swizzling.
    #[inline(always)]
    #[track_caller]
    pub fn plain<const N: usize>(memory: Shared<u32, N>) -> Self {
        Self { address: memory.address::<1>(0), align: 16, column: 0 }
    }
}

/// A lane's part of a product of 64 columns in f32: one fragment for each 8 columns, as `c` in [`crate::mma`].
pub type Fragments = [[f32; 4]; 8];

/// A lane's part of a product of 64 columns in 32-bit integers.
pub type IntegerFragments = [[i32; 4]; 8];

/// The first of the four words that hold bytes `16 sixteen` to `16 sixteen + 15` of a column of B.
#[inline(always)]
#[must_use]
pub const fn right_word(sixteen: u32, column: u32) -> u32 {
    4 * (64 * sixteen + column)
}

/// A lane's part of a product of 128 columns in f32.
pub type FragmentsN128 = [[f32; 4]; 16];

/// Rows of 64 BF16 in shared memory, an operand of a product: row after row, 128 bytes each. The 16 bytes of a row from
/// byte `16 sixteen` on are the four words from [`Rows::word`]`(sixteen, row)` on (PTX ISA 9.7.15.5.1, "128-Byte
/// swizzling mode"). Threads that write a row together write 128 contiguous bytes, and threads that read eight rows
/// have no bank conflicts.
///
/// A step of a product takes 32 bytes of each row. Where `mma` stands in for `wgmma` and neither operand is transposed,
/// lane `t` of a group of four takes the 8 bytes from `8 t` on: the order of the inner index within a step is free, if
/// it is the same in both operands.
#[derive(Clone, Copy, Debug)]
pub struct Rows<const N: usize> {
    memory: Shared<u32, N>,
    /// First word of row 0.
    first: u32,
    /// The unit of 16 bytes in each row at which this view starts.
    sixteen: u32,
}

impl<const N: usize> Rows<N> {
    /// Words of a row.
    pub const WORDS: u32 = 32;
    /// Alignment of the first word, in words: eight rows.
    pub const ALIGN: u32 = 8 * Self::WORDS;

    /// The rows from word `first` of `memory` on.
    ///
    /// # Safety
    /// - The address of the word is a multiple of 1,024 bytes.
    #[inline(always)]
    #[must_use]
    pub const unsafe fn at(memory: Shared<u32, N>, first: u32) -> Self {
        Self { memory, first, sixteen: 0 }
    }

    /// The view that starts at row `row`, a multiple of 8, and at byte `16 sixteen` of each row.
    #[inline(always)]
    #[must_use]
    pub const fn from(self, sixteen: u32, row: u32) -> Self {
        Self { first: self.first + Self::WORDS * row, sixteen: self.sixteen + sixteen, ..self }
    }

    /// The first of the four words that hold bytes `16 sixteen` to `16 sixteen + 15` of row `row`.
    #[inline(always)]
    #[must_use]
    pub const fn word(self, sixteen: u32, row: u32) -> u32 {
        self.first + Self::WORDS * row + 4 * ((self.sixteen + sixteen) ^ (row % 8))
    }

    /// The shared memory in which the rows lie.
    #[inline(always)]
    #[must_use]
    pub(crate) const fn memory(self) -> Shared<u32, N> {
        self.memory
    }

    /// The operand. The descriptor's address is that of row 0: the hardware computes the swizzle from address bits.
    #[inline(always)]
    #[track_caller]
    #[cfg(not(target_feature = "sm_90a"))]
    pub(crate) fn operand(self) -> Operand {
        let (address, align) = (self.memory.address::<1>(self.first), 4 * Self::ALIGN);
        Operand { address, align, column: 16 * self.sixteen }
    }

    /// The word whose address a matrix descriptor takes: the start of the view, without the swizzle.
    #[inline(always)]
    #[cfg(target_feature = "sm_90a")]
    pub(crate) const fn first(self) -> u32 {
        self.first + 4 * self.sixteen
    }
}

/// A lane's part of a product of 256 columns in f32: fragments of columns 0 to 127, then of columns 128 to 255.
pub type FragmentsN256 = [FragmentsN128; 2];

/// A matrix of 64 rows of BF16 in shared memory, one panel of 64 columns after another. A panel is 64 [`Rows`], 8 KiB.
#[derive(Clone, Copy, Debug)]
pub struct Panels<const N: usize>(Rows<N>);

impl<const N: usize> Panels<N> {
    /// Rows of a panel.
    pub const ROWS: u32 = 64;
    /// Words of a panel.
    pub const WORDS: u32 = Self::ROWS * Rows::<N>::WORDS;

    /// The panels from word `first` of `memory` on.
    ///
    /// # Safety
    /// - The address of the word is a multiple of 1,024 bytes.
    #[inline(always)]
    #[must_use]
    pub const unsafe fn at(memory: Shared<u32, N>, first: u32) -> Self {
        // SAFETY: the caller's duty is this callee's.
        Self(unsafe { Rows::at(memory, first) })
    }

    /// The view that starts at panel `panel` and at row `row`, a multiple of 8.
    #[inline(always)]
    #[must_use]
    pub const fn from(self, panel: u32, row: u32) -> Self {
        Self(self.panel(panel).from(0, row))
    }

    /// The rows of panel `panel`.
    #[inline(always)]
    #[must_use]
    pub const fn panel(self, panel: u32) -> Rows<N> {
        Rows { first: self.0.first + Self::WORDS * panel, ..self.0 }
    }
}
