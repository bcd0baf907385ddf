//! [`crate::shared`] on the device. Addresses are of the shared state space.
//!
//! The asm is neither `pure` nor `nomem`: LLVM moves nothing across it or across a barrier.

use core::arch::{asm, global_asm};

// Dynamic shared memory: the launch gives its size. Kernels that do not use it pay nothing. Operands of products that
// are swizzled lie at multiples of 1,024 bytes (`crate::warpgroup::Rows`).
global_asm!(".extern .shared .align 1024 .b8 simt_shared[];");

#[inline(always)]
pub unsafe fn array(byte_offset: u32, _bytes: u32) -> u32 {
    let window: u32;
    // SAFETY: the address of a symbol; reads nothing.
    unsafe {
        asm!(
            "mov.u32 {window}, simt_shared;",
            window = out(reg32) window,
            options(pure, nomem, nostack),
        );
    }
    window + byte_offset
}

#[inline(always)]
pub fn element<const WORDS: u32>(base: u32, _words: u32, i: u32) -> u32 {
    base + 4 * i
}

#[inline(always)]
pub unsafe fn load(address: u32) -> u32 {
    let word: u32;
    // SAFETY: inside the block's shared memory, aligned and ordered by the caller's promise.
    unsafe {
        asm!(
            "ld.shared.b32 {word}, [{address}];",
            word = out(reg32) word,
            address = in(reg32) address,
            options(readonly, nostack),
        );
    }
    word
}

#[inline(always)]
pub unsafe fn load_x2(address: u32) -> [u32; 2] {
    let (a, b): (u32, u32);
    // SAFETY: inside the block's shared memory, aligned and ordered by the caller's promise.
    unsafe {
        asm!(
            "ld.shared.v2.b32 {{{a}, {b}}}, [{address}];",
            a = out(reg32) a,
            b = out(reg32) b,
            address = in(reg32) address,
            options(readonly, nostack),
        );
    }
    [a, b]
}

#[inline(always)]
pub unsafe fn load_x4(address: u32) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: inside the block's shared memory, aligned and ordered by the caller's promise.
    unsafe {
        asm!(
            "ld.shared.v4.b32 {{{a}, {b}, {c}, {d}}}, [{address}];",
            a = out(reg32) a,
            b = out(reg32) b,
            c = out(reg32) c,
            d = out(reg32) d,
            address = in(reg32) address,
            options(readonly, nostack),
        );
    }
    [a, b, c, d]
}

#[inline(always)]
pub unsafe fn store(address: u32, value: u32) {
    // SAFETY: inside the block's shared memory, aligned and ordered by the caller's promise.
    unsafe {
        asm!(
            "st.shared.b32 [{address}], {value};",
            address = in(reg32) address,
            value = in(reg32) value,
            options(nostack),
        );
    }
}

#[inline(always)]
pub unsafe fn store_x2(address: u32, [a, b]: [u32; 2]) {
    // SAFETY: inside the block's shared memory, aligned and ordered by the caller's promise.
    unsafe {
        asm!(
            "st.shared.v2.b32 [{address}], {{{a}, {b}}};",
            address = in(reg32) address,
            a = in(reg32) a,
            b = in(reg32) b,
            options(nostack),
        );
    }
}

#[inline(always)]
pub unsafe fn store_x2_where(there: bool, address: impl FnOnce() -> u32, [a, b]: [u32; 2]) {
    // SAFETY: inside the block's shared memory, aligned and ordered by the caller's promise, if `there`.
    unsafe {
        asm!(
            "{{ .reg .pred there; setp.ne.u32 there, {there}, 0;",
            "@there st.shared.v2.b32 [{address}], {{{a}, {b}}}; }}",
            there = in(reg32) u32::from(there),
            address = in(reg32) address(),
            a = in(reg32) a,
            b = in(reg32) b,
            options(nostack),
        );
    }
}

#[inline(always)]
pub unsafe fn store_x4(address: u32, [a, b, c, d]: [u32; 4]) {
    // SAFETY: inside the block's shared memory, aligned and ordered by the caller's promise.
    unsafe {
        asm!(
            "st.shared.v4.b32 [{address}], {{{a}, {b}, {c}, {d}}};",
            address = in(reg32) address,
            a = in(reg32) a,
            b = in(reg32) b,
            c = in(reg32) c,
            d = in(reg32) d,
            options(nostack),
        );
    }
}
