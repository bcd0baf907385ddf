//! A trace's prompts through the prefix tree, one after the other, and through a second one for host memory.
//!
//! As in the cache, a checkpoint goes to host memory when it enters the device's tree, with the blocks above it, so
//! that nothing moves when it is evicted; what host memory has more of a prompt comes back before the prompt is
//! matched. Each memory evicts by itself; what a prompt goes on from counts as used in both.

use dsv4_kv::kv_layout::geometry::BLOCK_TOKENS;
use dsv4_kv_prefix::{
    Foreign, Limits, Lru, Origin, Placement, Policy, PrefixTree, Reference, ReuseStats, RootKey,
    ScoredLru,
};
use dsv4_kv_trace::{HASH_TOKENS, Prompt};
use indicatif::ProgressBar;

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
    /// Bytes of all blocks and checkpoints that the device keeps.
    pub pool: u64,
    /// Bytes of those that host memory keeps behind it; 0 without any.
    pub host: u64,
}

/// What became of the prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Simulated {
    /// What was reused, and what evicted from the device.
    pub stats: ReuseStats,
    /// Tokens of what was reused that had come back from host memory.
    pub from_host: u64,
    /// Bytes of blocks and checkpoints that went to host memory, and that came from there.
    pub traffic: [u64; 2],
}

/// Runs all prompts through an empty cache. `bar` moves by their tokens.
///
/// # Errors
/// Never: [`Foreign`] is a reference of another tree.
pub fn simulate(
    case: Case,
    sizes: Sizes,
    prompts: &[Prompt],
    bar: &ProgressBar,
) -> Result<Simulated, Foreign> {
    let prompts = prompts.iter().inspect(|prompt| bar.inc(prompt.tokens.into()));
    if case.scored {
        run(case, sizes, prompts, |capacity| ScoredLru { capacity })
    } else {
        run(case, sizes, prompts, |_| Lru)
    }
}

/// What a memory keeps. The origin of a checkpoint goes with it.
struct Pool<P> {
    tree: PrefixTree<(), Origin, P, BLOCK>,
    limits: Limits,
    bytes: u64,
}

impl<P: Policy> Pool<P> {
    fn new(limits: Limits, bytes: u64, policy: P) -> Self {
        Self { tree: PrefixTree::new(limits, policy), limits, bytes }
    }

    /// Keeps blocks and a checkpoint at their end, or counts them as used; the bytes of what was not there.
    fn keep(
        &mut self,
        root: &RootKey,
        blocks: &[[u32; BLOCK]],
        origin: Origin,
    ) -> Result<u64, Foreign> {
        let mut at = self.tree.refer_to_match(root, blocks);
        let kept = self.keep_on(&mut at, blocks, origin)?;
        self.tree.release(at, drop)?;
        Ok(kept)
    }

    /// As [`Self::keep`], from `at` on, which refers to the first of the blocks: it is moved to the last.
    fn keep_on(
        &mut self,
        at: &mut Reference,
        blocks: &[[u32; BLOCK]],
        origin: Origin,
    ) -> Result<u64, Foreign> {
        let before = self.used();
        let new = &blocks[at.blocks() as usize..];
        self.tree.extend(at, new, |_| (), drop)?;
        // One that is there already is the same.
        if self.tree.attach(at, at.blocks(), origin, origin).is_err() {
            self.tree.touch_at(at)?;
        }
        Ok(self.used() - before)
    }

    /// Evicts what does not fit.
    fn evict(&mut self) {
        while self.used() > self.bytes && self.tree.evict_first(drop) {}
    }

    fn used(&self) -> u64 {
        let (counts, of) = (self.tree.counts(), self.limits);
        u64::from(counts.blocks) * of.block_bytes
            + u64::from(counts.checkpoints) * of.checkpoint_bytes
    }
}

