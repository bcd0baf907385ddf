//! Proxy fences between stores to shared memory and products that read them. Also products in which not the whole
//! warpgroup takes part.

use simt::atomic::BlockAtomicU32;
use simt::cluster::{block_rank, sync_cluster};
use simt::copy::{commit_group, wait_for_groups};
use simt::emu::{AccessKind, FaultKind, Launch, ThreadIndex, launch, launch_clusters};
use simt::shared::Shared;
use simt::thread::{NamedBarrier, block_idx_x, lane_id, sync_threads, thread_idx_x, warp_id};
use simt::warp::sync_warp;
use simt::warpgroup::{
    Panels, bf16_m64n64k64, bf16_m64n64k128, fence_proxy_async, wait_for_products,
};

use crate::device::{Tensor, block_of};

/// Words of the second operand of a product. Each holds two BF16 ones.
const WORDS: u32 = 4096;
const ONES: u32 = 0x3F80_3F80;

fn operand() -> Shared<u32, { WORDS as usize }> {
    // SAFETY: every block here has as much.
    unsafe { Shared::at(0) }
}

/// Stores the operand, by the threads of a warpgroup.
fn store() {
    for word in (thread_idx_x() % 128..WORDS).step_by(128) {
        // SAFETY: each word once.
        unsafe { operand().store(word, ONES) }
    }
}

/// A product of the calling warpgroup that reads the operand.
#[track_caller]
fn multiply() {
    // SAFETY: all threads of the warpgroup come together, after a barrier that follows the stores.
    let product = unsafe { bf16_m64n64k128([[ONES; 4]; 8], operand()) };
    assert!(product.iter().flatten().all(|&sum| sum == 128.0));
}

fn shape(threads: u32, seed: u64) -> Launch {
    Launch { shared_bytes: 4 * WORDS, seed, ..block_of(threads) }
}

/// Runs a block of `threads` threads under several seeds. Returns the fault of a store that a product does not see, or
/// `None`. Panics on another fault, or if the seeds disagree.
fn missing(threads: u32, body: impl Fn() + Sync) -> Option<FaultKind> {
    let run = |seed| launch(&shape(threads, seed), &body).map_err(|fault| *fault.kind).err();
    let faults: Vec<Option<FaultKind>> = (0..8).map(run).collect();
    for fault in &faults {
        assert!(matches!(fault, None | Some(FaultKind::UnfencedOperand { .. })), "{fault:?}");
        assert_eq!(fault.is_some(), faults[0].is_some(), "{fault:?}");
    }
    faults.into_iter().next().flatten()
}

/// A warpgroup stores an operand and multiplies with it, and calls a function at each of three places. Returns whether
/// a fence is missing.
fn of_one_warpgroup(before_store: fn(), before_barrier: fn(), behind_barrier: fn()) -> bool {
    missing(128, || {
        before_store();
        store();
        before_barrier();
        // SAFETY: all threads come together.
        unsafe { sync_threads() };
        behind_barrier();
        multiply();
    })
    .is_some()
}

#[test]
fn who_stores_or_who_multiplies_fences() {
    let nothing = || ();
    assert!(!of_one_warpgroup(nothing, fence_proxy_async, nothing));
    assert!(!of_one_warpgroup(nothing, nothing, fence_proxy_async));
    assert!(of_one_warpgroup(nothing, nothing, nothing));
    assert!(of_one_warpgroup(fence_proxy_async, nothing, nothing), "before the stores");
}

#[test]
fn a_fault_names_the_store_and_the_product() {
    let kind = missing(128, || {
        store();
        // SAFETY: all threads come together.
        unsafe { sync_threads() };
        multiply(); // what the fault names
    });
    let Some(FaultKind::UnfencedOperand { write, location, .. }) = kind else { panic!("{kind:?}") };
    assert_eq!(
        (write.kind, write.location.line()),
        (AccessKind::Write, line_of("operand().store("))
    );
    assert_eq!(
        (location.file(), location.line()),
        (file!(), line_of("multiply(); // what the fault names"))
    );
}

