//! Prefixes that the device has lost and host memory still has: every byte is as if the request were alone.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::{CacheConfig, KvError, Prompt, RequestId, TierEvent, TierMiss};

use super::told::{self, Alone, Cut, Told, admit, assert_table, fed, reusable, same, settings};
use crate::fed::Fed;
use crate::rings::{assert_ring, assert_ring_is_zero};
use crate::stories::{Story, tiny};

/// Number of tokens in a prompt.
const TOKENS: usize = 420;
/// More host memory than these tests need.
const PLENTY: u64 = 64 << 20;

/// A prompt of one story. Tests admit each story under its own salt.
fn told(story: &Story) -> Told<'_> {
    Told::of(&[(1, story, TOKENS)])
}

/// Runs the tokens of a request in chunks.
fn compute<B: Backend>(fed: &mut Fed<B>, at: (RequestId, u32), told: &Told<'_>, chunk: usize) {
    told::compute(fed, at.0, told, at.1 as usize, Cut::Chunks(chunk));
}

/// Asserts that the request has the bytes that it has alone.
fn assert_alone<B: Backend>(fed: &Fed<B>, id: RequestId, told: &Told<'_>, what: &str) {
    let max_draft = fed.manager.config().max_draft;
    let alone = Alone::of(fed.manager.device(), told, settings(max_draft, 0, 0));
    same(&told::bytes(fed, id, TOKENS), &alone.bytes, what);
}

/// Computes a prompt, waits until host memory has it, and ends the request.
fn pass<B: Backend>(fed: &mut Fed<B>, told: &Told<'_>, salt: u8) {
    let admission = admit(fed, told, &[salt]);
    compute(fed, (admission.id, admission.reused), told, TOKENS);
    fed.manager.settle_tier(&fed.stream).unwrap();
    fed.manager.release(admission.id).unwrap();
    check(fed);
}

fn check<B: Backend>(fed: &Fed<B>) {
    fed.manager.ledger().audit().unwrap();
    fed.manager.audit_tier().unwrap();
    fed.manager.check_faults(&fed.stream).unwrap();
    fed.manager.check_poison(&fed.stream).unwrap();
}

/// Of four prompts the device keeps two. The others come back with the bytes that they have alone, by `admit_waiting`
/// or by an earlier `prefetch`; under another salt they do not.
pub fn what_the_device_lost_comes_back<B: Backend>(device: &Device<B>) {
    let stories = [401, 402, 403, 404].map(|seed| Story::random(&tiny(), TOKENS, seed));
    for max_draft in [0, 2] {
        let settings = settings(max_draft, 2, 0);
        let mut fed = fed(device, CacheConfig { host_bytes: PLENTY, ..settings });
        for (salt, story) in (0..).zip(&stories) {
            pass(&mut fed, &told(story), salt);
        }
        let stats = fed.manager.tier_stats();
        assert_eq!((stats.stored_blocks, stats.stored_checkpoints), (12, 4));
        let first = told(&stories[0]);
        assert_eq!(reusable(&mut fed, &first, &[0]), 0, "the device lost it");
        let tokens = first.ids();
        let prompt = |salt| Prompt { tokens: &tokens, salt, adapter: b"" };
        assert!(
            fed.manager.prefetch(&fed.stream, &prompt(&[9])).unwrap().is_none(),
            "another salt"
        );

        let waited = fed.manager.admit_waiting(&fed.stream, &prompt(&[0])).unwrap();
        assert_eq!((waited.reused, waited.matched), (384, 384));
        assert_table(&fed, waited.id);
        compute(&mut fed, (waited.id, 384), &first, TOKENS);
        assert_alone(&fed, waited.id, &first, "waited for");
        fed.manager.release(waited.id).unwrap();
        check(&fed);

        let second = told(&stories[1]);
        let tokens = second.ids();
        let prompt = Prompt { tokens: &tokens, salt: &[1], adapter: b"" };
        assert_eq!(reusable(&mut fed, &second, &[1]), 0, "the device lost it");
        let id = fed.manager.prefetch(&fed.stream, &prompt).unwrap().expect("host memory has it");
        while fed.manager.is_prefetching(id) {
            fed.manager.advance_tier(&fed.stream).unwrap();
        }
        let admission = admit(&mut fed, &second, &[1]);
        assert_eq!(admission.reused, 384);
        compute(&mut fed, (admission.id, 384), &second, 7);
        assert_alone(&fed, admission.id, &second, "asked for");
        let stats = fed.manager.tier_stats();
        assert_eq!((stats.restored_blocks, stats.restored_checkpoints), (6, 2));
        assert_eq!(stats.restored_tokens, 2 * 384);
        assert_eq!((stats.evicted_blocks, stats.misses), (0, [0; TierMiss::ALL.len()]));
        let events = fed.manager.take_tier_events();
        let moved = |events: &[TierEvent]| {
            let bytes = events.iter().map(|event| match event {
                TierEvent::Stored { bytes, .. } => [*bytes, 0],
                TierEvent::Restored { bytes, .. } => [0, *bytes],
                TierEvent::Missed { .. } => [0, 0],
            });
            bytes.fold([0, 0], |sum, bytes| [sum[0] + bytes[0], sum[1] + bytes[1]])
        };
        assert_eq!(moved(&events), [stats.bytes_to_host, stats.bytes_from_host]);
        check(&fed);
    }
}

