//! Products of matrices in panels (`crate::warpgroup::Panels`).

use core::arch::asm;

use super::address;
use super::wide::descriptor;
use crate::warpgroup::in_flight::{FragmentsInFlight, InFlight, InFlightN256};
use crate::warpgroup::layout::{Fragments, FragmentsN256, Panels, Rows};

/// Distance of two panels in a descriptor, in units of 16 bytes.
const PANEL: u64 = 8192 / 16;

/// The descriptor of 16 rows of four panels as a transposed B, with 128-byte swizzling (PTX ISA 9.7.15.5.1.2): its
/// columns continue in the next panel, its inner index after 8 rows, which are 1,024 bytes.
#[inline(always)]
fn transposed<const N: usize>(panels: Panels<N>) -> u64 {
    const LAYOUT: u64 = PANEL << 16 | (1024 / 16) << 32 | 1 << 62;
    let rows = panels.panel(0);
    address(rows.memory(), rows.first()) | LAYOUT
}

/// `asm!` as `asm_of_64_columns`, of 256 columns: operands 0 to 127.
macro_rules! asm_of_256_columns {
    ($d:ident, [$($template:tt)*], [$($more:tt)*]) => {
        asm!(
            $($template)*
            inout(reg32) $d[0][0][0], inout(reg32) $d[0][0][1], inout(reg32) $d[0][0][2], inout(reg32) $d[0][0][3],
            inout(reg32) $d[0][1][0], inout(reg32) $d[0][1][1], inout(reg32) $d[0][1][2], inout(reg32) $d[0][1][3],
            inout(reg32) $d[0][2][0], inout(reg32) $d[0][2][1], inout(reg32) $d[0][2][2], inout(reg32) $d[0][2][3],
            inout(reg32) $d[0][3][0], inout(reg32) $d[0][3][1], inout(reg32) $d[0][3][2], inout(reg32) $d[0][3][3],
            inout(reg32) $d[0][4][0], inout(reg32) $d[0][4][1], inout(reg32) $d[0][4][2], inout(reg32) $d[0][4][3],
            inout(reg32) $d[0][5][0], inout(reg32) $d[0][5][1], inout(reg32) $d[0][5][2], inout(reg32) $d[0][5][3],
            inout(reg32) $d[0][6][0], inout(reg32) $d[0][6][1], inout(reg32) $d[0][6][2], inout(reg32) $d[0][6][3],
            inout(reg32) $d[0][7][0], inout(reg32) $d[0][7][1], inout(reg32) $d[0][7][2], inout(reg32) $d[0][7][3],
            inout(reg32) $d[0][8][0], inout(reg32) $d[0][8][1], inout(reg32) $d[0][8][2], inout(reg32) $d[0][8][3],
            inout(reg32) $d[0][9][0], inout(reg32) $d[0][9][1], inout(reg32) $d[0][9][2], inout(reg32) $d[0][9][3],
            inout(reg32) $d[0][10][0], inout(reg32) $d[0][10][1], inout(reg32) $d[0][10][2], inout(reg32) $d[0][10][3],
            inout(reg32) $d[0][11][0], inout(reg32) $d[0][11][1], inout(reg32) $d[0][11][2], inout(reg32) $d[0][11][3],
            inout(reg32) $d[0][12][0], inout(reg32) $d[0][12][1], inout(reg32) $d[0][12][2], inout(reg32) $d[0][12][3],
            inout(reg32) $d[0][13][0], inout(reg32) $d[0][13][1], inout(reg32) $d[0][13][2], inout(reg32) $d[0][13][3],
            inout(reg32) $d[0][14][0], inout(reg32) $d[0][14][1], inout(reg32) $d[0][14][2], inout(reg32) $d[0][14][3],
            inout(reg32) $d[0][15][0], inout(reg32) $d[0][15][1], inout(reg32) $d[0][15][2], inout(reg32) $d[0][15][3],
            inout(reg32) $d[1][0][0], inout(reg32) $d[1][0][1], inout(reg32) $d[1][0][2], inout(reg32) $d[1][0][3],
            inout(reg32) $d[1][1][0], inout(reg32) $d[1][1][1], inout(reg32) $d[1][1][2], inout(reg32) $d[1][1][3],
            inout(reg32) $d[1][2][0], inout(reg32) $d[1][2][1], inout(reg32) $d[1][2][2], inout(reg32) $d[1][2][3],
            inout(reg32) $d[1][3][0], inout(reg32) $d[1][3][1], inout(reg32) $d[1][3][2], inout(reg32) $d[1][3][3],
            inout(reg32) $d[1][4][0], inout(reg32) $d[1][4][1], inout(reg32) $d[1][4][2], inout(reg32) $d[1][4][3],
            inout(reg32) $d[1][5][0], inout(reg32) $d[1][5][1], inout(reg32) $d[1][5][2], inout(reg32) $d[1][5][3],
            inout(reg32) $d[1][6][0], inout(reg32) $d[1][6][1], inout(reg32) $d[1][6][2], inout(reg32) $d[1][6][3],
            inout(reg32) $d[1][7][0], inout(reg32) $d[1][7][1], inout(reg32) $d[1][7][2], inout(reg32) $d[1][7][3],
            inout(reg32) $d[1][8][0], inout(reg32) $d[1][8][1], inout(reg32) $d[1][8][2], inout(reg32) $d[1][8][3],
            inout(reg32) $d[1][9][0], inout(reg32) $d[1][9][1], inout(reg32) $d[1][9][2], inout(reg32) $d[1][9][3],
            inout(reg32) $d[1][10][0], inout(reg32) $d[1][10][1], inout(reg32) $d[1][10][2], inout(reg32) $d[1][10][3],
            inout(reg32) $d[1][11][0], inout(reg32) $d[1][11][1], inout(reg32) $d[1][11][2], inout(reg32) $d[1][11][3],
            inout(reg32) $d[1][12][0], inout(reg32) $d[1][12][1], inout(reg32) $d[1][12][2], inout(reg32) $d[1][12][3],
            inout(reg32) $d[1][13][0], inout(reg32) $d[1][13][1], inout(reg32) $d[1][13][2], inout(reg32) $d[1][13][3],
            inout(reg32) $d[1][14][0], inout(reg32) $d[1][14][1], inout(reg32) $d[1][14][2], inout(reg32) $d[1][14][3],
            inout(reg32) $d[1][15][0], inout(reg32) $d[1][15][1], inout(reg32) $d[1][15][2], inout(reg32) $d[1][15][3],
            $($more)*
        )
    };
}

