//! What requests of a stress test say, and what a cache must hold and gather of it.

use dsv4_kv::device::EmuDevice;
use dsv4_kv::state::RunningSums;
use dsv4_kv::{CacheConfig, LayerId};
use dsv4_kv_oracle::row::{EncodedRow, RowFormat};

use super::op::Name;
use dsv4_kv_tests::hca::running_sums;
use dsv4_kv_tests::inputs::oracle;
use dsv4_kv_tests::stories::{Stored, Story};
use kv_layout::geometry::CompressorKind;

/// Stories that requests tell; a request tells the one of its name.
const STORIES: u64 = 5;

/// One layer of a story.
pub struct LayerBytes {
    /// Window rows as they are stored.
    pub rows: Vec<EncodedRow>,
    /// Window rows as they are gathered, `[512]` BF16 each.
    pub window: Vec<Vec<u16>>,
    /// Entries as they are gathered.
    pub entries: Vec<Vec<u16>>,
    /// Entries and keys as they are stored.
    pub stored: Stored,
    /// In an HCA layer the running sums after each number of tokens; empty in others.
    sums: Vec<Option<RunningSums>>,
}

/// A story, and what each layer makes of it.
pub struct Told {
    /// The tokens.
    pub story: Story,
    layers: Vec<LayerBytes>,
}

impl Told {
    fn new(config: &CacheConfig, seed: u64) -> Self {
        let device = EmuDevice::new(dsv4_kv::device::EmuOptions::default());
        let story = Story::random(&config.model.layers, config.max_context as usize, seed);
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

    /// What a layer makes of it.
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

/// All stories of a stress test, and one that is never right.
pub struct Library {
    told: Vec<Told>,
    drafts: Story,
}

impl Library {
    /// Stories for requests of `config`, each as long as a request can get.
    #[must_use]
    pub fn new(config: &CacheConfig) -> Self {
        let (layers, tokens) = (&config.model.layers, config.max_context as usize);
        Self {
            told: (1..=STORIES).map(|seed| Told::new(config, seed)).collect(),
            drafts: Story::random(layers, tokens, STORIES + 1),
        }
    }

    /// The story of a request.
    #[must_use]
    pub fn of(&self, name: Name) -> &Told {
        &self.told[name as usize % self.told.len()]
    }

    /// Tokens that are never right.
    #[must_use]
    pub fn drafts(&self) -> &Story {
        &self.drafts
    }
}
