//! Products of 128 columns, both operands in shared memory.

use core::arch::asm;

use super::address;
use crate::warpgroup::layout::{FragmentsN128, Rows};

/// The descriptor of 32 bytes of each row, with 128-byte swizzling (PTX ISA 9.7.15.5.1.2, "Matrix Descriptor
/// Format"): eight rows of 128 bytes lie 1,024 bytes from the next eight.
#[inline(always)]
pub(super) fn descriptor<const N: usize>(rows: Rows<N>) -> u64 {
    const LAYOUT: u64 = 1 << 16 | (1024 / 16) << 32 | 1 << 62;
    address(rows.memory(), rows.first()) | LAYOUT
}

/// `asm!` as `asm_of_64_columns`, of 128 columns: operands 0 to 63.
macro_rules! asm_of_128_columns {
    ($d:ident, [$($template:tt)*], [$($more:tt)*]) => {
        asm!(
            $($template)*
            inout(reg32) $d[0][0], inout(reg32) $d[0][1], inout(reg32) $d[0][2], inout(reg32) $d[0][3],
            inout(reg32) $d[1][0], inout(reg32) $d[1][1], inout(reg32) $d[1][2], inout(reg32) $d[1][3],
            inout(reg32) $d[2][0], inout(reg32) $d[2][1], inout(reg32) $d[2][2], inout(reg32) $d[2][3],
            inout(reg32) $d[3][0], inout(reg32) $d[3][1], inout(reg32) $d[3][2], inout(reg32) $d[3][3],
            inout(reg32) $d[4][0], inout(reg32) $d[4][1], inout(reg32) $d[4][2], inout(reg32) $d[4][3],
            inout(reg32) $d[5][0], inout(reg32) $d[5][1], inout(reg32) $d[5][2], inout(reg32) $d[5][3],
            inout(reg32) $d[6][0], inout(reg32) $d[6][1], inout(reg32) $d[6][2], inout(reg32) $d[6][3],
            inout(reg32) $d[7][0], inout(reg32) $d[7][1], inout(reg32) $d[7][2], inout(reg32) $d[7][3],
            inout(reg32) $d[8][0], inout(reg32) $d[8][1], inout(reg32) $d[8][2], inout(reg32) $d[8][3],
            inout(reg32) $d[9][0], inout(reg32) $d[9][1], inout(reg32) $d[9][2], inout(reg32) $d[9][3],
            inout(reg32) $d[10][0], inout(reg32) $d[10][1], inout(reg32) $d[10][2], inout(reg32) $d[10][3],
            inout(reg32) $d[11][0], inout(reg32) $d[11][1], inout(reg32) $d[11][2], inout(reg32) $d[11][3],
            inout(reg32) $d[12][0], inout(reg32) $d[12][1], inout(reg32) $d[12][2], inout(reg32) $d[12][3],
            inout(reg32) $d[13][0], inout(reg32) $d[13][1], inout(reg32) $d[13][2], inout(reg32) $d[13][3],
            inout(reg32) $d[14][0], inout(reg32) $d[14][1], inout(reg32) $d[14][2], inout(reg32) $d[14][3],
            inout(reg32) $d[15][0], inout(reg32) $d[15][1], inout(reg32) $d[15][2], inout(reg32) $d[15][3],
            $($more)*
        )
    };
}

/// One `wgmma`: descriptors of A and B, whether to add to D.
macro_rules! step {
    ($left:literal, $right:literal, $add:literal) => {
        concat!(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
            " {{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, ",
            "{8}, {9}, {10}, {11}, {12}, {13}, {14}, {15}, ",
            "{16}, {17}, {18}, {19}, {20}, {21}, {22}, {23}, ",
            "{24}, {25}, {26}, {27}, {28}, {29}, {30}, {31}, ",
            "{32}, {33}, {34}, {35}, {36}, {37}, {38}, {39}, ",
            "{40}, {41}, {42}, {43}, {44}, {45}, {46}, {47}, ",
            "{48}, {49}, {50}, {51}, {52}, {53}, {54}, {55}, ",
            "{56}, {57}, {58}, {59}, {60}, {61}, {62}, {63}}}, ",
            "{",
            $left,
            "}, {",
            $right,
            "}, ",
            $add,
            ", 1, 1, 0, 0;"
        )
    };
}

#[inline(always)]
pub unsafe fn bf16_m64n128k32<const N: usize>(
    left: Rows<N>,
    right: Rows<N>,
    adds: bool,
    sum: FragmentsN128,
) -> FragmentsN128 {
    let mut d = sum;
    // SAFETY: the caller brings all threads of the four warps, and both operands.
    unsafe {
        asm_of_128_columns!(d, [
            "{{ .reg .pred adds, yes; setp.ne.b32 adds, {68}, 0; setp.eq.b32 yes, 0, 0;",
            "wgmma.fence.sync.aligned;",
            step!(64, 66, "adds"),
            step!(65, 67, "yes"),
            "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }}",
        ], [
            in(reg64) descriptor(left), in(reg64) descriptor(left.from(2, 0)),
            in(reg64) descriptor(right), in(reg64) descriptor(right.from(2, 0)),
            in(reg32) u32::from(adds),
            options(readonly, nostack),
        ]);
    }
    d
}

#[inline(always)]
pub unsafe fn bf16_m64n128k64<T, const N: usize>(
    left: Rows<N>,
    right: Rows<N>,
    sum: FragmentsN128,
    meanwhile: impl FnOnce() -> T,
) -> (FragmentsN128, T) {
    let mut d = sum;
    // SAFETY: the caller brings all threads of the four warps, and both operands; the wait is below.
    unsafe {
        asm_of_128_columns!(d, [
            "{{ .reg .pred yes; setp.eq.b32 yes, 0, 0;",
            "wgmma.fence.sync.aligned;",
            step!(64, 68, "yes"),
            step!(65, 69, "yes"),
            step!(66, 70, "yes"),
            step!(67, 71, "yes"),
            "wgmma.commit_group.sync.aligned; }}",
        ], [
            in(reg64) descriptor(left), in(reg64) descriptor(left.from(2, 0)),
            in(reg64) descriptor(left.from(4, 0)), in(reg64) descriptor(left.from(6, 0)),
            in(reg64) descriptor(right), in(reg64) descriptor(right.from(2, 0)),
            in(reg64) descriptor(right.from(4, 0)), in(reg64) descriptor(right.from(6, 0)),
            options(readonly, nostack),
        ]);
    }
    let then = meanwhile();
    // SAFETY: the product that was started; its registers pass through.
    unsafe {
        asm_of_128_columns!(
            d,
            [
                "wgmma.wait_group.sync.aligned 0;",
                "// {0} {1} {2} {3} {4} {5} {6} {7} {8} {9} {10} {11} {12} {13} {14} {15}",
                "// {16} {17} {18} {19} {20} {21} {22} {23} {24} {25} {26} {27} {28} {29} {30} {31}",
                "// {32} {33} {34} {35} {36} {37} {38} {39} {40} {41} {42} {43} {44} {45} {46} {47}",
                "// {48} {49} {50} {51} {52} {53} {54} {55} {56} {57} {58} {59} {60} {61} {62} {63}",
            ],
            [options(nostack)]
        );
    }
    (d, then)
}
