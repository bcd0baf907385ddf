//! Runs a trace's prompts through the prefix tree, one after the other, and through a second tree for host memory.
//!
//! As in the cache, a checkpoint and the blocks above it are copied to host memory when the checkpoint enters the
//! device's tree, so that eviction moves nothing. If host memory has more of a prompt, that part comes back before the
//! prompt is matched. Each memory evicts independently. A prefix that a prompt reuses counts as used in both.

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
/// Number of evicted blocks that are remembered, to tell why tokens were not reused.
const REMEMBERED: u32 = 1 << 22;

/// Where checkpoints are taken, and the order of eviction.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Its name.
    pub name: &'static str,
    branch_points: bool,
    interval: bool,
    scored: bool,
}

/// The compared cases. Each prompt has a checkpoint at its end.
pub const CASES: [Case; 4] = [
    Case { name: "end, LRU", branch_points: false, interval: false, scored: false },
    Case { name: "end + branch point, LRU", branch_points: true, interval: false, scored: false },
    Case {
        name: "end + branch point + interval, LRU",
        branch_points: true,
        interval: true,
        scored: false,
    },
    Case {
        name: "end + branch point + interval, scored LRU",
        branch_points: true,
        interval: true,
        scored: true,
    },
];

/// The parameters of a simulation.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Bytes of a block in all layers.
    pub block_bytes: u64,
    /// Bytes of a checkpoint.
    pub checkpoint_bytes: u64,
    /// Tokens between interval checkpoints.
    pub interval: u32,
    /// Bytes for blocks and checkpoints on the device.
    pub pool: u64,
    /// Bytes for blocks and checkpoints in host memory; 0 without a host tier.
    pub host: u64,
}

/// The result of a simulation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Simulated {
    /// Reuse, and evictions from the device.
    pub stats: ReuseStats,
    /// Reused tokens that had come back from host memory.
    pub from_host: u64,
    /// Bytes of blocks and checkpoints copied to host memory, and copied back.
    pub traffic: [u64; 2],
}

/// Runs all prompts through an empty cache. `bar` advances by their tokens.
///
/// # Errors
/// None in practice: [`Foreign`] means a reference of another tree.
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

/// The contents of one memory. Each checkpoint is stored with its origin.
struct Pool<P> {
    tree: PrefixTree<(), Origin, P, BLOCK>,
    limits: Limits,
    bytes: u64,
}

impl<P: Policy> Pool<P> {
    fn new(limits: Limits, bytes: u64, policy: P) -> Self {
        Self { tree: PrefixTree::new(limits, policy), limits, bytes }
    }

    /// Stores blocks and a checkpoint at their end, or counts them as used if they are present. Returns the bytes that
    /// were added.
    fn keep(
        &mut self,
        root: &RootKey,
        blocks: &[[u32; BLOCK]],
        origin: Origin,
    ) -> Result<u64, Foreign> {
        let mut at = self.tree.lock_blocks(root, blocks);
        let kept = self.keep_on(&mut at, blocks, origin)?;
        self.tree.release(at, drop)?;
        Ok(kept)
    }

    /// As [`Self::keep`], with a reference `at` to the first of the blocks, which is extended to the last.
    fn keep_on(
        &mut self,
        at: &mut Reference,
        blocks: &[[u32; BLOCK]],
        origin: Origin,
    ) -> Result<u64, Foreign> {
        let before = self.used();
        let new = &blocks[at.blocks() as usize..];
        self.tree.extend(at, new, |_| (), drop)?;
        // If there is a checkpoint already, it is the same one.
        if self.tree.attach(at, at.blocks(), origin, origin).is_err() {
            self.tree.touch_at(at)?;
        }
        Ok(self.used() - before)
    }

    /// Evicts until the contents fit.
    fn evict(&mut self) {
        while self.used() > self.bytes && self.tree.evict_first(drop) {}
    }

    fn used(&self) -> u64 {
        let (counts, of) = (self.tree.counts(), self.limits);
        u64::from(counts.blocks) * of.block_bytes
            + u64::from(counts.checkpoints) * of.checkpoint_bytes
    }
}

