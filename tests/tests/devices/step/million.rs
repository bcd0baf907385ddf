//! Requests of 1,048,576 tokens, in pools past 4 GiB.

use dsv4_kv::device::{Backend, Device, EmuOptions, Stream, View};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::step::EntryLists;
use dsv4_kv::step_meta::Chunk;
use dsv4_kv::{
    Accepted, BlockId, CacheConfig, KvCacheManager, KvError, Launches, LayerId, Layers, PoolKind,
    RequestId, SlotId, StepRequest,
};
use dsv4_kv_oracle::index::KeyFormat;
use dsv4_kv_tests::failing::Failing;
use kv_layout::geometry::LayerKind::{self, Csa, Hca};
use kv_layout::geometry::{BLOCK_TOKENS, CompressorKind, MAX_CONTEXT};
use kv_layout::main_row::DATA_BYTES;

use crate::fed::resume;
use crate::history::{History, shape};
use crate::inputs::{assert_same, download_bits, filled, oracle, upload};
use crate::model::{OnDevice, Step, assert_rounds, ring};
use crate::rings::pool;
use crate::step::tensors::Tensors;
use crate::stories::{compressors, rotated};

const LAYERS: [LayerKind; 2] = [Csa, Hca];
/// Tokens of a step. Every step has the same tensors.
const STEP: u32 = 8192;
/// Blocks of a request of 1,048,576 tokens.
const BLOCKS: u32 = MAX_CONTEXT / BLOCK_TOKENS;
/// Bytes of a block in the data plane of the CSA layer.
const BLOCK_BYTES: u64 = 32 * DATA_BYTES;

/// Two requests of a million tokens, one across the offset of 2 GiB in the data plane of CSA entries, and one across
/// that of 4 GiB. Their first and last blocks, and those around the offset, hold the entries of their tokens, and
/// gathers of the last query read these.
///
/// The emulator takes seconds for a step. There kernels run only in the steps of those blocks; none of these steps
/// begins with a block that needs the step before.
pub fn entries_lie_where_they_should<B: Backend>(device: &Device<B>) {
    if device.info().sm.is_some() {
        return check(device, &|_| ());
    }
    let device = Failing::emulated(EmuOptions { memory: 8 << 30, seed: 1 });
    check(&device, &|skip| device.backend().skip_launches(skip));
}

/// The body of the test. After `skip_launches(true)` the device runs steps without kernels; on a device that must run
/// all kernels `skip_launches` does nothing.
fn check<B: Backend>(device: &Device<B>, skip_launches: &dyn Fn(bool)) {
    let stream = device.stream().unwrap();
    let requests = ((1_u64 << 32) / BLOCK_BYTES / u64::from(BLOCKS) + 1) as u32;
    let config = CacheConfig {
        max_requests: requests,
        num_blocks: requests * BLOCKS,
        max_context: MAX_CONTEXT,
        max_step_tokens: STEP,
        ..CacheConfig::new(ModelConfig {
            layers: LAYERS.into(),
            mtp_layers: 0,
            ..ModelConfig::preset("tiny").unwrap()
        })
    };
    let mut manager = KvCacheManager::new(device.clone(), config).unwrap();
    let tensors = Tensors::random(&stream, STEP as usize, LAYERS.len(), 1);
    let on_gpu = device.info().sm.is_some();
    let mut boundaries = [1_u64 << 31, 1 << 32].into_iter().map(|at| (at / BLOCK_BYTES) as u32);
    let mut next = boundaries.next();
    for request in 0..requests {
        let id = manager.admit().unwrap();
        let blocks = request * BLOCKS..(request + 1) * BLOCKS;
        let Some(boundary) = next.filter(|boundary| blocks.contains(boundary)) else {
            // The request only takes its blocks.
            feed(&mut manager, &stream, id, skip_launches, |_| None, |_| {});
            continue;
        };
        let at = boundary - blocks.start;
        let checked = [0, at - 1, at, at + 1, BLOCKS - 1];
        let holds_one =
            |start| checked.iter().any(|block| block * BLOCK_TOKENS / STEP == start / STEP);
        let run = |start| (on_gpu || holds_one(start)).then_some(&tensors);
        let mut gathered = Vec::new();
        feed(&mut manager, &stream, id, skip_launches, run, |layers| {
            gathered = checked.map(|logical| gather_block(layers, &tensors, logical)).into();
        });
        for (logical, gathered) in checked.into_iter().zip(&gathered) {
            check_block(&manager, &stream, id, logical, &tensors.histories, gathered);
        }
        next = boundaries.next();
    }
    assert_eq!(next, None, "both offsets were passed");
    manager.check_faults(&stream).unwrap();
}

/// Feeds a million tokens in steps. The kernels of a step run if `tensors` returns tensors for its first token. `last`
/// is called in the last step, after its layers.
fn feed<'t, B: Backend>(
    manager: &mut KvCacheManager<B>,
    stream: &Stream<B>,
    id: RequestId,
    skip_launches: &dyn Fn(bool),
    tensors: impl Fn(u32) -> Option<&'t Tensors<B>>,
    last: impl FnOnce(&mut Layers<'_, B>),
) {
    let mut last = Some(last);
    for start in (0..MAX_CONTEXT).step_by(STEP as usize) {
        skip_launches(tensors(start).is_none());
        let step = [StepRequest { id, start, tokens: STEP }];
        let mut step = manager.begin_step(stream, Launches::Eager, &step).unwrap();
        match tensors(start) {
            Some(tensors) => run_layers(&mut step, tensors).unwrap(),
            None => step.skip_kernels(),
        }
        if start + STEP == MAX_CONTEXT {
            last.take().expect("there is one last step")(&mut step);
        }
        step.commit(&[Accepted::count(id, STEP)]).unwrap();
    }
    skip_launches(false);
}

