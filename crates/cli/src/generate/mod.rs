//! `dsv4-kv generate`: continues a prompt.
//!
//! | module | what it holds |
//! |---|---|
//! | [`args`], [`attention`] | options |
//! | [`prompt`] | the prompt's tokens |
//! | [`load`] | the checkpoint's model, with progress |
//! | [`report`] | the result; [`crate::generated`] has its table and JSON |
//! | [`logits`] | the file of `--logits` |

mod args;
mod attention;
mod load;
mod logits;
mod prompt;
mod report;

use std::sync::Arc;

use anyhow::Result;
use dsv4_kv::device::{Backend, Device, EmuDevice, EmuOptions};
use dsv4_kv::kv_layout::geometry::BLOCK_TOKENS;
use dsv4_kv_model::generate::Observer;
use dsv4_kv_model::sample::Sampling;
use dsv4_kv_model::sequence::{Continuation, Generated, Work};
use dsv4_kv_model::text::{Text, TextError, TextStream};
use dsv4_kv_model::{Engine, EngineLimits, Model};
use dsv4_kv_model_files::ModelFiles;
use indicatif::ProgressBar;
use ndarray::ArrayView2;

pub use args::GenerateArgs;
#[cfg(feature = "serve")]
pub use attention::AttentionArgs;
pub use load::{load, refused_engine};

use crate::interrupt::Interrupt;
use crate::outcome::Outcome;
use crate::{output, progress};
use logits::Logits;
use report::report;

/// Memory of the emulated device, of which the host allocates only what is used.
pub const EMULATED_MEMORY: u64 = 64 << 30;

/// Runs the command and prints its result.
///
/// # Errors
/// Refused input; an error of the device; output that cannot be written.
pub fn run(args: &GenerateArgs) -> Result<Outcome> {
    args.check()?;
    let model = Arc::new(load(&args.model)?);
    let text = Text::of_model(&args.model, model.config.vocab_size);
    let tokens = prompt::tokens(args, &text, model.config.vocab_size)?;
    let text = usable(text);
    match args.device.gpu(0)? {
        Some(device) => on_device(&device, args, model, text, &tokens),
        None => {
            let device = EmuDevice::new(EmuOptions { memory: EMULATED_MEMORY, seed: 0 });
            on_device(&device, args, model, text, &tokens)
        }
    }
}

/// The tokenizer, if there is one. Ids need none, so one that cannot be used is told, and token ids are printed.
fn usable(text: Result<Text, TextError>) -> Option<Text> {
    match text {
        Ok(text) => Some(text),
        Err(TextError::NoTokenizer { .. }) => None,
        Err(error) => {
            output::note(format_args!("note: {error}; token ids are printed instead of text"));
            None
        }
    }
}

fn on_device<B: Backend>(
    device: &Device<B>,
    args: &GenerateArgs,
    model: Arc<Model>,
    text: Option<Text>,
    prompt: &[u32],
) -> Result<Outcome> {
    let interrupt = Interrupt::listen()?;
    let place = args.attention.place(device, &model)?;
    let mut engine =
        Engine::with_attention(device, Arc::clone(&model), limits(args, prompt), place)
            .map_err(refused_engine)?;
    if args.graphs {
        engine.capture(1, args.draft + 1).map_err(refused_engine)?;
    }
    let mut of_model = ModelFiles::files(&args.model).unwrap_or_default();
    of_model.extend(["tokenizer.json", "generation_config.json"].map(|name| args.model.join(name)));
    let of_model = of_model.iter().map(|path| ("--model", path.as_path()));
    let tokens = args.prompt_tokens.iter().map(|path| ("--prompt-tokens", path.as_path()));
    let inputs: Vec<_> = of_model.chain(tokens).collect();
    let logits = args.logits.as_deref().map(|path| Logits::open(path, &model, &inputs));
    let logits = logits.transpose()?;
    let mut console = Console {
        text,
        stream: TextStream::default(),
        end: model.config.eos.clone(),
        written: String::new(),
        print: !args.json,
        is_read: true,
        interrupt,
        logits,
        failed: None,
        // If tokens are printed as they are generated, the output itself shows the progress.
        bar: progress::tokens(
            prompt.len() as u64 + u64::from(if args.json { args.max_tokens } else { 0 }),
        ),
    };
    let summary =
        engine.generate(prompt, continuation(args, &model), args.chunk as usize, &mut console)?;
    console.bar.finish_and_clear();
    if let Some(error) = console.failed.take() {
        return Err(error);
    }
    console.finish()?;
    let Console { written, interrupt, logits, text, .. } = console;
    if let Some(logits) = logits {
        logits.write()?;
    }
    let report = report(&engine, device, prompt, &summary, text.map(|_| written));
    if args.json {
        output::print(serde_json::to_string_pretty(&report)?)?;
    } else {
        output::print(format_args!("\n\n{report}"))?;
    }
    Ok(if interrupt.is_requested() { Outcome::Interrupted } else { Outcome::Passed })
}

