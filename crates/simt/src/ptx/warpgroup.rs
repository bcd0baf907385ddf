//! [`crate::warpgroup`] on `sm_90a`.
//!
//! Registers of a product in flight must not be touched. So the sum goes from asm to asm until the one that
//! waits, and the left sides go along, so that their registers are not given to others before.

use core::arch::asm;

use crate::shared::Shared;
use crate::warpgroup::{Fragments, Left};

#[inline(always)]
pub fn fence_shared() {
    // SAFETY: no operand and no precondition.
    unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) }
}

/// How core matrices of B follow each other: 1024 bytes on along the inner index, 128 along the
/// columns (PTX ISA 9.7.15.5.1.2, "Matrix Descriptor Format", in units of 16 bytes).
const LAYOUT: u64 = 1024 / 16 << 16 | 128 / 16 << 32;

/// What 16 along the inner index add to a descriptor.
const STEP: u64 = 2 * 1024 / 16;

/// A step of 16 along the inner index: four registers of A, a descriptor of B, whether to add to D.
macro_rules! step {
    ($a:literal $b:literal $c:literal $d:literal, $right:literal, $add:literal) => {
        concat!(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{",
            "{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, ",
            "{8}, {9}, {10}, {11}, {12}, {13}, {14}, {15}, ",
            "{16}, {17}, {18}, {19}, {20}, {21}, {22}, {23}, ",
            "{24}, {25}, {26}, {27}, {28}, {29}, {30}, {31}}}, ",
            "{{{",
            $a,
            "}, {",
            $b,
            "}, {",
            $c,
            "}, {",
            $d,
            "}}}, ",
            "{",
            $right,
            "}, ",
            $add,
            ", 1, 1, 0;",
        )
    };
}

/// A product over 64 of the inner index, as a group; `$first` says whether its first step adds to D.
macro_rules! product {
    ($sum:ident as $direction:ident, $first:literal, $left:ident, $right:ident) => {
        asm!(
            "{{ .reg .pred no, yes; setp.ne.b32 no, 0, 0; setp.eq.b32 yes, 0, 0;",
            "wgmma.fence.sync.aligned;",
            step!(32 33 34 35, 48, $first),
            step!(36 37 38 39, 49, "yes"),
            step!(40 41 42 43, 50, "yes"),
            step!(44 45 46 47, 51, "yes"),
            "wgmma.commit_group.sync.aligned; }}",
            $direction(reg32) $sum[0][0], $direction(reg32) $sum[0][1], $direction(reg32) $sum[0][2], $direction(reg32) $sum[0][3],
            $direction(reg32) $sum[1][0], $direction(reg32) $sum[1][1], $direction(reg32) $sum[1][2], $direction(reg32) $sum[1][3],
            $direction(reg32) $sum[2][0], $direction(reg32) $sum[2][1], $direction(reg32) $sum[2][2], $direction(reg32) $sum[2][3],
            $direction(reg32) $sum[3][0], $direction(reg32) $sum[3][1], $direction(reg32) $sum[3][2], $direction(reg32) $sum[3][3],
            $direction(reg32) $sum[4][0], $direction(reg32) $sum[4][1], $direction(reg32) $sum[4][2], $direction(reg32) $sum[4][3],
            $direction(reg32) $sum[5][0], $direction(reg32) $sum[5][1], $direction(reg32) $sum[5][2], $direction(reg32) $sum[5][3],
            $direction(reg32) $sum[6][0], $direction(reg32) $sum[6][1], $direction(reg32) $sum[6][2], $direction(reg32) $sum[6][3],
            $direction(reg32) $sum[7][0], $direction(reg32) $sum[7][1], $direction(reg32) $sum[7][2], $direction(reg32) $sum[7][3],
            in(reg32) $left[0][0], in(reg32) $left[0][1], in(reg32) $left[0][2], in(reg32) $left[0][3],
            in(reg32) $left[1][0], in(reg32) $left[1][1], in(reg32) $left[1][2], in(reg32) $left[1][3],
            in(reg32) $left[2][0], in(reg32) $left[2][1], in(reg32) $left[2][2], in(reg32) $left[2][3],
            in(reg32) $left[3][0], in(reg32) $left[3][1], in(reg32) $left[3][2], in(reg32) $left[3][3],
            in(reg64) $right, in(reg64) $right + STEP,
            in(reg64) $right + 2 * STEP, in(reg64) $right + 3 * STEP,
            options(readonly, nostack),
        )
    };
}

pub struct Pending {
    sum: Fragments,
    left: [Left; 2],
}

impl Pending {
    #[inline(always)]
    pub unsafe fn start<const N: usize>(left: Left, right: Shared<u32, N>, first: u32) -> Self {
        let right = u64::from(right.address::<4>(first) >> 4) | LAYOUT;
        let mut sum = [[0.0_f32; 4]; 8];
        // SAFETY: the caller brings all threads of the four warps, and B.
        unsafe { product!(sum as out, "no", left, right) };
        Self { sum, left: [left; 2] }
    }

    #[inline(always)]
    pub unsafe fn add<const N: usize>(self, left: Left, right: Shared<u32, N>, first: u32) -> Self {
        let right = u64::from(right.address::<4>(first) >> 4) | LAYOUT;
        let Self { mut sum, left: [.., before] } = self;
        // SAFETY: the caller brings all threads of the four warps, and B.
        unsafe { product!(sum as inout, "yes", left, right) };
        Self { sum, left: [before, left] }
    }

    #[inline(always)]
    pub unsafe fn wait(self) -> Fragments {
        let Self { mut sum, left: [a, b] } = self;
        // SAFETY: the caller brings all threads of the four warps.
        unsafe {
            asm!(
                "wgmma.wait_group.sync.aligned 0;",
                // Named for the order: none may be read, or given to others, before.
                "// {0} {1} {2} {3} {4} {5} {6} {7} {8} {9} {10} {11} {12} {13} {14} {15}",
                "// {16} {17} {18} {19} {20} {21} {22} {23} {24} {25} {26} {27} {28} {29} {30} {31}",
                "// {32} {33} {34} {35} {36} {37} {38} {39} {40} {41} {42} {43} {44} {45} {46} {47}",
                "// {48} {49} {50} {51} {52} {53} {54} {55} {56} {57} {58} {59} {60} {61} {62} {63}",
                inout(reg32) sum[0][0], inout(reg32) sum[0][1], inout(reg32) sum[0][2], inout(reg32) sum[0][3],
                inout(reg32) sum[1][0], inout(reg32) sum[1][1], inout(reg32) sum[1][2], inout(reg32) sum[1][3],
                inout(reg32) sum[2][0], inout(reg32) sum[2][1], inout(reg32) sum[2][2], inout(reg32) sum[2][3],
                inout(reg32) sum[3][0], inout(reg32) sum[3][1], inout(reg32) sum[3][2], inout(reg32) sum[3][3],
                inout(reg32) sum[4][0], inout(reg32) sum[4][1], inout(reg32) sum[4][2], inout(reg32) sum[4][3],
                inout(reg32) sum[5][0], inout(reg32) sum[5][1], inout(reg32) sum[5][2], inout(reg32) sum[5][3],
                inout(reg32) sum[6][0], inout(reg32) sum[6][1], inout(reg32) sum[6][2], inout(reg32) sum[6][3],
                inout(reg32) sum[7][0], inout(reg32) sum[7][1], inout(reg32) sum[7][2], inout(reg32) sum[7][3],
                in(reg32) a[0][0], in(reg32) a[0][1], in(reg32) a[0][2], in(reg32) a[0][3],
                in(reg32) a[1][0], in(reg32) a[1][1], in(reg32) a[1][2], in(reg32) a[1][3],
                in(reg32) a[2][0], in(reg32) a[2][1], in(reg32) a[2][2], in(reg32) a[2][3],
                in(reg32) a[3][0], in(reg32) a[3][1], in(reg32) a[3][2], in(reg32) a[3][3],
                in(reg32) b[0][0], in(reg32) b[0][1], in(reg32) b[0][2], in(reg32) b[0][3],
                in(reg32) b[1][0], in(reg32) b[1][1], in(reg32) b[1][2], in(reg32) b[1][3],
                in(reg32) b[2][0], in(reg32) b[2][1], in(reg32) b[2][2], in(reg32) b[2][3],
                in(reg32) b[3][0], in(reg32) b[3][1], in(reg32) b[3][2], in(reg32) b[3][3],
                options(readonly, nostack),
            );
        }
        sum
    }
}
