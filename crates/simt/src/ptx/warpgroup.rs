//! [`crate::warpgroup`] on `sm_90a`.
//!
//! The registers of a product in flight must not be accessed. Either one asm block holds the product and its
//! wait, or a second asm block waits and has all of these registers as operands, so that the compiler uses
//! none of them in between. (If a register is accessed nevertheless, `ptxas` inserts an earlier wait.)

/// `asm!` of a template, registers `$kind` of a product of 64 columns as operands 0 to 31, and further operands.
macro_rules! asm_of_64_columns {
    ($kind:ident $d:ident, [$($template:tt)*], [$($more:tt)*]) => {
        asm!(
            $($template)*
            $kind(reg32) $d[0][0], $kind(reg32) $d[0][1], $kind(reg32) $d[0][2], $kind(reg32) $d[0][3],
            $kind(reg32) $d[1][0], $kind(reg32) $d[1][1], $kind(reg32) $d[1][2], $kind(reg32) $d[1][3],
            $kind(reg32) $d[2][0], $kind(reg32) $d[2][1], $kind(reg32) $d[2][2], $kind(reg32) $d[2][3],
            $kind(reg32) $d[3][0], $kind(reg32) $d[3][1], $kind(reg32) $d[3][2], $kind(reg32) $d[3][3],
            $kind(reg32) $d[4][0], $kind(reg32) $d[4][1], $kind(reg32) $d[4][2], $kind(reg32) $d[4][3],
            $kind(reg32) $d[5][0], $kind(reg32) $d[5][1], $kind(reg32) $d[5][2], $kind(reg32) $d[5][3],
            $kind(reg32) $d[6][0], $kind(reg32) $d[6][1], $kind(reg32) $d[6][2], $kind(reg32) $d[6][3],
            $kind(reg32) $d[7][0], $kind(reg32) $d[7][1], $kind(reg32) $d[7][2], $kind(reg32) $d[7][3],
            $($more)*
        )
    };
}

/// The registers of four steps of A, `$a`, as operands.
macro_rules! asm_of_four_steps {
    ($d:ident, [$($template:tt)*], [$($a:ident)+], [$($more:tt)*]) => {
        asm_of_64_columns!(inout $d, [$($template)*], [
            $(
                in(reg32) $a[0][0], in(reg32) $a[0][1], in(reg32) $a[0][2], in(reg32) $a[0][3],
                in(reg32) $a[1][0], in(reg32) $a[1][1], in(reg32) $a[1][2], in(reg32) $a[1][3],
                in(reg32) $a[2][0], in(reg32) $a[2][1], in(reg32) $a[2][2], in(reg32) $a[2][3],
                in(reg32) $a[3][0], in(reg32) $a[3][1], in(reg32) $a[3][2], in(reg32) $a[3][3],
            )+
            $($more)*
        ])
    };
}

/// Waits for a product of 64 columns whose A is in registers, of four steps or of eight. All registers of the product
/// and of A are operands of the wait.
macro_rules! wait_for_64_columns {
    ($d:ident, $a:ident) => {
        asm_of_four_steps!($d, [
            "wgmma.wait_group.sync.aligned 0;",
            "// {0} {1} {2} {3} {4} {5} {6} {7} {8} {9} {10} {11} {12} {13} {14} {15}",
            "// {16} {17} {18} {19} {20} {21} {22} {23} {24} {25} {26} {27} {28} {29} {30} {31}",
            "// {32} {33} {34} {35} {36} {37} {38} {39} {40} {41} {42} {43} {44} {45} {46} {47}",
        ], [$a], [options(nostack)])
    };
    ($d:ident, $a:ident, $b:ident) => {
        asm_of_four_steps!($d, [
            "wgmma.wait_group.sync.aligned 0;",
            "// {0} {1} {2} {3} {4} {5} {6} {7} {8} {9} {10} {11} {12} {13} {14} {15}",
            "// {16} {17} {18} {19} {20} {21} {22} {23} {24} {25} {26} {27} {28} {29} {30} {31}",
            "// {32} {33} {34} {35} {36} {37} {38} {39} {40} {41} {42} {43} {44} {45} {46} {47}",
            "// {48} {49} {50} {51} {52} {53} {54} {55} {56} {57} {58} {59} {60} {61} {62} {63}",
        ], [$a $b], [options(nostack)])
    };
}

mod panels;
mod wide;

use core::arch::asm;

