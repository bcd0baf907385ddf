//! The options of `dsv4-kv generate`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use super::attention::AttentionArgs;
use crate::device::DeviceChoice;
use crate::error::InputError;
use crate::options::{integer, number, seed};
use crate::outcome::{Exit, after_help};

/// Examples for `--help`: the purpose of each, and the command.
const EXAMPLES: [(&str, &str); 1] = [(
    "20 tokens of a tiny model of random weights",
    "cargo kv generate --model tests/e2e/hash --prompt Once --max-tokens 20",
)];

/// Exit codes.
const EXITS: [Exit; 4] = [
    (0, "the request has ended, or nobody reads its tokens any more (without --logits)"),
    (1, "a step or the device failed, or a result could not be written"),
    (2, "an option, a file or the model was refused"),
    (130, "SIGINT (Ctrl-C) ended it early; the result is of the tokens until then"),
];

/// Continues a prompt with a model.
///
/// Tokens are printed as they come, then a table: time to first token, tokens a second, bytes of the cache.
/// The cache, the indexer and the router run on the device, on a GPU attention too; dense mathematics in f32 on the
/// host: made to be exact, for models that fit the host's memory at four bytes a parameter.
#[derive(Args, Debug)]
#[command(after_help = after_help(&EXAMPLES, &EXITS))]
#[command(group(ArgGroup::new("input").required(true)))]
pub struct GenerateArgs {
    /// The model: a folder with config.json and safetensors files.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,

    /// The prompt as text: through the model's tokenizer.json, or a token for each byte if its vocabulary
    /// has 256 tokens.
    #[arg(long, value_name = "TEXT", group = "input")]
    pub prompt: Option<String>,

    /// The prompt as token ids, in a file: numbers with white space or commas between them, or a JSON list of numbers.
    #[arg(long, value_name = "FILE", group = "input")]
    pub prompt_tokens: Option<PathBuf>,

    /// Most tokens to generate.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = integer(1..=1 << 20))]
    pub max_tokens: u32,

    /// Divides the logits before a token is drawn; 0 takes the most likely token.
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = number(0.0..=100.0))]
    pub temperature: f64,

    /// Draws from the most likely tokens alone whose probabilities add up to this; needs --temperature above 0.
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = number(0.000_001..=1.0))]
    pub top_p: f64,

    /// Seed of the draws; needs --temperature above 0.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = seed)]
    pub seed: u64,

    /// Tokens that prompt lookup proposes and one step verifies; the output is the same with and without.
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = integer(0..=31))]
    pub draft: u32,

    /// Tokens of the prompt in one step; the output does not depend on it.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = integer(1..=8192))]
    pub chunk: u32,

    /// Replay each layer's launches as a graph while decoding.
    #[arg(long)]
    pub graphs: bool,

    #[command(flatten)]
    pub attention: AttentionArgs,

    /// Write the logits of every token, of the prompt too, to a safetensors file: `logits` [tokens, vocabulary]
    /// f32 and `tokens` [tokens] i64, without the last token, which was not fed.
    #[arg(long, value_name = "FILE")]
    pub logits: Option<PathBuf>,

    /// Where the kernels run.
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,

    /// Print the result as JSON instead of text and a table.
    #[arg(long)]
    pub json: bool,
}

impl GenerateArgs {
    /// Refuses options of draws if nothing is drawn.
    ///
    /// # Errors
    /// [`InputError::NothingToDraw`].
    pub fn check(&self) -> Result<(), InputError> {
        // The model's sampler computes in f32.
        let draws = self.temperature as f32 > 0.0;
        let given = [("top-p", self.top_p < 1.0), ("seed", self.seed != 0)];
        match given.into_iter().find(|(_, is_given)| *is_given && !draws) {
            Some((option, _)) => Err(InputError::NothingToDraw { option }),
            None => Ok(()),
        }
    }
}
