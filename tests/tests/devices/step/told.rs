//! Prompts of requests that share prefixes, the steps that compute them, and the bytes that they then have.

use std::ops::Range;

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::schema::PoolUnit;
use dsv4_kv::{
    Accepted, Admission, CacheConfig, KvError, LayerGroup, Prompt, RequestId, SavedCheckpoint,
};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

use crate::fed::{Fed, Padding, Part, begin};
use crate::inputs::{assert_same, download};
use crate::stories::{Story, config, tiny};

const FORMATS: (MainFormat, IndexFormat) = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
/// The token ids of a story begin at a multiple of this.
const IDS: u32 = 100_000;

/// The tokens of a request: pieces of stories, one after the other.
pub struct Told<'s> {
    /// The number of each story, the story, and its positions.
    pieces: Vec<(u32, &'s Story, Range<usize>)>,
}

impl<'s> Told<'s> {
    /// Pieces of stories: (number, story, end position), in order.
    pub fn of(stories: &[(u32, &'s Story, usize)]) -> Self {
        let starts = std::iter::once(0).chain(stories.iter().map(|&(_, _, end)| end));
        let pieces = starts.zip(stories).map(|(from, &(number, story, end))| {
            assert!(from <= end && end <= story.tokens(), "{from} to {end}");
            (number, story, from..end)
        });
        Self { pieces: pieces.filter(|(_, _, range)| !range.is_empty()).collect() }
    }

    /// `tokens` tokens: those of `first` up to `parting`, then those of `second`.
    pub fn parting(first: &'s Story, second: &'s Story, parting: usize, tokens: usize) -> Self {
        Self::of(&[(0, first, parting.min(tokens)), (1, second, tokens)])
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.pieces.last().map_or(0, |(_, _, range)| range.end)
    }

    /// The token ids. Stories with different numbers have different ids.
    pub fn ids(&self) -> Vec<u32> {
        let piece = |&(number, _, ref range): &(u32, &Story, Range<usize>)| {
            range.clone().map(move |at| number * IDS + at as u32)
        };
        self.pieces.iter().flat_map(piece).collect()
    }

    /// The part of a request in a step: its tokens `tokens`, then drafts from another story.
    pub fn part(
        &self,
        id: RequestId,
        tokens: Range<usize>,
        drafts: Option<Drafts<'s>>,
    ) -> Part<'s> {
        let of = |&(_, story, ref range): &(u32, &'s Story, Range<usize>)| {
            (story, range.start.max(tokens.start)..range.end.min(tokens.end))
        };
        let drafts = drafts.map(|(story, count)| (story, tokens.end..tokens.end + count));
        let pieces = self.pieces.iter().map(of).chain(drafts);
        Part { id, pieces: pieces.filter(|(_, range)| range.start < range.end).collect() }
    }
}

/// A story from which drafts come, and their number.
type Drafts<'s> = (&'s Story, usize);

/// How a prompt is cut into steps.
#[derive(Clone, Copy)]
pub enum Cut<'s> {
    /// This many tokens per step.
    Chunks(usize),
    /// `max_draft` + 1 tokens per step, of which none to `max_draft`, in turn, are drafts from this story, which are
    /// rejected.
    Drafts(&'s Story),
}

impl<'s> Cut<'s> {
    /// The number of accepted tokens, and the rejected drafts, of step number `turn`.
    fn tokens(self, max_draft: usize, turn: usize) -> (usize, Option<Drafts<'s>>) {
        match self {
            Self::Chunks(tokens) => (tokens, None),
            Self::Drafts(story) => {
                let rejected = turn % (max_draft + 1);
                (max_draft + 1 - rejected, Some((story, rejected)))
            }
        }
    }
}

/// A cache of the preset `tiny`; it is poisoned if it shares prefixes (has checkpoints).
pub fn fed<B: Backend>(device: &Device<B>, settings: CacheConfig) -> Fed<B> {
    let (poison, lease_bytes) = (settings.num_checkpoints > 0, u64::MAX);
    Fed::new(device, CacheConfig { poison, lease_bytes, ..settings })
}

