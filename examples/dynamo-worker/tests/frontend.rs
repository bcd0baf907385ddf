//! Dynamo's frontend and two workers, each a process: discovery by files, requests by TCP, events by ZMQ.
//!
//! `cargo xtask scale-test --dynamo-worker` installs the frontend and runs this test. To run it by hand, set
//! `DSV4_DYNAMO_PYTHON` to a Python that has `ai-dynamo` and `ai-dynamo-runtime` 1.6.1.

mod fleet;

use fleet::{Answer, Fleet};

const FRONTEND: &str = "needs a Python with Dynamo's frontend, named by DSV4_DYNAMO_PYTHON";
/// Tokens of an answer.
const TOKENS: u32 = 6;

/// A text of `tokens` bytes, each a token, that differs for each `number`.
fn text(number: usize, tokens: usize) -> String {
    let letter = |at: usize| char::from(b'a' + ((at * at + 7 * number + at / 11) % 26) as u8);
    (0..tokens).map(letter).collect()
}

/// Sends `prompts` prompts of 300 tokens three times each. The second and third time they end differently after the
/// first two blocks.
fn ask_again_and_again(fleet: &Fleet, prompts: usize) -> Vec<Answer> {
    let ask = |round: usize| {
        (0..prompts).map(move |number| {
            let prompt = text(number, 256) + &text(100 * round + number, 44);
            fleet.ask(&prompt, TOKENS)
        })
    };
    let first: Vec<_> = ask(1).collect();
    assert!(first.iter().all(|answer| answer.cached == 0), "{first:?}");
    // Wait until the workers' events have reached the router.
    std::thread::sleep(std::time::Duration::from_secs(2));
    (2..4).flat_map(ask).collect()
}

#[test]
#[ignore = "needs a Python with Dynamo's frontend, named by DSV4_DYNAMO_PYTHON"]
fn a_prefix_goes_to_who_has_it() {
    let fleet = Fleet::start("kv", &["agg", "agg"]).expect(FRONTEND);
    let again = ask_again_and_again(&fleet, 4);
    let reused = again.iter().filter(|answer| answer.cached == 256).count();
    eprintln!("two whole workers: 256 tokens reused by {reused} of {}", again.len());
    assert_eq!(reused, again.len(), "{again:?}");
}

/// The control: a frontend that routes at random finds some of the prefixes. The chance that it finds all eight is one
/// in thousands.
#[test]
#[ignore = "needs a Python with Dynamo's frontend, named by DSV4_DYNAMO_PYTHON"]
fn without_the_router_prefixes_are_missed() {
    let fleet = Fleet::start("random", &["agg", "agg"]).expect(FRONTEND);
    let again = ask_again_and_again(&fleet, 8);
    let reused = again.iter().filter(|answer| answer.cached == 256).count();
    eprintln!("without the router: 256 tokens reused by {reused} of {}", again.len());
    assert!(reused < again.len(), "{again:?}");
}

/// One worker computes the prompt and another one answers, with the same answer as from a worker that does both.
#[test]
#[ignore = "needs a Python with Dynamo's frontend, named by DSV4_DYNAMO_PYTHON"]
fn a_request_moves_and_has_the_same_answer() {
    let prompts: Vec<_> = [1, 2, 127, 128, 129, 300].map(|tokens| text(tokens, tokens)).into();
    let alone = Fleet::start("kv", &["agg"]).expect(FRONTEND);
    let expected: Vec<_> = prompts.iter().map(|prompt| alone.ask(prompt, TOKENS).text).collect();
    drop(alone);
    let pair = Fleet::start("kv", &["prefill", "decode"]).expect(FRONTEND);
    for (prompt, expected) in prompts.iter().zip(expected) {
        let answer = pair.ask(prompt, TOKENS);
        let tokens = prompt.len();
        assert_eq!(answer.text, expected, "{tokens} tokens");
        assert_eq!(answer.cached, tokens - 1, "all tokens but the last came, of {tokens}");
    }
}
