//! How the operands of a product lie in registers and in shared memory.

/// A lane's part of the product: by eight columns, as `c` in [`crate::mma`].
pub type Fragments = [[f32; 4]; 8];

/// The same of a product in integers.
pub type IntegerFragments = [[i32; 4]; 8];

/// Where bytes `16 sixteen` to `16 sixteen + 15` of a column of B lie.
#[inline(always)]
#[must_use]
pub const fn right_word(sixteen: u32, column: u32) -> u32 {
    4 * (64 * sixteen + column)
}