/// A simulation under way.
struct Simulation<P> {
    device: Pool<P>,
    /// Host memory, if there is any.
    host: Option<Pool<P>>,
    root: RootKey,
    placement: Placement,
    texts: Texts,
    /// Token ids of the last prompt.
    tokens: Vec<u32>,
    simulated: Simulated,
}

impl<P: Policy> Simulation<P> {
    fn new(case: Case, sizes: Sizes, policy: impl Fn(u64) -> P) -> Self {
        let Sizes { block_bytes, checkpoint_bytes, pool, host, .. } = sizes;
        let (lease_bytes, remembered, reserved_blocks) = (0, REMEMBERED, 0);
        let limits =
            Limits { block_bytes, checkpoint_bytes, lease_bytes, remembered, reserved_blocks };
        let device = Pool::new(limits, pool, policy(pool));
        // Host memory is divided into units of the size of a block.
        let checkpoint_bytes = checkpoint_bytes.next_multiple_of(block_bytes);
        let limits = Limits { checkpoint_bytes, remembered: 0, ..limits };
        let host = (host > 0).then(|| Pool::new(limits, host, policy(host)));
        let root = RootKey::new(b"", b"", b"");
        let placement = Placement {
            block_tokens: BLOCK_TOKENS,
            branch_points: case.branch_points,
            interval: case.interval.then_some(sizes.interval),
        };
        let (texts, tokens) = (Texts::new(1.0), Vec::new());
        let simulated = Simulated::default();
        Self { device, host, root, placement, texts, tokens, simulated }
    }

    /// Matches, inserts and releases a prompt, then evicts until the contents of each memory fit.
    fn feed(&mut self, prompt: &Prompt) -> Result<(), Foreign> {
        let Self { device, host, root, placement, texts, tokens, simulated } = self;
        tokens.clear();
        texts.push_prompt(tokens, prompt, prompt.tokens);
        let tokens: &[u32] = tokens;
        let (blocks, _) = tokens.as_chunks::<BLOCK>();
        if let Some(host) = host {
            let found = bring_back(host, device, root, tokens)?;
            simulated.from_host += found.0;
            simulated.traffic[1] += found.1;
        }
        let found = device.tree.match_and_lock(root, tokens);
        let used = device.tree.checkpoint(&found.reference)?.copied();
        if let (Some(host), Some(origin)) = (host.as_mut(), used) {
            let used = &blocks[..found.reference.blocks() as usize];
            simulated.traffic[0] += host.keep(root, used, origin)?;
        }
        let checkpoints = placement.checkpoints(comparable(prompt), found.matched);
        let (mut at, mut done) = (found.reference, found.reused);
        // A reference to the prompt in host memory. It is extended from checkpoint to checkpoint, since matching from
        // the root each time would take quadratic time.
        let mut host_at = None;
        while let Some((end, origin)) = checkpoints.after(done) {
            let end_block = (end / BLOCK_TOKENS) as usize;
            let new = &blocks[(done / BLOCK_TOKENS) as usize..end_block];
            device.tree.extend(&mut at, new, |_| (), drop)?;
            // If there is a checkpoint already, it is the same one, and was copied to host memory before.
            let attached = device.tree.attach(&at, at.blocks(), origin, origin).is_ok();
            if let Some(host) = host.as_mut().filter(|_| attached) {
                let blocks = &blocks[..end_block];
                let at = host_at.get_or_insert_with(|| host.tree.lock_blocks(root, blocks));
                simulated.traffic[0] += host.keep_on(at, blocks, origin)?;
            }
            done = end;
        }
        if let (Some(host), Some(at)) = (host.as_mut(), host_at) {
            host.tree.release(at, drop)?;
        }
        device.tree.release(at, drop)?;
        device.evict();
        host.iter_mut().for_each(Pool::evict);
        Ok(())
    }
}

