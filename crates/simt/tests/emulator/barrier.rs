//! Named barriers: what they order, and calls that break their rules.

use std::collections::HashSet;

use simt::emu::{FaultKind, Launch, Operation, launch};
use simt::shared::Shared;
use simt::thread::{NamedBarrier, lane_id, warp_id};

use crate::device::{Tensor, block_of, fault_kind, run};

/// The first two words of the block's shared memory.
unsafe fn word() -> Shared<u32, 2> {
    // SAFETY: the block has 1 KiB.
    unsafe { Shared::at(0) }
}

/// Runs a block of `threads` threads with a call that the emulator refuses; returns the message.
fn message(threads: u32, body: impl Fn() + Sync) -> String {
    match fault_kind(threads, body) {
        FaultKind::Panic { message, .. } => message,
        other => panic!("{other}"),
    }
}

/// Two buffers go from a producer to a consumer and back, under many orders of the warps.
#[test]
fn a_producer_and_a_consumer_take_turns() {
    const ROUNDS: u32 = 9;
    let full = |round: u32| NamedBarrier::new(1 + round % 2, 64);
    let empty = |round: u32| NamedBarrier::new(3 + round % 2, 64);
    for seed in 0..50 {
        let target = Tensor::zeros(ROUNDS as usize);
        let output = target.output::<u32>();
        // SAFETY: whole warps; a word is written only once it was read.
        let body = || unsafe {
            for round in 0..ROUNDS {
                if warp_id() == 0 {
                    if round >= 2 {
                        empty(round).sync();
                    }
                    if lane_id() == round {
                        word().store(round % 2, 100 + round);
                    }
                    full(round).arrive();
                } else {
                    full(round).sync();
                    if lane_id() == 0 {
                        output.store(u64::from(round), word().load(round % 2));
                    }
                    if round + 2 < ROUNDS {
                        empty(round).arrive();
                    }
                }
            }
        };
        launch(&Launch { seed, ..block_of(64) }, body).unwrap_or_else(|fault| panic!("{fault}"));
        assert_eq!(target.words(), Vec::from_iter((0..ROUNDS).map(|round| 100 + round)));
    }
}

/// One barrier orders warp 0 before warp 1, another orders warp 1 before warp 2: warp 2 may read what warp 0 wrote.
#[test]
fn order_is_transitive() {
    // SAFETY: whole warps; the word is read after both barriers.
    run(96, || unsafe {
        let (first, second) = (NamedBarrier::new(1, 64), NamedBarrier::new(2, 64));
        match warp_id() {
            0 => {
                if lane_id() == 5 {
                    word().store(0, 7);
                }
                first.arrive();
            }
            1 => {
                first.sync();
                second.arrive();
            }
            _ => {
                second.sync();
                assert_eq!(word().load(0), 7);
            }
        }
    });
}

/// A barrier of two warps does not order a third.
#[test]
fn a_warp_that_was_not_there_races() {
    // SAFETY: broken on purpose: warp 2 reads without a barrier.
    let kind = fault_kind(96, || unsafe {
        if lane_id() == 0 && warp_id() < 2 {
            word().store(warp_id(), 1);
        }
        if warp_id() < 2 {
            NamedBarrier::new(1, 64).sync();
        } else {
            NamedBarrier::new(2, 32).sync();
            if lane_id() == 0 {
                word().store(0, 2);
            }
        }
    });
    assert!(matches!(kind, FaultKind::SharedRace { offset: 0, .. }), "{kind}");
}

/// A warp that arrives does not wait: what it does next is not ordered before what the others do.
#[test]
fn an_arrival_orders_nothing_that_comes_after_it() {
    // SAFETY: broken on purpose: the word is written after the arrival.
    let kind = fault_kind(64, || unsafe {
        if warp_id() == 0 {
            NamedBarrier::new(1, 64).arrive();
            if lane_id() == 0 {
                word().store(0, 1);
            }
        } else {
            NamedBarrier::new(1, 64).sync();
            if lane_id() == 0 {
                word().store(0, 2);
            }
        }
    });
    assert!(matches!(kind, FaultKind::SharedRace { offset: 0, .. }), "{kind}");
}

