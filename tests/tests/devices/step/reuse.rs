//! Requests that continue from prefixes of others: every byte is as if they were alone.

use std::time::Duration;

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::{Accepted, CacheConfig, KvError, Launches, Prompt, RequestId, StepRequest};

use super::told::{self, Alone, Cut, Told, admit, assert_table, fed, same, settings};
use crate::fed::{Fed, Padding, Part, assert_pools, begin};
use crate::stories::{Story, tiny};

/// Number of tokens in a prompt.
const TOKENS: usize = 420;

/// The tokens of `first` up to `parting`, then those of `second`.
fn says<'s>(first: &'s Story, second: &'s Story, parting: usize) -> Told<'s> {
    Told::parting(first, second, parting, TOKENS)
}

/// All bytes of a request in the trunk.
fn bytes<B: Backend>(fed: &Fed<B>, id: RequestId) -> Vec<(String, Vec<u8>)> {
    told::bytes(fed, id, TOKENS)
}

/// The bytes of the same request in a cache of its own.
fn alone<B: Backend>(
    device: &Device<B>,
    told: &Told<'_>,
    max_draft: u32,
) -> Vec<(String, Vec<u8>)> {
    Alone::of(device, told, settings(max_draft, 0, 0)).bytes
}

/// Runs the tokens of a request in chunks.
fn compute<B: Backend>(
    fed: &mut Fed<B>,
    id: RequestId,
    told: &Told<'_>,
    from: usize,
    chunk: usize,
) {
    told::compute(fed, id, told, from, Cut::Chunks(chunk));
}

/// The second prompt differs from the first at several positions, and both are cut in several ways. The second
/// continues from the checkpoint at or before that position, has the bytes that it has alone, and changes no byte of
/// the first.
pub fn reuse_equals_computing<B: Backend>(device: &Device<B>) {
    let [a, b] = [301, 302].map(|seed| Story::random(&tiny(), TOKENS, seed));
    let first = says(&a, &a, TOKENS);
    for (max_draft, interval, parting, chunks) in [
        (0, 128, 127, [TOKENS, TOKENS]),
        (0, 128, 128, [150, 90]),
        (3, 128, 300, [TOKENS, 150]),
        (3, 256, 399, [90, TOKENS]),
        (2, 0, TOKENS, [130, 7]),
        (0, 0, 384, [2, TOKENS]),
    ] {
        let second = says(&a, &b, parting);
        let mut fed = fed(device, settings(max_draft, 8, interval));
        let one = admit(&mut fed, &first, b"");
        assert_eq!((one.reused, one.matched), (0, 0));
        compute(&mut fed, one.id, &first, 0, chunks[0]);
        let before = bytes(&fed, one.id);
        let two = admit(&mut fed, &second, b"");
        let matched = parting.min(TOKENS - 1) / 128 * 128;
        let checkpoint = match interval {
            0 if matched < 384 => 0,
            0 => 384,
            every => matched / every as usize * every as usize,
        };
        // There is also a checkpoint at the last boundary of the prompt.
        let reused = if matched == 384 { 384 } else { checkpoint };
        let what = format!("parting {parting}, interval {interval}, {max_draft} drafts");
        assert_eq!((two.reused as usize, two.matched as usize), (reused, matched), "{what}");
        assert_eq!(fed.manager.ledger().committed(two.id).unwrap() as usize, reused);
        assert_table(&fed, two.id);
        compute(&mut fed, two.id, &second, reused, chunks[1]);
        assert_table(&fed, two.id);
        same(&bytes(&fed, two.id), &alone(device, &second, max_draft), &what);
        same(&bytes(&fed, one.id), &before, &format!("the first one, {what}"));
        let tables = [one.id, two.id].map(|id| fed.manager.block_table(id).unwrap());
        let shared = tables[0].iter().zip(&tables[1]).take_while(|(a, b)| a == b).count();
        assert_eq!(shared, reused / 128, "blocks behind the checkpoint are its own, {what}");
        fed.manager.ledger().audit().unwrap();
    }
}

