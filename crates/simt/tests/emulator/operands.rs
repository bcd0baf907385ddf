//! Operands of products in shared memory: their alignment, and that all threads of a warpgroup name the same ones.

use simt::emu::{FaultKind, Launch, launch};
use simt::shared::Shared;
use simt::thread::{sync_threads, thread_idx_x, warp_id};
use simt::warpgroup::{Rows, bf16_m64n64k128, bf16_m64n128k32, fence_proxy_async};

use crate::device::block_of;

/// Words of 256 rows: 64 of A, 128 of B, and 64 more.
const WORDS: usize = 256 * 32;

/// Runs `product` on a warpgroup, with all words of shared memory written, also those beside the operands.
fn run(product: impl Fn(Shared<u32, WORDS>) + Sync) -> Result<(), FaultKind> {
    let body = || {
        // SAFETY: the block has the memory; each word once, then a barrier.
        let memory = unsafe { Shared::<u32, WORDS>::at(0) };
        for word in (thread_idx_x()..WORDS as u32).step_by(128) {
            // SAFETY: as above.
            unsafe { memory.store(word, 0) };
        }
        fence_proxy_async();
        // SAFETY: all threads come here.
        unsafe { sync_threads() };
        product(memory);
    };
    let shape = Launch { shared_bytes: 4 * WORDS as u32, ..block_of(128) };
    launch(&shape, body).map_err(|fault| *fault.kind)
}

/// Multiplies the operands `left` and `right`.
fn multiply(left: Rows<WORDS>, right: Rows<WORDS>, adds: bool) {
    // SAFETY: all threads come together, after the operands were written; broken on purpose if the operands are misaligned
    // or not the same in all threads.
    _ = unsafe { bf16_m64n128k32(left, right, adds, [[0.0; 4]; 16]) };
}

/// The rows from word `first` on.
fn rows(memory: Shared<u32, WORDS>, first: u32) -> Rows<WORDS> {
    // SAFETY: the rows lie in the memory; broken on purpose if `first` is no multiple of eight rows.
    unsafe { Rows::at(memory, first) }
}

/// Asserts that a product is refused because of an operand at byte `address`, which is no multiple of `align`.
#[track_caller]
fn assert_misaligned(found: Result<(), FaultKind>, address: u64, align: u32) {
    let Err(FaultKind::Misaligned { memory, address: at, align: of, location, .. }) = found else {
        panic!("{found:?}")
    };
    assert_eq!((memory, at, of), ("an operand of a product", address, align));
    assert_eq!(location.file(), file!());
}

#[test]
fn rows_start_at_eight_rows() {
    assert_eq!(run(|memory| multiply(rows(memory, 0), rows(memory, 2048), true)), Ok(()));
    for first in [32, 128] {
        let left = run(|memory| multiply(rows(memory, first), rows(memory, 2048), true));
        assert_misaligned(left, u64::from(4 * first), 1024);
        let right = run(|memory| multiply(rows(memory, 0), rows(memory, 2048 + first), true));
        assert_misaligned(right, u64::from(4 * (2048 + first)), 1024);
    }
    let view = run(|memory| {
        let all = rows(memory, 0);
        multiply(all.from(0, 3), all.from(0, 64), true);
    });
    assert_misaligned(view, 3 * 128, 1024);
}

#[test]
fn a_matrix_without_swizzling_starts_at_16_bytes() {
    let at = |byte: u32| {
        run(move |_| {
            // SAFETY: all threads come together, after B was written; broken on purpose if B is misaligned.
            _ = unsafe { bf16_m64n64k128([[0; 4]; 8], Shared::<u32, 4096>::at(byte)) };
        })
    };
    assert_eq!(at(16), Ok(()));
    assert_misaligned(at(8), 8, 16);
}

/// Asserts that a block is refused because its warpgroup's products differ.
#[track_caller]
fn assert_differ(found: Result<(), FaultKind>) {
    let Err(FaultKind::Panic { message, .. }) = found else { panic!("{found:?}") };
    assert!(message.contains("do not have the same products and waits"), "{message}");
}

/// The threads that name another operand than the rest: a lane, the last lane, a warp.
fn others() -> [fn() -> bool; 3] {
    [|| thread_idx_x() == 1, || thread_idx_x() == 127, || warp_id() == 2]
}

#[test]
fn threads_name_different_operands() {
    for is_other in others() {
        let right = |memory| rows(memory, 0).from(0, if is_other() { 72 } else { 64 });
        assert_differ(run(|memory| multiply(rows(memory, 0), right(memory), true)));
        let left = |memory| rows(memory, 0).from(0, if is_other() { 8 } else { 0 });
        assert_differ(run(|memory| multiply(left(memory), rows(memory, 2048), true)));
        let column = |memory| rows(memory, 0).from(if is_other() { 4 } else { 0 }, 64);
        assert_differ(run(|memory| multiply(rows(memory, 0), column(memory), true)));
    }
}

#[test]
fn threads_do_not_agree_whether_to_add() {
    for is_other in others() {
        assert_differ(run(|memory| multiply(rows(memory, 0), rows(memory, 2048), is_other())));
    }
}
