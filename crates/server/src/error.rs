//! Why requests are refused or fail, and why the server ends.

use dsv4_kv_cold_tier::ColdError;
use dsv4_kv_model::ModelError;

/// Why a request was refused. None of its completions runs.
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
        /// Number of token ids of the model.
        vocabulary: u32,
    },
    /// More tokens than a sequence of this server can have.
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
    /// A text that is certain to have more tokens than a sequence of this server can have, judged by its length in
    /// bytes. It was not encoded.
    #[error(
        "a prompt of {bytes} bytes has {least} tokens at least, and with max_tokens {max_tokens} more than the \
         {longest} tokens that a sequence may have; shorten the prompt or ask for fewer tokens"
    )]
    TextTooLong {
        /// Bytes of the text.
        bytes: usize,
        /// The least number of tokens that it can have.
        least: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// The context, or what the cache holds if that is less.
        longest: u32,
    },
    /// More sequences in one request than the queue has places.
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
        /// Completions that wait, or whose prompts are being read.
        waiting: usize,
        /// The most.
        most: usize,
    },
    /// The server is shutting down.
    #[error("the server is shutting down; send the request to another one")]
    ShuttingDown,
}

/// Why a completion that was accepted did not finish.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// A step that it was part of has failed.
    #[error("a step failed: {0}")]
    Step(String),
    /// The server has failed before the completion was done: its scheduler has panicked, or has ended with an error.
    #[error("the server has failed before the completion was done; its log says why")]
    Server,
    /// The server has shut down before the completion was done.
    #[error("the server has shut down before the completion was done")]
    ShutDown,
}

/// Why a server cannot start, or has ended.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A step cannot hold one token of each request that may run.
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
    /// More draft tokens than the engine was built for.
    #[error("{drafts} drafts are more than the {most} that the engine was made for")]
    TooManyDrafts {
        /// Drafts asked for.
        drafts: usize,
        /// The engine's limit.
        most: u32,
    },
    /// Several steps in a row have failed.
    #[error("{steps} steps in a row have failed, the last one so: {error}")]
    StepsFail {
        /// Number of steps.
        steps: u32,
        /// Why the last one failed.
        error: ModelError,
    },
    /// The engine has failed.
    #[error(transparent)]
    Engine(#[from] ModelError),
    /// The thread of the scheduler has panicked.
    #[error("the scheduler has panicked; its message is above")]
    Panicked,
    /// The operating system refuses a socket or a thread.
    #[error("{doing}: {error}")]
    System {
        /// The operation that was refused.
        doing: &'static str,
        /// The error.
        error: std::io::Error,
    },
    /// The cold tier cannot be opened.
    #[error("the cold cache: {0}")]
    Cold(#[from] ColdError),
    /// The recorder of metrics refuses its settings.
    #[error("metrics: {0}")]
    Metrics(String),
}