/// A prompt shares a prefix with one that is on the device. Only the missing part is moved; blocks that are there are
/// shared.
pub fn what_the_device_has_is_not_moved<B: Backend>(device: &Device<B>) {
    let [a, b, c] = [411, 412, 413].map(|seed| Story::random(&tiny(), TOKENS, seed));
    let whole = Told::parting(&a, &a, TOKENS, TOKENS);
    let parted = Told::parting(&a, &b, 256, TOKENS);
    let mut fed = fed(device, CacheConfig { host_bytes: PLENTY, ..settings(0, 4, 0) });
    pass(&mut fed, &whole, 0);
    // Saves a checkpoint at 256, where the prompts differ, and one at 384.
    pass(&mut fed, &parted, 0);
    let one = admit(&mut fed, &whole, &[0]);
    assert_eq!(one.reused, 384);
    // Other prompts take the device's remaining checkpoints.
    for salt in [1, 2, 3] {
        pass(&mut fed, &told(&c), salt);
    }
    let two = admit(&mut fed, &parted, &[0]);
    assert_eq!((two.reused, two.matched), (256, 256), "what the first one uses is there");
    fed.manager.release(two.id).unwrap();
    let before = fed.manager.tier_stats();
    let tokens = parted.ids();
    let prompt = Prompt { tokens: &tokens, salt: &[0], adapter: b"" };
    let two = fed.manager.admit_waiting(&fed.stream, &prompt).unwrap();
    assert_eq!(two.reused, 384);
    let stats = fed.manager.tier_stats();
    assert_eq!(stats.restored_blocks - before.restored_blocks, 1, "two blocks are there");
    assert_eq!(stats.restored_tokens - before.restored_tokens, 128);
    let tables = [one.id, two.id].map(|id| fed.manager.block_table(id).unwrap());
    assert_eq!(tables[0][..2], tables[1][..2]);
    compute(&mut fed, (two.id, 384), &parted, TOKENS);
    assert_alone(&fed, two.id, &parted, "the parted one");
    compute(&mut fed, (one.id, 384), &whole, TOKENS);
    assert_alone(&fed, one.id, &whole, "the whole one");
    check(&fed);
}