/// A configuration for three requests of up to 640 tokens.
pub fn settings(max_draft: u32, num_checkpoints: u32, checkpoint_interval: u32) -> CacheConfig {
    let base = config(&tiny(), FORMATS, 3);
    CacheConfig { max_draft, num_checkpoints, checkpoint_interval, ..base }
}

/// Admits a request with these tokens.
pub fn admit<B: Backend>(fed: &mut Fed<B>, told: &Told<'_>, salt: &[u8]) -> Admission {
    let tokens = told.ids();
    let prompt = Prompt { tokens: &tokens, salt, adapter: b"" };
    fed.manager.admit_with(&fed.stream, &prompt).unwrap()
}

/// Number of tokens of a prompt that the device can reuse. Admits a request and releases it.
pub fn reusable<B: Backend>(fed: &mut Fed<B>, told: &Told<'_>, salt: &[u8]) -> u32 {
    let admission = admit(fed, told, salt);
    fed.manager.release(admission.id).unwrap();
    admission.reused
}

/// Number of tokens at the end of a prompt that are computed one by one. They write every row of the rings, so that
/// earlier chunks and rejected drafts leave no difference.
pub fn tail(max_draft: u32) -> usize {
    8 + 2 * max_draft as usize
}

/// Runs the tokens of a request from `from` on, in steps cut as `cut` says, and commits their ids.
pub fn compute<'s, B: Backend>(
    fed: &mut Fed<B>,
    id: RequestId,
    told: &Told<'s>,
    from: usize,
    cut: Cut<'s>,
) {
    compute_to(fed, id, told, from..told.tokens(), cut);
}

/// As [`compute`], for the tokens `tokens`.
pub fn compute_to<'s, B: Backend>(
    fed: &mut Fed<B>,
    id: RequestId,
    told: &Told<'s>,
    tokens: Range<usize>,
    cut: Cut<'s>,
) {
    let (ids, max_draft) = (told.ids(), fed.manager.config().max_draft);
    let one_by_one = told.tokens().saturating_sub(tail(max_draft));
    let (mut done, mut turn) = (tokens.start, 0);
    while done < tokens.end {
        let (most, drafts) = cut.tokens(max_draft as usize, turn);
        let to = (done + most).min(one_by_one).max(done + 1).min(tokens.end);
        let drafts = drafts.filter(|_| to <= one_by_one);
        let parts = [told.part(id, done..to, drafts)];
        fed.inputs.load(&fed.stream, &parts, parts[0].request().tokens);
        let mut steps = begin(&mut fed.manager, &fed.stream, &parts, Padding::None).unwrap();
        for step in &mut steps {
            fed.inputs.run(step, &mut |_, _| Ok(())).unwrap();
        }
        let accepted = Accepted { id, accepted: (to - done) as u32, tokens: &ids[done..to] };
        steps.into_iter().for_each(|step| step.commit(&[accepted]).unwrap());
        fed.manager.save_wanted(&fed.stream).unwrap();
        (done, turn) = (to, turn + 1);
    }
    fed.manager.check_faults(&fed.stream).unwrap();
}

/// The bytes of a request with `tokens` tokens in each layer of the trunk: its whole slot, and every entry and key.
pub fn bytes<B: Backend>(fed: &Fed<B>, id: RequestId, tokens: usize) -> Vec<(String, Vec<u8>)> {
    let table = fed.manager.block_table(id).unwrap();
    let trunk = fed.manager.config().group_layers(LayerGroup::Trunk);
    let layers = fed.manager.schema().layers[..trunk.end as usize].iter();
    let pools = layers.flat_map(|layer| layer.pools.iter().map(move |pool| (layer, pool)));
    let of_pool = |(layer, pool): (&dsv4_kv::schema::LayerCacheSchema, &dsv4_kv::schema::Pool)| {
        let all = download(&fed.stream, &fed.manager.pool(layer.layer, pool.kind).unwrap());
        let unit = pool.unit_bytes() as usize;
        let of = |number: u32, bytes: usize| all[number as usize * unit..][..bytes].to_vec();
        let found = match pool.unit {
            PoolUnit::Slot => of(id.slot().0, unit),
            PoolUnit::Block => {
                let closed = tokens / layer.kind.ratio().unwrap() as usize;
                let rows =
                    |block: usize| (closed - block * pool.rows as usize).min(pool.rows as usize);
                let blocks = table.iter().enumerate().take(closed.div_ceil(pool.rows as usize));
                blocks
                    .flat_map(|(at, block)| of(block.0, rows(at) * pool.row_bytes as usize))
                    .collect()
            }
        };
        (format!("{:?} {:?}", layer.layer, pool.kind), found)
    };
    pools.map(of_pool).collect()
}

