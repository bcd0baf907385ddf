//! The order of eviction: by last use, hits, and origin of a checkpoint.

use dsv4_kv_prefix::{Freed, Limits, Need, Origin, PrefixTree, Reference, RootKey, ScoredLru};

/// Tokens of a block.
const T: usize = 2;
/// Bytes of a block and its checkpoint. The tree's clock counts bytes: a quarter of [`CAPACITY`] is a little more than
/// one block with its checkpoint.
const BYTES: [u64; 2] = [10, 80];
const CAPACITY: u64 = 400;
const ONE_CHECKPOINT: Need = Need { blocks: 0, checkpoints: 1 };

/// A tree of paths. Each letter names a block and the checkpoint at its end.
struct Paths {
    tree: PrefixTree<char, char, ScoredLru, T>,
    root: RootKey,
}

/// A prompt of these blocks, plus one token to compute.
fn prompt(path: &str) -> Vec<u32> {
    path.chars().flat_map(|letter| [letter.into(); T]).chain([0]).collect()
}

impl Paths {
    fn new() -> Self {
        Self::of(BYTES)
    }

    /// A tree whose blocks and checkpoints have these sizes in bytes.
    fn of([block_bytes, checkpoint_bytes]: [u64; 2]) -> Self {
        let limits = Limits {
            block_bytes,
            checkpoint_bytes,
            lease_bytes: 0,
            remembered: 0,
            reserved_blocks: 16,
        };
        let tree = PrefixTree::new(limits, ScoredLru { capacity: CAPACITY });
        Self { tree, root: RootKey::new(b"salt", b"", b"model") }
    }

    /// A request computes a path, and saves a checkpoint after each of these numbers of blocks.
    fn compute(&mut self, path: &str, checkpoints: &[(usize, Origin)]) -> Reference {
        let letters: Vec<char> = path.chars().collect();
        let mut at = self.tree.match_and_lock(&self.root, &[]).reference;
        let (tokens, take) = (prompt(path), |block: usize| letters[block]);
        self.tree.extend(&mut at, tokens.as_chunks().0, take, drop).unwrap();
        for &(blocks, origin) in checkpoints {
            self.tree.attach(&at, blocks as u32, origin, letters[blocks - 1]).unwrap();
        }
        at
    }

    /// As [`Self::compute`] for paths of one block each, one after another; the requests end.
    fn put(&mut self, letters: &str, origin: Origin) {
        for letter in letters.chars() {
            let at = self.compute(&letter.to_string(), &[(1, origin)]);
            self.tree.release(at, drop).unwrap();
        }
    }

    /// A request continues from the checkpoint of a block, and ends.
    fn hit(&mut self, letter: &str) {
        let found_prefix = self.tree.match_and_lock(&self.root, &prompt(letter));
        assert_eq!(found_prefix.reused as usize, T, "{letter} is there");
        self.tree.release(found_prefix.reference, drop).unwrap();
    }

    fn evict(&mut self, needed: Need) -> Vec<Freed<char, char>> {
        let mut freed = Vec::new();
        self.tree.evict(needed, |one| freed.push(one)).unwrap();
        self.tree.audit().unwrap();
        freed
    }

    /// Evicts `count` checkpoints one at a time, and returns their names in that order.
    fn order(&mut self, count: usize) -> String {
        let mut name = || match self.evict(ONE_CHECKPOINT)[..] {
            [Freed::Checkpoint(name), ..] => name,
            ref other => panic!("{other:?}"),
        };
        (0..count).map(|_| name()).collect()
    }
}

/// A checkpoint that was hit counts as used a quarter of the capacity after the hit: it outlives a newer one.
#[test]
fn what_was_hit_stays_longer() {
    let mut paths = Paths::new();
    paths.put("abc", Origin::Prompt);
    paths.hit("a");
    paths.put("d", Origin::Prompt);
    assert_eq!(paths.order(4), "bcda");
}

