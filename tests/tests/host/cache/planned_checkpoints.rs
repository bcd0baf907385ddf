//! The requests for which checkpoints are planned: not those that commit no token ids, but also forks made inside a
//! prompt.

use dsv4_kv::error::LimitedBy;
use dsv4_kv::{Admission, KvError, Prompt};

use super::conversations::{Run, config};

fn admit(run: &mut Run, tokens: &[u32]) -> Admission {
    run.ledger.admit_with(&Prompt { tokens, salt: b"", adapter: b"" }).unwrap()
}

/// A request that commits no token ids evicts no checkpoint of another, since the prefix tree would not take its own.
#[test]
fn who_tells_nothing_evicts_nothing() {
    let mut run = Run::new(&config(true, 200, 1));
    let mut told: Vec<u32> = (0..300).collect();
    assert_eq!(run.turn(&mut told, &[]), 0);
    let id = admit(&mut run, &(1000..1600).collect::<Vec<_>>()).id;
    [100, 500].into_iter().for_each(|count| run.step_told(id, count, &[]));
    run.ledger.release(id).unwrap();
    assert_eq!(run.turn(&mut told, &[]), 256);
}

/// A request that was forked inside its prompt gets checkpoints for the tokens that it computes itself.
#[test]
fn a_fork_inside_a_prompt_is_saved() {
    let mut run = Run::new(&config(true, 200, 4));
    let prompt: Vec<u32> = (0..4000).collect();
    let parent = admit(&mut run, &prompt).id;
    run.step(parent, &prompt[..1000]);
    let fork = run.ledger.fork(parent).unwrap();
    let own: Vec<u32> = (5000..5600).collect();
    own.chunks(100).for_each(|tokens| run.step(fork, tokens));
    run.ledger.release(fork).unwrap();
    let said: Vec<u32> = prompt[..1000].iter().chain(&own).copied().chain([7]).collect();
    assert_eq!(admit(&mut run, &said).reused, 1536);
    run.ledger.audit().unwrap();
}

/// A position that no request can reach is refused: a list of them would only grow.
#[test]
fn a_position_beyond_the_context_is_refused() {
    let config = config(true, 200, 1);
    let mut run = Run::new(&config);
    let id = admit(&mut run, &[1]).id;
    let context = config.max_context;
    let last = context / 128 * 128;
    run.ledger.want_checkpoint(id, last).unwrap();
    let refused = run.ledger.want_checkpoint(id, last + 128).unwrap_err();
    let KvError::ContextTooLong { request, end, limit, by: LimitedBy::Cache } = refused else {
        panic!("{refused}")
    };
    assert_eq!((request, end, limit), (id, u64::from(last) + 128, context));
}
