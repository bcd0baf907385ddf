//! `Config`: the fields of a `config.json` that a forward pass needs.

use kv_layout::config::{ConfigError, Fields, ModelConfig, RopeConstants};
use kv_layout::geometry::NORM_EPSILON;
use kv_layout::router::{HIDDEN_STEP, MAX_EXPERTS, MAX_SELECTED};
use serde_json::{Value, json};

pub use kv_layout::config::CompressRope;

/// The fields of a DeepSeek-V4 `config.json` that a forward pass needs, as released or as transformers'
/// `save_pretrained` writes them.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The part for the cache: kinds of layers, MTP layers, indexer, longest context.
    pub cache: ModelConfig,
    /// Size of the vocabulary.
    pub vocab_size: u32,
    /// Width of a residual stream.
    pub hidden_size: u32,
    /// Query heads, of 512 channels each.
    pub heads: u32,
    /// Rank of the query projection. The indexer reads its normalised latent too.
    pub q_lora_rank: u32,
    /// Groups of heads in the output projection.
    pub o_groups: u32,
    /// Rank of each group's output projection.
    pub o_lora_rank: u32,
    /// Epsilon, which every RMS norm adds to the mean square.
    pub norm_eps: f32,
    /// Base of the rotary embedding of sliding-window layers.
    pub rope_theta: f64,
    /// Rotary embedding of layers with compressed entries.
    pub compress_rope: CompressRope,
    /// The hyper-connections between residual streams.
    pub hyper: HyperConnections,
    /// The mixture of experts.
    pub experts: Experts,
    /// The token that begins a text.
    pub bos: Option<u32>,
    /// The tokens that end a text, in order; there may be none.
    pub eos: Vec<u32>,
}

/// Manifold-constrained hyper-connections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HyperConnections {
    /// Number of residual streams (`hc_mult`).
    pub streams: u32,
    /// Iterations of Sinkhorn's normalisation (`hc_sinkhorn_iters`).
    pub sinkhorn_iterations: u32,
    /// Added to gates and to the sums that Sinkhorn divides by (`hc_eps`).
    pub eps: f32,
}

/// The mixture of experts of every layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// Routed experts of a layer, a multiple of 32 up to 512.
    pub routed: u32,
    /// Routed experts of a token, 1 to 8.
    pub per_token: u32,
    /// Number of shared experts, which every token uses. They are stored as one expert, this many times as wide.
    pub shared: u32,
    /// Intermediate channels of an expert.
    pub intermediate_size: u32,
    /// The sum of the weights of a token's routed experts (`routed_scaling_factor`).
    pub scaling: f32,
    /// In every expert, the upper bound of the gate, and the bound of the absolute value of the other factor.
    pub swiglu_limit: f32,
    /// How each layer chooses experts, one item for each of `Config::cache.layers`. MTP layers choose by score.
    pub routing: Vec<Routing>,
}

/// How a layer chooses its experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// By token id, from a table (`gate.tid2eid`).
    Hash,
    /// By score, with a bias (`gate.bias`).
    Learned,
}

impl Config {
    /// Reads a `config.json`. Each field that changes a result is used, or refused by name and value; no missing value
    /// is guessed. Unknown fields at the top level are ignored.
    ///
    /// # Errors
    /// [`ConfigError`] names the field, its value and what it must be. A file without `eos_token_id` is refused:
    /// `null` says that no token ends a text.
    pub fn from_json(json: &str) -> Result<Self, ConfigError> {
        Self::with_end_tokens(json, None)
    }

    /// As [`Self::from_json`]; more tokens end a text, if the model says so in its `generation_config.json`.
    pub(crate) fn with_end_tokens(json: &str, more: Option<Vec<u32>>) -> Result<Self, ConfigError> {
        let fields = Fields::parse(json)?;
        let cache = ModelConfig::read(&fields)?;
        check_unsupported(&fields)?;
        check_quantisation(&fields)?;
        let RopeConstants { theta, compress } = RopeConstants::read(&fields)?;
        let heads = fields.count("num_attention_heads", 1, 1024)?;
        let o_groups = fields.count("o_groups", 1, 1024)?;
        multiple("num_attention_heads (in o_groups groups)", heads, o_groups)?;
        multiple("hidden_size", cache.hidden_size, HIDDEN_STEP)?;
        let vocab_size = fields.count("vocab_size", 1, 1 << 28)?;
        Ok(Self {
            vocab_size,
            hidden_size: cache.hidden_size,
            heads,
            q_lora_rank: cache.q_lora_rank,
            o_groups,
            o_lora_rank: fields.count("o_lora_rank", 1, 1 << 20)?,
            norm_eps: NORM_EPSILON as f32,
            rope_theta: theta,
            compress_rope: compress,
            hyper: HyperConnections {
                streams: fields.count("hc_mult", 1, 64)?,
                sinkhorn_iterations: fields.count("hc_sinkhorn_iters", 1, 1000)?,
                eps: fields.number("hc_eps", 1e-30, 1.0)? as f32,
            },
            experts: Experts::read(&fields, &cache)?,
            bos: fields.find("bos_token_id")?,
            eos: all_end_tokens(&fields, more, vocab_size)?,
            cache,
        })
    }
}