/// The number of the first line of this file that contains `text`.
fn line_of(text: &str) -> u32 {
    let line = include_str!("proxy.rs").lines().position(|line| line.contains(text));
    line.expect("a line of this file") as u32 + 1
}

#[test]
fn some_threads_fence() {
    let some = |fences: fn() -> bool, together: bool| {
        missing(128, || {
            store();
            // SAFETY: all threads come together.
            unsafe { sync_threads() };
            if fences() {
                fence_proxy_async();
            }
            if together {
                // SAFETY: all lanes come together.
                unsafe { sync_warp() };
            }
            multiply();
        })
    };
    assert!(
        some(|| lane_id() == 3, true).is_none(),
        "each warp has one that fences, and then meets it"
    );
    assert!(some(|| lane_id() == 3, false).is_some());
    assert!(some(|| warp_id() < 3, true).is_some(), "a warp has none");
    // Before the barrier, a thread's fence covers only its own stores.
    let before = |fences: fn() -> bool| {
        missing(128, || {
            store();
            if fences() {
                fence_proxy_async();
            }
            // SAFETY: all threads come together.
            unsafe { sync_threads() };
            multiply();
        })
    };
    let Some(FaultKind::UnfencedOperand { write, .. }) = before(|| thread_idx_x() != 77) else {
        panic!("no fault")
    };
    assert_eq!(write.thread, ThreadIndex(77));
    assert!(before(|| true).is_none());
}

const STORED: NamedBarrier = NamedBarrier::new(1, 384);
const FENCED: NamedBarrier = NamedBarrier::new(2, 256);

/// The first warpgroup stores, the second fences if `fences`, and the third multiplies. The second fences after a
/// barrier with the first if `knows_stores`, else before it. The third waits at a barrier for the second if `tells`.
/// Returns whether a fence is missing.
fn a_third_fences(fences: bool, knows_stores: bool, tells: bool) -> bool {
    missing(384, || {
        // SAFETY: each warpgroup comes together.
        unsafe {
            match warp_id() / 4 {
                0 => {
                    store();
                    STORED.arrive();
                }
                1 => {
                    if !knows_stores && fences {
                        fence_proxy_async();
                    }
                    STORED.sync();
                    if knows_stores && fences {
                        fence_proxy_async();
                    }
                    if tells {
                        FENCED.arrive();
                    }
                }
                _ => {
                    STORED.sync();
                    if tells {
                        FENCED.sync();
                    }
                    multiply();
                }
            }
        }
    })
    .is_some()
}

#[test]
fn a_fence_of_others_counts_between_two_barriers() {
    assert!(!a_third_fences(true, true, true));
    assert!(a_third_fences(false, true, true));
    assert!(a_third_fences(true, false, true), "it fenced before it knew of the stores");
    assert!(a_third_fences(true, true, false), "nobody knows that it fenced");
}

/// The first warpgroup stores, the second fences, the third passes the knowledge of the fence on, and the last
/// multiplies.
#[test]
fn a_fence_is_known_through_others() {
    let met = |number| NamedBarrier::new(number, 256);
    let run = |passes: bool| {
        missing(512, || {
            let role = warp_id() / 4;
            // SAFETY: each warpgroup comes together.
            unsafe {
                if role == 0 {
                    store();
                    STORED_FOR_TWO.arrive();
                    return;
                }
                if role != 2 {
                    STORED_FOR_TWO.sync();
                }
                if role == 1 {
                    fence_proxy_async();
                    met(2).arrive();
                } else if role == 2 {
                    if passes {
                        met(2).sync();
                        met(3).arrive();
                    } else {
                        met(3).arrive();
                        met(2).sync();
                    }
                } else {
                    met(3).sync();
                    multiply();
                }
            }
        })
    };
    assert!(run(true).is_none());
    assert!(run(false).is_some(), "it arrives before it knows of the fence");
}

