//! The calls of the README, compiled: each Rust block of its section "In your server" that is not a program by itself.
//! Nothing runs here; doctests in `src/` run the same calls.

#![expect(dead_code, reason = "what is here is compiled, and that is the test")]

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use dsv4_kv::checkpoint::Checkpoint;
use dsv4_kv::device::{Backend, Buffer, CudaOptions, Memory, Stream};
use dsv4_kv::indexer::{Activations, CsaIndexer};
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::step::{
    AttentionTensors, CompressorInputs, Csa, CsaInputs, EntryLists, Hca, HcaInputs, QueryForm, Swa,
    UpdatedLayer,
};
use dsv4_kv::{
    Accepted, Admission, Bucket, CacheConfig, IndexerWorkspace, KvCacheManager, KvError, Launches,
    LayerId, Layers, Prompt, RequestId, StepRequest, Suspended, WorkspaceLimits, bf16,
};

/// Tensors of a program.
struct Tensors<'t, B: Backend> {
    kv: Buffer<B, bf16>,
    window: Buffer<B, bf16>,
    entries: Buffer<B, bf16>,
    lengths: Buffer<B, i32>,
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
    tensors: Tensors<'_, dsv4_kv::device::Cuda>,
) -> Result<(), KvError> {
    let Tensors { kv, window, entries, lengths, lists, main, index, activations } = tensors;
let device = dsv4_kv::open_cuda(CudaOptions::default())?;
let stream = device.stream()?;
let checkpoint = Checkpoint::open(directory)?;
let model = checkpoint.config().cache.clone();
let mut indexers = HashMap::new();
for layer in csa_layers {
    indexers.insert(layer, CsaIndexer::of_layer(&stream, &checkpoint, layer.0)?);
}
let workspace = IndexerWorkspace::new(&device, &model, limits)?;
let mut cache = KvCacheManager::new(device, CacheConfig::for_memory(model, 64 << 30, 256)?)?;
let request = cache.admit()?;

let requests = [StepRequest { id: request, start, tokens }];
let mut step = cache.begin_step(&stream, Launches::Eager, &requests)?;
for (id, kind) in step.ids() {
    match kind {
        LayerKind::Swa => {
            let layer = step.swa(id)?.update(&kv)?;
            layer.gather_window(.., &window, &lengths)?;
            layer.append()?;
        }
        LayerKind::Csa => {
            let layer = step.csa(id)?.update(&CsaInputs { kv: &kv, main, index })?;
            layer.gather_window(.., &window, &lengths)?;
            let lists = EntryLists { queries: 0..tokens, k, entries: &lists };
            layer.select(&indexers[&id], &activations, &workspace, &lists)?;
            layer.gather_entries(.., &lists, &entries)?;
            layer.append()?;
        }
        LayerKind::Hca => {
            let layer = step.hca(id)?.update(&HcaInputs { kv: &kv, main })?;
            layer.gather_window(.., &window, &lengths)?;
            layer.gather_all(.., rows, &entries, &lengths)?;
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
