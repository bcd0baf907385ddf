//! A request for completions, read and checked field by field.

use rand::TryRngCore;
use rand::rngs::OsRng;
use serde_json::{Map, Value, json};

use crate::api_error::ApiError;
use crate::fields::{Fields, shortened, without_fraction};

/// Most completions of a prompt.
const MAX_N: u32 = 128;
/// Most stop texts of a request.
const MAX_STOPS: usize = 16;
/// Most bytes of a stop text, and so of the text that is held back.
const MAX_STOP_BYTES: usize = 1024;
/// Most bytes of a salt. Each salt is stored with the blocks computed under it, and there may be as many salts as the
/// cache has blocks.
const MAX_SALT_BYTES: usize = 256;
/// Most alternatives whose log probabilities are returned with each token.
const MAX_LOGPROBS: u32 = 5;

/// A request to `POST /v1/completions`.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// The model's name.
    pub model: String,
    /// The prompts, at least one.
    pub prompts: Vec<Prompt>,
    /// Most tokens of each completion.
    pub max_tokens: usize,
    /// Divides the logits; 0 means greedy sampling.
    pub temperature: f32,
    /// The cumulative probability for nucleus (top-p) sampling.
    pub top_p: f32,
    /// Number of completions of each prompt.
    pub n: u32,
    /// The seed of the first completion of each prompt, if the client gave one. Each further completion uses the next
    /// number.
    pub seed: Option<u64>,
    /// Only completions with the same salt share cached prefixes. Empty if the client gave none.
    pub cache_salt: String,
    /// Stop texts, which end a completion.
    pub stop: Vec<String>,
    /// If set, log probabilities are returned: of each token, and of this many most likely tokens at its position.
    pub logprobs: Option<usize>,
    /// Whether the prompt is returned in front of each completion, with its log probabilities if these are returned.
    pub echo: bool,
    /// Whether a completion continues after a token that ends it.
    pub ignore_eos: bool,
    /// Whether pieces are sent as they are generated.
    pub stream: bool,
    /// Which events of a stream have token counts.
    pub stream_usage: StreamUsage,
}

/// Which events of a stream have token counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamUsage {
    /// None.
    #[default]
    Never,
    /// One behind those of the completions.
    AtTheEnd,
    /// That one, and each event before it has the counts so far.
    InEachEvent,
}

/// A prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

impl CompletionRequest {
    /// Reads the fields of a request.
    ///
    /// # Errors
    /// [`ApiError`] names the field: one that is missing, has a wrong type or a value out of range, is not
    /// supported, or is unknown.
    pub fn read(object: Map<String, Value>) -> Result<Self, ApiError> {
        let mut fields = Fields::new(object);
        let missing = |name: &str| ApiError::invalid(name, format!("`{name}` is missing"));
        let model = fields.get("model", "the name of a model")?;
        let n = fields.number("n", [1, MAX_N])?.unwrap_or(1);
        // Only the default values of these fields are accepted, since other values would change the result.
        fields.unsupported("best_of", &[json!(n)])?;
        fields.unsupported("frequency_penalty", &[json!(0)])?;
        fields.unsupported("logit_bias", &[json!({})])?;
        fields.unsupported("presence_penalty", &[json!(0)])?;
        fields.unsupported("suffix", &[json!("")])?;
        // Fields of vLLM, which its clients send with these values.
        fields.unsupported("min_p", &[json!(0)])?;
        fields.unsupported("repetition_penalty", &[json!(1)])?;
        fields.unsupported("skip_special_tokens", &[json!(true)])?;
        fields.unsupported("top_k", &[json!(0), json!(-1)])?;
        let _user: Option<String> = fields.get("user", "a string")?;
        let stream = fields.get("stream", "true or false")?.unwrap_or(false);
        let min_tokens = fields.number("min_tokens", [0, 1 << 32])?.unwrap_or(0);
        let request = Self {
            model: model.ok_or_else(|| missing("model"))?,
            prompts: prompts(fields.value("prompt").ok_or_else(|| missing("prompt"))?)?,
            max_tokens: fields.number("max_tokens", [0, 1 << 32])?.unwrap_or(16),
            temperature: fields.number("temperature", [0.0, 2.0])?.unwrap_or(1.0),
            top_p: fields.number("top_p", [0.0, 1.0])?.unwrap_or(1.0),
            n,
            seed: seed(fields.value("seed"))?,
            cache_salt: salt(fields.get("cache_salt", "a string")?)?,
            stop: stops(fields.value("stop"))?,
            logprobs: fields.number("logprobs", [0, MAX_LOGPROBS])?.map(|most| most as usize),
            echo: fields.get("echo", "true or false")?.unwrap_or(false),
            ignore_eos: fields.get("ignore_eos", "true or false")?.unwrap_or(false),
            stream,
            stream_usage: stream_usage(fields.value("stream_options"), stream)?,
        };
        fields.end()?;
        request.check_min_tokens(min_tokens)?;
        Ok(request)
    }

