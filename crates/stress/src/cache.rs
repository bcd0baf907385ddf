//! A whole cache put to the test: the manager, and the kernels of every step.

use std::cell::RefCell;
use std::sync::Arc;

use dsv4_kv::device::{Backend, Buffer, Device};
use dsv4_kv::plan::{Section, StepLayout};
use dsv4_kv::{
    BlockId, CacheConfig, CapturedStep, KvError, LayerId, RequestId, StepPlan, StepRequest,
};
use kv_layout::geometry::LayerKind;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::library::Library;
use super::model::{Model, Request};
use super::op;
use super::subject::Subject;
use dsv4_kv_tests::inputs::{download, upload};
use dsv4_kv_tests::stories::{Fed, Part};

/// Tokens of the captured steps.
const BUCKET: u32 = 8;
/// Entries of a query's list.
const LIST: u32 = 4;
/// Of so many steps whose watched layer has an indexer, one lets its last query score all it sees.
const SCORED: u32 = 4;

/// How a step's kernels are launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Launches {
    /// A layer's operations one by one.
    Separate,
    /// One launch a layer, for steps of one token a request.
    Fused,
}

/// A cache with its stories.
pub struct Cache<B: Backend> {
    pub(super) fed: Fed<B>,
    pub(super) library: Arc<Library>,
    graphs: Vec<(Launches, CapturedStep<B>)>,
    random: SmallRng,
    /// What was wrong with the last step.
    trouble: RefCell<Option<String>>,
}

/// What the gathers of one layer gave.
struct Gathered<B: Backend> {
    layer: LayerId,
    /// Rows of `all`.
    rows: u32,
    selected: Vec<i32>,
    window: Option<Buffer<B, u16>>,
    listed: Buffer<B, u16>,
    all: Buffer<B, u16>,
    lengths: Buffer<B, i32>,
}

impl Launches {
    /// Most tokens of a launch: of a fused one, as many as there are requests.
    fn most(self, config: &CacheConfig) -> u32 {
        match self {
            Self::Separate => config.max_step_tokens,
            Self::Fused => config.max_step_tokens.min(config.max_requests),
        }
    }
}

impl<B: Backend> Cache<B> {
    /// An empty cache whose memory is poison.
    ///
    /// # Panics
    /// If the device refuses, or the configuration is out of range.
    #[must_use]
    pub fn new(
        device: &Device<B>,
        config: &CacheConfig,
        library: &Arc<Library>,
        seed: u64,
    ) -> Self {
        let fed = Fed::new(device, config.clone());
        let graphs = [Launches::Separate, Launches::Fused]
            .into_iter()
            .map(|launches| {
                let bucket = BUCKET.min(launches.most(config));
                let record = |_: &_| update(&fed, launches, bucket, &mut |_| Ok(()));
                let graph = fed.manager.capture(&fed.stream, bucket, fed.inputs(), record);
                (launches, graph.expect("a step can be captured"))
            })
            .collect();
        let (random, library) = (SmallRng::seed_from_u64(seed), Arc::clone(library));
        Self { fed, library, graphs, random, trouble: RefCell::new(None) }
    }

    /// Compares every byte of every request, in all layers, whose tokens are known.
    ///
    /// # Errors
    /// Which bytes differ.
    pub fn check_all(&self, model: &Model) -> Result<(), String> {
        for (id, request) in model.live().filter(|(_, request)| request.known) {
            self.fed.layer_ids().try_for_each(|layer| self.check_request(id, request, layer))?;
        }
        Ok(())
    }

