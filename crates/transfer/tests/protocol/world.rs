//! A source cache whose requests were computed once and move many times, and a target cache.

use std::time::Duration;

use dsv4_kv::device::{Backend, Device, EmuOptions, Emulator};
use dsv4_kv::transfer::Reserved;
use dsv4_kv::transfer::{PartLayout, Positions, TransferStaging};
use dsv4_kv::{CacheConfig, RequestId};
use dsv4_kv_tests::fed::{Fed, Padding, Part};
use dsv4_kv_tests::stories::{Story, config, tiny};
use dsv4_kv_transfer::protocol::Offer;
use dsv4_kv_transfer::{
    Claimed, Control, Deadlines, Expected, Fingerprint, OpenTransfer, Sender, Source, Target,
    TransferError, Transport, Verified,
};
#[cfg(feature = "nixl")]
use kv_layout::config::ModelConfig;
#[cfg(feature = "nixl")]
use kv_layout::geometry::BLOCK_TOKENS;
use kv_layout::geometry::LayerKind;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

/// The digest of the weights in the fingerprints of these tests.
pub fn weights() -> [u8; 32] {
    Fingerprint::weights_of(b"weights").unwrap()
}

/// Blocks of the target.
pub const BLOCKS: u32 = 6;
/// Most bytes that a sender holds.
pub const MAX_BYTES: u64 = 64 << 20;
/// The deadline of offers and answers that never expire.
pub const NEVER: Duration = Duration::from_secs(1_000_000);
/// Lengths of the samples.
const LENGTHS: [usize; 3] = [2, 7, 132];
/// Tokens that a test may compute.
const TOKENS: usize = 400;
/// As `TOKENS`, for [`Schema::Long`].
#[cfg(feature = "nixl")]
pub const LONG: usize = 8192;

/// A request of the source: its positions, its tokens, and its bytes.
pub struct Sample {
    pub id: RequestId,
    pub at: Positions,
    pub tokens: Vec<u32>,
    pub payload: Vec<u8>,
}

/// A cache and its transfer staging.
pub struct Site<B: Backend = Emulator> {
    pub fed: Fed<B>,
    pub staging: TransferStaging<B>,
}

pub struct World<B: Backend = Emulator> {
    pub samples: Vec<Sample>,
    pub story: Story,
    pub fingerprint: Fingerprint,
    pub layout: PartLayout,
    pub source: Site<B>,
    pub target: Site<B>,
}

/// Which model a world has.
#[derive(Clone, Copy)]
pub enum Schema {
    /// Five layers of every kind.
    Tiny,
    /// V4-Flash with all its layers.
    #[cfg(feature = "nixl")]
    Flash,
    /// As `Tiny`, with long prompts.
    #[cfg(feature = "nixl")]
    Long,
}

impl Schema {
    fn layers(self) -> Vec<LayerKind> {
        match self {
            #[cfg(feature = "nixl")]
            Self::Flash => flash().layers,
            _ => tiny(),
        }
    }

    /// Tokens that a test may compute.
    fn tokens(self) -> usize {
        match self {
            #[cfg(feature = "nixl")]
            Self::Long => LONG,
            _ => TOKENS,
        }
    }

    /// A small cache of the model.
    pub fn settings(self, max_draft: u32, max_requests: u32, num_blocks: u32) -> CacheConfig {
        let config = settings(max_draft, max_requests, num_blocks);
        match self {
            Self::Tiny => config,
            #[cfg(feature = "nixl")]
            Self::Flash => CacheConfig { model: flash(), ..config },
            #[cfg(feature = "nixl")]
            Self::Long => {
                let (max_context, blocks) = (LONG as u32, LONG as u32 / BLOCK_TOKENS);
                CacheConfig { max_context, num_blocks: num_blocks + blocks, ..config }
            }
        }
    }
}

#[cfg(feature = "nixl")]
fn flash() -> ModelConfig {
    ModelConfig::preset("flash").unwrap()
}

/// A new emulated device.
pub fn emulated() -> Device<Emulator> {
    Device::from_backend(Emulator::new(EmuOptions::default()))
}

