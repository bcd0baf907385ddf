//! The token ids of a commit must be those of the prompt with which the request was admitted.

use dsv4_kv::error::TokenMismatch;
use dsv4_kv::{Accepted, KvError, LayerGroup, Prompt, StepRequest};

use super::conversations::{Run, config};

/// A commit with other token ids than the prompt's is refused, wherever they differ, and changes nothing. Otherwise
/// requests with these tokens would continue from rows of other tokens.
#[test]
fn other_tokens_than_the_prompts_are_refused() {
    let mut run = Run::new(&config(true, 200, 4));
    let mut first: Vec<u32> = (0..300).collect();
    run.turn(&mut first, &[]);
    // The cache has the rows of the first 256 tokens.
    let prompt: Vec<u32> = (0..700).collect();
    let shared = Prompt { tokens: &prompt, salt: b"", adapter: b"" };
    let admission = run.ledger.admit_with(&shared).unwrap();
    assert_eq!(admission.reused, 256);
    let id = admission.id;
    for at in [256, 300, 511] {
        let mut wrong = prompt[256..512].to_vec();
        wrong[at - 256] += 10_000;
        let error = run.refused(id, &wrong);
        let KvError::PromptMismatch(TokenMismatch { request, position, token, expected }) = error
        else {
            panic!("{error}")
        };
        assert_eq!(
            (request, position, token, expected),
            (id, at as u32, at as u32 + 10_000, at as u32)
        );
    }
    run.step(id, &prompt[256..512]);
    // The first part continues the prompt, the rest is the answer.
    let mut rest = prompt[512..].to_vec();
    rest.extend(5000..5100);
    rest[187] = 1;
    assert!(matches!(
        run.refused(id, &rest),
        KvError::PromptMismatch(TokenMismatch { position: 699, .. })
    ));
    rest[187] = 699;
    run.step(id, &rest);
    // A fork may answer with any tokens, and a request without a prompt may run any.
    let fork = run.ledger.fork(id).unwrap();
    run.step(fork, &[1, 2, 3]);
    let plain = run.ledger.admit().unwrap();
    run.step(plain, &[9, 9]);
    run.ledger.audit().unwrap();
}

impl Run {
    /// The error of a commit with these tokens. The step stays open and unchanged, and is then rejected.
    fn refused(&mut self, id: dsv4_kv::RequestId, tokens: &[u32]) -> KvError {
        let start = self.ledger.committed(id).unwrap();
        let (group, count) = (LayerGroup::Trunk, tokens.len() as u32);
        let mut array = vec![0; self.ledger.largest_layout().elements()];
        let step = [StepRequest { id, start, tokens: count }];
        self.ledger.begin_step(group, &step, &mut array).unwrap();
        let before = serde_json::to_value(&self.ledger).unwrap();
        let accepted = Accepted { id, accepted: count, tokens };
        let error = self.ledger.commit_step(group, &[accepted]).unwrap_err();
        assert_eq!(serde_json::to_value(&self.ledger).unwrap(), before, "{error}");
        self.ledger.reject_step(group, dsv4_kv::ledger::Written::Nothing);
        error
    }
}
