//! Converts a request of Dynamo to a job, or refuses it.

use std::hash::{BuildHasher, RandomState};

use dsv4_kv_model::sample::Sampling;
use dsv4_kv_model::sequence::{Continuation, Finish};
use dynamo_backend_common::{
    BackendError, DynamoError, ErrorType, PreprocessedRequest, SamplingOptions, StopConditions,
};
use tokio::sync::mpsc::UnboundedSender;

use crate::moves::Fetched;
use crate::offers::Kept;
use crate::ticket::Ticket;

/// A prompt, how it is continued, and where its tokens go.
pub struct Job {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// How it is continued.
    pub continuation: Continuation,
    /// The part that a prefill worker has computed. If the job is dropped before it is admitted, that worker is told.
    pub moved: Option<Fetched>,
    /// Gets the updates. Dropping the receiver cancels the request.
    pub updates: UnboundedSender<Update>,
}

/// An update of a job.
pub enum Update {
    /// A generated token.
    Token(u32),
    /// The job is complete. Has the number of prompt tokens that were not computed here.
    Finished(Finish, u32),
    /// The prompt was computed and offered; nothing follows. Without a ticket there is nothing to move. If the update is
    /// dropped, the offer is taken back. The number is as in [`Self::Finished`].
    Offered(Option<(Ticket, Kept)>, u32),
    /// The job has failed; nothing follows.
    Failed(String),
}

/// An error of this kind.
pub fn error(kind: BackendError, message: impl Into<String>) -> DynamoError {
    DynamoError::builder().error_type(ErrorType::Backend(kind)).message(message.into()).build()
}

/// The name of the first option of a request that is not supported, if any.
fn unsupported(request: &PreprocessedRequest) -> Option<&'static str> {
    let SamplingOptions {
        n,
        best_of,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        top_k,
        min_p,
        use_beam_search,
        guided_decoding,
        ..
    } = &request.sampling_options;
    let set = |value: &Option<f32>, neutral: f32| value.is_some_and(|value| value != neutral);
    let refused = [
        (n.is_some_and(|n| n > 1), "n"),
        (best_of.is_some_and(|n| n > 1), "best_of"),
        (set(presence_penalty, 0.0), "presence_penalty"),
        (set(frequency_penalty, 0.0), "frequency_penalty"),
        (set(repetition_penalty, 1.0), "repetition_penalty"),
        (top_k.is_some_and(|k| k > 0), "top_k"),
        (set(min_p, 0.0), "min_p"),
        (use_beam_search.unwrap_or(false), "use_beam_search"),
        (guided_decoding.is_some(), "guided_decoding"),
        (request.output_options.logprobs.is_some(), "logprobs"),
        (request.output_options.prompt_logprobs.is_some(), "prompt_logprobs"),
        (request.prompt_embeds.is_some(), "prompt_embeds"),
        (request.multi_modal_data.is_some(), "multi_modal_data"),
    ];
    refused.into_iter().find_map(|(is_set, name)| is_set.then_some(name))
}

/// How a request is continued by a model with this context length, vocabulary size, and tokens that end a request.
///
/// # Errors
/// Options that are not supported, tokens outside of the vocabulary, and prompts that are empty or too long.
pub fn continuation(
    request: &PreprocessedRequest,
    (context, vocabulary): (u32, u32),
    end: &[u32],
) -> Result<Continuation, DynamoError> {
    let refuse = |why: String| Err(error(BackendError::InvalidArgument, why));
    if let Some(name) = unsupported(request) {
        return refuse(format!("{name} is not supported; leave it out"));
    }
    let prompt = &request.token_ids;
    if let Some(token) = prompt.iter().find(|&&token| token >= vocabulary) {
        return refuse(format!("token {token} is not below the vocabulary's {vocabulary}"));
    }
    let room = (context as usize).saturating_sub(prompt.len());
    let StopConditions { max_tokens, min_tokens, ignore_eos, .. } = &request.stop_conditions;
    if prompt.is_empty() || room == 0 {
        let len = prompt.len();
        return refuse(format!(
            "a prompt has 1 to {} tokens, this one {len}",
            context.saturating_sub(1)
        ));
    }
    // Generation ends at the end of the context at the latest.
    let most = max_tokens.map_or(room, |most| room.min(most as usize));
    // The frontend handles all other conditions that end a request, such as stop texts.
    let ends = !ignore_eos.unwrap_or(false) && min_tokens.unwrap_or(0) <= 1;
    let SamplingOptions { temperature, top_p, seed, .. } = &request.sampling_options;
    let sampling = Sampling {
        temperature: temperature.unwrap_or(1.0),
        top_p: top_p.unwrap_or(1.0),
        seed: seed.map_or_else(|| RandomState::new().hash_one("seed"), |seed| seed as u64),
    };
    Ok(Continuation {
        sampling,
        max_tokens: most,
        end: if ends { end.to_vec() } else { Vec::new() },
        drafts: 0,
        top_logprobs: 0,
        prompt_logits: false,
    })
}
