//! [`crate::shared`] on the CPU. An address is a byte offset in the block's shared memory.

use std::panic::Location;

use super::block::{Block, current};
use super::fault::{AccessKind, FaultKind, Site};
use super::time::warp_of;

/// Checks that an array lies in the block's shared memory; returns its address.
#[track_caller]
pub unsafe fn array(byte_offset: u32, bytes: u32) -> u32 {
    let location = Location::caller();
    current(|block| {
        let limit = u64::from(block.shared_memory.borrow().bytes());
        let span = Span { offset: u64::from(byte_offset), bytes, align: 4 };
        span.check(block, limit, location);
    });
    byte_offset
}

/// Checks that words `i..i + WORDS` lie in the array of `words` words at `base`; returns their address.
#[track_caller]
pub fn element<const WORDS: u32>(base: u32, words: u32, i: u32) -> u32 {
    let location = Location::caller();
    let offset = u64::from(base) + 4 * u64::from(i);
    let limit = u64::from(base) + 4 * u64::from(words);
    let span = Span { offset, bytes: 4 * WORDS, align: 4 * WORDS };
    current(|block| span.check(block, limit, location));
    offset as u32
}

/// A range of shared memory to be checked, in bytes.
struct Span {
    offset: u64,
    bytes: u32,
    align: u32,
}

impl Span {
    fn check(&self, block: &Block, limit: u64, location: Site) {
        let Self { offset, bytes, align } = *self;
        let thread = block.running.get();
        if offset + u64::from(bytes) > limit {
            block.fail(FaultKind::SharedOutOfBounds { offset, bytes, limit, thread, location });
        }
        if !offset.is_multiple_of(u64::from(align)) {
            let (memory, address) = ("shared memory", offset);
            block.fail(FaultKind::Misaligned { memory, address, align, thread, location });
        }
    }
}

#[track_caller]
pub unsafe fn load(address: u32) -> u32 {
    let [word] = read(address, AccessKind::Read, Location::caller());
    word
}

#[track_caller]
pub unsafe fn load_x2(address: u32) -> [u32; 2] {
    read(address, AccessKind::Read, Location::caller())
}

#[track_caller]
pub unsafe fn load_x4(address: u32) -> [u32; 4] {
    read(address, AccessKind::Read, Location::caller())
}

#[track_caller]
pub unsafe fn store(address: u32, value: u32) {
    write(address, [value], AccessKind::Write, Location::caller());
}

#[track_caller]
pub unsafe fn store_x2(address: u32, value: [u32; 2]) {
    write(address, value, AccessKind::Write, Location::caller());
}

#[track_caller]
pub unsafe fn store_x2_where(there: bool, address: impl FnOnce() -> u32, value: [u32; 2]) {
    if there {
        // SAFETY: the caller's duty is this callee's.
        unsafe { store_x2(address(), value) }
    }
}

#[track_caller]
pub unsafe fn store_x4(address: u32, value: [u32; 4]) {
    write(address, value, AccessKind::Write, Location::caller());
}

/// The words from `address` on, which [`element`] has checked.
pub fn read<const N: usize>(address: u32, kind: AccessKind, location: Site) -> [u32; N] {
    current(|block| {
        let (thread, mut words) = (block.running.get(), [0; N]);
        let to = (address, &mut words[..]);
        let result = match block.thread().multiplies.get() {
            Some(product) => read_operand(block, product, to),
            None => block.shared_memory.borrow_mut().read(to, kind, thread, location),
        };
        result.unwrap_or_else(|fault| block.fail(fault));
        words
    })
}

/// Reads words that are operands of a product which the running thread has started.
fn read_operand(
    block: &Block,
    product: u32,
    (address, to): (u32, &mut [u32]),
) -> Result<(), FaultKind> {
    let (thread, memory) = (block.running.get(), block.shared_memory.borrow());
    let operands = &mut block.operands.borrow_mut()[warp_of(thread)];
    if let Some(location) = operands.read(product, address) {
        memory.start_operands(address, thread, location)?;
    }
    memory.copy_to(address, to);
    Ok(())
}

/// Sets the words from `address` on, which [`element`] has checked.
pub fn write<const N: usize>(address: u32, words: [u32; N], kind: AccessKind, location: Site) {
    current(|block| {
        let (thread, from) = (block.running.get(), (address, &words[..]));
        let result = block.shared_memory.borrow_mut().write(from, kind, thread, location);
        result.unwrap_or_else(|fault| block.fail(fault));
    });
}
