//! The calls of the README, compiled: each Rust block of its section "In your server" that is not a program by itself;
//! and the loop of a scheduler in `docs/tutorial.md`. Nothing runs here; doctests in `src/` run the same calls.

#![expect(dead_code, reason = "what is here is compiled, and that is the test")]

// The imports of the README's first sketch.
use std::collections::HashMap;

use dsv4_kv::device::CudaOptions;
use dsv4_kv::indexer::CsaIndexer;
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::model_files::ModelFiles;
use dsv4_kv::step::{CsaInputs, EntryLists, HcaInputs};
use dsv4_kv::{Accepted, CacheConfig, IndexerWorkspace, KvCacheManager, Launches, StepRequest};

// What this file needs besides.
use std::fs;
use std::path::Path;

use dsv4_kv::device::{Backend, Buffer, Cuda, Memory, Stream};
use dsv4_kv::indexer::Activations;
use dsv4_kv::step::{AttentionTensors, CompressorInputs, Csa, Hca, QueryForm, Swa, UpdatedLayer};
use dsv4_kv::{
    Admission, Bucket, KvError, LayerId, Layers, Prompt, RequestId, Step, Suspended,
    WorkspaceLimits, bf16,
};

/// What the tutorial says of threads: a cache, and an open step, may be used by any thread.
const fn is_of_any_thread<T: Send + Sync>() {}
const _: () = is_of_any_thread::<KvCacheManager<Cuda>>();
const _: () = is_of_any_thread::<Step<'static, Cuda>>();

/// Tensors of a program.
struct Tensors<'t, B: Backend> {
    kv: Buffer<B, bf16>,
    window: Buffer<B, bf16>,
    entries: Buffer<B, bf16>,
    lengths: Buffer<B, i32>,
    counts: Buffer<B, i32>,
    lists: Buffer<B, i32>,
    main: CompressorInputs<'t, B>,
    index: CompressorInputs<'t, B>,
    activations: Activations<'t, B>,
}

#[rustfmt::skip]
fn a_step(
    directory: &Path,
    (start, tokens, accepted): (u32, u32, u32),
    (k, rows): (u32, u32),
    (csa_layers, limits): (Vec<LayerId>, WorkspaceLimits),
    tensors: Tensors<'_, Cuda>,
) -> Result<(), KvError> {
    let Tensors { kv, window, entries, lengths, counts, lists, main, index, activations } = tensors;
let device = dsv4_kv::open_cuda(CudaOptions::default())?;
let stream = device.stream()?;
let model_files = ModelFiles::open(directory)?;
let model = model_files.config().cache.clone();
let mut indexers = HashMap::new();
for layer in csa_layers {
    indexers.insert(layer, CsaIndexer::of_layer(&stream, &model_files, layer.0)?);
}
let workspace = IndexerWorkspace::new(&device, &model, limits)?;
let config = CacheConfig::for_memory(model, 64 << 30, 256)?;
let mut cache = KvCacheManager::new(device, config)?;
let request = cache.admit()?;

let requests = [StepRequest { id: request, start, tokens }];
let mut step = cache.begin_step(&stream, Launches::Eager, &requests)?;
for (id, kind) in step.layer_kinds() {
    match kind {
        LayerKind::Swa => {
            let layer = step.swa(id)?.update(&kv)?;
            layer.gather_window(.., &window, &lengths)?;
            layer.append()?;
        }
        LayerKind::Csa => {
            let layer = step.csa(id)?.update(&CsaInputs { kv: &kv, main, index })?;
            layer.gather_window(.., &window, &lengths)?;
            let lists = EntryLists { queries: 0..tokens, k, indices: &lists };
            layer.select(&indexers[&id], &activations, &workspace, &lists)?;
            layer.gather_entries(.., &lists, &entries)?;
            layer.append()?;
        }
        LayerKind::Hca => {
            let layer = step.hca(id)?.update(&HcaInputs { kv: &kv, main })?;
            layer.gather_window(.., &window, &lengths)?;
            layer.gather_all(.., rows, &entries, &counts)?;
            layer.append()?;
        }
    }
}
step.commit(&[Accepted::count(request, accepted)])?;
cache.check_faults(&stream)?;
    Ok(())
}

