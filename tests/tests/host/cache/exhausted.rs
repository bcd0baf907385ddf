//! Slots, blocks, checkpoints and host memory run out, in each call that takes them: the refusal is typed, and nothing
//! has changed.

use dsv4_kv::device::Null;
use dsv4_kv::{CacheConfig, KvError, Launches, RequestId, RootKey, StepRequest, TierMiss};
use dsv4_kv_tests::fed::Fed;

use super::host_memory::{fill, other, pass, story, with_room_for};
use super::tier::{counts, prompt, run, tokens};

/// A cache of ten blocks that has computed prompts a, b and c. The device keeps as many of them as it has checkpoints.
fn cache(num_checkpoints: u32) -> Fed<Null> {
    let config = |base| CacheConfig { num_checkpoints, max_requests: 5, ..base };
    let mut fed = with_room_for(4, config);
    for salt in [b"a", b"b", b"c"] {
        pass(&mut fed, salt);
    }
    fed
}

/// Takes blocks until only `blocks` are free or evictable.
fn leave(fed: &mut Fed<Null>, blocks: u32) -> Vec<RequestId> {
    let mut held = Vec::new();
    loop {
        let left = obtainable(fed) - blocks;
        if left == 0 {
            return held;
        }
        held.push(fill(fed, 128 * left.min(5)));
    }
}

fn obtainable(fed: &Fed<Null>) -> u32 {
    let ledger = fed.manager.ledger();
    ledger.free_blocks() + ledger.evictable_blocks()
}

/// Admits a prompt that the device has.
fn admit(fed: &mut Fed<Null>, salt: &[u8]) -> RequestId {
    let admission = fed.manager.admit_with(&fed.stream, &prompt(&tokens(), salt)).unwrap();
    assert_eq!(admission.reused, 256);
    admission.id
}

/// To bring a prompt back takes two blocks and a checkpoint.
#[test]
fn an_arrival_takes_all_or_nothing() {
    let tokens = tokens();
    for (blocks, checkpoints) in [(0, 1), (1, 1), (2, 0), (2, 1)] {
        let mut fed = cache(2);
        // Requests that use the prompts on the device: b, or b and c.
        let salts = [b"b", b"c"].into_iter().take(2 - checkpoints);
        let users: Vec<_> = salts.map(|salt| admit(&mut fed, salt)).collect();
        let held = leave(&mut fed, blocks);
        let (before, ask) = (counts(&fed), prompt(&tokens, b"a"));
        let stats = fed.manager.tier_stats();
        let result = fed.manager.prefetch(&fed.stream, &ask);
        match (blocks, checkpoints) {
            (2, 1) => assert!(matches!(result, Ok(Some(_))), "{result:?}"),
            (_, 0) => assert!(
                matches!(result, Err(KvError::OutOfCheckpoints { needed: 1, free: 0 })),
                "{result:?}"
            ),
            _ => assert!(
                matches!(result, Err(KvError::OutOfBlocks { needed: 2, free }) if free == blocks),
                "{result:?}"
            ),
        }
        if result.is_err() {
            assert_eq!(counts(&fed), before, "{blocks} blocks, {checkpoints} checkpoints");
            assert!(!fed.manager.has_tier_transfers());
            let misses = fed.manager.tier_stats().misses[TierMiss::NoRoomOnDevice.index()];
            assert_eq!(misses - stats.misses[TierMiss::NoRoomOnDevice.index()], 1);
            // With room it is brought back.
            held.iter().for_each(|&id| fed.manager.release(id).unwrap());
            users.iter().for_each(|&id| fed.manager.release(id).unwrap());
        }
        let back = fed.manager.admit_waiting(&fed.stream, &ask).unwrap();
        assert_eq!(back.reused, 256);
        fed.manager.ledger().audit().unwrap();
        fed.manager.audit_tier().unwrap();
    }
}

