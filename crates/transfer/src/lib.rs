//! Moves a request from one KV cache to another, or copies a prefix, as an image. Every byte of an image is verified
//! before it is used.
//!
//! | module | what it holds |
//! |---|---|
//! | [`mod@image`] | manifest and payload, and the reasons to refuse them |
//! | [`transport`] | ways to move payloads between processes and machines |
//! | [`protocol`] | offers, reads, deadlines, quarantine, claims, admission |
//!
//! # While a prompt is computed
//!
//! The length of a prompt is known in advance, so the source can open a transfer before the first step: [`OpenTransfer::opening`]
//! goes to [`Receiver::open`]. After each step [`Sender::take`] copies the blocks that became full and returns how many
//! bytes are ready. That goes to [`Receiver::ready`], and the target reads these blocks while the next step runs. The
//! last call of `take` copies the state too. The offer goes to [`Receiver::offered`]; the target uses bytes only after
//! all of them match the digests of the offer.
//!
//! # From one cache to another
//!
//! The parts of a request leave its cache ([`dsv4_kv::transfer`]) in this order: blocks as soon as they are full, then
//! the state of its slot. A [`Sender`] holds them in memory that its [`Transport`] has registered, and offers them: it
//! sends the manifest, with a digest of each part, over the control channel, which the caller provides. A [`Receiver`]
//! reads the bytes, compares them with the digests, and gives them to a [`Target`]. The target writes them to memory
//! that was reserved in its cache ([`Target::load`]), claims the request from the source, and enters it when the source
//! has said yes ([`Target::settle`]). The target's steps run meanwhile: no call waits for the source, whose answer has
//! a deadline.
//!
//! A prefix is offered by [`Sender::offer_prefix`], read and compared in the same way, and entered in the prefix tree
//! by [`Target::admit_prefix`]. Both caches then have it, so there is no claim.
//!
//! Times are durations since an instant that the caller chooses, on each side for itself.
//!
//! ```
//! use std::time::Duration;
//!
//! use dsv4_kv::transfer::Positions;
//! # use dsv4_kv::device::{EmuDevice, EmuOptions};
//! # use dsv4_kv::kv_layout::{config::ModelConfig, geometry::LayerKind};
//! # use dsv4_kv::{Accepted, CacheConfig, KvCacheManager, Launches, StepRequest};
//! use dsv4_kv_transfer::transport::{Fabric, Loopback};
//! use dsv4_kv_transfer::{
//!     Claimed, Control, Deadlines, Expected, Fingerprint, Receiver, Sender, Source, Target,
//! };
//!
//! # let layers = vec![LayerKind::Swa; 2];
//! # let model = ModelConfig { layers, mtp_layers: 0, ..ModelConfig::preset("tiny").expect("a preset") };
//! # let smallest = CacheConfig::new(model);
//! # let config = |max_draft| CacheConfig { max_draft, max_context: 512, max_step_tokens: 64, ..smallest.clone() };
//! # let device = EmuDevice::new(EmuOptions::default());
//! # let (stream, kv) = (device.stream()?, device.allocate("rows", 5 * 512)?);
//! // Two caches of one model; rings of different sizes, for other numbers of drafts.
//! let mut ours = KvCacheManager::new(device.clone(), config(0))?;
//! let mut theirs = KvCacheManager::new(device.clone(), config(3))?;
//! let id = ours.admit()?;
//! # let mut step = ours.begin_step(&stream, Launches::Eager, &[StepRequest { id, start: 0, tokens: 5 }])?;
//! # for (layer, _) in step.layer_kinds() {
//! #     step.swa(layer)?.update(&kv)?.append()?;
//! # }
//! # step.commit(&[Accepted::count(id, 5)])?;
//! // ... five tokens later, between steps:
//! let tokens = [11, 12, 13, 14, 15];
//! let fabric = Fabric::default();
//! // 1 GiB of offers at most, each for a minute.
//! let (mut sender, mut staging) = (Sender::new(Loopback::new(&fabric), 1 << 30), ours.new_transfer_staging()?);
//! let fingerprint = Fingerprint::new(ours.config(), b"revision of the weights", b"salt", b"")?;
//! let mut export = ours.export(&stream, &mut staging, id)?;
//! let at = export.positions();
//! let mut transfer = sender.open(&export, fingerprint, (at, &tokens))?;
//! sender.take(&mut transfer, &mut export)?;
//! let offer = sender.offer(transfer, Duration::from_secs(60))?;
//!
//! // The offer goes over the control channel. The target, in a thread of its own:
//! let [read, fence, quiet] = [2, 20, 60].map(Duration::from_secs);
//! let deadlines = Deadlines { read, fence, quiet };
//! let mut receiver = Receiver::new(Loopback::new(&fabric), deadlines, 1 << 30);
//! let mut staging = theirs.new_transfer_staging()?;
//! let fingerprint = Fingerprint::new(theirs.config(), b"revision of the weights", b"salt", b"")?;
//! let layout = staging.layout().clone();
//! let max_context = theirs.config().max_context;
//! let expected =
//!     Expected { fingerprint: &fingerprint, layout: &layout, tokens: None, max_context };
//! receiver.begin(Duration::ZERO, &offer, &expected)?;
//! let (_, verified) = receiver.poll(Duration::ZERO).remove(0);
//! let verified = verified?;
//!
//! // Between two steps of its cache:
//! struct Channel<'s>(&'s mut Sender<Loopback>, Option<bool>);
//! impl Control for Channel<'_> {
//!     fn ask(&mut self, source: Source) -> Result<(), String> {
//!         // A source elsewhere gets a message, and answers when it does.
//!         self.1 = Some(self.0.claim(source));
//!         Ok(())
//!     }
//!     fn answer(&mut self, _source: Source) -> Result<Option<bool>, String> {
//!         Ok(self.1)
//!     }
//!     fn give_up(&mut self, source: Source) {
//!         self.0.give_up(source);
//!     }
//! }
//! let mut channel = Channel(&mut sender, None);
//! let reserved = theirs.reserve(verified.manifest().at)?;
//! let weights = fingerprint.weights;
//! let mut target = Target { cache: &mut theirs, stream: &stream, staging: &mut staging, weights };
//! let mut claim = target.load(&verified, reserved, Duration::from_secs(2), &mut channel)?;
//! let moved = loop {
//!     // Between two steps, again and again.
//!     match target.settle(Duration::ZERO, claim, &mut channel)? {
//!         Claimed::Waits(waiting) => claim = waiting,
//!         Claimed::Admitted(id) => break id,
//!     }
//! };
//! assert_eq!(theirs.positions(moved)?, Positions { trunk: 5, draft: 0 });
//! ours.release(id)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod image;
#[doc(hidden)]
pub mod mistake;
pub mod protocol;
pub mod transport;

pub use image::{Expected, Fingerprint, Image, ImageError, ImageKind, Manifest, Section, Source};
pub use protocol::{
    Claim, Claimed, Control, Deadlines, Offer, OpenTransfer, Opening, Ready, Receiver, Sender,
    Target, TransferError, TransferId, Verified,
};
pub use transport::{Transport, TransportError};