/// An arrival does not order the lanes of its warp with each other; a wait does.
#[test]
fn an_arrival_does_not_bring_lanes_together() {
    let body = |waits: bool| {
        // SAFETY: broken on purpose if the first warp does not wait.
        move || unsafe {
            let barrier = NamedBarrier::new(1, 64);
            if warp_id() == 0 && lane_id() == 3 {
                word().store(0, 1);
            }
            if waits || warp_id() == 1 {
                barrier.sync()
            } else {
                barrier.arrive()
            }
            assert_eq!(word().load(0), 1);
        }
    };
    run(64, body(true));
    let kind = fault_kind(64, body(false));
    let FaultKind::SharedRace { first, second, .. } = kind else { panic!("{kind}") };
    assert_eq!((first.thread.0 / 32, second.thread.0 / 32), (0, 0));
}

/// A warp may arrive again only if the completion of the barrier happens before that, whichever warp runs first.
#[test]
fn a_second_arrival_that_nothing_orders() {
    let mut messages = HashSet::new();
    for seed in 0..50 {
        // SAFETY: broken on purpose: nothing tells the first warp that the second has come.
        let body = || unsafe {
            let barrier = NamedBarrier::new(1, 64);
            for _ in 0..2 {
                if warp_id() == 0 { barrier.arrive() } else { barrier.sync() }
            }
        };
        let fault = launch(&Launch { seed, ..block_of(64) }, body).expect_err("a second arrival");
        let FaultKind::Panic { message, .. } = *fault.kind else { panic!("{fault}") };
        messages.insert(message);
    }
    let again = "warp 0 arrives at barrier 1 again";
    let found = ["before it is complete", "and nothing says that it is complete"];
    let [early, unordered] = found.map(|end| {
        messages.iter().any(|message| message.starts_with(again) && message.ends_with(end))
    });
    assert!(messages.len() == 2 && early && unordered, "{messages:?}");
}

#[test]
fn arrivals_that_are_left_over() {
    // SAFETY: broken on purpose: the second warp does not come.
    let left_over = message(96, || unsafe {
        if warp_id() == 1 {
            NamedBarrier::new(3, 64).arrive();
        }
    });
    assert_eq!(left_over, "barrier 3 is not complete when its block returns");
}

#[test]
fn a_wait_that_nobody_ends() {
    // SAFETY: broken on purpose: three warps are to come.
    let kind = fault_kind(64, || unsafe { NamedBarrier::new(1, 96).sync() });
    let FaultKind::Divergence { groups } = kind else { panic!("{kind}") };
    let (operation, _) = groups[0].waiting.expect("all wait");
    assert_eq!((groups.len(), operation), (1, Operation::BarrierSync));
}

#[test]
fn calls_that_break_the_rules() {
    // SAFETY: broken on purpose, each.
    let refused: [(fn(), &str); 5] = unsafe {
        [
            (|| NamedBarrier::new(0, 32).sync(), "there is no named barrier 0"),
            (|| NamedBarrier::new(16, 32).sync(), "there is no named barrier 16"),
            (
                || NamedBarrier::new(1, 40).sync(),
                "a barrier of 40 threads: they are no whole warps",
            ),
            (
                || NamedBarrier::new(1, 32 + lane_id() / 16 * 32).sync(),
                "the lanes of a warp arrive at different barriers",
            ),
            (
                || {
                    NamedBarrier::new(1, 64).arrive();
                    NamedBarrier::new(1, 64).arrive();
                },
                "warp 0 arrives at barrier 1 again before it is complete",
            ),
        ]
    };
    for (body, expected) in refused {
        assert_eq!(message(32, body), expected);
    }
    // SAFETY: broken on purpose.
    let two = message(64, || unsafe { NamedBarrier::new(1, 64 + 32 * warp_id()).sync() });
    assert!(two.starts_with("barrier 1 has "), "{two}");
}