/// The barrier of the warpgroups that store, fence and multiply.
const STORED_FOR_TWO: NamedBarrier = NamedBarrier::new(1, 384);

#[test]
fn copies_are_fenced_behind_their_wait() {
    let tensor = Tensor::new(&vec![ONES; WORDS as usize]);
    let input = tensor.input::<u32>();
    let run = |before: bool, behind: bool| {
        missing(128, || {
            for four in (thread_idx_x()..WORDS / 4).step_by(128) {
                // SAFETY: each word once.
                unsafe { operand().copy_from(4 * four, input, u64::from(4 * four)) };
            }
            commit_group();
            if before {
                fence_proxy_async();
            }
            wait_for_groups::<0>();
            if behind {
                fence_proxy_async();
            }
            // SAFETY: all threads come together.
            unsafe { sync_threads() };
            multiply();
        })
        .is_some()
    };
    assert!(!run(false, true));
    assert!(run(true, false) && run(false, false));
}

/// Stores into another block's shared memory are fenced in that block, after the cluster barrier.
#[test]
fn stores_of_other_blocks_are_fenced_where_they_are_read() {
    let run = |sender: bool, reader: bool| {
        let shape = Launch { grid: (4, 1), ..shape(128, 5) };
        launch_clusters(&shape, 2, || {
            // SAFETY: each word of a block once, by the other block; all threads come together.
            unsafe {
                sync_cluster();
                for word in (thread_idx_x()..WORDS).step_by(128) {
                    operand().store_to(1 - block_rank(), word, ONES);
                }
                if sender {
                    fence_proxy_async();
                }
                sync_cluster();
                if reader {
                    fence_proxy_async();
                }
                multiply();
            }
        })
        .map_err(|fault| *fault.kind)
    };
    assert_eq!(run(false, true), Ok(()));
    for sender in [false, true] {
        let found = run(sender, false);
        assert!(matches!(found, Err(FaultKind::UnfencedOperand { .. })), "{found:?}");
    }
}

#[test]
fn fences_of_another_block_do_not_count() {
    let grid = Launch { grid: (16, 1), ..shape(128, 1) };
    let run = |fences: fn() -> bool| {
        let body = || {
            store();
            if fences() {
                fence_proxy_async();
            }
            // SAFETY: all threads come together.
            unsafe { sync_threads() };
            multiply();
        };
        launch(&grid, body)
    };
    assert_eq!(run(|| true), Ok(()));
    let fault = run(|| block_idx_x() != 13).expect_err("a block does not fence");
    assert_eq!(fault.block, Some((13, 0)));
    assert!(matches!(*fault.kind, FaultKind::UnfencedOperand { .. }), "{fault}");
}

/// The function that runs while a product is in flight must not write the product's operands.
#[test]
fn an_operand_that_is_written_meanwhile() {
    let run = |write: bool| {
        missing_or_race(|| {
            // SAFETY: a warpgroup comes together; broken on purpose if the operand is written.
            unsafe {
                store();
                fence_proxy_async();
                sync_threads();
                let panels = Panels::at(operand(), 0);
                let (_, ()) = bf16_m64n64k64([[ONES; 4]; 4], panels, [[0.0; 4]; 8], || {
                    if write && thread_idx_x() == 0 {
                        operand().store(5, 0);
                    }
                    sync_warp();
                });
            }
        })
    };
    assert_eq!(run(false), None);
    let found = run(true);
    assert!(matches!(found, Some(FaultKind::SharedRace { .. })), "{found:?}");
}

fn missing_or_race(body: impl Fn() + Sync) -> Option<FaultKind> {
    launch(&shape(128, 2), body).map_err(|fault| *fault.kind).err()
}