/// Of two checkpoints that were hit as often, the one that was hit last stays, also if nothing was added between the hits.
#[test]
fn the_later_hit_counts_as_later() {
    for hits in ["ab", "ba", "bbaa", "aabb"] {
        let mut paths = Paths::new();
        paths.put("ab", Origin::Prompt);
        hits.split("").filter(|letter| !letter.is_empty()).for_each(|letter| paths.hit(letter));
        let last = hits.chars().last().unwrap();
        let first = if last == 'a' { "ba" } else { "ab" };
        assert_eq!(paths.order(2), first, "{hits}");
    }
}

/// A fourth hit does not count: with four quarters `a` would outlive `e`.
#[test]
fn three_hits_count() {
    let mut paths = Paths::new();
    paths.put("a", Origin::Prompt);
    (0..4).for_each(|_| paths.hit("a"));
    paths.put("bcde", Origin::Prompt);
    assert_eq!(paths.order(5), "bcdae");
}

/// Interval and output checkpoints are evicted first, even if they are the newest, unless they were hit.
#[test]
fn what_was_never_hit_and_is_expendable_goes_first() {
    let mut paths = Paths::new();
    paths.put("abc", Origin::Prompt);
    paths.hit("a");
    assert_eq!(paths.order(1), "b");
    paths.put("d", Origin::Interval);
    assert_eq!(paths.order(1), "d");
    paths.put("e", Origin::Output);
    assert_eq!(paths.order(1), "e");
    for (letter, origin) in [("f", Origin::Interval), ("g", Origin::Output)] {
        paths.put(letter, origin);
        paths.hit(letter);
    }
    paths.put("h", Origin::Branch);
    assert_eq!(paths.order(5), "cafhg");
}

/// Expendable checkpoints count as used 1.25 capacities, 500 bytes, earlier.
#[test]
fn what_is_expendable_outlives_what_is_much_older() {
    for (later, order) in [(499, "ba"), (501, "ab")] {
        let mut paths = Paths::of([1, 0]);
        paths.put("a", Origin::Prompt);
        // The last byte is the other block itself.
        let between = paths.compute(&"z".repeat(later - 1), &[]);
        paths.put("b", Origin::Interval);
        assert_eq!(paths.order(2), order, "{later} bytes later");
        paths.tree.release(between, drop).unwrap();
    }
}

/// An expendable checkpoint inside a path is evicted before older ones, without its blocks. If blocks are needed, a
/// leaf is evicted, and the checkpoint stays.
#[test]
fn the_checkpoint_inside_a_path_goes_alone() {
    let paths = || {
        let mut paths = Paths::new();
        paths.put("a", Origin::Prompt);
        let at = paths.compute("xy", &[(1, Origin::Interval), (2, Origin::Prompt)]);
        paths.tree.release(at, drop).unwrap();
        paths
    };
    let [a, x, y] = ['a', 'x', 'y'].map(Freed::Checkpoint);
    let mut first = paths();
    assert_eq!(first.evict(ONE_CHECKPOINT), [x]);
    assert_eq!(first.evict(ONE_CHECKPOINT), [a, Freed::Block('a')]);
    assert_eq!(first.evict(ONE_CHECKPOINT), [y, Freed::Block('y'), Freed::Block('x')]);
    let freed = paths().evict(Need { blocks: 1, checkpoints: 0 });
    assert_eq!(freed, [Freed::Checkpoint('a'), Freed::Block('a')]);
}

/// Continuing from a reference counts as a hit of its checkpoint, and as a use of everything above it.
#[test]
fn what_somebody_goes_on_from_elsewhere_was_used() {
    let mut paths = Paths::new();
    let at = paths.compute("a", &[(1, Origin::Interval)]);
    paths.tree.touch_at(&at).unwrap();
    paths.tree.release(at, drop).unwrap();
    paths.put("b", Origin::Prompt);
    assert_eq!(paths.order(2), "ba", "it was hit: no expendable one");

    // There is one more block after the checkpoints, and the reference is at its end.
    let at = paths.compute("uvw", &[(1, Origin::Prompt), (2, Origin::Interval)]);
    paths.put("cd", Origin::Prompt);
    paths.tree.touch_at(&at).unwrap();
    paths.tree.release(at, drop).unwrap();
    assert_eq!(paths.order(2), "vc", "`u` is older than `c`, and was used since");
}