fn run<'p, P: Policy>(
    case: Case,
    sizes: Sizes,
    prompts: impl Iterator<Item = &'p Prompt>,
    policy: impl Fn(u64) -> P,
) -> Result<Simulated, Foreign> {
    let Sizes { block_bytes, checkpoint_bytes, pool, host, .. } = sizes;
    let (lease_bytes, remembered, room) = (0, REMEMBERED, 0);
    let limits = Limits { block_bytes, checkpoint_bytes, lease_bytes, remembered, room };
    let mut device = Pool::new(limits, pool, policy(pool));
    // Host memory has units as large as a block.
    let checkpoint_bytes = checkpoint_bytes.next_multiple_of(block_bytes);
    let limits = Limits { checkpoint_bytes, remembered: 0, ..limits };
    let mut host = (host > 0).then(|| Pool::new(limits, host, policy(host)));
    let root = RootKey::new(b"", b"", b"");
    let placement = Placement {
        block_tokens: BLOCK_TOKENS,
        junctions: case.junctions,
        interval: case.interval.then_some(sizes.interval),
    };
    let (texts, mut tokens) = (Texts::new(1.0), Vec::new());
    let mut simulated = Simulated::default();
    for prompt in prompts {
        tokens.clear();
        texts.push_prompt(&mut tokens, prompt, prompt.tokens);
        let (blocks, _) = tokens.as_chunks::<BLOCK>();
        if let Some(host) = &mut host {
            let found = bring_back(host, &mut device, &root, &tokens)?;
            simulated.from_host += found.0;
            simulated.traffic[1] += found.1;
        }
        let adopted = device.tree.adopt(&root, &tokens);
        let used = device.tree.checkpoint(&adopted.reference)?.copied();
        if let (Some(host), Some(origin)) = (&mut host, used) {
            let used = &blocks[..adopted.reference.blocks() as usize];
            simulated.traffic[0] += host.keep(&root, used, origin)?;
        }
        let checkpoints = placement.checkpoints(comparable(prompt), adopted.matched);
        let (mut at, mut done) = (adopted.reference, adopted.reused);
        // The prompt in host memory. It goes on from checkpoint to checkpoint: from the root each time would be quadratic.
        let mut host_at = None;
        while let Some((end, origin)) = checkpoints.after(done) {
            let end_block = (end / BLOCK_TOKENS) as usize;
            let new = &blocks[(done / BLOCK_TOKENS) as usize..end_block];
            device.tree.extend(&mut at, new, |_| (), drop)?;
            // One that is there already is the same, and was offered to host memory before.
            let attached = device.tree.attach(&at, at.blocks(), origin, origin).is_ok();
            if let Some(host) = host.as_mut().filter(|_| attached) {
                let blocks = &blocks[..end_block];
                let at = host_at.get_or_insert_with(|| host.tree.refer_to_match(&root, blocks));
                simulated.traffic[0] += host.keep_on(at, blocks, origin)?;
            }
            done = end;
        }
        if let (Some(host), Some(at)) = (&mut host, host_at) {
            host.tree.release(at, drop)?;
        }
        device.tree.release(at, drop)?;
        device.evict();
        host.iter_mut().for_each(Pool::evict);
    }
    Ok(Simulated { stats: device.tree.stats(), ..simulated })
}

/// Brings what a prompt can go on from to the device, if host memory has more of it; tokens more, and bytes that moved.
fn bring_back<P: Policy>(
    host: &mut Pool<P>,
    device: &mut Pool<P>,
    root: &RootKey,
    tokens: &[u32],
) -> Result<(u64, u64), Foreign> {
    let [there, here] = [&host.tree, &device.tree].map(|of| of.lookup(root, tokens).reusable);
    if there <= here {
        return Ok((0, 0));
    }
    let adopted = host.tree.adopt(root, tokens);
    let origin = host.tree.checkpoint(&adopted.reference)?.copied().unwrap_or(Origin::Prompt);
    host.tree.release(adopted.reference, drop)?;
    let blocks = &tokens.as_chunks::<BLOCK>().0[..(there / BLOCK_TOKENS) as usize];
    Ok((u64::from(there - here), device.keep(root, blocks, origin)?))
}