/// One `wgmma` of 64 columns, and the next step's descriptors: `$next` units further.
macro_rules! scores {
    ($add:literal, $next:literal) => {
        concat!(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{",
            "{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {10}, {11}, {12}, {13}, {14}, {15}, ",
            "{16}, {17}, {18}, {19}, {20}, {21}, {22}, {23}, {24}, {25}, {26}, {27}, {28}, {29}, {30}, {31}",
            "}}, a, b, ",
            $add,
            ", 1, 1, 0, 0; add.u32 low_a, low_a, ",
            $next,
            "; add.u32 low_b, low_b, ",
            $next,
            "; mov.b64 a, {{low_a, high_a}}; mov.b64 b, {{low_b, high_b}};"
        )
    };
}

/// The four steps of a panel; the first one adds if `$add`.
macro_rules! scores_panel {
    ($add:literal) => {
        concat!(scores!($add, "2"), scores!("yes", "2"), scores!("yes", "2"), scores!("yes", "506"))
    };
}

#[inline(always)]
pub unsafe fn start_bf16_m64n64k512<const N: usize>(
    left: Panels<N>,
    right: Panels<N>,
) -> FragmentsInFlight<N> {
    let mut d = [[0.0_f32; 4]; 8];
    // SAFETY: the caller brings all threads of the four warps, and both operands.
    unsafe {
        asm_of_64_columns!(out d, [
            "{{ .reg .pred no, yes; setp.ne.b32 no, 0, 0; setp.eq.b32 yes, 0, 0;",
            ".reg .b64 a, b; mov.b64 a, {32}; mov.b64 b, {33};",
            ".reg .b32 low_a, high_a, low_b, high_b;",
            "mov.b64 {{low_a, high_a}}, a; mov.b64 {{low_b, high_b}}, b;",
            "wgmma.fence.sync.aligned;",
            scores_panel!("no"),
            scores_panel!("yes"),
            scores_panel!("yes"),
            scores_panel!("yes"),
            scores_panel!("yes"),
            scores_panel!("yes"),
            scores_panel!("yes"),
            scores_panel!("yes"),
            "wgmma.commit_group.sync.aligned; }}",
        ], [
            in(reg64) descriptor(left.panel(0)), in(reg64) descriptor(right.panel(0)),
            options(readonly, nostack),
        ]);
    }
    InFlight::idle(d)
}

/// One `wgmma` of 64 columns of a transposed B, A in registers, and the next step's descriptor: 16 rows of B.
macro_rules! panel {
    ($a:literal $b:literal $c:literal $d:literal) => {
        concat!(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{",
            "{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, ",
            "{8}, {9}, {10}, {11}, {12}, {13}, {14}, {15}, ",
            "{16}, {17}, {18}, {19}, {20}, {21}, {22}, {23}, ",
            "{24}, {25}, {26}, {27}, {28}, {29}, {30}, {31}",
            "}}, {{{",
            $a,
            "}, {",
            $b,
            "}, {",
            $c,
            "}, {",
            $d,
            "}}}, b, yes, 1, 1, 1; ",
            "add.u32 low_b, low_b, 128; mov.b64 b, {{low_b, high_b}};"
        )
    };
}

#[inline(always)]
pub unsafe fn bf16_m64n64k64<T, const N: usize>(
    a: [[u32; 4]; 4],
    right: Panels<N>,
    sum: Fragments,
    meanwhile: impl FnOnce() -> T,
) -> (Fragments, T) {
    let mut d = sum;
    // SAFETY: the caller brings all threads of the four warps, and B; the wait is below, and has all registers of the
    // product.
    unsafe {
        asm_of_four_steps!(d, [
            "{{ .reg .pred yes; setp.eq.b32 yes, 0, 0;",
            ".reg .b64 b; mov.b64 b, {48};",
            ".reg .b32 low_b, high_b; mov.b64 {{low_b, high_b}}, b;",
            "wgmma.fence.sync.aligned;",
            panel!(32 33 34 35),
            panel!(36 37 38 39),
            panel!(40 41 42 43),
            panel!(44 45 46 47),
            "wgmma.commit_group.sync.aligned; }}",
        ], [a], [in(reg64) transposed(right), options(readonly, nostack)]);
    }
    let then = meanwhile();
    // SAFETY: the product that was started; its registers pass through.
    unsafe {
        wait_for_64_columns!(d, a);
    }
    (d, then)
}

#[inline(always)]
pub unsafe fn bf16_m64n64k64_twice<T, const N: usize>(
    [a, b]: [[[u32; 4]; 4]; 2],
    [first, second]: [Panels<N>; 2],
    sum: Fragments,
    meanwhile: impl FnOnce() -> T,
) -> (Fragments, T) {
    let mut d = sum;
    // SAFETY: the caller brings all threads of the four warps, and B; the wait is below, and has all registers of the
    // products.
    unsafe {
        asm_of_four_steps!(d, [
            "{{ .reg .pred yes; setp.eq.b32 yes, 0, 0;",
            ".reg .b64 b; mov.b64 b, {64};",
            ".reg .b32 low_b, high_b; mov.b64 {{low_b, high_b}}, b;",
            "wgmma.fence.sync.aligned;",
            panel!(32 33 34 35),
            panel!(36 37 38 39),
            panel!(40 41 42 43),
            panel!(44 45 46 47),
            "mov.b64 b, {65}; mov.b64 {{low_b, high_b}}, b;",
            panel!(48 49 50 51),
            panel!(52 53 54 55),
            panel!(56 57 58 59),
            panel!(60 61 62 63),
            "wgmma.commit_group.sync.aligned; }}",
        ], [a b], [
            in(reg64) transposed(first), in(reg64) transposed(second),
            options(readonly, nostack),
        ]);
    }
    let then = meanwhile();
    // SAFETY: the products that were started; their registers pass through.
    unsafe {
        wait_for_64_columns!(d, a, b);
    }
    (d, then)
}

/// One `wgmma` of 256 columns, and the next step's descriptors: 32 bytes of A, 16 rows of B.
macro_rules! tall {
    () => {
        concat!(
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {{",
            "{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, ",
            "{8}, {9}, {10}, {11}, {12}, {13}, {14}, {15}, ",
            "{16}, {17}, {18}, {19}, {20}, {21}, {22}, {23}, ",
            "{24}, {25}, {26}, {27}, {28}, {29}, {30}, {31}, ",
            "{32}, {33}, {34}, {35}, {36}, {37}, {38}, {39}, ",
            "{40}, {41}, {42}, {43}, {44}, {45}, {46}, {47}, ",
            "{48}, {49}, {50}, {51}, {52}, {53}, {54}, {55}, ",
            "{56}, {57}, {58}, {59}, {60}, {61}, {62}, {63}, ",
            "{64}, {65}, {66}, {67}, {68}, {69}, {70}, {71}, ",
            "{72}, {73}, {74}, {75}, {76}, {77}, {78}, {79}, ",
            "{80}, {81}, {82}, {83}, {84}, {85}, {86}, {87}, ",
            "{88}, {89}, {90}, {91}, {92}, {93}, {94}, {95}, ",
            "{96}, {97}, {98}, {99}, {100}, {101}, {102}, {103}, ",
            "{104}, {105}, {106}, {107}, {108}, {109}, {110}, {111}, ",
            "{112}, {113}, {114}, {115}, {116}, {117}, {118}, {119}, ",
            "{120}, {121}, {122}, {123}, {124}, {125}, {126}, {127}",
            "}}, a, b, yes, 1, 1, 0, 1; add.u32 low_a, low_a, 2; add.u32 low_b, low_b, 128; ",
            "mov.b64 a, {{low_a, high_a}}; mov.b64 b, {{low_b, high_b}};"
        )
    };
}

#[inline(always)]
pub unsafe fn start_bf16_m64n256k32<const N: usize>(
    left: Rows<N>,
    right: Panels<N>,
    sum: InFlightN256<N>,
) -> InFlightN256<N> {
    let mut d = sum.fragments;
    // SAFETY: the caller brings all threads of the four warps, and both operands.
    unsafe {
        asm_of_256_columns!(d, [
            "{{ .reg .pred yes; setp.eq.b32 yes, 0, 0;",
            ".reg .b64 a, b; mov.b64 a, {128}; mov.b64 b, {129};",
            ".reg .b32 low_a, high_a, low_b, high_b;",
            "mov.b64 {{low_a, high_a}}, a; mov.b64 {{low_b, high_b}}, b;",
            "wgmma.fence.sync.aligned;",
            tall!(),
            tall!(),
            "wgmma.commit_group.sync.aligned; }}",
        ], [
            in(reg64) descriptor(left), in(reg64) transposed(right),
            options(readonly, nostack),
        ]);
    }
    InFlight::idle(d)
}

impl<const N: usize> FragmentsInFlight<N> {
    #[inline(always)]
    pub(crate) unsafe fn finish<const PENDING: u32>(self) -> Fragments {
        let mut d = self.fragments;
        // SAFETY: the product that was started; its registers pass through.
        unsafe {
            asm_of_64_columns!(inout d, [
                "wgmma.wait_group.sync.aligned {32};",
                "// {0} {1} {2} {3} {4} {5} {6} {7} {8} {9} {10} {11} {12} {13} {14} {15}",
                "// {16} {17} {18} {19} {20} {21} {22} {23} {24} {25} {26} {27} {28} {29} {30} {31}",
            ], [
                const PENDING,
                options(nostack),
            ]);
        }
        d
    }
}

impl<const N: usize> InFlightN256<N> {
    #[inline(always)]
    pub(crate) unsafe fn finish<const PENDING: u32>(self) -> FragmentsN256 {
        let mut d = self.fragments;
        // SAFETY: the product that was started; its registers pass through.
        unsafe {
            asm_of_256_columns!(d, [
                "wgmma.wait_group.sync.aligned {128};",
                "// {0} {1} {2} {3} {4} {5} {6} {7} {8} {9} {10} {11} {12} {13} {14} {15}",
                "// {16} {17} {18} {19} {20} {21} {22} {23} {24} {25} {26} {27} {28} {29} {30} {31}",
                "// {32} {33} {34} {35} {36} {37} {38} {39} {40} {41} {42} {43} {44} {45} {46} {47}",
                "// {48} {49} {50} {51} {52} {53} {54} {55} {56} {57} {58} {59} {60} {61} {62} {63}",
                "// {64} {65} {66} {67} {68} {69} {70} {71} {72} {73} {74} {75} {76} {77} {78} {79}",
                "// {80} {81} {82} {83} {84} {85} {86} {87} {88} {89} {90} {91} {92} {93} {94} {95}",
                "// {96} {97} {98} {99} {100} {101} {102} {103} {104} {105} {106} {107} {108} {109} {110} {111}",
                "// {112} {113} {114} {115} {116} {117} {118} {119} {120} {121} {122} {123} {124} {125} {126} {127}",
            ], [
                const PENDING,
                options(nostack),
            ]);
        }
        d
    }
}