impl Experts {
    fn read(fields: &Fields, cache: &ModelConfig) -> Result<Self, ConfigError> {
        let routed = fields.count("n_routed_experts", 1, MAX_EXPERTS)?;
        multiple("n_routed_experts", routed, 32)?;
        Ok(Self {
            routed,
            per_token: fields.count("num_experts_per_tok", 1, MAX_SELECTED.min(routed))?,
            shared: fields.count("n_shared_experts", 1, 64)?,
            intermediate_size: fields.count("moe_intermediate_size", 1, 1 << 20)?,
            scaling: fields.number("routed_scaling_factor", f32::MIN_POSITIVE.into(), 1e6)? as f32,
            swiglu_limit: fields.number("swiglu_limit", f32::MIN_POSITIVE.into(), 1e30)? as f32,
            routing: routing(fields, cache)?,
        })
    }
}

/// How each layer chooses experts. Released files give the number of layers that choose by table; transformers lists
/// each layer.
fn routing(fields: &Fields, cache: &ModelConfig) -> Result<Vec<Routing>, ConfigError> {
    let layers = cache.layers.len() as u32;
    let trunk = layers - cache.mtp_layers;
    let counted = match fields.find::<u32>("num_hash_layers")? {
        None => None,
        Some(_) => {
            let hash = fields.count("num_hash_layers", 0, trunk)?;
            let of = |layer| if layer < hash { Routing::Hash } else { Routing::Learned };
            Some((0..trunk).map(of).collect::<Vec<_>>())
        }
    };
    let named = named_routing(fields, trunk)?;
    let mut routing = match (counted, named) {
        (Some(counted), Some(named)) if counted != named => {
            let [first, second] = ["mlp_layer_types", "num_hash_layers"].map(String::from);
            return Err(ConfigError::Disagree { first, second });
        }
        (Some(routing), _) | (None, Some(routing)) => routing,
        (None, None) => return Err(fields.missing("num_hash_layers")),
    };
    routing.resize(layers as usize, Routing::Learned);
    Ok(routing)
}

fn named_routing(fields: &Fields, trunk: u32) -> Result<Option<Vec<Routing>>, ConfigError> {
    let field = "mlp_layer_types";
    let Some(types) = fields.find::<Vec<String>>(field)? else { return Ok(None) };
    if types.len() != trunk as usize {
        let found = types.len();
        return Err(ConfigError::BadLength { field, found, layers: trunk, mtp_layers: 0 });
    }
    let of = |(layer, found): (usize, String)| match found.as_str() {
        "hash_moe" => Ok(Routing::Hash),
        "moe" => Ok(Routing::Learned),
        _ => Err(ConfigError::BadLayerType { field, layer, found, expected: "hash_moe, moe" }),
    };
    types.into_iter().enumerate().map(of).collect::<Result<_, _>>().map(Some)
}

/// The field with the tokens that end a text.
const END_TOKENS: &str = "eos_token_id";

/// Reads `eos_token_id`: one token, a list, or `null` for none. `None` if there is no such field.
fn end_tokens(fields: &Fields) -> Result<Option<Vec<u32>>, ConfigError> {
    match fields.find::<Value>(END_TOKENS)? {
        Some(Value::Array(_)) => fields.need(END_TOKENS).map(Some),
        Some(_) => Ok(Some(vec![fields.need(END_TOKENS)?])),
        None => Ok(fields.contains(END_TOKENS).then(Vec::new)),
    }
}