fn run_layers<B: Backend>(layers: &mut Layers<'_, B>, tensors: &Tensors<B>) -> Result<(), KvError> {
    for (layer, kind) in layers.layer_kinds() {
        tensors.update(layers, layer, kind)?.append()?;
    }
    Ok(())
}

/// Gathers the entries of the request's block `logical` for the step's last query, in each layer.
fn gather_block<B: Backend>(
    layers: &mut Layers<'_, B>,
    tensors: &Tensors<B>,
    logical: u32,
) -> Vec<Vec<u16>> {
    let stream = layers.stream().clone();
    let mut gathered = Vec::new();
    for (layer, kind) in layers.layer_kinds() {
        let per_block = kind.entries_per_block();
        let first = (logical * per_block) as i32;
        let list: Vec<i32> = (first..first + per_block as i32).collect();
        let (tile, selected) = (filled(&stream, list.len() * 512), upload(&stream, &list));
        let (queries, kv) = (STEP - 1..STEP, tensors.kv_of(layer));
        let updated = resume(layers, layer, kind, &kv).unwrap();
        let lists = EntryLists { queries: queries.clone(), k: per_block, indices: &selected };
        updated.gather_entries(queries, &lists, &tile).unwrap();
        gathered.push(download_bits(&stream, &tile));
    }
    gathered
}

/// Asserts that the request's block `logical` holds the entries and keys of its tokens, and that the last query
/// gathered them.
fn check_block<B: Backend>(
    manager: &KvCacheManager<B>,
    stream: &Stream<B>,
    id: RequestId,
    logical: u32,
    histories: &[History; 3],
    gathered: &[Vec<u16>],
) {
    let (device, config) = (manager.device(), manager.config());
    let BlockId(block) = manager.block_table(id).unwrap()[logical as usize];
    for (layer, &kind) in (0..).map(LayerId).zip(&LAYERS) {
        let per_block = kind.entries_per_block();
        let rows = (u64::from(block) * u64::from(per_block), per_block as usize);
        let same = |kind, want: Vec<Vec<u8>>, what: &str| {
            read(stream, &pool(manager, layer, kind), rows, &want.concat(), what);
        };
        for history in histories.iter().filter(|one| compressors(kind).contains(&one.stream)) {
            let made = alone(device, history, layer, logical);
            let what = format!("{:?} of block {logical}", history.stream);
            if history.stream == CompressorKind::CsaIndex {
                let format = KeyFormat::from_name(config.index_format.name()).unwrap();
                let want = made.iter().map(|key| format.encode(&rotated(key)));
                let (codes, scales) = want.map(|key| (key.codes, key.scale)).unzip();
                same(PoolKind::IndexCode, codes, &what);
                same(PoolKind::IndexScale, scales, &what);
                continue;
            }
            let want: Vec<_> =
                made.iter().map(|entry| oracle(config.main_format).encode(entry)).collect();
            let decoded: Vec<u16> =
                want.iter().flat_map(|row| oracle(config.main_format).decode(row)).collect();
            let (data, scale) = want.into_iter().map(|row| (row.data, row.scale)).unzip();
            same(PoolKind::EntryData, data, &what);
            same(PoolKind::EntryScale, scale, &what);
            assert_same(&gathered[layer.0 as usize], &decoded, &what);
        }
    }
}

/// Asserts that rows of a plane equal `want`.
fn read<B: Backend>(
    stream: &Stream<B>,
    plane: &View<B, u8>,
    (first_row, rows): (u64, usize),
    want: &[u8],
    what: &str,
) {
    let mut got = vec![0; want.len()];
    let row_bytes = (want.len() / rows) as u64;
    stream.download(plane, first_row * row_bytes, &mut got).unwrap();
    assert_same(&got, want, what);
}

/// The entries of one block, computed by the single operations from its own tokens and the window before them, and
/// checked against the oracle.
fn alone<B: Backend>(
    device: &Device<B>,
    all: &History,
    layer: LayerId,
    block: u32,
) -> Vec<Vec<u16>> {
    let shape = shape(all.stream);
    let before = if shape.overlap && block > 0 { shape.ratio as u32 } else { 0 };
    let start = block * BLOCK_TOKENS - before;
    let end = (block + 1) * BLOCK_TOKENS;
    let columns = shape.columns();
    let token = |position: u32| (position % STEP + layer.0) as usize * columns;
    let cut = |x: &[f32]| -> Vec<f32> {
        (start..end).flat_map(|position| x[token(position)..][..columns].to_vec()).collect()
    };
    let own = History { kv: cut(&all.kv), gate: cut(&all.gate), ..all.clone() };
    let compressor = OnDevice::new(device, &own, 1, ring(all.stream, 1));
    let step = Step::new(&compressor.stream, 0, &[Chunk { slot: SlotId(0), start, end }]);
    let mut made = compressor.run(&step, &own.kv, &own.gate);
    let skipped = before as usize / shape.ratio;
    made.drain(..skipped);
    for (at, entry) in made.iter().enumerate() {
        let pooled = own.oracle().pooled(skipped + at);
        let number = start as usize / shape.ratio + skipped + at;
        let want = own.oracle().norm_and_rotate(&pooled, number);
        let want: Vec<f32> = want.iter().map(|&x| x as f32).collect();
        assert_rounds(entry, &want, 5e-6, &format!("{:?} entry {number}", all.stream));
    }
    made
}
