//! Reuse compared with computing alone: at every boundary, with every number of drafts, however prompts are cut; and
//! with random prompts of one tree of prefixes, in a cache that evicts all the time. No byte differs.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::{CacheConfig, Prompt, RequestId};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::told::{
    Alone, Cut, Told, admit, assert_table, bytes, compute, fed, image, same, settings, tail,
};
use crate::fed::{Fed, Part};
use crate::inputs::assert_same;
use crate::stories::{Story, tiny};

/// Number of tokens after a boundary at which the second prompt differs from the first, in turn.
const PARTINGS: [usize; 4] = [0, 1, 77, 127];

/// A cache for prompts that share up to `most` tokens, with a request that computed them in steps cut as `cut` says.
fn shared<'s, B: Backend>(
    device: &Device<B>,
    told: &Told<'s>,
    settings: &CacheConfig,
    cut: Cut<'s>,
) -> (Fed<B>, RequestId) {
    let mut fed = fed(device, settings.clone());
    let id = admit(&mut fed, told, b"").id;
    compute(&mut fed, id, told, 0, cut);
    (fed, id)
}

/// For every boundary up to `most` tokens and each of these numbers of drafts, a request continues from the checkpoint
/// that another request has there, and gets the bytes that it has alone. Both are cut in each way: in long chunks, in
/// chunks whose ends are not aligned, and in steps of a token and drafts, some of which are rejected. The other request
/// keeps its bytes.
fn boundaries<B: Backend>(device: &Device<B>, most: usize, drafts: RangeInclusive<u32>) {
    let [a, b, wrong] = [801, 802, 803].map(|seed| Story::random(&tiny(), most + 320, seed));
    let first = Told::of(&[(0, &a, most + 1)]);
    let mut compared = 0;
    for max_draft in drafts {
        let blocks = most as u32 / 128;
        let settings = CacheConfig {
            max_context: most as u32 + 320,
            num_blocks: blocks + 8,
            ..settings(max_draft, blocks + 4, 128)
        };
        let cuts = [Cut::Chunks(512), Cut::Chunks(90), Cut::Drafts(&wrong)];
        let mut caches = cuts.map(|cut| shared(device, &first, &settings, cut));
        let before = caches.each_ref().map(|(fed, id)| bytes(fed, *id, most + 1));
        for (boundary, parting) in (128..=most).step_by(128).zip(PARTINGS.into_iter().cycle()) {
            // Beyond the next boundary, and so far that every row of every ring is written again.
            let tokens = boundary + 140 + tail(max_draft);
            let second = |number| Told::of(&[(0, &a, boundary + parting), (number, &b, tokens)]);
            let want = Alone::of(device, &second(1), settings.clone());
            let ways = (0..cuts.len()).flat_map(|one| (0..cuts.len()).map(move |two| (one, two)));
            for (one, two) in ways {
                let what = format!("at {boundary}, {max_draft} drafts, cut as {one} and {two}");
                // The same tensors with other token ids; with equal ids it would continue from the request before.
                let (second, (fed, _)) = (second(1 + two as u32), &mut caches[one]);
                let admission = admit(fed, &second, b"");
                assert_eq!(admission.reused as usize, boundary, "{what}");
                assert_table(fed, admission.id);
                let image = image(fed, admission.id, boundary).expect("a checkpoint is free");
                assert_same(&image, &want.images[boundary / 128 - 1], &format!("restored {what}"));
                compute(fed, admission.id, &second, boundary, cuts[two]);
                same(&bytes(fed, admission.id, tokens), &want.bytes, &what);
                fed.manager.release(admission.id).unwrap();
                compared += 1;
            }
        }
        for ((fed, id), before) in caches.iter().zip(&before) {
            same(&bytes(fed, *id, most + 1), before, "the one that was there before");
            fed.manager.check_poison(&fed.stream).unwrap();
            fed.manager.ledger().audit().unwrap();
        }
    }
    assert!(compared > 0);
}

/// A sample of [`boundaries_to_1024_without_drafts`] and the tests after it.
pub fn some_boundaries<B: Backend>(device: &Device<B>) {
    boundaries(device, 256, 2..=2);
}

macro_rules! boundaries {
    ($($name:ident $most:literal $drafts:expr;)*) => {
        $(
            /// See [`boundaries`].
            pub fn $name<B: Backend>(device: &Device<B>) {
                boundaries(device, $most, $drafts);
            }
        )*
    };
}