fn limits(args: &GenerateArgs, prompt: &[u32]) -> EngineLimits {
    // No draft follows the last token.
    let context = (prompt.len() as u64 + u64::from(args.max_tokens))
        .min(u64::from(u32::MAX - BLOCK_TOKENS)) as u32;
    EngineLimits {
        requests: 1,
        context,
        max_total_tokens: context.next_multiple_of(BLOCK_TOKENS),
        max_step_tokens: args.chunk.max(args.draft + 1),
        max_draft: args.draft,
        checkpoints: 0,
        host_bytes: 0,
        event_capacity: 0,
        attention_cluster: args.attention.attention_cluster.into(),
    }
}

fn continuation(args: &GenerateArgs, model: &Model) -> Continuation {
    let (temperature, top_p) = (args.temperature as f32, args.top_p as f32);
    Continuation {
        sampling: Sampling { temperature, top_p, seed: args.seed },
        max_tokens: args.max_tokens as usize,
        end: model.config.eos.clone(),
        drafts: args.draft as usize,
        top_logprobs: 0,
        prompt_logits: args.logits.is_some(),
    }
}

/// Prints tokens as they are generated, and keeps the requested logits.
struct Console {
    /// The tokenizer. Without it, token ids are printed.
    text: Option<Text>,
    stream: TextStream,
    /// Tokens that end a request.
    end: Vec<u32>,
    written: String,
    print: bool,
    /// Whether the reader of standard output is still there, as far as was seen.
    is_read: bool,
    interrupt: Interrupt,
    logits: Option<Logits>,
    failed: Option<anyhow::Error>,
    /// Progress of the prompt, and of the generated tokens if they are not printed at once.
    bar: ProgressBar,
}

impl Console {
    fn write(&mut self, part: &str) -> Result<()> {
        self.written.push_str(part);
        if self.print {
            self.is_read &= output::print_part(part)?;
        }
        Ok(())
    }

    /// Writes the rest of the text, from a last incomplete character.
    fn finish(&mut self) -> Result<()> {
        let rest = self.stream.finish();
        self.write(&rest)
    }
}

impl Observer for Console {
    fn logits(&mut self, work: &Work, logits: ArrayView2<'_, f32>, accepted: u32) {
        self.bar.inc(accepted.into());
        if let Some(file) = &mut self.logits {
            file.push(work, logits, accepted);
        }
    }

    fn goes_on(&mut self) -> bool {
        !self.interrupt.is_requested()
    }

    fn token(&mut self, token: &Generated) -> bool {
        let id = token.picked.token;
        let part = match &self.text {
            // As in the server, the text does not include the token that ends it.
            Some(_) if self.end.contains(&id) => String::new(),
            Some(text) => self.stream.push(text, id),
            None => format!("{id} "),
        };
        if self.print {
            self.bar.finish_and_clear();
        }
        let written = self.write(&part);
        let is_wanted = self.is_read || self.logits.is_some();
        let goes_on = written.is_ok() && is_wanted && !self.interrupt.is_requested();
        if let Err(error) = written {
            self.failed = Some(error);
        }
        goes_on
    }
}
