//! A tree allocates when it is created, and not afterwards.

use allocation_counter::measure;
use dsv4_kv_prefix::{Limits, Need, Origin, PrefixTree, RootKey, ScoredLru};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

const T: usize = 16;
/// Most blocks and most checkpoints of the tree.
const BLOCKS: u32 = 200;
const CHECKPOINTS: u32 = 40;

type Tree = PrefixTree<u32, u32, ScoredLru, T>;

fn tree(reserved_blocks: u32) -> Tree {
    let limits = Limits {
        block_bytes: 10,
        checkpoint_bytes: 80,
        lease_bytes: 0,
        remembered: 64,
        reserved_blocks,
    };
    Tree::new(limits, ScoredLru { capacity: 10 * u64::from(BLOCKS) })
}

/// Prompts that diverge at several places, in four roots.
fn prompts(random: &mut SmallRng) -> Vec<(RootKey, Vec<u32>)> {
    let roots = [b"a", b"b", b"c", b"d"].map(|salt| RootKey::new(salt, b"", b""));
    let mut prompts: Vec<(RootKey, Vec<u32>)> = Vec::new();
    for turn in 0..400 {
        let root = roots.choose(random).unwrap().clone();
        let earlier = prompts.choose(random).filter(|_| turn % 8 > 0);
        let mut tokens = earlier.map_or(Vec::new(), |(_, tokens)| tokens.clone());
        tokens.truncate(random.random_range(0..=tokens.len()));
        tokens.extend((0..random.random_range(1..12 * T)).map(|_| random.random::<u32>()));
        tokens.truncate(40 * T);
        prompts.push((root, tokens));
    }
    prompts
}

/// Matches a prompt, registers the missing blocks in chunks of three, each with a checkpoint after its second block,
/// and releases the prompt. If the tree is full, evicts first.
fn turn(tree: &mut Tree, (root, prompt): &(RootKey, Vec<u32>)) {
    let mut at = tree.match_and_lock(root, prompt).reference;
    let blocks = &prompt.as_chunks::<T>().0[at.blocks() as usize..];
    for chunk in blocks.chunks(3) {
        let counts = tree.counts();
        let need = Need {
            blocks: (counts.blocks + chunk.len() as u32).saturating_sub(BLOCKS),
            checkpoints: (counts.checkpoints + 1).saturating_sub(CHECKPOINTS),
        };
        if tree.evict(need, drop).is_err() {
            break;
        }
        tree.extend(&mut at, chunk, |_| 0, drop).unwrap();
        let inside = at.blocks() - u32::from(chunk.len() > 1);
        // Often a checkpoint exists already.
        let _ = tree.attach(&at, inside, Origin::Interval, 0);
    }
    tree.release(at, drop).unwrap();
}

/// Covers matches, splits, new and extended segments, checkpoints, eviction, and roots that come and go.
#[test]
fn a_tree_allocates_nothing_after_it_was_made() {
    let mut random = SmallRng::seed_from_u64(1);
    let prompts = prompts(&mut random);
    let mut tree = tree(BLOCKS);
    let mut roots = 0;
    let counted = measure(|| {
        for _ in 0..20_000 {
            let prompt = prompts.choose(&mut random).unwrap();
            roots += u32::from(tree.lookup(&prompt.0, &prompt.1).matched == 0);
            turn(&mut tree, prompt);
        }
    });
    assert_eq!(counted.count_total, 0);
    let (stats, counts) = (tree.stats(), tree.counts());
    let met = [stats.reused, stats.no_checkpoint, stats.never_seen, stats.evicted_blocks];
    assert!(met.iter().all(|&count| count > 1000) && roots > 100, "{stats:?}");
    assert!(counts.segments > 10 && stats.evicted_checkpoints > 1000, "{counts:?}");
    tree.audit().unwrap();
}

/// As many roots as blocks, each with one segment.
#[test]
fn as_many_roots_as_blocks_allocate_nothing() {
    let keys: Vec<_> = (0..BLOCKS).map(|at| RootKey::new(&at.to_le_bytes(), b"", b"")).collect();
    let mut tree = tree(BLOCKS);
    let counted = measure(|| {
        for key in &keys {
            let mut at = tree.match_and_lock(key, &[]).reference;
            tree.extend(&mut at, &[[7; T]], |_| 0, drop).unwrap();
            tree.attach(&at, 1, Origin::Prompt, 0).unwrap();
            tree.release(at, drop).unwrap();
        }
    });
    assert_eq!((tree.counts().segments, counted.count_total), (BLOCKS, 0));
    tree.audit().unwrap();
}

/// A tree that outgrows its reserved memory does allocate: so the counts above are meaningful.
#[test]
fn a_tree_without_room_grows() {
    let mut random = SmallRng::seed_from_u64(1);
    let prompts = prompts(&mut random);
    let mut tree = tree(0);
    let counted = measure(|| prompts.iter().for_each(|prompt| turn(&mut tree, prompt)));
    assert!(counted.count_total > 0);
    tree.audit().unwrap();
}