impl<B: Backend> Site<B> {
    pub fn new(device: &Device<B>, config: CacheConfig) -> Self {
        let fed = Fed::new(device, config);
        let staging = fed.manager.new_transfer_staging().unwrap();
        Self { fed, staging }
    }

    /// All bytes of a request.
    pub fn export(&mut self, id: RequestId) -> (Positions, Vec<u8>) {
        let stream = self.fed.stream.clone();
        let mut export = self.fed.manager.export(&stream, &mut self.staging, id).unwrap();
        let at = export.positions();
        let mut payload = vec![0; export.layout().bytes(at) as usize];
        export.all(&mut payload).unwrap();
        (at, payload)
    }

    /// An open transfer of a request of the source that will be at positions `at`.
    pub fn open<T: Transport>(
        &mut self,
        sender: &mut Sender<T>,
        (id, fingerprint): (RequestId, Fingerprint),
        (at, tokens): (Positions, &[u32]),
    ) -> OpenTransfer {
        let stream = self.fed.stream.clone();
        let export = self.fed.manager.export(&stream, &mut self.staging, id).unwrap();
        sender.open(&export, fingerprint, (at, tokens)).unwrap()
    }

    /// An open transfer of a request that is at positions `at`, with all its parts.
    pub fn whole<T: Transport>(
        &mut self,
        sender: &mut Sender<T>,
        (id, fingerprint): (RequestId, Fingerprint),
        (at, tokens): (Positions, &[u32]),
    ) -> OpenTransfer {
        let mut transfer = self.open(sender, (id, fingerprint), (at, tokens));
        let stream = self.fed.stream.clone();
        let mut export = self.fed.manager.export(&stream, &mut self.staging, id).unwrap();
        sender.take(&mut transfer, &mut export).unwrap();
        transfer
    }
}

/// 2 s for reads, 4 s until a fence, 6 s of silence.
pub fn deadlines() -> Deadlines {
    let [read, fence, quiet] = [2, 4, 6].map(Duration::from_secs);
    Deadlines { read, fence, quiet }
}

/// A small cache of the model `tiny`.
pub fn settings(max_draft: u32, max_requests: u32, num_blocks: u32) -> CacheConfig {
    let formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
    let config = config(&tiny(), formats, max_requests);
    CacheConfig { max_draft, num_blocks, poison: true, ..config }
}

impl World {
    /// A source and a target, each on an emulated device of its own.
    pub fn new() -> Self {
        Self::on(&emulated(), &emulated())
    }
}

impl<B: Backend> World<B> {
    /// A source and a target, each on its device.
    pub fn on(source: &Device<B>, target: &Device<B>) -> Self {
        Self::of(Schema::Tiny, source, target)
    }

    /// As [`Self::on`], with a model.
    pub fn of(schema: Schema, source: &Device<B>, target: &Device<B>) -> Self {
        let mut source = Site::new(source, schema.settings(0, 4, 12));
        let target = Site::new(target, schema.settings(3, 2, BLOCKS));
        let story = Story::random(&schema.layers(), schema.tokens(), 71);
        let ids = LENGTHS.map(|_| source.fed.manager.admit().unwrap());
        let parts = ids.iter().zip(LENGTHS).map(|(&id, end)| Part::new(id, &story, 0..end));
        source.fed.step(&parts.collect::<Vec<_>>(), Padding::None);
        let sample = |(id, end): (RequestId, usize)| {
            let (at, payload) = source.export(id);
            Sample { id, at, tokens: (0..end as u32).collect(), payload }
        };
        let samples = ids.into_iter().zip(LENGTHS).map(sample).collect();
        let config = target.fed.manager.config();
        let fingerprint = Fingerprint::new(config, b"weights", b"salt", b"").unwrap();
        let layout = PartLayout::new(config);
        Self { samples, story, fingerprint, layout, source, target }
    }

