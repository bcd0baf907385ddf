//! [`crate::shared`] on the CPU. An address is a byte offset in the block's shared memory.

use std::panic::Location;

use super::block::{Block, current};
use super::fault::{AccessKind, FaultKind, Site};
use super::time::warp_of;

/// Checks that an array lies in the block's shared memory; its address.
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

/// Checks that words `i..i + WORDS` lie in the array of `words` at `base`; their address.
#[track_caller]
pub fn element<const WORDS: u32>(base: u32, words: u32, i: u32) -> u32 {
    let location = Location::caller();
    let offset = u64::from(base) + 4 * u64::from(i);
    let limit = u64::from(base) + 4 * u64::from(words);
    let span = Span { offset, bytes: 4 * WORDS, align: 4 * WORDS };
    current(|block| span.check(block, limit, location));
    offset as u32
}

/// A range of shared memory that is to be accessed.
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
    read(address, AccessKind::Read, Location::caller())
}

#[track_caller]
pub unsafe fn load_x2(address: u32) -> [u32; 2] {
    let location = Location::caller();
    [0, 4].map(|offset| read(address + offset, AccessKind::Read, location))
}

#[track_caller]
pub unsafe fn load_x4(address: u32) -> [u32; 4] {
    let location = Location::caller();
    [0, 4, 8, 12].map(|offset| read(address + offset, AccessKind::Read, location))
}

#[track_caller]
pub unsafe fn store(address: u32, value: u32) {
    write(address, value, AccessKind::Write, Location::caller());
}

#[track_caller]
pub unsafe fn store_x2(address: u32, value: [u32; 2]) {
    let location = Location::caller();
    for (offset, value) in [0, 4].into_iter().zip(value) {
        write(address + offset, value, AccessKind::Write, location);
    }
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
    let location = Location::caller();
    for (offset, value) in [0, 4, 8, 12].into_iter().zip(value) {
        write(address + offset, value, AccessKind::Write, location);
    }
}

/// The word at `address`, which [`element`] has checked.
pub fn read(address: u32, kind: AccessKind, location: Site) -> u32 {
    current(|block| {
        let thread = block.running.get();
        let result = match block.thread().multiplies.get() {
            Some(product) => read_operand(block, product, address),
            None => block.shared_memory.borrow_mut().read(address, kind, thread, location),
        };
        result.unwrap_or_else(|fault| block.fail(fault))
    })
}

/// The word at `address`, an operand of a product that the running thread has started.
fn read_operand(block: &Block, product: u32, address: u32) -> Result<u32, FaultKind> {
    let (thread, memory) = (block.running.get(), block.shared_memory.borrow());
    let operands = &mut block.operands.borrow_mut()[warp_of(thread)];
    if let Some(location) = operands.read(product, address) {
        memory.start_operands(address, thread, location)?;
    }
    Ok(memory.value(address))
}

/// Sets the word at `address`, which [`element`] has checked.
pub fn write(address: u32, value: u32, kind: AccessKind, location: Site) {
    current(|block| {
        let thread = block.running.get();
        let result = block.shared_memory.borrow_mut().write(address, value, kind, thread, location);
        result.unwrap_or_else(|fault| block.fail(fault));
    });
}
