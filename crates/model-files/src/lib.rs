//! Reads the files of a DeepSeek-V4 model: configuration and weights, as released or as transformers writes them.
//!
//! This crate is host code only and needs no device: `dsv4-kv`, `dsv4-kv-router` and the model take their weights from
//! a [`ModelFiles`].
//!
//! Reading only the configuration, of a model of four layers:
//!
//! ```
//! use dsv4_kv_model_files::{Config, Routing};
//!
//! # let json = r#"{"model_type": "deepseek_v4", "vocab_size": 1000, "hidden_size": 64, "head_dim": 512,
//! #   "num_attention_heads": 4, "num_key_value_heads": 1, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 32,
//! #   "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "num_hidden_layers": 4, "num_nextn_predict_layers": 0,
//! #   "max_position_embeddings": 65536, "sliding_window": 128, "index_head_dim": 128, "index_n_heads": 64,
//! #   "index_topk": 512, "compress_ratios": [0, 4, 128, 4], "compress_rope_theta": 160000.0, "rope_theta": 10000.0,
//! #   "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "hidden_act": "silu", "n_routed_experts": 32,
//! #   "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5,
//! #   "norm_topk_prob": true, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "swiglu_limit": 10.0,
//! #   "num_hash_layers": 1, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": false,
//! #   "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
//! #     "original_max_position_embeddings": 65536}}"#;
//! // `json` is the text of a `config.json`, as released.
//! let config = Config::from_json(json)?;
//! assert_eq!((config.vocab_size, config.cache.layers.len()), (1000, 4));
//! assert_eq!(config.experts.routing[..2], [Routing::Hash, Routing::Learned]);
//!
//! // Fields that change a result are used or refused by name; none is guessed.
//! let error = Config::from_json(&json.replace("\"o_groups\": 2", "\"o_groups\": 3")).unwrap_err();
//! assert!(error.to_string().contains("o_groups"), "{error}");
//! # Ok::<(), dsv4_kv_model_files::ConfigError>(())
//! ```
//!
//! Reading weights: files are memory-mapped, and a tensor is read when it is requested. The request gives the released
//! name and the expected shape. The result has the numbers that the tensor represents, whatever format it is stored in:
//!
//! ```no_run
//! use dsv4_kv_model_files::ModelFiles;
//!
//! let model_files = ModelFiles::open("DeepSeek-V4-Flash".as_ref())?;
//! let config = model_files.config();
//! let shape = [u64::from(config.vocab_size), u64::from(config.hidden_size)];
//! let embedding = model_files.bf16("embed.weight", &shape)?;
//! # Ok::<(), dsv4_kv_model_files::ModelFileError>(())
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | `config` | [`Config`]: all of a `config.json` that a forward pass needs |
//! | `model_files` | [`ModelFiles`]: tensors by released name, shape and type |
//! | `files` | which files a model has |
//! | `mapped` | a memory-mapped file; the only `unsafe` code |
//! | `catalogue` | the tensors of all files, under released names |
//! | `names` | maps transformers' names to released names |
//! | `dequantise` | decodes E4M3, MXFP4 and NVFP4 weights |
//! | `error` | [`ModelFileError`] |

mod catalogue;
mod config;
mod dequantise;
mod error;
mod files;
mod mapped;
mod model_files;
mod names;

pub use config::{CompressRope, Config, Experts, HyperConnections, Routing};
pub use error::ModelFileError;
pub use kv_layout::config::{ConfigError, ModelConfig};
pub use model_files::{ModelFiles, Nvfp4Parts};