    /// Runs the kernels of a prepared step, and compares what one layer gathers.
    fn run(&mut self, model: &Model, parts: &[op::Part], plan: StepPlan) -> Result<(), String> {
        let library = Arc::clone(&self.library);
        let pieces = parts.iter().map(|part| {
            let request = model.named(part.request).expect("it is in a step");
            let (start, tokens) = (request.tokens as usize, part.tokens as usize);
            let right = start + (part.genuine.min(part.tokens)) as usize;
            let own = (&library.of(part.request).story, start..right);
            let drafts = (library.drafts(), right..start + tokens);
            Part { id: model.handle(part.request), pieces: vec![own, drafts] }
        });
        let pieces: Vec<_> = pieces.collect();
        let single = parts.iter().all(|part| part.tokens == 1);
        let launches =
            if single && self.random.random() { Launches::Fused } else { Launches::Separate };
        let graph = self.graphs.iter().find(|(of, _)| *of == launches).map(|(_, graph)| graph);
        let graph = graph.filter(|graph| plan.tokens <= graph.bucket() && self.random.random());
        let padded =
            if self.random.random() { plan.tokens.next_power_of_two() } else { plan.tokens };
        let padded = padded.min(launches.most(model.config()));
        let bucket = graph.map_or(padded, CapturedStep::bucket);
        let watched =
            LayerId(self.random.random_range(0..model.config().model.layers.len() as u32));
        let scored = self.random.random_ratio(1, SCORED);
        let (fed, mut gathered) = (&self.fed, None);
        fed.load(&pieces, bucket);
        let mut after = |layer: LayerId| {
            if layer == watched {
                gathered = Some(gather(fed, model, parts, layer, plan.tokens)?);
                if scored && model.config().model.layers[layer.0 as usize] == LayerKind::Csa {
                    fed.score(layer, plan.tokens - 1..plan.tokens, 1)?;
                }
            }
            Ok(())
        };
        match graph {
            Some(graph) => fed.manager.replay(&fed.stream, graph).and_then(|()| after(watched)),
            None => update(fed, launches, bucket, &mut after),
        }
        .map_err(|error| error.to_string())?;
        fed.manager.check_faults(&fed.stream).map_err(|error| error.to_string())?;
        fed.manager.check_poison(&fed.stream).map_err(|error| error.to_string())?;
        gathered.map_or(Ok(()), |gathered| self.check_gathered(model, parts, &gathered))
    }

    /// Every query of the step that is right was given its window, its list and all it sees.
    fn check_gathered(
        &self,
        model: &Model,
        parts: &[op::Part],
        gathered: &Gathered<B>,
    ) -> Result<(), String> {
        let stream = &self.fed.stream;
        let tile = |buffer: &Buffer<B, u16>| -> Vec<u16> { download(stream, buffer) };
        let window = gathered.window.as_ref().map(tile);
        let (listed, all) = (tile(&gathered.listed), tile(&gathered.all));
        let lengths = download(stream, &gathered.lengths);
        let ratio = model.config().model.layers[gathered.layer.0 as usize].ratio();
        let mut query = 0;
        for part in parts {
            let request = model.named(part.request).expect("it is in a step");
            let told = self.library.of(part.request).layer(gathered.layer);
            for index in 0..part.tokens as usize {
                let (at, position) = (query, request.tokens as usize + index);
                query += 1;
                if index >= part.genuine as usize || !request.known {
                    continue;
                }
                let what =
                    format!("{:?}, request {}, position {position}", gathered.layer, part.request);
                if let Some(window) = &window {
                    let from = (position + 1).saturating_sub(128);
                    let want = told.window[from..=position].iter();
                    rows_equal(window, at * 128, want, &format!("window of {what}"))?;
                }
                let Some(ratio) = ratio else { continue };
                let seen = (position + 1) / ratio as usize;
                if lengths[at] as usize != seen {
                    return Err(format!("{what}: sees {} entries, should see {seen}", lengths[at]));
                }
                let want = told.entries[..seen].iter();
                rows_equal(&all, at * gathered.rows as usize, want, &format!("entries of {what}"))?;
                let list = &gathered.selected[at * LIST as usize..][..LIST as usize];
                let zero = vec![0; 512];
                let want = list.iter().map(|&entry| {
                    usize::try_from(entry).map_or(&zero, |entry| &told.entries[entry])
                });
                rows_equal(&listed, at * LIST as usize, want, &format!("list of {what}"))?;
            }
        }
        Ok(())
    }
}

/// Queues a step's kernels as a server does; `between` runs in each layer where attention would.
fn update<B: Backend>(
    fed: &Fed<B>,
    launches: Launches,
    bucket: u32,
    between: &mut dyn FnMut(LayerId) -> Result<(), KvError>,
) -> Result<(), KvError> {
    let (manager, stream) = (&fed.manager, &fed.stream);
    if launches == Launches::Separate {
        manager.build_plan_for(stream, bucket)?;
    }
    for layer in fed.layer_ids() {
        let (handle, rows) = (manager.layer_for(layer, bucket)?, fed.rows(layer));
        match (launches, fed.projected(layer).as_slice()) {
            (_, []) => {}
            (Launches::Separate, [hca]) => handle.update_hca(stream, hca)?,
            (Launches::Separate, [main, index, ..]) => handle.update_csa(stream, main, index)?,
            (Launches::Fused, [hca]) => handle.decode_hca(stream, rows, hca)?,
            (Launches::Fused, [main, index, ..]) => handle.decode_csa(stream, rows, main, index)?,
        }
        between(layer)?;
        if launches == Launches::Separate || handle.schema().kind == LayerKind::Swa {
            handle.append_swa(stream, rows)?;
        }
    }
    Ok(())
}

