//! The next step: which tokens of which requests run in it.

use dsv4_kv_model::sequence::{Sequence, Work};

/// A request's part of a step.
pub(crate) struct Part {
    /// Its place among the running requests.
    pub index: usize,
    /// Its tokens.
    pub work: Work,
}

/// The limits of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepLimits {
    /// Most tokens; at least one for each request.
    pub tokens: usize,
    /// Most tokens of one prompt.
    pub chunk: usize,
    /// Whether requests that decode may have drafts.
    pub drafts: bool,
}

/// The next step of these requests, oldest first: those that decode with their drafts, then chunks of prompts. Each
/// request has at least one token. While there are prompts, drafts leave them a chunk, or half of the room if that is
/// less: else drafts of many requests would leave a prompt one token per step.
pub(crate) fn plan(sequences: &[&Sequence], limits: StepLimits) -> Vec<Part> {
    let left = |&index: &usize| sequences[index].tokens().len() - sequences[index].cached();
    let (decoding, prompts): (Vec<_>, Vec<_>) =
        (0..sequences.len()).partition(|index| left(index) == 1);
    let chunk = limits.chunk.max(1);
    // The room beside one token of each request that decodes.
    let mut room = limits.tokens.saturating_sub(decoding.len());
    let wanted: usize = prompts.iter().map(left).sum();
    let reserved = chunk.min(room / 2).min(wanted).max(prompts.len());
    let mut drafts = if limits.drafts { room.saturating_sub(reserved) } else { 0 };
    let mut parts = Vec::with_capacity(sequences.len());
    for index in decoding {
        let work = sequences[index].next(1 + drafts);
        drafts -= work.drafts;
        room -= work.drafts;
        parts.push(Part { index, work });
    }
    for (before, &index) in prompts.iter().enumerate() {
        // Each later prompt gets at least one token.
        let later = prompts.len() - before - 1;
        let work = sequences[index].next(chunk.min(room.saturating_sub(later)));
        room -= work.tokens.len();
        parts.push(Part { index, work });
    }
    parts
}

#[cfg(test)]
mod tests {
    use dsv4_kv_model::sample::GREEDY;
    use dsv4_kv_model::sequence::Continuation;

    use super::*;

    /// A request with a prompt of `tokens` tokens, of which `left` are not in the cache yet. If only the last one is
    /// left, prompt lookup finds as many drafts as are allowed.
    fn sequence(tokens: u32, left: u32) -> Sequence {
        let continuation = Continuation {
            sampling: GREEDY,
            max_tokens: 100,
            end: Vec::new(),
            drafts: 31,
            top_logprobs: 0,
            prompt_logits: false,
        };
        let prompt = (0..tokens).map(|at| at % 40).collect();
        let mut sequence = Sequence::new(prompt, continuation).expect("it has tokens");
        sequence.reuse((tokens - left) as usize);
        sequence
    }

    /// Tokens of each request in the next step: first of `decoding` requests, then of prompts with so many tokens.
    fn tokens(decoding: usize, prompts: &[u32], limits: StepLimits) -> (Vec<usize>, Vec<usize>) {
        let decoding = (0..decoding).map(|_| sequence(80, 1));
        let all: Vec<_> =
            decoding.clone().chain(prompts.iter().map(|&left| sequence(left, left))).collect();
        let parts = plan(&all.iter().collect::<Vec<_>>(), limits);
        assert!(parts.iter().map(|part| part.index).eq(0..all.len()));
        let tokens: Vec<_> = parts.iter().map(|part| part.work.tokens.len()).collect();
        assert!(tokens.iter().sum::<usize>() <= limits.tokens, "{tokens:?}");
        let (decoding, prompts) = tokens.split_at(decoding.len());
        (decoding.to_vec(), prompts.to_vec())
    }

    const LIMITS: StepLimits = StepLimits { tokens: 512, chunk: 256, drafts: true };

    #[test]
    fn drafts_leave_a_prompt_its_part() {
        // 496 tokens beside one of each, and drafts of eight requests fill half of them.
        let (decoding, prompts) = tokens(16, &[8000], LIMITS);
        assert_eq!(decoding, [[32; 8], [1; 8]].concat());
        assert_eq!(prompts, [248]);
        // No more than a chunk, and than the prompts have.
        assert_eq!(tokens(16, &[8000], StepLimits { chunk: 100, ..LIMITS }).1, [100]);
        let (decoding, prompts) = tokens(16, &[20], LIMITS);
        assert_eq!((decoding.iter().sum::<usize>(), prompts), (512 - 20, vec![20]));
        // Prompts share it, the oldest first.
        assert_eq!(tokens(16, &[8000, 90, 90], LIMITS).1, [246, 1, 1]);
        // Without prompts all of it is for drafts.
        assert_eq!(tokens(16, &[], LIMITS).0, [32; 16]);
    }

    #[test]
    fn each_request_has_a_token() {
        let limits = StepLimits { tokens: 5, ..LIMITS };
        assert_eq!(tokens(3, &[9, 9], limits), (vec![1; 3], vec![1; 2]));
        assert_eq!(tokens(1, &[9], StepLimits { chunk: 0, ..limits }), (vec![4], vec![1]));
    }

    #[test]
    fn a_step_without_drafts_has_none() {
        assert_eq!(tokens(2, &[], StepLimits { drafts: false, ..LIMITS }).0, [1, 1]);
    }
}