/// Layers of a step, after their updates.
type Updated<'u, B> =
    (UpdatedLayer<'u, B, Swa>, UpdatedLayer<'u, B, Csa>, UpdatedLayer<'u, B, Hca>);

#[rustfmt::skip]
fn attention_in_place<B: Backend>(
    (swa, csa, hca): Updated<'_, B>,
    lists: EntryLists<'_, B>,
    (q, sinks, out): (Buffer<B, bf16>, Buffer<B, f32>, Buffer<B, bf16>),
) -> Result<(), KvError> {
let tensors = AttentionTensors {
    heads: 64,
    query: &q,
    form: QueryForm::Rotated,
    sinks: &sinks,
    out: &out,
    lse: None,
};
swa.attend(.., &tensors)?;
csa.attend(.., &lists, &tensors)?;
hca.attend(.., &tensors)?;
    Ok(())
}

/// The layers of a model.
struct Model;

impl Model {
    fn run<B: Backend>(&self, _: &mut Layers<'_, B>) -> Result<(), KvError> {
        Ok(())
    }
}

#[rustfmt::skip]
fn a_captured_step<B: Backend>(
    mut cache: KvCacheManager<B>,
    stream: Stream<B>,
    your_buffers: Vec<Memory<B>>,
    (workspace, indexers): (IndexerWorkspace<B>, HashMap<LayerId, CsaIndexer<B>>),
    (requests, accepted): (Vec<StepRequest>, Vec<Accepted<'_>>),
) -> Result<(), KvError> {
    let model = Model;
let bucket = Bucket::decode(cache.config(), 32);
let mut touched = your_buffers;
touched.extend(workspace.memory());
touched.extend(indexers.values().flat_map(CsaIndexer::memory));
let graph = cache.capture(&stream, &bucket, touched, |layers| model.run(layers))?;
let mut step = cache.begin_step(&stream, Launches::Bucket(&bucket), &requests)?;
step.replay(&graph)?;
step.commit(&accepted)?;
    Ok(())
}

#[rustfmt::skip]
fn shared_prefixes<B: Backend>(
    mut cache: KvCacheManager<B>,
    stream: Stream<B>,
    tokens: Vec<u32>,
    accepted: u32,
) -> Result<(), KvError> {
let prompt = Prompt { tokens: &tokens, salt: b"tenant", adapter: b"" };
let Admission { id, reused, .. } = cache.admit_with(&stream, &prompt)?;
    let (start, end) = (reused as usize, tokens.len());
    let requests = [StepRequest { id, start: reused, tokens: (end - start) as u32 }];
    let step = cache.begin_step(&stream, Launches::Eager, &requests)?;
step.commit(&[Accepted { id, accepted, tokens: &tokens[start..end] }])?;
cache.save_wanted(&stream)?;
    Ok(())
}

#[rustfmt::skip]
fn copies<B: Backend>(
    mut cache: KvCacheManager<B>,
    stream: Stream<B>,
    id: RequestId,
    (mut running, mut waiting): (Vec<RequestId>, Vec<Suspended>),
) -> Result<RequestId, KvError> {
let other = cache.fork(&stream, id)?;
let suspended = cache.suspend(&stream, id)?;
match cache.resume(&stream, suspended) {
    Ok(id) => running.push(id),
    Err(refused) => waiting.push(refused.into_suspended()),
}
    Ok(other)
}

/// A running request of a scheduler.
struct Running {
    id: RequestId,
    /// The tokens that it has, its prompt included, computed or not.
    tokens: u32,
}

/// Begins a step, runs its layers and commits it.
fn run_step<B: Backend>(
    _: &mut KvCacheManager<B>,
    _: &Stream<B>,
    _: &[Running],
) -> Result<(), KvError> {
    Ok(())
}

#[rustfmt::skip]
fn when_blocks_run_out<B: Backend>(
    cache: &mut KvCacheManager<B>,
    stream: &Stream<B>,
    (running, preempted): (&mut Vec<Running>, &mut Vec<Running>),
    prompt_tokens: u32,
) -> Result<bool, KvError> {
    // ANCHOR: blocks
    // Admission: free and evictable blocks, less those that running requests still need for their tokens.
    let ledger = cache.ledger();
    let mut free = ledger.free_blocks() + ledger.evictable_blocks();
    for request in running.iter() {
        let held = ledger.block_table(request.id)?.len() as u32;
        free = free.saturating_sub(ledger.blocks_of(request.tokens).saturating_sub(held));
    }
    let fits = ledger.blocks_of(prompt_tokens) <= free;
    drop(ledger);

    // A step: `run_step` plans it, begins it, runs its layers and commits it.
    while let Err(error) = run_step(cache, stream, running) {
        match error {
            // With host memory: blocks that are being copied cannot be evicted until the copies are done.
            KvError::OutOfBlocks { .. } if cache.has_tier_transfers() => cache.settle_tier(stream)?,
            // Preempts the newest request. It is admitted again later, and computed from its tokens.
            KvError::OutOfBlocks { .. } if running.len() > 1 => {
                let newest = running.remove(running.len() - 1);
                cache.release(newest.id)?;
                preempted.push(newest);
            }
            error => return Err(error),
        }
    }
    // ANCHOR_END: blocks
    Ok(fits)
}

/// A line without its comment.
fn code(line: &str) -> &str {
    line.split(" //").next().unwrap_or_default().trim()
}

/// The lines of a text's Rust blocks.
fn blocks(text: &str) -> impl Iterator<Item = Vec<&str>> {
    let blocks = text.split("```rust\n").skip(1).map(|from| from.split("```").next());
    blocks.map(|block| {
        let lines = block.unwrap_or_default().lines().filter(|line| !line.starts_with("//"));
        lines.map(code).filter(|line| !line.is_empty()).collect()
    })
}

/// The first of `wanted` that does not follow the one before it in `lines`.
fn missing<'w>(wanted: &[&'w str], lines: &[&str]) -> Option<&'w str> {
    let start = lines.iter().position(|line| Some(line) == wanted.first()).unwrap_or(0);
    let mut rest = lines[start..].iter();
    wanted.iter().find(|wanted| !rest.any(|line| line == *wanted)).copied()
}

#[test]
fn the_blocks_of_the_readme_are_compiled() {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    // A package has no such file, nor a README of that name above it.
    let Ok(readme) = fs::read_to_string(readme) else { return };
    let here: Vec<&str> = include_str!("readme.rs").lines().map(code).collect();
    let section = readme.split("## In your server").nth(1).expect("the section is there");
    let section = section.split("\n## ").next().unwrap_or_default();
    // The first block is a program, which a doctest of the crate runs.
    let found: Vec<_> = blocks(section).skip(1).map(|block| missing(&block, &here)).collect();
    assert!(found.len() >= 5, "{} blocks", found.len());
    assert_eq!(found.iter().flatten().next(), None, "README.md has it, and tests/readme.rs not");
}

#[test]
fn a_line_that_is_not_here_is_found() {
    let here = ["let a = 1;", "let b = 2;", "let c = 3;"];
    assert_eq!(missing(&["let a = 1;", "let c = 3;"], &here), None);
    assert_eq!(missing(&["let c = 3;", "let a = 1;"], &here), Some("let a = 1;"));
}