pub use panels::{
    bf16_m64n64k64, bf16_m64n64k64_twice, start_bf16_m64n64k512, start_bf16_m64n256k32,
};
pub use wide::{bf16_m64n128k32, bf16_m64n128k64};

use crate::shared::Shared;
use crate::warpgroup::layout::{Fragments, IntegerFragments};

#[inline(always)]
pub fn fence_proxy_async() {
    // SAFETY: no operand and no precondition.
    unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) }
}

#[inline(always)]
pub unsafe fn setmaxnreg_inc<const REGISTERS: u32>() {
    // SAFETY: the caller brings all threads of the four warps, and the registers.
    unsafe {
        asm!("setmaxnreg.inc.sync.aligned.u32 {registers};", registers = const REGISTERS, options(nostack));
    }
}

#[inline(always)]
pub unsafe fn setmaxnreg_dec<const REGISTERS: u32>() {
    // SAFETY: the caller brings all threads of the four warps.
    unsafe {
        asm!("setmaxnreg.dec.sync.aligned.u32 {registers};", registers = const REGISTERS, options(nostack));
    }
}

#[inline(always)]
pub unsafe fn wait_for_products<const PENDING: u32>() {
    // SAFETY: the caller brings all threads of the four warps.
    unsafe {
        asm!("wgmma.wait_group.sync.aligned {pending};", pending = const PENDING, options(nostack))
    }
}

/// Distance of two steps in a descriptor: twice 16 bytes of all columns, in units of 16 bytes.
const STEP: u64 = 2 * 1024 / 16;

/// The descriptor of the first step of B.
#[inline(always)]
fn descriptor<const N: usize>(right: Shared<u32, N>) -> u64 {
    /// Distances of core matrices of B: 1024 bytes along the inner index, 128 along the columns
    /// (PTX ISA 9.7.15.5.1.2, "Matrix Descriptor Format").
    const LAYOUT: u64 = 1024 / 16 << 16 | 128 / 16 << 32;
    address(right, 0) | LAYOUT
}

/// The address of word `i` in a descriptor: 14 bits, in units of 16 bytes. In a cluster the higher bits of a
/// shared-memory address hold the block's rank.
#[inline(always)]
fn address<const N: usize>(memory: Shared<u32, N>, i: u32) -> u64 {
    u64::from(memory.address::<4>(i) >> 4 & 0x3FFF)
}

/// One `wgmma`: its name, four registers of A, a descriptor of B, whether to add to D, further operands.
macro_rules! step {
    ($name:literal, $a:literal $b:literal $c:literal $d:literal, $right:literal, $add:literal $rest:literal) => {
        concat!(
            $name,
            " {{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, ",
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
            $rest,
        )
    };
}

macro_rules! bf16_step {
    ($a:literal $b:literal $c:literal $d:literal, $right:literal, $add:literal) => {
        step!(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
            $a $b $c $d, $right, $add ", 1, 1, 0;"
        )
    };
}

#[inline(always)]
pub unsafe fn bf16_m64n64k128<const N: usize>(
    a: [[u32; 4]; 8],
    right: Shared<u32, N>,
) -> Fragments {
    let first = descriptor(right);
    let mut d = [[0.0_f32; 4]; 8];
    // SAFETY: the caller brings all threads of the four warps, and B.
    unsafe {
        asm_of_64_columns!(out d, [
            "{{ .reg .pred no, yes; setp.ne.b32 no, 0, 0; setp.eq.b32 yes, 0, 0;",
            "wgmma.fence.sync.aligned;",
            bf16_step!(32 33 34 35, 64, "no"),
            bf16_step!(36 37 38 39, 65, "yes"),
            bf16_step!(40 41 42 43, 66, "yes"),
            bf16_step!(44 45 46 47, 67, "yes"),
            bf16_step!(48 49 50 51, 68, "yes"),
            bf16_step!(52 53 54 55, 69, "yes"),
            bf16_step!(56 57 58 59, 70, "yes"),
            bf16_step!(60 61 62 63, 71, "yes"),
            "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }}",
        ], [
            in(reg32) a[0][0], in(reg32) a[0][1], in(reg32) a[0][2], in(reg32) a[0][3],
            in(reg32) a[1][0], in(reg32) a[1][1], in(reg32) a[1][2], in(reg32) a[1][3],
            in(reg32) a[2][0], in(reg32) a[2][1], in(reg32) a[2][2], in(reg32) a[2][3],
            in(reg32) a[3][0], in(reg32) a[3][1], in(reg32) a[3][2], in(reg32) a[3][3],
            in(reg32) a[4][0], in(reg32) a[4][1], in(reg32) a[4][2], in(reg32) a[4][3],
            in(reg32) a[5][0], in(reg32) a[5][1], in(reg32) a[5][2], in(reg32) a[5][3],
            in(reg32) a[6][0], in(reg32) a[6][1], in(reg32) a[6][2], in(reg32) a[6][3],
            in(reg32) a[7][0], in(reg32) a[7][1], in(reg32) a[7][2], in(reg32) a[7][3],
            in(reg64) first, in(reg64) first + 1 * STEP,
            in(reg64) first + 2 * STEP, in(reg64) first + 3 * STEP,
            in(reg64) first + 4 * STEP, in(reg64) first + 5 * STEP,
            in(reg64) first + 6 * STEP, in(reg64) first + 7 * STEP,
            options(readonly, nostack),
        ]);
    }
    d
}