/// The next turn of a conversation continues from the last boundary of the answer before, which steps with drafts
/// passed. It has the bytes that it has alone, also if the request that answered was forked, suspended and discarded.
pub fn the_next_turn_goes_on_from_the_answer<B: Backend>(device: &Device<B>) {
    let [a, b, wrong] = [361, 362, 363].map(|seed| Story::random(&tiny(), 620, seed));
    for max_draft in [0, 3] {
        for is_suspended in [false, true] {
            let settings = CacheConfig { max_suspended: 1, ..settings(max_draft, 4, 0) };
            let mut fed = fed(device, settings.clone());
            let first = Told::of(&[(0, &a, 530)]);
            let ids = first.ids();
            let prompt = Prompt { tokens: &ids[..300], salt: b"", adapter: b"" };
            let one = fed.manager.admit_with(&fed.stream, &prompt).unwrap().id;
            told::compute_to(&mut fed, one, &first, 0..300, Cut::Chunks(300));
            told::compute_to(&mut fed, one, &first, 300..530, Cut::Drafts(&wrong));
            let counts = |fed: &Fed<B>| {
                let ledger = fed.manager.ledger();
                [ledger.tree_counts().checkpoints, ledger.output_checkpoints()]
            };
            assert_eq!(counts(&fed), [1, 1], "the prompt's, and the last one of the answer");
            if is_suspended {
                let fork = fed.manager.fork(&fed.stream, one).unwrap();
                let suspended = fed.manager.suspend(&fed.stream, one).unwrap();
                fed.manager.discard(suspended).unwrap();
                fed.manager.release(fork).unwrap();
            } else {
                fed.manager.release(one).unwrap();
            }
            assert_eq!(counts(&fed), [2, 0]);
            let second = Told::of(&[(0, &a, 530), (1, &b, 600)]);
            let two = admit(&mut fed, &second, b"");
            assert_eq!(two.reused, 512, "{max_draft} drafts");
            assert_table(&fed, two.id);
            compute(&mut fed, two.id, &second, 512, 60);
            let want = Alone::of(device, &second, settings);
            let what = format!("{max_draft} drafts, suspended {is_suspended}");
            same(&told::bytes(&fed, two.id, 600), &want.bytes, &what);
            fed.manager.ledger().audit().unwrap();
        }
    }
}

/// The second of two prompts saves a checkpoint where it differs from the first. The third continues from there, also
/// after the first two have ended. Under another salt nothing is shared.
pub fn a_branch_point_is_reused_by_the_third<B: Backend>(device: &Device<B>) {
    let stories = [311, 312, 313].map(|seed| Story::random(&tiny(), TOKENS, seed));
    let [a, b, c] = &stories;
    let mut fed = fed(device, settings(0, 8, 0));
    let first = says(a, a, TOKENS);
    let one = admit(&mut fed, &first, b"x");
    compute(&mut fed, one.id, &first, 0, TOKENS);
    fed.manager.release(one.id).unwrap();
    let second = says(a, b, 300);
    let two = admit(&mut fed, &second, b"x");
    assert_eq!((two.reused, two.matched), (0, 256));
    compute(&mut fed, two.id, &second, 0, 200);
    same(&bytes(&fed, two.id), &alone(device, &second, 0), "the second");
    fed.manager.release(two.id).unwrap();
    let third = says(a, c, 270);
    let elsewhere = admit(&mut fed, &third, b"y");
    assert_eq!((elsewhere.reused, elsewhere.matched), (0, 0));
    fed.manager.release(elsewhere.id).unwrap();
    let three = admit(&mut fed, &third, b"x");
    assert_eq!((three.reused, three.matched), (256, 256));
    compute(&mut fed, three.id, &third, 256, TOKENS);
    same(&bytes(&fed, three.id), &alone(device, &third, 0), "the third");
    let stats = fed.manager.reuse_stats();
    assert_eq!((stats.prompts, stats.hits, stats.reused), (4, 1, 256));
    assert_eq!((stats.no_checkpoint, stats.other_root), (256, 128));
}