/// The tokens of `config.json` and `more`, which are those of another file. One of the two must say them.
fn all_end_tokens(
    fields: &Fields,
    more: Option<Vec<u32>>,
    vocab_size: u32,
) -> Result<Vec<u32>, ConfigError> {
    let mut tokens = match (end_tokens(fields)?, more) {
        (None, None) => return Err(ConfigError::NoEndTokens),
        (own, more) => [own, more].into_iter().flatten().flatten().collect::<Vec<u32>>(),
    };
    tokens.sort_unstable();
    tokens.dedup();
    match tokens.last() {
        Some(&last) if last >= vocab_size => {
            let [value, least, most] = [last, 0, vocab_size - 1].map(f64::from);
            Err(ConfigError::OutOfRange { field: END_TOKENS.to_owned(), value, least, most })
        }
        _ => Ok(tokens),
    }
}

/// The end tokens of a `generation_config.json`; `None` if it does not say any. Other fields have no effect: they are
/// defaults of requests.
pub(crate) fn generation_end_tokens(json: &str) -> Result<Option<Vec<u32>>, ConfigError> {
    end_tokens(&Fields::parse(json)?)
}

/// Refuses variants of the architecture that no released model uses. Each field may be absent, but must have the
/// supported value if it is present.
fn check_unsupported(fields: &Fields) -> Result<(), ConfigError> {
    for (name, supported) in [
        ("attention_bias", json!(false)),
        ("mlp_bias", json!(false)),
        ("tie_word_embeddings", json!(false)),
        ("norm_topk_prob", json!(true)),
        ("hidden_act", json!("silu")),
        ("scoring_func", json!("sqrtsoftplus")),
        ("topk_method", json!("noaux_tc")),
        // With others, a CSA layer takes the list of an earlier one (IndexCache).
        ("use_index_cache", json!(false)),
        ("index_topk_freq", json!(1)),
        ("index_topk_pattern", json!(null)),
    ] {
        fields.one_of(name, &[supported])?;
    }
    Ok(())
}

/// Fields of `quantization_config` that are not needed: types, shapes and names of the tensors say the same, or it
/// concerns activations, loading or the tool.
const NOT_NEEDED: [&str; 19] = [
    "activation_scheme",
    "config_groups",
    "dequantize",
    "exclude_modules",
    "global_compression_ratio",
    "group_size",
    "ignore",
    "ignored_layers",
    "kv_cache_quant_algo",
    "kv_cache_scheme",
    "modules_to_convert",
    "modules_to_not_convert",
    "packed_modules_mapping",
    "producer",
    "quantization_status",
    "quantized_layers",
    "run_compressed",
    "sparsity_config",
    "version",
];

/// Checks how weights are quantised. Types and scales are stated in the weight files themselves. This only checks the
/// size of the block that shares an E4M3 scale, that the format is supported, and that no field is unknown: weights may
/// be stored rotated, for instance (`transform_config`).
fn check_quantisation(fields: &Fields) -> Result<(), ConfigError> {
    let expert_dtypes = texts(&["fp4", "fp8", "bf16", "bfloat16"]);
    fields.one_of("expert_dtype", &expert_dtypes)?;
    let Some(section) = fields.section("quantization_config")? else { return Ok(()) };
    let checked = [
        ("quant_method", texts(&["fp8", "modelopt", "modelopt_fp4", "compressed-tensors"])),
        // Of a file in which only the experts are NVFP4.
        ("quant_algo", texts(&["NVFP4", "MIXED_PRECISION"])),
        ("moe_quant_algo", texts(&["NVFP4"])),
        ("expert_dtype", expert_dtypes),
        ("format", texts(&["nvfp4-pack-quantized"])),
        ("fmt", texts(&["e4m3"])),
        ("scale_fmt", texts(&["ue8m0"])),
        ("weight_block_size", vec![json!([128, 128])]),
        ("transform_config", vec![json!({})]),
    ];
    checked.iter().try_for_each(|(name, supported)| section.one_of(name, supported))?;
    let known: Vec<&str> = checked.iter().map(|(name, _)| *name).chain(NOT_NEEDED).collect();
    section.only(&known)
}

fn texts(values: &[&str]) -> Vec<Value> {
    values.iter().map(|value| json!(value)).collect()
}

fn multiple(field: &str, value: u32, multiple: u32) -> Result<(), ConfigError> {
    if value.is_multiple_of(multiple) {
        return Ok(());
    }
    Err(ConfigError::NotMultiple { field: field.to_owned(), value, multiple })
}
