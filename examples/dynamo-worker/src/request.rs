//! A request of Dynamo as a job, or why it is refused.

use std::hash::{BuildHasher, RandomState};

use dsv4_kv_model::sample::Sampling;
use dsv4_kv_model::sequence::{Continuation, Finish};
use dsv4_kv_transfer::Verified;
use dynamo_backend_common::{
    BackendError, DynamoError, ErrorType, PreprocessedRequest, SamplingOptions, StopConditions,
};
use tokio::sync::mpsc::UnboundedSender;

use crate::ticket::Ticket;

/// A prompt, how it is continued, and where its tokens go.
pub struct Job {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// How it is continued.
    pub continuation: Continuation,
    /// What another worker has computed of it, and whom to ask for it.
    pub moved: Option<(Verified, Ticket)>,
    /// A receiver that is dropped cancels the request.
    pub updates: UnboundedSender<Update>,
}

/// What becomes of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Update {
    /// A token.
    Token(u32),
    /// The end, with how many tokens of the prompt were not computed here.
    Finished(Finish, u32),
    /// The prompt is computed and offered; nothing follows. Without a ticket there is nothing to move.
    Offered(Option<Ticket>, u32),
    /// It failed; nothing follows.
    Failed(String),
}

/// An error of a kind.
pub fn error(kind: BackendError, message: impl Into<String>) -> DynamoError {
    DynamoError::builder().error_type(ErrorType::Backend(kind)).message(message.into()).build()
}

/// What a request is refused for, if it asks for what is not done here.
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
        (request.output_options.logprobs.is_some_and(|n| n > 0), "logprobs"),
        (request.output_options.prompt_logprobs.is_some(), "prompt_logprobs"),
        (request.prompt_embeds.is_some(), "prompt_embeds"),
        (request.multi_modal_data.is_some(), "multi_modal_data"),
    ];
    refused.into_iter().find_map(|(is_set, name)| is_set.then_some(name))
}

/// How a request is continued by a model with so long a context, so many token ids, and these that end a request.
///
/// # Errors
/// What is not done here, and what is too long.
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
    // It ends where the context does.
    let most = max_tokens.map_or(room, |most| room.min(most as usize));
    // Whatever else ends a request, texts too, the frontend finds.
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