    pub fn expected(&self) -> Expected<'_> {
        let max_context = self.target.fed.manager.config().max_context;
        let (fingerprint, layout) = (&self.fingerprint, &self.layout);
        Expected { fingerprint, layout, tokens: None, max_context }
    }

    /// All bytes of a request with `tokens` tokens that is computed here and does not move.
    pub fn compute(&mut self, tokens: usize) -> Vec<u8> {
        let id = self.source.fed.manager.admit().unwrap();
        self.source.fed.step(&[Part::new(id, &self.story, 0..tokens)], Padding::None);
        let (_, bytes) = self.source.export(id);
        self.source.fed.manager.release(id).unwrap();
        bytes
    }

    /// Offers a complete sample until `until`. Returns its source and the offer.
    pub fn offer_until<T: Transport>(
        &mut self,
        sender: &mut Sender<T>,
        sample: usize,
        until: Duration,
    ) -> (Source, Offer) {
        let transfer = self.take(sender, sample, self.fingerprint);
        (transfer.source(), sender.offer(transfer, until).unwrap())
    }

    /// Offers a complete sample.
    pub fn offer<T: Transport>(&mut self, sender: &mut Sender<T>, sample: usize) -> Offer {
        self.offer_as(sender, sample, self.fingerprint)
    }

    /// As [`Self::offer`], with another fingerprint.
    pub fn offer_as<T: Transport>(
        &mut self,
        sender: &mut Sender<T>,
        sample: usize,
        fingerprint: Fingerprint,
    ) -> Offer {
        let transfer = self.take(sender, sample, fingerprint);
        sender.offer(transfer, NEVER).unwrap()
    }

    /// An open transfer with all parts of a sample.
    pub fn take<T: Transport>(
        &mut self,
        sender: &mut Sender<T>,
        sample: usize,
        fingerprint: Fingerprint,
    ) -> OpenTransfer {
        let Self { samples, source, .. } = self;
        let Sample { id, at, tokens, .. } = &samples[sample];
        source.whole(sender, (*id, fingerprint), (*at, tokens))
    }

    /// Offers another request of the source, which has `end` tokens.
    #[cfg(feature = "nixl")]
    pub fn offer_walk<T: Transport>(
        &mut self,
        sender: &mut Sender<T>,
        id: RequestId,
        end: usize,
    ) -> Offer {
        let tokens: Vec<_> = (0..end as u32).collect();
        let at = Positions { trunk: end as u32, draft: end as u32 };
        let transfer = self.source.whole(sender, (id, self.fingerprint), (at, &tokens));
        sender.offer(transfer, NEVER).unwrap()
    }
}

/// A source that answers immediately.
pub trait Answers {
    fn claim(&mut self, source: Source) -> Result<bool, String>;
    fn give_up(&mut self, _source: Source) {}
}

/// A control channel to a source that answers immediately.
struct AtOnce<'a, A: Answers>(&'a mut A, Option<Result<bool, String>>);

impl<A: Answers> Control for AtOnce<'_, A> {
    fn ask(&mut self, source: Source) -> Result<(), String> {
        self.1 = Some(self.0.claim(source));
        Ok(())
    }

    fn answer(&mut self, _source: Source) -> Result<Option<bool>, String> {
        self.1.take().transpose()
    }

    fn give_up(&mut self, source: Source) {
        self.0.give_up(source);
    }
}

/// Loads a verified payload, and admits it if its source says yes.
pub fn admit<B: Backend>(
    target: &mut Target<'_, B>,
    verified: &Verified,
    reserved: Reserved,
    source: &mut impl Answers,
) -> Result<RequestId, TransferError> {
    let mut control = AtOnce(source, None);
    let claim = target.load(verified, reserved, NEVER, &mut control)?;
    match target.settle(Duration::ZERO, claim, &mut control)? {
        Claimed::Admitted(id) => Ok(id),
        Claimed::Waits(claim) => panic!("{claim:?} was answered"),
    }
}

/// A sender in this process.
pub struct Direct<'s, T: Transport>(pub &'s mut Sender<T>);

impl<T: Transport> Answers for Direct<'_, T> {
    fn claim(&mut self, source: Source) -> Result<bool, String> {
        Ok(self.0.claim(source))
    }

    fn give_up(&mut self, source: Source) {
        self.0.give_up(source);
    }
}