boundaries! {
    boundaries_to_1024_without_drafts 1024 0..=0;
    boundaries_to_1024_with_1_to_4_drafts 1024 1..=4;
    boundaries_to_1024_with_5_to_8_drafts 1024 5..=8;
    boundaries_to_8192_without_drafts 8192 0..=0;
    boundaries_to_8192_with_1_to_4_drafts 8192 1..=4;
    boundaries_to_8192_with_5_to_8_drafts 8192 5..=8;
}

/// The tokens of a request: (story, end position) in order. The last tokens are its answer.
type Script = Vec<(usize, usize)>;

/// Number of tokens in an answer.
const ANSWER: usize = 16;

/// A prompt made of up to three stories. Many prompts have a common prefix.
fn script(random: &mut SmallRng) -> Script {
    let ends = [100, 127, 128, 129, 200, 256, 300, 384];
    let tokens = *[129, 130, 256, 257, 300, 384, 385, 420].choose(random).expect("not empty");
    let mut script: Script = Vec::new();
    for _ in 0..random.random_range(0..=2) {
        let end = *ends.choose(random).expect("not empty");
        if end < tokens && script.last().is_none_or(|&(_, last)| last < end) {
            script.push((random.random_range(0..2), end));
        }
    }
    script.push((random.random_range(0..3), tokens + ANSWER));
    script
}

/// Random combinations of prefix, suffix and eviction: prompts of one tree of prefixes, some admitted while the request
/// before still runs, in a cache of few blocks and checkpoints, from which other requests sometimes take blocks.
fn triples<B: Backend>(device: &Device<B>, count: usize, seed: u64) {
    let mut random = SmallRng::seed_from_u64(seed);
    let stories = [811, 812, 813].map(|seed| Story::random(&tiny(), 440, seed));
    let wrong = Story::random(&tiny(), 440, 814);
    let settings = CacheConfig { num_blocks: 11, ..settings(2, 4, 256) };
    let scripts: Vec<_> = (0..count.min(48)).map(|_| script(&mut random)).collect();
    let mut wanted = HashMap::new();
    let mut fed = fed(device, settings.clone());
    let (mut before, mut images) = (None, 0);
    for number in 0..count {
        if random.random_ratio(1, 3) {
            let (other, blocks) = (fed.manager.admit().unwrap(), random.random_range(1..=4));
            fed.lose(&[Part::new(other, &wrong, 0..blocks * 100)]);
            fed.manager.release(other).unwrap();
        }
        let at = random.random_range(0..scripts.len());
        let pieces = scripts[at].iter().map(|&(story, end)| (story as u32, &stories[story], end));
        let told = Told::of(&pieces.collect::<Vec<_>>());
        let want = wanted.entry(at).or_insert_with(|| Alone::of(device, &told, settings.clone()));
        let cuts = [Cut::Chunks(512), Cut::Chunks(130), Cut::Chunks(77), Cut::Drafts(&wrong)];
        let cut = *cuts.choose(&mut random).expect("not empty");
        let (ids, salt) = (told.ids(), [random.random_range(0..2)]);
        let prompt = Prompt { tokens: &ids[..ids.len() - ANSWER], salt: &salt, adapter: b"" };
        let admission = fed.manager.admit_with(&fed.stream, &prompt).unwrap();
        let (id, reused) = (admission.id, admission.reused as usize);
        let what = format!("number {number} of seed {seed}, {admission:?}");
        if reused > 0
            && let Some(image) = image(&mut fed, id, reused)
        {
            assert_same(&image, &want.images[reused / 128 - 1], &format!("restored {what}"));
            images += 1;
        }
        compute(&mut fed, id, &told, reused, cut);
        same(&bytes(&fed, id, told.tokens()), &want.bytes, &what);
        let stays = random.random_ratio(1, 3);
        let ended = std::mem::replace(&mut before, stays.then_some(id));
        let ended = ended.into_iter().chain((!stays).then_some(id));
        ended.for_each(|id| fed.manager.release(id).unwrap());
    }
    fed.manager.check_poison(&fed.stream).unwrap();
    fed.manager.ledger().audit().unwrap();
    let stats = fed.manager.reuse_stats();
    println!("{count} triples of seed {seed}, {images} looked at when restored: {stats:?}");
    let (count, hits) = (count as u64, stats.hits);
    assert!(images > hits / 2, "{images} of {hits}");
    assert!(hits > count / 5 && stats.evicted_blocks > count / 5, "{stats:?}");
}

/// A sample of [`ten_thousand_triples`].
pub fn some_triples<B: Backend>(device: &Device<B>) {
    triples(device, 40, 0);
}

/// As [`some_triples`], with 10,000 combinations.
pub fn ten_thousand_triples<B: Backend>(device: &Device<B>) {
    (1..=4).for_each(|seed| triples(device, 2_500, seed));
}