/// Asserts that the device's block table has the blocks of the ledger.
pub fn assert_table<B: Backend>(fed: &Fed<B>, id: RequestId) {
    let blocks = fed.manager.block_table(id).unwrap();
    let table = download(&fed.stream, &fed.manager.device_block_table());
    let width = table.len() / fed.manager.config().max_requests as usize;
    let row = &table[id.slot().0 as usize * width..][..blocks.len()];
    assert!(
        row.iter().zip(&blocks).all(|(&found, block)| found == block.0 as i32),
        "{row:?} {blocks:?}"
    );
}

/// The bytes of a request that is alone in a cache where nothing is shared.
pub struct Alone {
    /// The trunk's part of its checkpoint at each multiple of 128 tokens.
    pub images: Vec<Vec<u8>>,
    /// All its bytes in the end: [`bytes`].
    pub bytes: Vec<(String, Vec<u8>)>,
}

impl Alone {
    /// Computes the request.
    pub fn of<B: Backend>(device: &Device<B>, told: &Told<'_>, settings: CacheConfig) -> Self {
        let (num_checkpoints, checkpoint_interval) = (1, 0);
        let mut fed = fed(device, CacheConfig { num_checkpoints, checkpoint_interval, ..settings });
        let id = fed.manager.admit().unwrap();
        let (mut images, mut from) = (Vec::new(), 0);
        for boundary in (128..=told.tokens()).step_by(128) {
            compute_to(&mut fed, id, told, from..boundary, Cut::Chunks(128));
            images.push(image(&mut fed, id, boundary).expect("a checkpoint is free"));
            from = boundary;
        }
        compute(&mut fed, id, told, from, Cut::Chunks(128));
        Self { images, bytes: bytes(&fed, id, told.tokens()) }
    }
}

/// The trunk's part of a checkpoint of a request that has `tokens` tokens; `None` if no checkpoint is free or
/// evictable.
pub fn image<B: Backend>(fed: &mut Fed<B>, id: RequestId, tokens: usize) -> Option<Vec<u8>> {
    let saved = match fed.manager.save_checkpoints(&fed.stream, &[(id, tokens as u32)]) {
        Err(KvError::OutOfCheckpoints { .. }) => return None,
        saved => saved.unwrap().remove(0),
    };
    let image = trunk(fed, &saved);
    fed.manager.discard_checkpoint(saved).unwrap();
    Some(image)
}

/// The trunk's part of a checkpoint.
pub fn trunk<B: Backend>(fed: &Fed<B>, saved: &SavedCheckpoint) -> Vec<u8> {
    // The rows of the draft layer come last.
    const DRAFT_BYTES: usize = 128 * (576 + 8);
    let mut bytes = download(&fed.stream, &fed.manager.writable_checkpoint(saved));
    bytes.truncate(bytes.len() - DRAFT_BYTES);
    bytes
}

/// Asserts that both have the same bytes.
pub fn same(got: &[(String, Vec<u8>)], want: &[(String, Vec<u8>)], what: &str) {
    assert_eq!(got.len(), want.len());
    for ((name, got), (_, want)) in got.iter().zip(want) {
        assert_same(got, want, &format!("{name}, {what}"));
    }
}
