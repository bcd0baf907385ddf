//! Global memory: bounds, alignment, binding, atomics.

use std::sync::atomic::AtomicU32;

use simt::atomic::{DeviceAtomicU32, fence_device, fence_system};
use simt::emu::{FaultKind, Launch, Memory, ThreadIndex, launch};
use simt::mem::{Global, GlobalMut, Views};
use simt::thread::{block_dim_x, block_idx_x, block_idx_y, grid_dim_x, grid_dim_y, thread_idx_x};

use crate::device::{Tensor, assert_at, block_of, fault, fault_kind};

/// Runs `body` in one thread of a block; the others do nothing.
fn only(thread: u32, body: impl Fn() + Sync) -> impl Fn() + Sync {
    move || {
        if thread_idx_x() == thread {
            body();
        }
    }
}

#[test]
fn load_one_element_past_the_end() {
    let tensor = Tensor::zeros(100);
    let input = tensor.input::<u32>();
    let line = line!() + 3;
    let kind = fault_kind(32, || {
        // SAFETY: broken on purpose in thread 31.
        let _ = unsafe { input.load(69 + u64::from(thread_idx_x())) };
    });
    let FaultKind::OutOfBounds { argument, index, offset, bytes, thread, location, .. } = kind
    else {
        panic!("{kind}");
    };
    assert_eq!((argument, index, offset, bytes), ("input", 100, 400, 4));
    assert_eq!(thread, ThreadIndex(31));
    assert_at(location, file!(), line);
}