/// Runs a block of `threads` threads whose warps do not all multiply; returns the message of the fault.
fn incomplete(threads: u32, body: impl Fn() + Sync) -> String {
    let kind = *launch(&shape(threads, 3), || {
        for word in (thread_idx_x()..WORDS).step_by(threads as usize) {
            // SAFETY: each word once.
            unsafe { operand().store(word, ONES) };
        }
        fence_proxy_async();
        // SAFETY: all threads come together.
        unsafe { sync_threads() };
        body();
    })
    .expect_err("a warp stays away")
    .kind;
    let FaultKind::Panic { message, .. } = kind else { panic!("{kind:?}") };
    message
}

#[test]
fn a_warp_stays_away_from_a_product_of_its_warpgroup() {
    let message = |threads: &str, products: &str| {
        format!(
            "threads {threads} of a warpgroup do not have the same products and waits: {products} products"
        )
    };
    let found = incomplete(256, || (0..warp_id().min(1)).for_each(|_| multiply()));
    assert_eq!(found, message("0 and 32", "0 and 1"));
    let found = incomplete(256, || (0..2 - warp_id() / 7).for_each(|_| multiply()));
    assert_eq!(found, message("128 and 224", "2 and 1"));
    assert_eq!(incomplete(96, multiply), "a product of 96 threads: a warpgroup has 128");
    assert_eq!(incomplete(128, || elsewhere(warp_id() == 2)), message("0 and 64", "1 and 1"));
}

/// The same product, called from another place if `is_other`.
fn elsewhere(is_other: bool) {
    if is_other {
        multiply();
    } else {
        let product = multiply;
        product();
    }
}

#[test]
fn lanes_stay_away_from_a_product_or_a_wait_of_their_warp() {
    let halves = incomplete(128, || elsewhere(lane_id() < 16));
    assert!(halves.starts_with("threads 0 and 16 of a warpgroup"), "{halves}");
    let waits = |who: fn() -> bool| {
        move || {
            multiply();
            if who() {
                // SAFETY: broken on purpose: not all threads wait.
                unsafe { wait_for_products::<0>() };
            }
        }
    };
    let found = incomplete(128, waits(|| warp_id() != 3));
    assert!(found.starts_with("threads 0 and 96 of a warpgroup"), "{found}");
    let found = incomplete(128, waits(|| lane_id() == 0));
    assert!(found.starts_with("threads 0 and 1 of a warpgroup"), "{found}");
}

/// A wait for all products, or for all but one, called from the same place.
#[track_caller]
fn wait(for_all: bool) {
    // SAFETY: all threads of the warp come; broken on purpose where others wait for fewer.
    unsafe {
        if for_all {
            wait_for_products::<0>();
        } else {
            wait_for_products::<1>();
        }
    }
}

#[test]
fn a_warp_waits_for_fewer_products() {
    let found = incomplete(128, || {
        multiply();
        wait(warp_id() != 1);
    });
    assert!(found.starts_with("threads 0 and 32 of a warpgroup"), "{found}");
}

/// Atomic stores need a proxy fence as plain stores do. The last store to the word counts, plain or atomic.
#[test]
fn atomic_stores_need_a_fence_too() {
    let add = |word| {
        // SAFETY: each word by one thread, after a barrier.
        unsafe { BlockAtomicU32::new(operand(), word) }.add(0);
    };
    let run = |fences: bool, adds_behind: bool| {
        missing(128, || {
            let t = thread_idx_x();
            store();
            if adds_behind {
                fence_proxy_async();
            }
            // SAFETY: all threads come together.
            unsafe { sync_threads() };
            if t < 32 {
                add(64 + t);
            }
            if fences {
                fence_proxy_async();
            }
            // SAFETY: all threads come together.
            unsafe { sync_threads() };
            multiply();
        })
    };
    assert!(run(true, true).is_none() && run(true, false).is_none());
    let kind = run(false, true);
    let Some(FaultKind::UnfencedOperand { write, .. }) = kind else { panic!("{kind:?}") };
    assert_eq!(write.kind, AccessKind::Atomic);
}