/// The same prompt twice in the same steps: both compute it, the tree keeps the blocks of the first, and those of the
/// second are freed when it ends.
pub fn the_same_prompt_twice_at_once<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), TOKENS, 321);
    let told = says(&story, &story, TOKENS);
    let mut fed = fed(device, settings(0, 8, 128));
    let ids = [0, 1].map(|_| admit(&mut fed, &told, b"").id);
    let tokens = told.ids();
    let mut done = 0;
    for to in [100, 250, TOKENS] {
        let parts = ids.map(|id| told.part(id, done..to, None));
        fed.inputs.load(&fed.stream, &parts, 2 * (to - done) as u32);
        let mut steps = begin(&mut fed.manager, &fed.stream, &parts, Padding::None).unwrap();
        for step in &mut steps {
            fed.inputs.run(step, &mut |_, _| Ok(())).unwrap();
        }
        let accepted =
            ids.map(|id| Accepted { id, accepted: (to - done) as u32, tokens: &tokens[done..to] });
        steps.into_iter().for_each(|step| step.commit(&accepted).unwrap());
        done = to;
    }
    let want = alone(device, &told, 0);
    ids.iter().for_each(|&id| same(&bytes(&fed, id), &want, &format!("{id}")));
    let counts = fed.manager.ledger().tree_counts();
    assert_eq!((counts.blocks, counts.checkpoints), (3, 3));
    assert_eq!(fed.manager.ledger().free_blocks(), 15 - 8);
    fed.manager.release(ids[0]).unwrap();
    let third = admit(&mut fed, &told, b"");
    assert_eq!(third.reused, 384);
    fed.manager.release(ids[1]).unwrap();
    compute(&mut fed, third.id, &told, 384, TOKENS);
    same(&bytes(&fed, third.id), &want, "the third");
    fed.manager.release(third.id).unwrap();
    assert_eq!((fed.manager.ledger().free_blocks(), counts.checkpoints), (12, 3));
}

/// Checkpoints that only the prefix tree has are evicted for a save, if there are enough of them.
pub fn a_save_evicts_what_nobody_uses<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), TOKENS, 343);
    let told = says(&story, &story, TOKENS);
    let mut fed = fed(device, settings(0, 2, 128));
    let one = admit(&mut fed, &told, b"").id;
    compute(&mut fed, one, &told, 0, 256);
    fed.manager.release(one).unwrap();
    let checkpoints = |fed: &Fed<B>| fed.manager.ledger().tree_counts().checkpoints;
    assert_eq!(fed.manager.ledger().free_checkpoints(), 0);
    assert_eq!(checkpoints(&fed), 2);
    let other = fed.manager.admit().unwrap();
    fed.step(&[Part::new(other, &story, 0..128)], Padding::None);
    let mut save = |times| fed.manager.save_checkpoints(&fed.stream, &vec![(other, 128); times]);
    let error = save(3).unwrap_err();
    assert!(matches!(error, KvError::OutOfCheckpoints { needed: 3, free: 2 }), "{error}");
    let saved = save(1).unwrap().remove(0);
    assert_eq!(checkpoints(&fed), 1, "the refused save evicted none");
    fed.manager.discard_checkpoint(saved).unwrap();
    fed.manager.ledger().audit().unwrap();
}

/// A request continues from its own checkpoint after a long rejected step has overwritten its rows, and registers its
/// blocks as before. The checkpoint of another request is refused: its blocks hold other tokens.
pub fn a_request_goes_on_from_its_own_checkpoint<B: Backend>(device: &Device<B>) {
    let [a, b] = [341, 342].map(|seed| Story::random(&tiny(), TOKENS, seed));
    let told = says(&a, &a, TOKENS);
    let mut fed = fed(device, settings(0, 8, 128));
    let stream = fed.stream.clone();
    let other = fed.manager.admit().unwrap();
    fed.step(&[Part::new(other, &b, 0..128)], Padding::None);
    let one = admit(&mut fed, &told, b"").id;
    let (parts, ids) = ([told.part(one, 0..128, None)], told.ids());
    fed.inputs.load(&stream, &parts, 128);
    for mut step in begin(&mut fed.manager, &stream, &parts, Padding::None).unwrap() {
        fed.inputs.run(&mut step, &mut |_, _| Ok(())).unwrap();
        step.commit(&[Accepted { id: one, accepted: 128, tokens: &ids[..128] }]).unwrap();
    }
    let saves = [(other, 128), (one, 128)];
    let saved = fed.manager.save_checkpoints(&stream, &saves).unwrap();
    let rejected = [told.part(one, 128..300, None)];
    fed.inputs.load(&stream, &rejected, 172);
    for mut step in begin(&mut fed.manager, &stream, &rejected, Padding::None).unwrap() {
        fed.inputs.run(&mut step, &mut |_, _| Ok(())).unwrap();
    }
    let next = [told.part(one, 128..129, None)];
    let refused = begin(&mut fed.manager, &stream, &next, Padding::None).err().unwrap();
    assert!(matches!(refused, KvError::Overwritten { request, .. } if request == one), "{refused}");
    let before = fed.pool_bytes();
    let error = fed.manager.restore_checkpoint(&stream, one, &saved[0]).unwrap_err();
    let KvError::OtherRequest { request, saved: of } = error else { panic!("{error}") };
    assert_eq!((request, of), (one, other));
    assert_pools(&fed, &before, "after the refusal");
    fed.manager.restore_checkpoint(&stream, one, &saved[1]).unwrap();
    compute(&mut fed, one, &told, 128, TOKENS);
    let want = alone(device, &told, 0);
    same(&bytes(&fed, one), &want, "the first");
    let two = admit(&mut fed, &told, b"");
    assert_eq!(two.reused, 384);
    compute(&mut fed, two.id, &told, 384, TOKENS);
    same(&bytes(&fed, two.id), &want, "the second");
    saved.into_iter().for_each(|saved| fed.manager.discard_checkpoint(saved).unwrap());
}