fn run<'p, P: Policy>(
    case: Case,
    sizes: Sizes,
    mut prompts: impl Iterator<Item = &'p Prompt>,
    policy: impl Fn(u64) -> P,
) -> Result<Simulated, Foreign> {
    let mut simulation = Simulation::new(case, sizes, policy);
    prompts.try_for_each(|prompt| simulation.feed(prompt))?;
    Ok(Simulated { stats: simulation.device.tree.stats(), ..simulation.simulated })
}

/// Brings the reusable part of a prompt to the device, if host memory has more of it. Returns the additional tokens,
/// and the bytes that were copied.
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
    let found = host.tree.match_and_lock(root, tokens);
    let origin = host.tree.checkpoint(&found.reference)?.copied().unwrap_or(Origin::Prompt);
    host.tree.release(found.reference, drop)?;
    let blocks = &tokens.as_chunks::<BLOCK>().0[..(there / BLOCK_TOKENS) as usize];
    Ok((u64::from(there - here), device.keep(root, blocks, origin)?))
}

/// Number of comparable tokens of a prompt: those of its whole hash ids, and one more. An id that stands for fewer than
/// 512 tokens never occurs in a longer prompt, though the next turn of the conversation has the same tokens. A
/// checkpoint within such an id would never be found.
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

    /// The same prompt twice, then twice one that differs after 1,024 tokens.
    #[test]
    fn each_placement_reuses_what_it_can() {
        let long = prompt(4097, 0..9);
        let other = prompt(4097, [0, 1].into_iter().chain(100..107));
        let prompts = [&long, &long, &other, &other].map(Clone::clone);
        let reused =
            |case: Case| simulate(case, sizes(1 << 40), &prompts, &hidden()).unwrap().stats.reused;
        assert_eq!(reused(CASES[0]), 2 * 4096);
        // The third prompt takes a checkpoint at 1,024, from which the fourth continues.
        assert_eq!(reused(CASES[1]), 2 * 4096);
        let third = prompt(4097, [0, 1].into_iter().chain(200..207));
        let prompts = [&long, &other, &third].map(Clone::clone);
        let reused =
            |case: Case| simulate(case, sizes(1 << 40), &prompts, &hidden()).unwrap().stats;
        assert_eq!(reused(CASES[0]).reused, 0);
        assert_eq!(reused(CASES[0]).no_checkpoint, 2 * 1024);
        assert_eq!(reused(CASES[1]).reused, 1024);
        assert_eq!(reused(CASES[1]).no_checkpoint, 1024);
        assert_eq!(reused(CASES[1]).tail, 3);
    }

    /// A pool with room for one prompt: the second prompt evicts the first.
    #[test]
    fn what_does_not_fit_is_evicted() {
        let prompts: Vec<_> = [0, 100, 0].map(|first| prompt(4097, first..first + 9)).into();
        let stats = |sizes| simulate(CASES[0], sizes, &prompts, &hidden()).unwrap().stats;
        let one = stats(sizes(32 * 10 + 80));
        // Some evicted blocks may be forgotten, where two hashes share a place; their tokens count as new.
        assert_eq!((one.reused, one.evicted_blocks), (0, 2 * 32));
        assert!(one.missed_by_eviction > 0, "{one:?}");
        let both = stats(sizes(2 * (32 * 10 + 80)));
        assert_eq!((both.reused, both.missed_by_eviction), (4096, 0));
    }

    /// The same pool, with host memory for two prompts, or for one.
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
            // Both prompts were copied to host memory with their checkpoints, of which the interval case has one more
            // in each; one prompt came back.
            let checkpoints = 1 + u64::from(case.interval);
            let expected = [2 * (32 * 10 + checkpoints * 80), one];
            assert_eq!(traffic, expected, "{case:?}");
        }
        assert_eq!(with(one)[0].from_host, 0);
        // The results are equal, except for the memory of evicted blocks: hashes differ from tree to tree.
        let [none, small] = [0, one].map(|host| with(host)[0]);
        let forgotten = |stats| ReuseStats { missed_by_eviction: 0, never_seen: 0, ..stats };
        assert_eq!(forgotten(none.stats), forgotten(small.stats));
        assert_eq!((none.from_host, none.traffic), (0, [0; 2]));
    }
}