/// Tokens up to the end of a prompt as the trace tells it, and one more. An id of fewer than 512 tokens is never that
/// of a longer prompt, though the next turn of a conversation has those tokens too: what ends in it would never be
/// found.
fn comparable(prompt: &Prompt) -> u32 {
    prompt.tokens.min(prompt.tokens / HASH_TOKENS * HASH_TOKENS + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hidden() -> ProgressBar {
        ProgressBar::hidden()
    }

    fn prompt(tokens: u32, ids: impl IntoIterator<Item = u64>) -> Prompt {
        Prompt { tokens, hash_ids: ids.into_iter().collect() }
    }

    fn sizes(pool: u64) -> Sizes {
        Sizes { block_bytes: 10, checkpoint_bytes: 80, interval: 2048, pool, host: 0 }
    }

    /// Twice the same prompt, then one that leaves it after 1,024 tokens, twice.
    #[test]
    fn each_placement_reuses_what_it_can() {
        let long = prompt(4097, 0..9);
        let other = prompt(4097, [0, 1].into_iter().chain(100..107));
        let prompts = [&long, &long, &other, &other].map(Clone::clone);
        let reused =
            |case: Case| simulate(case, sizes(1 << 40), &prompts, &hidden()).unwrap().stats.reused;
        assert_eq!(reused(CASES[0]), 2 * 4096);
        // The third one takes a checkpoint at 1,024, and the fourth one goes on from its end.
        assert_eq!(reused(CASES[1]), 2 * 4096);
        let third = prompt(4097, [0, 1].into_iter().chain(200..207));
        let prompts = [&long, &other, &third].map(Clone::clone);
        let reused =
            |case: Case| simulate(case, sizes(1 << 40), &prompts, &hidden()).unwrap().stats;
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
        let stats = |sizes| simulate(CASES[0], sizes, &prompts, &hidden()).unwrap().stats;
        let one = stats(sizes(32 * 10 + 80));
        // Of what was evicted some may be forgotten, where two hashes fall into one place, and count as new.
        assert_eq!((one.reused, one.evicted_blocks), (0, 2 * 32));
        assert!(one.evicted > 0, "{one:?}");
        let both = stats(sizes(2 * (32 * 10 + 80)));
        assert_eq!((both.reused, both.evicted), (4096, 0));
    }

    /// The same pool, and host memory for two prompts, or for one.
    #[test]
    fn what_was_evicted_comes_back_from_host_memory() {
        let prompts: Vec<_> = [0, 100, 0].map(|first| prompt(4097, first..first + 9)).into();
        let one = 32 * 10 + 80;
        let with = |host| {
            let sizes = Sizes { host, ..sizes(one) };
            CASES.map(|case| simulate(case, sizes, &prompts, &hidden()).unwrap())
        };
        for (case, simulated) in CASES.into_iter().zip(with(2 * one + 2 * 80)) {
            let Simulated { stats, from_host, traffic } = simulated;
            assert_eq!((stats.reused, from_host), (4096, 4096), "{case:?}");
            // Both prompts went there with their checkpoints, of which one more is inside; one prompt came back.
            let checkpoints = 1 + u64::from(case.interval);
            let expected = [2 * (32 * 10 + checkpoints * 80), one];
            assert_eq!(traffic, expected, "{case:?}");
        }
        assert_eq!(with(one)[0].from_host, 0);
        // The same, but for what is remembered of what was evicted: hashes differ from tree to tree.
        let [none, small] = [0, one].map(|host| with(host)[0]);
        let forgotten = |stats| ReuseStats { evicted: 0, diverged: 0, ..stats };
        assert_eq!(forgotten(none.stats), forgotten(small.stats));
        assert_eq!((none.from_host, none.traffic), (0, [0; 2]));
    }
}
