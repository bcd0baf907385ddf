//! The suites of `bench`, and the options that each of them reads.

use clap::parser::ValueSource;
use clap::{ArgMatches, ValueEnum};

use crate::error::InputError;

/// A group of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// The sliding window: append and gather.
    Swa,
    /// Compressed entries: gathers by top-k list and of all.
    Gather,
    /// Attention over the rows of the cache: decode steps and chunks of prompts.
    Attention,
    /// Cache writes of a CSA or HCA layer in a decode step.
    Decode,
    /// The router, from logits and from hidden states.
    Router,
    /// The indexer: scores, selection of the largest, both.
    Indexer,
    /// Products with a weight in NVFP4, and in BF16.
    Linear,
    /// The state of requests: checkpoints saved and restored, slots copied, payloads digested.
    State,
    /// All of these.
    All,
    /// A model's whole decode step as one graph: in all, by kind of launch, and on the host.
    Step,
    /// A chunk of a prompt in a layer of each kind, kernel by kernel, and per token for the whole model.
    Prefill,
    /// A chunk of a prompt in all layers of a model, without checkpoints and with one every 2,048 tokens.
    Checkpoints,
    /// The host tier: a long prefix to host memory and back, beside one copy of as many bytes, and decode steps
    /// meanwhile.
    Tier,
    /// What a step costs the host, without the driver. Needs no GPU.
    Bookkeeping,
}

impl Suite {
    /// Its name on the command line.
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// The suites that read each of these options.
const READ_BY: [(&str, &[Suite]); 9] = [
    ("model", &[Suite::Step, Suite::Prefill, Suite::Checkpoints, Suite::Tier]),
    ("context", &[Suite::Step]),
    ("batch", &[Suite::Step]),
    ("attention", &[Suite::Step]),
    ("attention_cluster", &[Suite::Step]),
    ("chunk", &[Suite::Prefill, Suite::Checkpoints]),
    ("past", &[Suite::Prefill, Suite::Checkpoints, Suite::Tier]),
    ("only", &[Suite::Attention]),
    ("index_weight", &[Suite::Step, Suite::Prefill]),
];

/// Refuses options that a suite would ignore. `given` has those of the command line.
///
/// # Errors
/// [`InputError::OtherSuite`].
pub fn check_options(suite: Suite, given: &ArgMatches) -> Result<(), InputError> {
    let is_given = |option: &str| given.value_source(option) == Some(ValueSource::CommandLine);
    let mut options = READ_BY.iter().filter(|(option, _)| is_given(option));
    let ignored = options.find(|(_, suites)| !suites.contains(&suite));
    let Some((option, suites)) = ignored else { return Ok(()) };
    Err(InputError::OtherSuite {
        option: option.replace('_', "-"),
        suites: suites.iter().map(|of| of.name()).collect(),
        suite: suite.name(),
    })
}
