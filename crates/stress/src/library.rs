//! The token histories of the requests of a stress test, and the bytes that a cache must store and gather for them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dsv4_kv::device::EmuDevice;
use dsv4_kv::state::RunningSums;
use dsv4_kv::{CacheConfig, LayerId};
use dsv4_kv_oracle::row::{EncodedRow, RowFormat};

use super::text::{Prefix, Text};
use dsv4_kv_tests::hca::running_sums;
use dsv4_kv_tests::inputs::oracle;
use dsv4_kv_tests::stories::{Stored, Story};
use kv_layout::geometry::CompressorKind;

/// Number of texts whose bytes are cached at once.
const KEPT: usize = 32;

/// The bytes of a story in one layer.
pub struct LayerBytes {
    /// Window rows as stored.
    pub rows: Vec<EncodedRow>,
    /// Window rows as gathered, `[512]` BF16 each.
    pub window: Vec<Vec<u16>>,
    /// Entries as gathered.
    pub entries: Vec<Vec<u16>>,
    /// Entries and indexer keys as stored.
    pub stored: Stored,
    /// In an HCA layer, the running sums after each number of tokens; empty in other layers.
    sums: Vec<Option<RunningSums>>,
}

/// A story, and its bytes in each layer.
pub struct Told {
    /// The inputs of its tokens.
    pub story: Story,
    layers: Vec<LayerBytes>,
}

impl Told {
    fn new(config: &CacheConfig, story: Story) -> Self {
        let device = EmuDevice::new(dsv4_kv::device::EmuOptions::default());
        let format = oracle(config.main_format);
        let stored = story.stored(&device, (config.main_format, config.index_format));
        let layers = stored.into_iter().zip(0..).map(|(stored, layer)| {
            let rows = story.window_rows(LayerId(layer));
            let rows: Vec<_> = rows.iter().map(|row| format.encode(row)).collect();
            let histories = story.histories(LayerId(layer)).iter();
            let hca = histories.filter(|history| history.stream == CompressorKind::Hca);
            LayerBytes {
                sums: hca.flat_map(running_sums).collect(),
                window: decoded(format, &rows),
                entries: decoded(format, &stored.entries),
                rows,
                stored,
            }
        });
        Self { layers: layers.collect(), story }
    }

    /// The bytes of one layer.
    #[must_use]
    pub fn layer(&self, layer: LayerId) -> &LayerBytes {
        &self.layers[layer.0 as usize]
    }

    /// The running sums of an HCA layer after `tokens` tokens, if a window is open.
    #[must_use]
    pub fn sums(&self, layer: LayerId, tokens: u32) -> Option<&RunningSums> {
        self.layer(layer).sums.get(tokens as usize)?.as_ref()
    }
}

fn decoded(format: RowFormat, rows: &[EncodedRow]) -> Vec<Vec<u16>> {
    rows.iter().map(|row| format.decode(row)).collect()
}

/// The stories of the requests of a stress test, made on demand, and a story for wrong drafts.
pub struct Library {
    config: CacheConfig,
    drafts: Story,
    /// By salt and token id: the story of a text that repeats this token.
    stories: Mutex<BTreeMap<(u8, u32), Arc<Story>>>,
    told: Mutex<BTreeMap<Prefix, Arc<Told>>>,
}

impl Library {
    /// The library for requests of `config`.
    #[must_use]
    pub fn new(config: &CacheConfig) -> Self {
        let (stories, told) = (Mutex::default(), Mutex::default());
        Self { drafts: random(config, 0), config: config.clone(), stories, told }
    }

    /// The story of a text, up to the longest context of a request. A token has other inputs at each position and under
    /// each salt.
    #[must_use]
    pub fn of(&self, text: &Text) -> Arc<Told> {
        let prefix = text.prefix(self.config.max_context);
        if let Some(told) = lock(&self.told).get(&prefix) {
            return Arc::clone(told);
        }
        let (mut pieces, mut end) = (Vec::new(), 0);
        for &(token, count) in prefix.runs() {
            end += count as usize;
            pieces.push((self.story(prefix.salt(), token), end));
        }
        let pieces: Vec<_> = pieces.iter().map(|(story, end)| (&**story, *end)).collect();
        let made = Arc::new(Told::new(&self.config, Story::spliced(&pieces)));
        let mut told = lock(&self.told);
        if told.len() == KEPT {
            told.clear();
        }
        told.insert(prefix, Arc::clone(&made));
        made
    }

    /// Inputs of draft tokens that are always wrong.
    #[must_use]
    pub fn drafts(&self) -> &Story {
        &self.drafts
    }

    fn story(&self, salt: u8, token: u32) -> Arc<Story> {
        let seed = 1 + 100 * u64::from(salt) + u64::from(token);
        let mut stories = lock(&self.stories);
        let story = stories.entry((salt, token));
        Arc::clone(story.or_insert_with(|| Arc::new(random(&self.config, seed))))
    }
}

fn random(config: &CacheConfig, seed: u64) -> Story {
    Story::random(&config.model.layers, config.max_context as usize, seed)
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
