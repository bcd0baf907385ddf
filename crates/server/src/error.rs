//! What is refused, and why the server ends.

use dsv4_kv_model::ModelError;
use dsv4_kv_tier::ColdError;

/// Why a completion was not taken. Nothing of it runs then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A prompt without tokens.
    #[error("the prompt is empty; a completion needs a token to begin with")]
    EmptyPrompt,
    /// A token id that the model does not have.
    #[error("token {token} is outside the vocabulary of {vocabulary} tokens")]
    TokenOutOfVocabulary {
        /// The token.
        token: u32,
        /// Tokens there are.
        vocabulary: u32,
    },
    /// More tokens than one sequence may ever have here.
    #[error(
        "a prompt of {prompt} tokens and max_tokens {max_tokens} are more than the {longest} tokens that a \
         sequence may have; shorten the prompt or ask for fewer tokens"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// The context, or what the cache holds if that is less.
        longest: u32,
    },
    /// A text that has more tokens than one sequence may ever have here, whatever they are. They were not counted.
    #[error(
        "a prompt of {bytes} bytes has {least} tokens at least, and with max_tokens {max_tokens} more than the \
         {longest} tokens that a sequence may have; shorten the prompt or ask for fewer tokens"
    )]
    TextTooLong {
        /// Bytes of the text.
        bytes: usize,
        /// Tokens that it has at least.
        least: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// The context, or what the cache holds if that is less.
        longest: u32,
    },
    /// More sequences at once than may wait.
    #[error(
        "the request has {sequences} completions (prompts times n), and at most {most} may wait; \
         send fewer at once"
    )]
    TooManySequences {
        /// Prompts times `n`.
        sequences: usize,
        /// The most.
        most: usize,
    },
    /// Too many completions wait.
    #[error("{waiting} of at most {most} completions are waiting; try again later")]
    QueueFull {
        /// How many wait, or have their prompts read.
        waiting: usize,
        /// The most.
        most: usize,
    },
    /// The server is shutting down.
    #[error("the server is shutting down; send the request to another one")]
    ShuttingDown,
}

/// Why a completion that was taken did not reach its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The step that it took part in failed.
    #[error("a step failed: {0}")]
    Step(String),
    /// The server has ended before it was done.
    #[error("the server has shut down before the completion was done")]
    ShutDown,
}

/// Why a server cannot begin, or has ended.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A step cannot hold a token of each running request.
    #[error(
        "steps of {step_tokens} tokens do not hold one of each of {requests} requests; \
         allow longer steps or fewer requests"
    )]
    StepTooShort {
        /// Tokens of a step.
        step_tokens: usize,
        /// Requests that may run at once.
        requests: u32,
    },
    /// More drafts than the engine can reject.
    #[error("{drafts} drafts are more than the {most} that the engine was made for")]
    TooManyDrafts {
        /// Drafts asked for.
        drafts: usize,
        /// The engine's limit.
        most: u32,
    },
    /// Every step fails.
    #[error("{steps} steps in a row have failed, the last one so: {error}")]
    StepsFail {
        /// How many.
        steps: u32,
        /// Why the last one failed.
        error: ModelError,
    },
    /// The engine.
    #[error(transparent)]
    Engine(#[from] ModelError),
    /// The thread of the scheduler has panicked.
    #[error("the scheduler has panicked; its message is above")]
    Panicked,
    /// The system refuses a socket or a thread.
    #[error("{doing}: {error}")]
    System {
        /// What was asked for.
        doing: &'static str,
        /// Why not.
        error: std::io::Error,
    },
    /// The cold tier cannot be opened.
    #[error("the cold cache: {0}")]
    Cold(#[from] ColdError),
    /// The recorder of metrics refuses its settings.
    #[error("metrics: {0}")]
    Metrics(String),
}
