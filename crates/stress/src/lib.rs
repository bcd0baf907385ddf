//! The stress test: random operations on a cache and on a slow, simple reference model. The two are compared after
//! every operation.
//!
//! | module | what it holds |
//! |---|---|
//! | [`op`] | operations and scripts |
//! | [`generate`] | random caches and operations |
//! | [`model`] | the reference model |
//! | [`answer`] | answers, in a form that can be compared |
//! | [`subject`] | the subject: a cache, or its ledger alone |
//! | [`cache`] | a cache with its kernels as the subject: `run` runs its steps, `gathered` compares the gathered rows of a layer, `bytes` compares memory that is read back, `cache_reuse` is its prefix reuse, `cache_tier` its host tier |
//! | [`library`] | the token histories of its requests |
//! | [`reuse`], [`text`] | the subject where prefixes are shared, and the texts of requests there |
//! | [`index`] | the blocks that exist according to the events of a cache |
//! | [`tier`] | the subject where a host tier keeps evicted prefixes |
//! | [`drive`] | runs subject and model together |
//! | [`shrink`] | makes a failing script short |

pub mod answer;
mod bytes;
pub mod cache;
mod cache_reuse;
mod cache_tier;
pub mod drive;
mod gathered;
pub mod generate;
pub mod index;
pub mod library;
pub mod model;
pub mod op;
pub mod reuse;
mod run;
pub mod shrink;
pub mod subject;
pub mod text;
pub mod tier;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use drive::{Counts, Divergence, Run};
use dsv4_kv::CacheConfig;
use generate::{Generator, Manners};
use library::Library;
use model::Model;
use op::{Op, Script};
use subject::Subject;

/// A seed that failed.
#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The divergence of the full run.
    pub found: Divergence,
    /// The divergence of the short script.
    pub shrunk: Divergence,
    /// The short script.
    pub script: Script,
}

/// Time limit for shrinking a failing script.
pub const SHRINK: Duration = Duration::from_secs(120);

/// Applies `ops` random operations of a seed to a cache that `new` creates.
///
/// # Errors
/// [`Failure`] with a short script, if the cache and its model differ or something panics.
pub fn stress<S: Subject>(
    seed: u64,
    ops: u64,
    manners: Manners,
    config: &CacheConfig,
    new: impl Fn() -> S,
) -> Result<Counts, Box<Failure>> {
    watched_stress(seed, ops, manners, config, new, || ())
}

/// As [`stress`]; `watch` is called for each operation.
///
/// # Errors
/// As [`stress`].
pub fn watched_stress<S: Subject>(
    seed: u64,
    ops: u64,
    manners: Manners,
    config: &CacheConfig,
    new: impl Fn() -> S,
    watch: impl Fn(),
) -> Result<Counts, Box<Failure>> {
    let run = |ops, each: &mut dyn FnMut(&Op)| random_run(seed, ops, manners, config, &new, each);
    let found = match run(ops, &mut |_| watch()) {
        Ok(counts) => return Ok(counts),
        Err(found) => found,
    };
    // Repeats the same operations and records them. The first run does not record, since most runs succeed, and a run
    // may have a million operations. The releases at the end of a run are numbered after its last random operation.
    let mut script = Script { config: config.clone(), seed, ops: Vec::new() };
    let recorded = run(ops.min(found.op + 1), &mut |op| script.ops.push(op.clone()));
    let found = recorded.err().unwrap_or(found);
    let (script, shrunk) =
        shrink::shrink(script, found.clone(), SHRINK, |script| try_script(&new, script).err());
    Err(Box::new(Failure { seed, found, shrunk, script }))
}

/// Applies all operations of a script to a cache that `new` creates; a panic is a divergence.
///
/// # Errors
/// The first [`Divergence`].
pub fn try_script<S: Subject>(new: impl Fn() -> S, script: &Script) -> Result<Counts, Divergence> {
    let mut run = None;
    caught(&mut run, |run| {
        let run = run.insert(Run::new(new(), Model::new(&script.config)));
        script.ops.iter().try_for_each(|op| run.apply(op))?;
        run.drain()
    })
}

/// Runs a script on a cache on the CPU, whose device runs work late.
///
/// # Errors
/// The first [`Divergence`].
pub fn try_on_cpu(script: &Script) -> Result<Counts, Divergence> {
    let Script { config, seed, .. } = script;
    let library = Arc::new(Library::new(config));
    try_script(|| cache::late(config, &library, *seed), script)
}

/// As [`try_on_cpu`], on a device that also skips kernels.
///
/// # Errors
/// The first [`Divergence`].
pub fn try_skipping(script: &Script) -> Result<Counts, Divergence> {
    let Script { config, seed, .. } = script;
    let library = Arc::new(Library::new(config));
    try_script(|| cache::skipping(config, &library, *seed), script)
}

/// Applies `ops` random operations of a seed to a cache that `new` creates. Each operation is passed to `each` first.
///
/// # Errors
/// The first [`Divergence`].
pub fn random_run<S: Subject>(
    seed: u64,
    ops: u64,
    manners: Manners,
    config: &CacheConfig,
    new: &impl Fn() -> S,
    each: &mut dyn FnMut(&Op),
) -> Result<Counts, Divergence> {
    let mut generator = Generator::new(seed, manners);
    let mut run = None;
    caught(&mut run, |run| {
        let run = run.insert(Run::new(new(), Model::new(config)));
        for _ in 0..ops {
            let op = generator.next(run.model());
            each(&op);
            run.apply(&op)?;
        }
        run.drain()
    })
}

/// Runs `work`; a panic becomes a divergence of the operation in which it happened.
fn caught<S: Subject>(
    run: &mut Option<Run<S>>,
    work: impl FnOnce(&mut Option<Run<S>>) -> Result<(), Divergence>,
) -> Result<Counts, Divergence> {
    let result = catch_unwind(AssertUnwindSafe(|| work(run)));
    let ops = run.as_ref().map_or(0, Run::ops);
    match result {
        Ok(result) => result?,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            let what = format!("panicked: {text}");
            return Err(Divergence { op: ops.saturating_sub(1), what });
        }
    }
    Ok(run.take().map(|run| run.counts).unwrap_or_default())
}