/// Host memory for two prompts: of four the last two are there. A prefix for which the device has no room is refused,
/// and nothing changes.
pub fn host_memory_evicts_what_nobody_uses<B: Backend>(device: &Device<B>) {
    let stories = [421, 422, 423, 424].map(|seed| Story::random(&tiny(), TOKENS, seed));
    let mut fed = fed(device, CacheConfig { host_bytes: PLENTY, ..settings(0, 1, 0) });
    pass(&mut fed, &told(&stories[0]), 0);
    let (free, all) = fed.manager.host_units();
    let unit = PLENTY / u64::from(all);
    let host_bytes = 2 * u64::from(all - free) * unit;
    let mut fed = super::told::fed(device, CacheConfig { host_bytes, ..settings(0, 1, 0) });
    for (salt, story) in (0..).zip(&stories) {
        pass(&mut fed, &told(story), salt);
    }
    assert_eq!(fed.manager.host_units(), (0, 2 * (all - free)));
    let stats = fed.manager.tier_stats();
    assert_eq!((stats.evicted_blocks, stats.evicted_checkpoints), (6, 2));
    let tokens = told(&stories[0]).ids();
    let prompt = |salt| Prompt { tokens: &tokens, salt, adapter: b"" };
    assert!(fed.manager.prefetch(&fed.stream, &prompt(&[0])).unwrap().is_none(), "it was evicted");
    // The only checkpoint of the device is in use, so nothing can be brought back.
    let last = admit(&mut fed, &told(&stories[3]), &[3]);
    assert_eq!(last.reused, 384);
    let before = fed.manager.ledger().tree_counts();
    let error = fed.manager.prefetch(&fed.stream, &prompt(&[2])).unwrap_err();
    assert!(matches!(error, KvError::OutOfCheckpoints { needed: 1, free: 0 }), "{error}");
    assert_eq!(fed.manager.ledger().tree_counts(), before);
    let refused = fed.manager.admit_waiting(&fed.stream, &prompt(&[2])).unwrap();
    assert_eq!(refused.reused, 0, "it is computed again");
    assert_eq!(fed.manager.tier_stats().misses[TierMiss::NoRoomOnDevice.index()], 2);
    compute(&mut fed, (last.id, 384), &told(&stories[3]), TOKENS);
    assert_alone(&fed, last.id, &told(&stories[3]), "the last");
    check(&fed);
}

/// Windows of draft layers come back with a checkpoint that has them. A checkpoint that a chunk saved has none: the
/// windows are zero, whatever was in the checkpoint's memory before.
pub fn draft_windows_come_back_if_they_were_saved<B: Backend>(device: &Device<B>) {
    let stories = [431, 432, 433].map(|seed| Story::random(&tiny(), TOKENS, seed));
    let mut fed = fed(device, CacheConfig { host_bytes: PLENTY, ..settings(1, 1, 0) });
    // All checkpoints use the same device memory, one after the other.
    for (salt, chunk) in [(0, 380), (1, TOKENS), (2, 380)] {
        let told = told(&stories[salt]);
        let id = admit(&mut fed, &told, &[salt as u8]).id;
        told::compute_to(&mut fed, id, &told, 0..chunk, Cut::Chunks(chunk));
        told::compute_to(&mut fed, id, &told, chunk..TOKENS, Cut::Chunks(1));
        fed.manager.settle_tier(&fed.stream).unwrap();
        fed.manager.release(id).unwrap();
        check(&fed);
    }
    let draft = fed.layer_ids().last().unwrap();
    for (salt, was_saved) in [(0, true), (1, false)] {
        let story = &stories[salt];
        let prompt = Prompt { tokens: &told(story).ids(), salt: &[salt as u8], adapter: b"" };
        let admission = fed.manager.admit_waiting(&fed.stream, &prompt).unwrap();
        assert_eq!(admission.reused, 384);
        if was_saved {
            let rows = &story.window_rows(draft)[..384];
            assert_ring(&fed.manager, &fed.stream, draft, admission.id, rows);
        } else {
            assert_ring_is_zero(&fed.manager, &fed.stream, draft, admission.id);
        }
        fed.manager.release(admission.id).unwrap();
        check(&fed);
    }
    assert_eq!(fed.manager.tier_stats().restored_checkpoints, 2);
}
