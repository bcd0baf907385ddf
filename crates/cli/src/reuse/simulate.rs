//! A trace's prompts through the prefix tree, one after the other.

use dsv4_kv::kv_layout::geometry::BLOCK_TOKENS;
use dsv4_kv_cli::trace::{HASH_TOKENS, Prompt};
use dsv4_kv_prefix::{
    Foreign, Limits, Lru, Placement, Policy, PrefixTree, ReuseStats, RootKey, ScoredLru,
};

use crate::texts::Texts;

/// Tokens of a block, as the tree counts them.
const BLOCK: usize = BLOCK_TOKENS as usize;
/// Blocks that are remembered after they were evicted, to tell why tokens were not reused.
const REMEMBERED: u32 = 1 << 22;

/// Where checkpoints are taken, and which leaf is evicted first.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// What it is called.
    pub name: &'static str,
    junctions: bool,
    interval: bool,
    scored: bool,
}

/// What is compared. Each prompt has a checkpoint at its end.
pub const CASES: [Case; 4] = [
    Case { name: "end, LRU", junctions: false, interval: false, scored: false },
    Case { name: "end + junction, LRU", junctions: true, interval: false, scored: false },
    Case { name: "end + junction + interval, LRU", junctions: true, interval: true, scored: false },
    Case {
        name: "end + junction + interval, scored LRU",
        junctions: true,
        interval: true,
        scored: true,
    },
];

/// What a simulation is given.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Bytes of a block in all layers.
    pub block_bytes: u64,
    /// Bytes of a checkpoint.
    pub checkpoint_bytes: u64,
    /// Tokens of an interval.
    pub interval: u32,
    /// Bytes of all blocks and checkpoints that are kept.
    pub pool: u64,
}

/// Runs all prompts through an empty tree.
///
/// # Errors
/// Never: [`Foreign`] is a reference of another tree.
pub fn simulate(case: Case, sizes: Sizes, prompts: &[Prompt]) -> Result<ReuseStats, Foreign> {
    if case.scored {
        run(case, sizes, prompts, ScoredLru { capacity: sizes.pool })
    } else {
        run(case, sizes, prompts, Lru)
    }
}

fn run<P: Policy>(
    case: Case,
    sizes: Sizes,
    prompts: &[Prompt],
    policy: P,
) -> Result<ReuseStats, Foreign> {
    let Sizes { block_bytes, checkpoint_bytes, pool, .. } = sizes;
    let limits = Limits { block_bytes, checkpoint_bytes, lease_bytes: 0, remembered: REMEMBERED };
    let mut tree = PrefixTree::<(), (), P, BLOCK>::new(limits, policy);
    let root = RootKey::new(b"", b"", b"");
    let placement = Placement {
        block_tokens: BLOCK_TOKENS,
        junctions: case.junctions,
        interval: case.interval.then_some(sizes.interval),
    };
    let (texts, mut tokens) = (Texts::new(1.0), Vec::new());
    for prompt in prompts {
        tokens.clear();
        texts.push_prompt(&mut tokens, prompt, prompt.tokens);
        let adopted = tree.adopt(&root, &tokens);
        let checkpoints = placement.checkpoints(comparable(prompt), adopted.matched);
        let (blocks, _) = tokens.as_chunks::<BLOCK>();
        let (mut at, mut done) = (adopted.reference, adopted.reused);
        while let Some((end, origin)) = checkpoints.after(done) {
            let new = &blocks[(done / BLOCK_TOKENS) as usize..(end / BLOCK_TOKENS) as usize];
            tree.extend(&mut at, new, |_| (), drop)?;
            // One that is there already is the same.
            let _ = tree.attach(&at, at.blocks(), origin, ());
            done = end;
        }
        tree.release(at, drop)?;
        let bytes = |tree: &PrefixTree<(), (), P, BLOCK>| {
            let counts = tree.counts();
            u64::from(counts.blocks) * block_bytes
                + u64::from(counts.checkpoints) * checkpoint_bytes
        };
        while bytes(&tree) > pool && tree.evict_first(drop) {}
    }
    Ok(tree.stats())
}

/// Tokens up to the end of a prompt as the trace tells it, and one more. An id of fewer than 512 tokens is never that of a
/// longer prompt, though the next turn of a conversation has those tokens too: what ends in it would never be found.
fn comparable(prompt: &Prompt) -> u32 {
    prompt.tokens.min(prompt.tokens / HASH_TOKENS * HASH_TOKENS + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(tokens: u32, ids: impl IntoIterator<Item = u64>) -> Prompt {
        Prompt { tokens, hash_ids: ids.into_iter().collect() }
    }

    fn sizes(pool: u64) -> Sizes {
        Sizes { block_bytes: 10, checkpoint_bytes: 80, interval: 2048, pool }
    }

    /// Twice the same prompt, then one that leaves it after 1,024 tokens, twice.
    #[test]
    fn each_placement_reuses_what_it_can() {
        let long = prompt(4097, 0..9);
        let other = prompt(4097, [0, 1].into_iter().chain(100..107));
        let prompts = [&long, &long, &other, &other].map(Clone::clone);
        let reused = |case: Case| simulate(case, sizes(1 << 40), &prompts).unwrap().reused;
        assert_eq!(reused(CASES[0]), 2 * 4096);
        // The third one takes a checkpoint at 1,024, and the fourth one goes on from its end.
        assert_eq!(reused(CASES[1]), 2 * 4096);
        let third = prompt(4097, [0, 1].into_iter().chain(200..207));
        let prompts = [&long, &other, &third].map(Clone::clone);
        let reused = |case: Case| simulate(case, sizes(1 << 40), &prompts).unwrap();
        assert_eq!(reused(CASES[0]).reused, 0);
        assert_eq!(reused(CASES[0]).no_checkpoint, 2 * 1024);
        assert_eq!(reused(CASES[1]).reused, 1024);
        assert_eq!(reused(CASES[1]).no_checkpoint, 1024);
        assert_eq!(reused(CASES[1]).partial, 3);
    }

    /// A pool that holds one prompt: the second one evicts the first.
    #[test]
    fn what_does_not_fit_is_evicted() {
        let prompts: Vec<_> = [0, 100, 0].map(|first| prompt(4097, first..first + 9)).into();
        let one = simulate(CASES[0], sizes(32 * 10 + 80), &prompts).unwrap();
        assert_eq!((one.reused, one.evicted), (0, 4096));
        let both = simulate(CASES[0], sizes(2 * (32 * 10 + 80)), &prompts).unwrap();
        assert_eq!((both.reused, both.evicted), (4096, 0));
    }
}
