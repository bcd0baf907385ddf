//! [`crate::atomic`] on the device.

use core::arch::asm;

use super::mem::Pointer;

/// A word of global memory.
#[derive(Clone, Copy, Debug)]
pub struct GlobalWord(u64);

#[inline(always)]
pub unsafe fn global_word(memory: Pointer<u32>, index: u64) -> GlobalWord {
    // SAFETY: in bounds by the caller's promise.
    GlobalWord(unsafe { memory.global_address(index) })
}

/// `old = op(word, value)` in the global state space.
macro_rules! in_global_memory {
    ($($name:ident: $instruction:literal;)*) => { $(
        #[inline(always)]
        pub fn $name(word: GlobalWord, value: u32) -> u32 {
            let old: u32;
            // SAFETY: `global_word` was promised a word in bounds and aligned.
            unsafe {
                asm!(
                    concat!($instruction, " {old}, [{word}], {value};"),
                    old = out(reg32) old,
                    word = in(reg64) word.0,
                    value = in(reg32) value,
                    options(nostack),
                );
            }
            old
        }
    )* };
}

in_global_memory! {
    global_add: "atom.relaxed.gpu.global.add.u32";
    global_add_acq_rel: "atom.acq_rel.gpu.global.add.u32";
    global_max: "atom.relaxed.gpu.global.max.u32";
    global_exchange: "atom.relaxed.gpu.global.exch.b32";
}

/// As `in_global_memory`, in the shared state space.
macro_rules! in_shared_memory {
    ($($name:ident: $instruction:literal;)*) => { $(
        #[inline(always)]
        pub fn $name(address: u32, value: u32) -> u32 {
            let old: u32;
            // SAFETY: `BlockAtomicU32::new` was promised an element of a shared array.
            unsafe {
                asm!(
                    concat!($instruction, " {old}, [{word}], {value};"),
                    old = out(reg32) old,
                    word = in(reg32) address,
                    value = in(reg32) value,
                    options(nostack),
                );
            }
            old
        }
    )* };
}

in_shared_memory! {
    shared_add: "atom.relaxed.cta.shared.add.u32";
    shared_max: "atom.relaxed.cta.shared.max.u32";
    shared_exchange: "atom.relaxed.cta.shared.exch.b32";
}

#[inline(always)]
pub fn global_compare_exchange(word: GlobalWord, expected: u32, new: u32) -> u32 {
    let old: u32;
    // SAFETY: `global_word` was promised a word in bounds and aligned.
    unsafe {
        asm!(
            "atom.relaxed.gpu.global.cas.b32 {old}, [{word}], {expected}, {new};",
            old = out(reg32) old,
            word = in(reg64) word.0,
            expected = in(reg32) expected,
            new = in(reg32) new,
            options(nostack),
        );
    }
    old
}

#[inline(always)]
pub fn shared_compare_exchange(address: u32, expected: u32, new: u32) -> u32 {
    let old: u32;
    // SAFETY: `BlockAtomicU32::new` was promised an element of a shared array.
    unsafe {
        asm!(
            "atom.relaxed.cta.shared.cas.b32 {old}, [{word}], {expected}, {new};",
            old = out(reg32) old,
            word = in(reg32) address,
            expected = in(reg32) expected,
            new = in(reg32) new,
            options(nostack),
        );
    }
    old
}

#[inline(always)]
pub fn global_load(word: GlobalWord) -> u32 {
    let value: u32;
    // SAFETY: `global_word` was promised a word in bounds and aligned. Not `readonly`: each load
    // of an atomic is its own.
    unsafe {
        asm!(
            "ld.relaxed.gpu.global.u32 {value}, [{word}];",
            value = out(reg32) value,
            word = in(reg64) word.0,
            options(nostack),
        );
    }
    value
}

#[inline(always)]
pub fn shared_load(address: u32) -> u32 {
    let value: u32;
    // SAFETY: `BlockAtomicU32::new` was promised an element of a shared array. Not `readonly`: each
    // load of an atomic is its own.
    unsafe {
        asm!(
            "ld.relaxed.cta.shared.u32 {value}, [{word}];",
            value = out(reg32) value,
            word = in(reg32) address,
            options(nostack),
        );
    }
    value
}

#[inline(always)]
pub fn global_store(word: GlobalWord, value: u32) {
    // SAFETY: `global_word` was promised a word in bounds and aligned.
    unsafe {
        asm!(
            "st.relaxed.gpu.global.u32 [{word}], {value};",
            word = in(reg64) word.0,
            value = in(reg32) value,
            options(nostack),
        );
    }
}

#[inline(always)]
pub fn shared_store(address: u32, value: u32) {
    // SAFETY: `BlockAtomicU32::new` was promised an element of a shared array.
    unsafe {
        asm!(
            "st.relaxed.cta.shared.u32 [{word}], {value};",
            word = in(reg32) address,
            value = in(reg32) value,
            options(nostack),
        );
    }
}

macro_rules! fences {
    ($($name:ident: $instruction:literal;)*) => { $(
        #[inline(always)]
        pub fn $name() {
            // SAFETY: a fence has no precondition.
            unsafe { asm!($instruction, options(nostack)) }
        }
    )* };
}

fences! {
    fence_block: "fence.acq_rel.cta;";
    fence_device: "fence.acq_rel.gpu;";
    fence_system: "fence.acq_rel.sys;";
}