#[test]
fn store_one_element_past_the_end() {
    let tensor = Tensor::zeros(100);
    let output = tensor.output::<u16>();
    // SAFETY: broken on purpose.
    let fault = fault(32, only(5, || unsafe { output.store(200, 1) }));
    let text = fault.to_string();
    let expected = "out of bounds: thread 5 (warp 0, lane 5) accesses 2 bytes at element 200 of \
                    `output`, which ends 402 bytes into the allocation `tensor` of 400 bytes, at ";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn vector_that_straddles_the_end() {
    let tensor = Tensor::zeros(10);
    let (input, output) = (tensor.input::<u32>(), tensor.output::<u32>());
    let out_of_bounds = |body: &(dyn Fn() + Sync)| {
        let kind = fault_kind(32, body);
        assert!(matches!(kind, FaultKind::OutOfBounds { .. }), "{kind}");
    };
    // SAFETY: broken on purpose, here and below.
    out_of_bounds(&|| _ = unsafe { input.load_u32x4(8) });
    // SAFETY: as above.
    out_of_bounds(&|| _ = unsafe { output.load_u32x4(8) });
    // SAFETY: as above.
    out_of_bounds(&|| _ = unsafe { input.load_u32x2(10) });
    // SAFETY: as above.
    out_of_bounds(&|| unsafe { output.store_u32x4(8, [0; 4]) });
    // SAFETY: as above.
    out_of_bounds(&|| unsafe { output.store_u32x2(10, [0; 2]) });
}

#[test]
fn index_that_wraps_around_the_address_space() {
    let tensor = Tensor::zeros(8);
    let input = tensor.input::<u32>();
    for index in [u64::MAX, 1 << 62, (1 << 62) - 1] {
        // SAFETY: broken on purpose.
        let kind = fault_kind(32, || _ = unsafe { input.load(index) });
        assert!(matches!(kind, FaultKind::OutOfBounds { .. }), "{kind}");
    }
}

#[test]
fn bounds_are_those_of_the_bound_allocation() {
    // Two halves of one host buffer, registered as two allocations: a read past the end of the first
    // touches live memory, but not the allocation of the argument.
    let words = Box::new([const { AtomicU32::new(0) }; 8]);
    let address = words.as_ptr().expose_provenance() as u64;
    let memory = Memory::new();
    // SAFETY: the words outlive both registrations, and only launches touch them.
    let _first = unsafe { memory.register(address, 16, "first") };
    // SAFETY: as above.
    let _second = unsafe { memory.register(address + 16, 16, "second") };
    let first: Global<u32> = Global::bind(&memory, address + 8, "first").expect("live");
    // SAFETY: element 1 of the pointer is the last of `first`.
    launch(&block_of(32), || _ = unsafe { first.load(1) }).expect("in bounds");
    // SAFETY: broken on purpose.
    let kind = fault_kind(32, || _ = unsafe { first.load(2) });
    let FaultKind::OutOfBounds { label, offset, allocation_bytes, .. } = kind else {
        panic!("{kind}");
    };
    assert_eq!((label, offset, allocation_bytes), ("first", 16, 16));
}

#[test]
fn misaligned_vectors_and_elements() {
    let tensor = Tensor::zeros(64);
    let misaligned = |align_wanted: u32, body: &(dyn Fn() + Sync)| {
        let kind = fault_kind(32, body);
        let FaultKind::Misaligned { address, align, .. } = kind else { panic!("{kind}") };
        assert_eq!(align, align_wanted);
        assert!(!address.is_multiple_of(u64::from(align)));
    };
    let (input, output) = (tensor.input::<u32>(), tensor.output::<u32>());
    // SAFETY: broken on purpose, here and below.
    misaligned(16, &|| _ = unsafe { input.load_u32x4(2) });
    // SAFETY: as above.
    misaligned(8, &|| _ = unsafe { input.load_u32x2(1) });
    // SAFETY: as above.
    misaligned(16, &|| unsafe { output.store_u32x4(1, [0; 4]) });
    // SAFETY: as above.
    misaligned(8, &|| _ = unsafe { output.load_u32x2(3) });
    let odd: GlobalMut<f32> =
        GlobalMut::bind(tensor.memory(), tensor.address() + 2, "odd").expect("live");
    // SAFETY: as above.
    misaligned(4, &|| unsafe { odd.store(0, 1.0) });
}

#[test]
fn pointer_to_nothing() {
    let tensor = Tensor::zeros(4);
    let end = tensor.address() + 16;
    for address in [0, tensor.address() - 1, end] {
        let fault = Global::<u8>::bind(tensor.memory(), address, "input").expect_err("unbound");
        assert_eq!(*fault.kind, FaultKind::UnboundPointer { argument: "input", address });
    }
    assert!(Global::<u8>::bind(tensor.memory(), end - 1, "input").is_ok());
}

#[test]
fn freed_allocation_is_unbound() {
    let memory = Memory::new();
    // SAFETY: nothing is launched.
    let allocation = unsafe { memory.register(4096, 64, "short-lived") };
    assert!(GlobalMut::<u8>::bind(&memory, 4096, "output").is_ok());
    drop(allocation);
    let fault = GlobalMut::<u8>::bind(&memory, 4096, "output").expect_err("freed");
    let text = "argument `output`: no live allocation contains address 0x1000";
    assert_eq!(fault.to_string(), text);
}

#[test]
#[should_panic(expected = "allocation `b` overlaps `a`")]
fn overlapping_allocations_are_refused() {
    let memory = Memory::new();
    // SAFETY: nothing is launched, here and below.
    let _a = unsafe { memory.register(4096, 64, "a") };
    // SAFETY: as above.
    let _b = unsafe { memory.register(4096 + 63, 64, "b") };
}

#[test]
fn every_element_type_and_vector_goes_there_and_back() {
    let source = Tensor::new(&Vec::from_iter((0..64).map(|i| 0x8070_6050 + i * 0x0101_0101)));
    let target = Tensor::zeros(64);
    macro_rules! copy {
        ($element:ty, $count:literal) => {{
            let target = Tensor::zeros(64);
            let (from, to) = (source.input::<$element>(), target.output::<$element>());
            // SAFETY: element `i` of each, in bounds.
            let copy = || (0..$count).for_each(|i| unsafe { to.store(i, from.load(i)) });
            launch(&block_of(32), only(0, copy)).expect("in bounds");
            assert_eq!(source.words(), target.words(), stringify!($element));
        }};
    }
    copy!(u8, 256);
    copy!(u16, 128);
    copy!(u32, 64);
    copy!(i32, 64);
    copy!(f32, 64);
    let (from, to) = (source.input::<u8>(), target.output::<u8>());
    let body = || {
        // SAFETY: 8 and 16 aligned bytes each, in bounds.
        unsafe {
            to.store_u32x4(16, from.load_u32x4(0));
            to.store_u32x2(8, from.load_u32x2(24));
            to.store_u32x4(64, to.load_u32x4(16));
            to.store_u32x2(128, to.load_u32x2(8));
        }
    };
    launch(&block_of(32), only(0, body)).expect("in bounds");
    let (source, target) = (source.words(), target.words());
    assert_eq!((&target[4..8], &target[2..4]), (&source[0..4], &source[6..8]));
    assert_eq!((&target[16..20], &target[32..34]), (&source[0..4], &source[6..8]));
}

#[test]
fn every_thread_of_a_grid_runs_once() {
    let (x, y, block) = (7, 5, 96);
    let tensor = Tensor::zeros((x * y * block) as usize);
    let output = tensor.output::<u32>();
    let shape = Launch { grid: (x, y), ..block_of(block) };
    let body = || {
        assert_eq!((grid_dim_x(), grid_dim_y(), block_dim_x()), (x, y, block));
        let row = block_idx_y() * grid_dim_x() + block_idx_x();
        let i = u64::from(row * block_dim_x() + thread_idx_x());
        // SAFETY: one element per thread of the grid.
        unsafe { output.store(i, output.load(i) + 1) };
    };
    launch(&shape, body).expect("in bounds");
    assert_eq!(tensor.words(), vec![1; (x * y * block) as usize]);
}

#[test]
fn device_atomics_across_blocks() {
    const THREADS: u32 = 64 * 256;
    let tensor = Tensor::zeros(THREADS as usize + 4);
    let output = tensor.output::<u32>();
    let shape = Launch { grid: (256, 1), ..block_of(64) };
    let body = || {
        let me = block_idx_x() * block_dim_x() + thread_idx_x();
        // SAFETY: elements in bounds; the counters are accessed atomically only.
        unsafe {
            let ticket = DeviceAtomicU32::new(output, 0).add(1);
            DeviceAtomicU32::new(output, 1).max(me);
            // The first thread swaps out zero.
            if DeviceAtomicU32::new(output, 2).exchange(1) == 0 {
                DeviceAtomicU32::new(output, 3).add(1);
            }
            fence_device();
            fence_system();
            DeviceAtomicU32::new(output, 4 + u64::from(ticket)).add(1);
        }
    };
    launch(&shape, body).expect("in bounds");
    let words = tensor.words();
    assert_eq!(words[..4], [THREADS, THREADS - 1, 1, 1]);
    assert!(words[4..].iter().all(|&taken| taken == 1), "a ticket was drawn twice");
}

/// Each thread writes a word and arrives at a counter; the last one to arrive reads all words.
#[test]
fn arrivals_in_order_say_what_is_left() {
    const THREADS: u32 = 64 * 32;
    let tensor = Tensor::zeros(THREADS as usize + 2);
    let output = tensor.output::<u32>();
    let shape = Launch { grid: (64, 1), ..block_of(32) };
    let body = || {
        let me = block_idx_x() * block_dim_x() + thread_idx_x();
        // SAFETY: elements in bounds; the counter is accessed atomically only, and words are read when all threads have
        // arrived.
        unsafe {
            output.opt_barrier().store(u64::from(2 + me), me);
            if DeviceAtomicU32::new(output, 0).add_acq_rel(1) == THREADS - 1 {
                let sum = (0..THREADS).map(|i| output.load(u64::from(2 + i))).sum();
                output.store(1, sum);
            }
        }
    };
    launch(&shape, body).expect("in bounds");
    assert_eq!(tensor.words()[..2], [THREADS, THREADS * (THREADS - 1) / 2]);
}

#[test]
fn views_tell_where_their_elements_lie() {
    let tensors = [0, 100, 200].map(|first| Tensor::new(&[first, first + 1, first + 2, first + 3]));
    let views = Views(tensors.each_ref().map(|tensor| tensor.input::<u32>()));
    let found = Tensor::zeros(32);
    let output = found.output::<u32>();
    let body = || {
        let thread = thread_idx_x();
        let place = views.place(thread % 3, u64::from(thread % 2));
        // SAFETY: `place` gave it, of the same views; elements in bounds.
        unsafe { output.store(u64::from(thread), views.at(place).load(2)) }
    };
    launch(&block_of(32), body).expect("in bounds");
    let expected: Vec<u32> = (0..32).map(|thread| 100 * (thread % 3) + thread % 2 + 2).collect();
    assert_eq!(found.words(), expected);
    // SAFETY: broken on purpose.
    let kind = fault_kind(32, || _ = unsafe { views.at(views.place(1, 3)).load(1) });
    assert!(matches!(kind, FaultKind::OutOfBounds { index: 1, offset: 16, .. }), "{kind}");
}

#[test]
fn compare_exchange_returns_the_old_value() {
    let tensor = Tensor::new(&[5]);
    let output = tensor.output::<u32>();
    let body = || {
        // SAFETY: element 0 of one.
        let word = unsafe { DeviceAtomicU32::new(output, 0) };
        assert_eq!(word.compare_exchange(4, 9), 5);
        assert_eq!(word.compare_exchange(5, 9), 5);
        assert_eq!(word.load(), 9);
        word.store(1);
    };
    launch(&block_of(32), only(0, body)).expect("in bounds");
    assert_eq!(tensor.words(), [1]);
}

#[test]
fn atomic_out_of_bounds() {
    let tensor = Tensor::zeros(2);
    let output = tensor.output::<u32>();
    // SAFETY: broken on purpose.
    let kind = fault_kind(32, || _ = unsafe { DeviceAtomicU32::new(output, 2) });
    assert!(matches!(kind, FaultKind::OutOfBounds { index: 2, .. }), "{kind}");
}