/// Gathers everything that attention of a layer can ask for, of every query of the step.
fn gather<B: Backend>(
    fed: &Fed<B>,
    model: &Model,
    parts: &[op::Part],
    layer: LayerId,
    tokens: u32,
) -> Result<Gathered<B>, KvError> {
    let stream = &fed.stream;
    let handle = fed.manager.layer(layer)?;
    let ratio = handle.schema().kind.ratio();
    let mut selected = Vec::new();
    let mut most = 1;
    for part in parts {
        let request = model.named(part.request).expect("it is in a step");
        for position in request.tokens..request.tokens + part.tokens {
            let seen = ratio.map_or(0, |ratio| (position + 1) / ratio);
            most = most.max(seen);
            let newest = seen as i32 - 1;
            selected.extend([newest, -1, newest.min(0), newest.min(newest / 2)]);
        }
    }
    // After the step's own rows have been written, a window that is longer than the ring's slack
    // has lost its oldest rows.
    let whole = parts.iter().all(|part| part.tokens <= model.config().max_draft + 1);
    let tile = |rows: u32| stream.device().allocate("tile", u64::from(tokens * rows) * 512);
    let lengths = stream.device().allocate("lengths", tokens.into())?;
    let gathered = Gathered {
        layer,
        rows: most,
        window: if whole { Some(tile(128)?) } else { None },
        listed: tile(LIST)?,
        all: tile(most)?,
        lengths,
        selected,
    };
    if let Some(window) = &gathered.window {
        handle.gather_swa(stream, fed.rows(layer), 0..tokens, window, &gathered.lengths)?;
    }
    if ratio.is_some() {
        let list = upload(stream, &gathered.selected);
        handle.gather_kv(stream, 0..tokens, &list, LIST, &gathered.listed)?;
        handle.gather_all(stream, 0..tokens, most, &gathered.all, &gathered.lengths)?;
    }
    Ok(gathered)
}

fn rows_equal<'a>(
    tile: &[u16],
    first: usize,
    want: impl Iterator<Item = &'a Vec<u16>>,
    what: &str,
) -> Result<(), String> {
    for (row, want) in want.enumerate() {
        if tile[(first + row) * 512..][..512] != want[..] {
            return Err(format!("{what}: row {row} differs"));
        }
    }
    Ok(())
}

impl<B: Backend> Subject for Cache<B> {
    fn admit(&mut self) -> Result<RequestId, KvError> {
        self.fed.manager.admit()
    }

    fn release(&mut self, id: RequestId) -> Result<(), KvError> {
        self.fed.manager.release(id)
    }

    fn prepare(
        &mut self,
        model: &Model,
        parts: &[op::Part],
        step: &[StepRequest],
    ) -> Result<StepPlan, KvError> {
        let plan = self.fed.manager.prepare_forward(&self.fed.stream, step)?;
        if plan.tokens > 0 {
            let trouble = self.run(model, parts, plan).err();
            *self.trouble.borrow_mut() = trouble;
        }
        Ok(plan)
    }

    fn commit(&mut self, id: RequestId, accepted: u32) -> Result<(), KvError> {
        self.fed.manager.commit(id, accepted)
    }

    fn array(&self) -> Vec<i32> {
        let CacheConfig { max_step_tokens, max_requests, .. } = *self.fed.manager.config();
        let layout = StepLayout::new(max_step_tokens, max_requests);
        let mut array = vec![0; layout.elements()];
        let handle = self.fed.manager.layer(LayerId(0)).expect("there is a layer");
        for section in [
            Section::Position,
            Section::Slot,
            Section::Index,
            Section::Remaining,
            Section::RingRow,
            Section::TableIndex,
            Section::TableBlock,
        ] {
            let values = download(&self.fed.stream, &handle.section(section));
            array[layout.range(section)].copy_from_slice(&values);
        }
        array
    }

    fn blocks(&self, id: RequestId) -> Option<Vec<BlockId>> {
        self.fed.manager.block_table(id).ok().map(Iterator::collect)
    }

    fn tokens(&self, id: RequestId) -> Option<u32> {
        self.fed.manager.ledger().committed(id).ok()
    }

    fn counts(&self) -> (u32, u32) {
        let ledger = self.fed.manager.ledger();
        (ledger.free_blocks(), ledger.live_requests())
    }

    fn check_bytes(&mut self, model: &Model, turn: u64) -> Result<(), String> {
        if let Some(trouble) = self.trouble.take() {
            return Err(trouble);
        }
        let known = |(_, request): &(RequestId, &Request)| request.known;
        let live: Vec<_> = model.live().filter(known).collect();
        let Some(&(id, request)) = live.get(turn as usize % live.len().max(1)) else {
            return Ok(());
        };
        let layers = self.fed.layer_ids().count() as u64;
        self.check_request(id, request, LayerId((turn / 7 % layers) as u32))
    }
}