/// Prompts that do not fit together: prefixes without references are evicted, those in use stay, and evicted ones are
/// computed again. A step that would need more is refused as a whole.
pub fn what_is_evicted_is_computed_again<B: Backend>(device: &Device<B>) {
    let stories = [331, 332, 333, 334, 335].map(|seed| Story::random(&tiny(), TOKENS, seed));
    let mut fed = fed(device, settings(0, 3, 0));
    for turn in 0..7 {
        let story = &stories[turn % 5];
        // All stories have the same token ids here, so each has its own salt; otherwise a prompt would reuse another
        // story's blocks.
        let told = says(story, story, 0);
        let admission = admit(&mut fed, &told, &[turn as u8 % 5]);
        assert_eq!(admission.reused, 0, "three checkpoints are of the last three prompts");
        compute(&mut fed, admission.id, &told, 0, 210);
        same(&bytes(&fed, admission.id), &alone(device, &told, 0), &format!("turn {turn}"));
        fed.manager.release(admission.id).unwrap();
        fed.manager.ledger().audit().unwrap();
    }
    assert!(fed.manager.reuse_stats().evicted_blocks >= 6);
    let told = stories.each_ref().map(|story| says(story, story, 0));
    // The last prompt is still in the tree.
    let kept = admit(&mut fed, &told[1], &[1]);
    assert_eq!(kept.reused, 384);
    // Two requests need four blocks each, and six are free: another prompt is evicted.
    let others = [0, 1].map(|_| fed.manager.admit().unwrap());
    others.iter().for_each(|&id| fed.lose(&[told[0].part(id, 0..TOKENS, None)]));
    assert_eq!(fed.manager.ledger().tree_counts().blocks, 6);
    // One block is free, three could be evicted, and four are needed: all or none.
    let step = [kept.id, others[0], others[1]].map(|id| {
        let start = fed.manager.ledger().committed(id).unwrap();
        StepRequest { id, start, tokens: 165 }
    });
    let tokens = told[0].ids();
    let pinned = Prompt { tokens: &tokens, salt: &[0], adapter: b"" };
    let lease = fed.manager.pin(&pinned, Duration::from_secs(5)).unwrap();
    assert_eq!(lease.tokens(), 384);
    let refused = fed.manager.begin_step(&fed.stream, Launches::Eager, &step).err().unwrap();
    assert!(matches!(refused, KvError::OutOfBlocks { needed: 4, free: 1 }), "{refused}");
    assert_eq!(fed.manager.ledger().tree_counts().blocks, 6);
    assert_eq!(fed.manager.expire(Duration::from_secs(5)), 0);
    assert_eq!(fed.manager.expire(Duration::from_secs(6)), 1);
    assert!(!fed.manager.unpin(lease), "its time has ended it");
    let begun = fed.manager.begin_step(&fed.stream, Launches::Eager, &step).unwrap();
    assert_eq!(begun.plan().new_blocks, 4);
    drop(begun);
    assert_eq!(fed.manager.ledger().tree_counts().blocks, 3);
    assert_eq!(fed.manager.ledger().free_blocks(), 4);
    fed.manager.ledger().audit().unwrap();
}
