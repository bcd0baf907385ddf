//! How the operands of a product lie in registers and in shared memory.

/// A lane's part of a product in f32: one fragment for each 8 columns, as `c` in [`crate::mma`].
pub type Fragments = [[f32; 4]; 8];

/// A lane's part of a product in 32-bit integers.
pub type IntegerFragments = [[i32; 4]; 8];

/// The first of the four words that hold bytes `16 sixteen` to `16 sixteen + 15` of a column of B.
#[inline(always)]
#[must_use]
pub const fn right_word(sixteen: u32, column: u32) -> u32 {
    4 * (64 * sixteen + column)
}