    /// Whether the client gets log probabilities of the prompt.
    pub fn scores_prompt(&self) -> bool {
        self.echo && self.logprobs.is_some()
    }

    /// Refuses a least number of tokens, unless every completion has as many.
    fn check_min_tokens(&self, min_tokens: usize) -> Result<(), ApiError> {
        let has_all = self.ignore_eos && self.stop.is_empty();
        if min_tokens == 0 || (has_all && min_tokens <= self.max_tokens) {
            return Ok(());
        }
        let text = "`min_tokens` is not supported, unless `ignore_eos` is true, there is no `stop`, and it is at most \
                    `max_tokens`";
        Err(ApiError::invalid("min_tokens", text.into()))
    }
}

fn prompts(value: Value) -> Result<Vec<Prompt>, ApiError> {
    let refused = || {
        let text = "`prompt` must be a string, an array of strings, an array of token ids, or an array of such";
        ApiError::invalid("prompt", text.into())
    };
    let parts = match value {
        Value::String(text) => return Ok(vec![Prompt::Text(text)]),
        Value::Array(parts) if !parts.is_empty() => parts,
        _ => return Err(refused()),
    };
    if parts[0].is_number() {
        return Ok(vec![Prompt::Tokens(tokens(&parts)?)]);
    }
    let prompt = |part| match part {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(ids) => Ok(Prompt::Tokens(tokens(&ids)?)),
        _ => Err(refused()),
    };
    parts.into_iter().map(prompt).collect()
}

fn tokens(ids: &[Value]) -> Result<Vec<u32>, ApiError> {
    let token = |id: &Value| {
        let number = if id.is_f64() { without_fraction(id.clone()).as_u64() } else { id.as_u64() };
        let token = number.and_then(|id| u32::try_from(id).ok());
        token.ok_or_else(|| {
            let given = shortened(id);
            let text =
                format!("`prompt` has {given} as a token id; it must be from 0 to {}", u32::MAX);
            ApiError::invalid("prompt", text)
        })
    };
    ids.iter().map(token).collect()
}

/// A random seed.
pub fn random_seed() -> u64 {
    // If the system has no source of randomness, the seed is 0.
    OsRng.try_next_u64().unwrap_or_default()
}

fn seed(value: Option<Value>) -> Result<Option<u64>, ApiError> {
    let Some(value) = value.map(without_fraction) else { return Ok(None) };
    let signed = value.as_i64().map(i64::cast_unsigned);
    let refused = || {
        let given = shortened(&value);
        ApiError::invalid("seed", format!("`seed` is {given}; it must be a 64-bit integer"))
    };
    value.as_u64().or(signed).map(Some).ok_or_else(refused)
}

/// The salt; empty without one. A client that sends an empty one means its own, and has lost it.
fn salt(salt: Option<String>) -> Result<String, ApiError> {
    let Some(salt) = salt else { return Ok(String::new()) };
    let text = match salt.len() {
        0 => "`cache_salt` is empty: send the salt of a tenant, or leave it out to share prefixes with all who do"
            .to_owned(),
        1..=MAX_SALT_BYTES => return Ok(salt),
        bytes => format!(
            "`cache_salt` has {bytes} bytes; it may have {MAX_SALT_BYTES}: send a digest of it"
        ),
    };
    Err(ApiError::invalid("cache_salt", text))
}

fn stops(value: Option<Value>) -> Result<Vec<String>, ApiError> {
    let refused = |text: String| Err(ApiError::invalid("stop", text));
    let stops = match value {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(value) => match serde_json::from_value(value) {
            Ok(stops) => stops,
            Err(_) => return refused("`stop` must be a string or an array of strings".into()),
        },
    };
    if stops.len() > MAX_STOPS {
        return refused(format!("`stop` has {} strings; it may have {MAX_STOPS}", stops.len()));
    }
    if let Some(stop) = stops.iter().find(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES) {
        let bytes = stop.len();
        return refused(format!(
            "`stop` has a string of {bytes} bytes; they must have from 1 to {MAX_STOP_BYTES}"
        ));
    }
    Ok(stops)
}

