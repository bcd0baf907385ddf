//! The cold tier of the KV cache: prefixes that were in host memory are kept in an object store: a local directory by
//! default, or any store by its URL. An object is checked before any of its bytes is used: version, sizes, model, salt,
//! all tokens of the prefix, and a digest of each section. A damaged or foreign object is a miss, with a reason.
//!
//! | module | what it holds |
//! |---|---|
//! | [`cold`] | [`ColdTier`]: below the host tier of a cache |
//! | [`mod@image`] | the bytes of an object |
//! | `error` | errors of storing and reading prefixes |
//! | `key` | names of objects |
//! | `objects` | reading and writing of objects, on the store's thread |
//! | `open` | the store that a URL names |
//! | `queue` | work that waits for that thread, and prefixes that it has read |
//! | `store` | the thread that waits for the store |
//!
//! A prompt is computed once, in a cache that ends; the next one has it from files:
//!
//! ```
//! # use dsv4_kv::device::{Device, EmuDevice, EmuOptions, Emulator, bf16};
//! # use dsv4_kv::kv_layout::config::ModelConfig;
//! # use dsv4_kv::kv_layout::geometry::LayerKind;
//! # use dsv4_kv::step::{CompressorInputs, HcaInputs};
//! # use dsv4_kv::{Accepted, CacheConfig, KvCacheManager, KvError, Launches, Prompt, StepRequest};
//! use dsv4_kv_cold_tier::{ColdOptions, ColdTier};
//!
//! # fn cache(device: &Device<Emulator>) -> Result<KvCacheManager<Emulator>, KvError> {
//! #     let tiny = ModelConfig::preset("tiny").expect("a preset");
//! #     let model = ModelConfig { layers: vec![LayerKind::Hca], mtp_layers: 0, ..tiny };
//! #     let smallest = CacheConfig::new(model);
//! #     let (num_blocks, host_bytes) = (16, 8 << 20);
//! #     let pools = CacheConfig { num_blocks, host_bytes, num_checkpoints: 4, ..smallest };
//! #     let steps = CacheConfig { max_context: 512, max_step_tokens: 300, ..pools };
//! #     KvCacheManager::new(device.clone(), CacheConfig { checkpoint_interval: 128, ..steps })
//! # }
//! # let device = EmuDevice::new(EmuOptions::default());
//! # let stream = device.stream()?;
//! # let kv = device.allocate::<bf16>("rows", 300 * 512)?;
//! # let floats = |label| device.allocate::<f32>(label, 300 * 512);
//! # let (keys, gate, ape, norm) = (floats("keys")?, floats("gates")?, floats("bias")?, floats("norm")?);
//! # stream.fill(&kv, 0)?;
//! # for tensor in [&keys, &gate, &ape, &norm] {
//! #     stream.fill(tensor, 0)?;
//! # }
//! # let main = CompressorInputs { kv: &keys, gate: &gate, ape: &ape, norm: &norm };
//! # let directory = tempfile::tempdir()?;
//! # let directory = directory.path().to_str().expect("UTF-8");
//! // What makes other bytes of the same tokens is part of the identity: a digest of the model's weights.
//! let (identity, options) = (b"a digest", ColdOptions::default());
//! let tokens: Vec<u32> = (0..300).collect();
//! let prompt = Prompt { tokens: &tokens, salt: b"tenant", adapter: b"" };
//!
//! // A cache with a host tier, and below it a directory, or a store by its URL.
//! let mut first = cache(&device)?;
//! let mut cold = ColdTier::open(&mut first, directory, identity, &options)?;
//! let id = first.admit_with(&stream, &prompt)?.id;
//! # let mut step = first.begin_step(&stream, Launches::Eager, &[StepRequest { id, start: 0, tokens: 300 }])?;
//! # for (layer, _) in step.layer_kinds() {
//! #     step.hca(layer)?.update(&HcaInputs { kv: &kv, main })?.append()?;
//! # }
//! // ... its steps, and:
//! # step.commit(&[Accepted { id, accepted: 300, tokens: &tokens }])?;
//! first.release(id)?;
//! // Between steps, both without waiting: `advance_tier` and `advance`. At the end, until all is stored:
//! first.settle_tier(&stream)?;
//! cold.settle(&mut first);
//! assert!(cold.stats().stored > 0);
//! drop((cold, first));
//!
//! // The next start: a prompt is asked for while it waits for its turn, and goes on behind what was found.
//! let mut next = cache(&device)?;
//! let mut cold = ColdTier::open(&mut next, directory, identity, &options)?;
//! assert!(cold.fetch(&next, &prompt)?.is_some());
//! cold.settle(&mut next);
//! assert!(cold.take_errors().is_empty());
//! let admission = next.admit_waiting(&stream, &prompt)?;
//! assert_eq!(admission.reused, 256); // whole units of 128 tokens
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod cold;
mod error;
pub mod image;
mod key;
#[doc(hidden)]
pub mod mistake;
mod objects;
mod open;
mod queue;
mod store;

pub use cold::{ColdOptions, ColdStats, ColdTier, FetchId, MAX_FETCHES};
pub use error::{ColdError, ColdErrorKind};
pub use image::{ImageError, NoMemory, Section};
