//! [`crate::mem`] on the device: bare pointers.
//!
//! Single elements are plain loads and stores, which LLVM folds and schedules; it infers the global
//! address space from the kernel's pointer parameters. Vectors are asm, because LLVM splits a wide
//! copy of a struct.

use core::arch::asm;

/// An element type; on the device without methods.
pub trait Access: Copy {}

impl Access for u8 {}
impl Access for u16 {}
impl Access for u32 {}
impl Access for i32 {}
impl Access for f32 {}

/// A generic address that points to global memory.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Pointer<T>(*mut T);

impl<T: Access> Pointer<T> {
    #[inline(always)]
    pub fn new(pointer: *mut T) -> Self {
        Self(pointer)
    }

    #[inline(always)]
    pub fn cast<U>(self) -> Pointer<U> {
        Pointer(self.0.cast())
    }

    /// The pointer to element `i`.
    #[inline(always)]
    pub fn skip(self, i: u64) -> Self {
        Self(self.0.wrapping_add(i as usize))
    }

    #[inline(always)]
    pub fn opt_barrier(self) -> Self {
        let mut address = self.0;
        // SAFETY: no instruction.
        unsafe { asm!("// {0}", inout(reg64) address, options(nomem, nostack)) }
        Self(address)
    }

    /// Address of element `i` in the global state space, which inline asm addresses.
    ///
    /// # Safety
    /// - Element `i` lies in the allocation, or `i` is 0.
    #[inline(always)]
    pub unsafe fn global_address(self, i: u64) -> u64 {
        let address: u64;
        // SAFETY: in bounds by the caller's promise; the conversion reads no memory.
        unsafe {
            asm!(
                "cvta.to.global.u64 {address}, {generic};",
                address = out(reg64) address,
                generic = in(reg64) self.0.add(i as usize),
                options(pure, nomem, nostack),
            );
        }
        address
    }
}

/// The place of element `i` of view `which`: its address.
#[inline(always)]
pub fn place<T: Access, const N: usize>(views: [Pointer<T>; N], which: u32, i: u64) -> u64 {
    let mut view = views[0];
    let mut n = 1;
    while n < N {
        view = if which == n as u32 { views[n] } else { view };
        n += 1;
    }
    view.skip(i).0 as u64
}

/// The view that starts at a place.
#[inline(always)]
pub fn at_place<T: Access, const N: usize>(_views: [Pointer<T>; N], place: u64) -> Pointer<T> {
    Pointer(place as *mut T)
}

#[inline(always)]
pub unsafe fn precompute_address<T: Access>(pointer: Pointer<T>, i: u64) {
    // SAFETY: a comment; the operand is in bounds by the caller's promise. Not `pure`, so that LLVM does
    // not move it.
    unsafe {
        asm!(
            "// {address}",
            address = in(reg64) pointer.global_address(i),
            options(nomem, nostack),
        );
    }
}

#[inline(always)]
pub unsafe fn prefetch_l2<T: Access>(pointer: Pointer<T>, i: u64, bytes: u32) {
    // SAFETY: in bounds and aligned by the caller's promise. Not `pure`, so that LLVM does not move it.
    unsafe {
        asm!(
            "cp.async.bulk.prefetch.L2.global [{address}], {bytes};",
            address = in(reg64) pointer.global_address(i),
            bytes = in(reg32) bytes,
            options(nomem, nostack),
        );
    }
}

#[inline(always)]
pub unsafe fn load_constant<T: Access>(pointer: Pointer<T>, i: u64) -> T {
    // SAFETY: in bounds and aligned by the caller's promise.
    unsafe { pointer.0.add(i as usize).read() }
}

#[inline(always)]
pub unsafe fn load_constant_x2<T: Access>(pointer: Pointer<T>, i: u64) -> [u32; 2] {
    let (a, b): (u32, u32);
    // SAFETY: in bounds, aligned and unwritten during the launch by the caller's promise.
    unsafe {
        asm!(
            "ld.global.nc.v2.u32 {{{a}, {b}}}, [{address}];",
            a = out(reg32) a,
            b = out(reg32) b,
            address = in(reg64) pointer.global_address(i),
            options(pure, readonly, nostack),
        );
    }
    [a, b]
}