macro_rules! e4m3_step {
    ($a:literal $b:literal $c:literal $d:literal, $right:literal, $add:literal) => {
        step!(
            "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3",
            $a $b $c $d, $right, $add ", 1, 1;"
        )
    };
}

#[inline(always)]
pub unsafe fn e4m3_m64n64k64<const N: usize>(
    a: [[u32; 4]; 2],
    right: Shared<u32, N>,
    step: u32,
) -> Fragments {
    let first = descriptor(right) + u64::from(step) * STEP;
    let mut d = [[0.0_f32; 4]; 8];
    // SAFETY: the caller brings all threads of the four warps, and B.
    unsafe {
        asm_of_64_columns!(out d, [
            "{{ .reg .pred no, yes; setp.ne.b32 no, 0, 0; setp.eq.b32 yes, 0, 0;",
            "wgmma.fence.sync.aligned;",
            e4m3_step!(32 33 34 35, 40, "no"),
            e4m3_step!(36 37 38 39, 41, "yes"),
            "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }}",
        ], [
            in(reg32) a[0][0], in(reg32) a[0][1], in(reg32) a[0][2], in(reg32) a[0][3],
            in(reg32) a[1][0], in(reg32) a[1][1], in(reg32) a[1][2], in(reg32) a[1][3],
            in(reg64) first, in(reg64) first + STEP,
            options(readonly, nostack),
        ]);
    }
    d
}

macro_rules! s8_step {
    ($a:literal $b:literal $c:literal $d:literal, $right:literal, $add:literal) => {
        step!(
            "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8",
            $a $b $c $d, $right, $add ";"
        )
    };
}

#[inline(always)]
pub unsafe fn s8_m64n64k128<T, const N: usize>(
    a: [[u32; 4]; 4],
    right: Shared<u32, N>,
    meanwhile: impl FnOnce() -> T,
) -> (IntegerFragments, T) {
    let first = descriptor(right);
    let mut d = [[0_i32; 4]; 8];
    // SAFETY: the caller brings all threads of the four warps, and B; the wait is below.
    unsafe {
        asm_of_64_columns!(out d, [
            "{{ .reg .pred no, yes; setp.ne.b32 no, 0, 0; setp.eq.b32 yes, 0, 0;",
            "wgmma.fence.sync.aligned;",
            s8_step!(32 33 34 35, 48, "no"),
            s8_step!(36 37 38 39, 49, "yes"),
            s8_step!(40 41 42 43, 50, "yes"),
            s8_step!(44 45 46 47, 51, "yes"),
            "wgmma.commit_group.sync.aligned; }}",
        ], [
            in(reg32) a[0][0], in(reg32) a[0][1], in(reg32) a[0][2], in(reg32) a[0][3],
            in(reg32) a[1][0], in(reg32) a[1][1], in(reg32) a[1][2], in(reg32) a[1][3],
            in(reg32) a[2][0], in(reg32) a[2][1], in(reg32) a[2][2], in(reg32) a[2][3],
            in(reg32) a[3][0], in(reg32) a[3][1], in(reg32) a[3][2], in(reg32) a[3][3],
            in(reg64) first, in(reg64) first + 1 * STEP,
            in(reg64) first + 2 * STEP, in(reg64) first + 3 * STEP,
            options(readonly, nostack),
        ]);
    }
    let then = meanwhile();
    // SAFETY: the product that was started; its registers pass through.
    unsafe {
        wait_for_64_columns!(d, a);
    }
    (d, then)
}