fn stream_usage(value: Option<Value>, stream: bool) -> Result<StreamUsage, ApiError> {
    let name = "stream_options";
    match value {
        None => Ok(StreamUsage::Never),
        Some(_) if !stream => {
            Err(ApiError::invalid(name, format!("`{name}` needs `stream` to be true")))
        }
        Some(Value::Object(options)) => {
            let mut options = Fields::new(options);
            let mut is_set = |name| -> Result<bool, ApiError> {
                Ok(options.get(name, "true or false")?.unwrap_or(false))
            };
            let (ends, continues) = (is_set("include_usage")?, is_set("continuous_usage_stats")?);
            options.unsupported("include_obfuscation", &[json!(false)])?;
            options.end()?;
            // As in vLLM, the second needs the first.
            Ok(match (ends, continues) {
                (false, _) => StreamUsage::Never,
                (true, false) => StreamUsage::AtTheEnd,
                (true, true) => StreamUsage::InEachEvent,
            })
        }
        Some(_) => Err(ApiError::invalid(name, format!("`{name}` must be an object"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{CompletionRequest, Prompt, StreamUsage};

    /// A request with the model, a prompt and these fields.
    fn read(fields: Value) -> Result<CompletionRequest, String> {
        let mut object = json!({ "model": "m", "prompt": "p" });
        for (name, value) in fields.as_object().expect("an object") {
            object[name] = value.clone();
        }
        let object = object.as_object().expect("an object").clone();
        CompletionRequest::read(object).map_err(|error| {
            assert_eq!(error.status, 400, "{error:?}");
            error.param.expect("the field is named")
        })
    }

    #[test]
    fn what_is_left_out_is_as_openai_says() {
        assert!(read(json!({ "n": 2, "best_of": 2 })).is_ok(), "as many as are asked for");
        assert_eq!(read(json!({ "n": 2, "best_of": 1 })).err(), Some("best_of".into()));
        let request = read(json!({ "user": "u", "presence_penalty": 0.0, "best_of": null }));
        let request = request.expect("a request");
        assert_eq!((request.max_tokens, request.n, request.stream), (16, 1, false));
        assert_eq!((request.temperature, request.top_p), (1.0, 1.0));
        assert_eq!((request.stop.len(), request.logprobs), (0, None));
        assert_eq!(request.seed, None);
        for (salt, read_as) in [(Value::Null, ""), (json!("x"), "x")] {
            let request = read(json!({ "cache_salt": salt })).expect("a request");
            assert_eq!(request.cache_salt, read_as);
        }
        let neutral = json!({ "ignore_eos": false, "min_p": 0, "min_tokens": 0, "repetition_penalty": 1.0,
                              "skip_special_tokens": true, "top_k": -1, "stream": true,
                              "stream_options": { "include_obfuscation": false } });
        assert!(read(neutral).is_ok());
        assert_ne!(super::random_seed(), super::random_seed());
    }

    #[test]
    fn prompts_come_in_four_forms() {
        let prompts = |prompt| read(json!({ "prompt": prompt })).map(|request| request.prompts);
        let text = |text: &str| Prompt::Text(text.into());
        assert_eq!(prompts(json!("a")), Ok(vec![text("a")]));
        assert_eq!(prompts(json!(["a", "b"])), Ok(vec![text("a"), text("b")]));
        for tokens in [json!([1, 2]), json!([1.0, 2]), json!([1, 2.0])] {
            assert_eq!(prompts(tokens), Ok(vec![Prompt::Tokens(vec![1, 2])]));
        }
        let both = vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])];
        assert_eq!(prompts(json!([[1], [2, 3]])), Ok(both));
        for wrong in [json!([]), json!(1), json!([1, "a"]), json!([-1]), json!([1.5]), json!({})] {
            assert_eq!(prompts(wrong.clone()), Err("prompt".into()), "{wrong}");
        }
    }

    #[test]
    fn what_would_be_ignored_is_refused_by_name() {
        let fields = [
            ("best_of", json!(2)),
            ("best_of", json!(0)),
            ("echo", json!("yes")),
            ("frequency_penalty", json!(0.1)),
            ("logit_bias", json!({ "1": 2 })),
            ("presence_penalty", json!(-1)),
            ("suffix", json!("x")),
            ("ignore_eos", json!(1)),
            ("min_p", json!(0.1)),
            ("min_tokens", json!(1)),
            ("repetition_penalty", json!(1.1)),
            ("skip_special_tokens", json!(false)),
            ("top_k", json!(5)),
            ("stream_options", json!({ "include_usage": true })),
            ("max_tokens", json!(-1)),
            ("max_tokens", json!("9")),
            ("max_tokens", json!(2.5)),
            ("temperature", json!(2.1)),
            ("top_p", json!(-0.1)),
            ("n", json!(0)),
            ("n", json!(129)),
            ("logprobs", json!(6)),
            ("seed", json!(0.5)),
            ("stop", json!([1])),
            ("stop", json!("")),
            ("stop", json!(vec!["a"; 17])),
            ("stop", json!("x".repeat(1025))),
            ("cache_salt", json!("x".repeat(257))),
            ("cache_salt", json!("")),
            ("stream", json!("yes")),
            ("model", json!(3)),
            ("user", json!(3)),
        ];
        for (name, value) in fields {
            assert_eq!(read(json!({ name: value })).err(), Some(name.into()), "{value}");
        }
        for name in ["model", "prompt"] {
            assert_eq!(read(json!({ name: null })).err(), Some(name.into()));
        }
    }

    /// What load generators and lm-eval send.
    #[test]
    fn fields_of_benchmarks_are_read() {
        let request = read(json!({
            "ignore_eos": true, "min_tokens": 8, "max_tokens": 8.0, "stream": true, "stop": [],
            "stream_options": { "include_usage": true, "continuous_usage_stats": true },
        }));
        let request = request.expect("a request");
        assert!(request.ignore_eos && !request.echo && request.max_tokens == 8);
        assert_eq!(request.stream_usage, StreamUsage::InEachEvent);
        let usage = |options| {
            let request = read(json!({ "stream": true, "stream_options": options }));
            request.expect("a request").stream_usage
        };
        assert_eq!(usage(json!({ "continuous_usage_stats": true })), StreamUsage::Never);
        let both = json!({ "include_usage": true, "continuous_usage_stats": false });
        assert_eq!(usage(both), StreamUsage::AtTheEnd);
        for refused in [
            json!({ "ignore_eos": true, "min_tokens": 17 }),
            json!({ "ignore_eos": true, "min_tokens": 8, "stop": "x" }),
            json!({ "min_tokens": 8 }),
        ] {
            assert_eq!(read(refused.clone()).err(), Some("min_tokens".into()), "{refused}");
        }
        let scored = json!({ "echo": true, "logprobs": 1, "max_tokens": 1, "stop": vec!["a"; 16] });
        let request = read(scored).expect("a request");
        assert!(request.scores_prompt() && request.stop.len() == 16);
        assert!(!read(json!({ "echo": true })).expect("a request").scores_prompt());
    }

    /// A refusal says that a number must be an integer, if only that is wrong.
    #[test]
    fn integers_are_called_so() {
        let message = |fields: Value| {
            let object = fields.as_object().expect("an object").clone();
            CompletionRequest::read(object).expect_err("a refusal").message
        };
        let asked = json!({ "model": "m", "prompt": "p", "max_tokens": 2.5 });
        let expected = "`max_tokens` is 2.5; it must be an integer from 0 to 4294967296";
        assert_eq!(message(asked), expected);
        let asked = json!({ "model": "m", "prompt": "p", "top_p": 2 });
        assert_eq!(message(asked), "`top_p` is 2; it must be a number from 0 to 1");
    }

    #[test]
    fn seeds_have_64_bits() {
        let seed = |seed| read(json!({ "seed": seed })).map(|request| request.seed);
        assert_eq!(seed(json!(u64::MAX)), Ok(Some(u64::MAX)));
        assert_eq!(seed(json!(-1)), Ok(Some(u64::MAX)));
        assert_eq!(seed(json!(7)), Ok(Some(7)));
        assert_eq!(seed(json!(7.0)), Ok(Some(7)));
        assert_eq!(seed(json!(-1.0)), Ok(Some(u64::MAX)));
        assert_eq!(seed(json!(1e300)), Err("seed".into()));
    }
}