#[inline(always)]
pub unsafe fn load_constant_x4<T: Access>(pointer: Pointer<T>, i: u64) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: in bounds, aligned and unwritten during the launch by the caller's promise.
    unsafe {
        asm!(
            "ld.global.nc.v4.u32 {{{a}, {b}, {c}, {d}}}, [{address}];",
            a = out(reg32) a,
            b = out(reg32) b,
            c = out(reg32) c,
            d = out(reg32) d,
            address = in(reg64) pointer.global_address(i),
            options(pure, readonly, nostack),
        );
    }
    [a, b, c, d]
}

#[inline(always)]
pub unsafe fn load_early_x4<T: Access>(pointer: Pointer<T>, i: u64) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: in bounds, aligned and unwritten by the caller's promise. Not `pure`, so that LLVM does not move it.
    unsafe {
        asm!(
            "ld.global.nc.L1::no_allocate.v4.u32 {{{a}, {b}, {c}, {d}}}, [{address}];",
            a = out(reg32) a,
            b = out(reg32) b,
            c = out(reg32) c,
            d = out(reg32) d,
            address = in(reg64) pointer.global_address(i),
            options(readonly, nostack),
        );
    }
    [a, b, c, d]
}

#[inline(always)]
pub unsafe fn load<T: Access>(pointer: Pointer<T>, i: u64) -> T {
    // SAFETY: in bounds and aligned by the caller's promise.
    unsafe { pointer.0.add(i as usize).read() }
}

#[inline(always)]
pub unsafe fn load_volatile<T: Access>(pointer: Pointer<T>, i: u64) -> u32 {
    let word: u32;
    // SAFETY: in bounds and aligned by the caller's promise.
    unsafe {
        asm!(
            "ld.global.b32 {word}, [{address}];",
            word = out(reg32) word,
            address = in(reg64) pointer.global_address(i),
            options(readonly, nostack),
        );
    }
    word
}

#[inline(always)]
pub unsafe fn load_x2<T: Access>(pointer: Pointer<T>, i: u64) -> [u32; 2] {
    let (a, b): (u32, u32);
    // SAFETY: in bounds and aligned by the caller's promise.
    unsafe {
        asm!(
            "ld.global.v2.u32 {{{a}, {b}}}, [{address}];",
            a = out(reg32) a,
            b = out(reg32) b,
            address = in(reg64) pointer.global_address(i),
            options(readonly, nostack),
        );
    }
    [a, b]
}

#[inline(always)]
pub unsafe fn load_x4<T: Access>(pointer: Pointer<T>, i: u64) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: in bounds and aligned by the caller's promise.
    unsafe {
        asm!(
            "ld.global.v4.u32 {{{a}, {b}, {c}, {d}}}, [{address}];",
            a = out(reg32) a,
            b = out(reg32) b,
            c = out(reg32) c,
            d = out(reg32) d,
            address = in(reg64) pointer.global_address(i),
            options(readonly, nostack),
        );
    }
    [a, b, c, d]
}

#[inline(always)]
pub unsafe fn store<T: Access>(pointer: Pointer<T>, i: u64, value: T) {
    // SAFETY: in bounds and aligned by the caller's promise.
    unsafe { pointer.0.add(i as usize).write(value) }
}

#[inline(always)]
pub unsafe fn store_x2<T: Access>(pointer: Pointer<T>, i: u64, [a, b]: [u32; 2]) {
    // SAFETY: in bounds and aligned by the caller's promise.
    unsafe {
        asm!(
            "st.global.v2.u32 [{address}], {{{a}, {b}}};",
            address = in(reg64) pointer.global_address(i),
            a = in(reg32) a,
            b = in(reg32) b,
            options(nostack),
        );
    }
}

#[inline(always)]
pub unsafe fn store_x4<T: Access>(pointer: Pointer<T>, i: u64, [a, b, c, d]: [u32; 4]) {
    // SAFETY: in bounds and aligned by the caller's promise.
    unsafe {
        asm!(
            "st.global.v4.u32 [{address}], {{{a}, {b}, {c}, {d}}};",
            address = in(reg64) pointer.global_address(i),
            a = in(reg32) a,
            b = in(reg32) b,
            c = in(reg32) c,
            d = in(reg32) d,
            options(nostack),
        );
    }
}