/// A fork needs a slot, and a block unless the request ends at a block boundary.
#[test]
fn a_fork_takes_all_or_nothing() {
    for (tokens, blocks) in [(300, 0), (300, 1), (256, 0)] {
        let mut fed = cache(2);
        let id = fill(&mut fed, tokens);
        leave(&mut fed, blocks);
        let before = counts(&fed);
        let result = fed.manager.fork(&fed.stream, id);
        if (tokens, blocks) == (300, 0) {
            let expected = matches!(result, Err(KvError::OutOfBlocks { needed: 1, free: 0 }));
            assert!(expected, "{result:?}");
            assert_eq!(counts(&fed), before);
        } else {
            assert_eq!(fed.manager.ledger().committed(result.unwrap()).unwrap(), tokens);
        }
        while fed.manager.admit().is_ok() {}
        let before = counts(&fed);
        let result = fed.manager.fork(&fed.stream, id);
        assert!(matches!(result, Err(KvError::NoFreeSlot { slots: 5 })), "{result:?}");
        assert_eq!(counts(&fed), before);
        fed.manager.ledger().audit().unwrap();
    }
}

/// An admission needs a slot and no block, since its shared blocks exist. Its step needs blocks. A checkpoint that
/// finds no room fails nothing.
#[test]
fn an_admission_takes_a_slot_and_nothing_else() {
    let tokens = tokens();
    let mut fed = cache(1);
    let ask = prompt(&tokens, b"c");
    let held: Vec<_> = std::iter::from_fn(|| fed.manager.admit().ok()).collect();
    assert_eq!(held.len(), 5);
    let (before, reuse) = (counts(&fed), fed.manager.ledger().reuse_stats());
    let result = fed.manager.admit_with(&fed.stream, &ask);
    assert!(matches!(result, Err(KvError::NoFreeSlot { slots: 5 })), "{result:?}");
    assert_eq!(counts(&fed), before);
    assert_eq!(fed.manager.ledger().reuse_stats(), reuse, "it was no prompt");
    held.iter().for_each(|&id| fed.manager.release(id).unwrap());

    let admission = fed.manager.admit_with(&fed.stream, &ask).unwrap();
    assert_eq!(admission.reused, 256);
    let held = leave(&mut fed, 0);
    let before = counts(&fed);
    let step = [StepRequest { id: admission.id, start: 256, tokens: 44 }];
    let result = fed.manager.begin_step(&fed.stream, Launches::Eager, &step).map(drop);
    assert!(matches!(result, Err(KvError::OutOfBlocks { needed: 1, free: 0 })), "{result:?}");
    assert_eq!(counts(&fed), before);
    fed.manager.release(*held.last().unwrap()).unwrap();
    // The only checkpoint is in use: another prompt is computed and not saved.
    let other = fed.manager.admit_with(&fed.stream, &prompt(&tokens, b"d")).unwrap();
    run(&mut fed, other.id, &story(), 0);
    assert_eq!(fed.manager.ledger().tree_counts().checkpoints, 1);
    fed.manager.ledger().audit().unwrap();
}

/// A checkpoint that is copied to host memory needs units there. Without them it stays where it is, and nothing else is
/// evicted for it.
#[test]
fn a_departure_takes_all_or_nothing() {
    let tokens = tokens();
    let root = RootKey::new(b"root", b"", b"");
    for free in [0, 1, 14] {
        let mut fed = with_room_for(1, |base| CacheConfig { num_checkpoints: 2, ..base });
        let units = fed.manager.host_units().1;
        assert_eq!(units, 14, "two blocks, and twelve of a checkpoint");
        // A block and a checkpoint take thirteen units, two blocks and a checkpoint fourteen.
        let taken = (free < 2).then(|| fed.manager.reserve_host(&root, &other(2 - free)).unwrap());
        let admission = fed.manager.admit_with(&fed.stream, &prompt(&tokens, b"a")).unwrap();
        run(&mut fed, admission.id, &story(), 0);
        let before = counts(&fed);
        fed.manager.settle_tier(&fed.stream).unwrap();
        let misses = fed.manager.tier_stats().misses[TierMiss::NoRoomOnHost.index()];
        if let Some(reservation) = taken {
            assert_eq!((misses, counts(&fed)), (1, before), "{free} units are free");
            assert!(fed.manager.give_host_back(reservation).is_ok());
        } else {
            assert_eq!((misses, fed.manager.host_units().0), (0, 0));
        }
        fed.manager.audit_tier().unwrap();
    }
}
