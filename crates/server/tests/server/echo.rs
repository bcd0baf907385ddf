//! Prompts in front of completions, and their log probabilities.

use dsv4_kv_model::sample::{Picked, top_logprobs};
use dsv4_kv_model::sequence::{Continuation, Finish, Generated};
use dsv4_kv_model::{Chunk, EngineLimits, Logits};
use dsv4_kv_server::Settings;
use dsv4_kv_server::metrics::Metrics;
use dsv4_kv_server::queue::{Event, Events, Submission};
use dsv4_kv_server::scheduler::{Progress, Scheduler, SchedulerLimits};
use serde_json::{Value, json};

use crate::client::{Running, settings};
use crate::http::{alone, request, streamed, tokens_alone};
use crate::scheduler::{LIMITS, received, submit, value};
use crate::small::{self, HASH};

/// The tokens of a prompt from the second one on, with the probabilities that the model gives them in one step.
fn scores(prompt: &[u32], top: usize) -> Vec<Generated> {
    let limits = EngineLimits { max_step_tokens: 256, ..small::limits(1, 4) };
    let mut engine = small::engine(&small::emulated(), &HASH, limits);
    let id = engine.admit().expect("a slot");
    let forward = engine.forward(&[Chunk { id, tokens: prompt, logits: Logits::All }]);
    let forward = forward.expect("a step");
    let logits = forward.logits(0);
    let score = |(row, &token): (usize, &u32)| {
        let logits = logits.row(row);
        Generated { picked: Picked::of(logits, token), top: top_logprobs(logits, top) }
    };
    prompt[1..].iter().enumerate().map(score).collect()
}

/// The events of a sequence so far: scored tokens of its prompt, and those behind them.
fn told(events: &mut Events) -> (Vec<Generated>, Vec<Event>) {
    let (mut scored, mut others) = (Vec::new(), Vec::new());
    while let Ok(event) = events.try_recv() {
        match event {
            Event::Admitted { .. } => {}
            Event::Prompt(token) => {
                assert!(others.is_empty(), "a token of the prompt behind the answer");
                scored.push(token);
            }
            other => others.push(other),
        }
    }
    (scored, others)
}

/// A prompt of different tokens that is scored, and two more tokens.
fn scored(tokens: u32) -> Submission {
    let prompt = (0..tokens).map(|at| at * at % 251).collect();
    let continuation = Continuation { prompt_logits: true, ..small::continuation(2) };
    Submission { prompt, continuation, salt: Vec::new() }
}

/// The scores have the bits of one step over the whole prompt, and the answer is as without them.
#[test]
fn a_prompt_is_scored_in_any_chunks() {
    let new = scored(30);
    let expected = scores(&new.prompt, 2);
    let mut engine = small::engine(&small::emulated(), &HASH, small::limits(1, 4));
    let continuation = small::continuation(2);
    let (answer, _) = small::alone(&mut engine, &Submission { continuation, ..new.clone() });
    for chunk in [1, 24, 48] {
        let engine = small::engine(&small::emulated(), &HASH, small::limits(1, 4));
        let limits = SchedulerLimits { chunk, ..LIMITS };
        let metrics = Metrics::new().expect("metrics");
        let mut scheduler = Scheduler::new(engine, limits, metrics).expect("a scheduler");
        let mut events = submit(&scheduler.queue(), &new);
        while scheduler.step().expect("no step fails") == Progress::Ran {}
        let (scored, rest) = told(&mut events);
        assert_eq!(scored, expected, "chunks of {chunk}");
        let tokens = answer.iter().cloned().map(Event::Token);
        assert_eq!(rest, Vec::from_iter(tokens.chain([Event::Finished(Finish::Length)])));
    }
}

/// A prompt that is preempted in its middle is scored once: what was told is not told again.
#[test]
fn a_preempted_prompt_is_scored_once() {
    let engine = small::engine(&small::emulated(), &HASH, small::limits(2, 3));
    let metrics = Metrics::new().expect("metrics");
    let mut scheduler = Scheduler::new(engine, LIMITS, metrics.clone()).expect("a scheduler");
    let queue = scheduler.queue();
    // It takes its second block before the other one, of 24 tokens per step, needs its own.
    let continuation = small::continuation(12);
    let first = Submission { prompt: vec![1; 127], continuation, salt: Vec::new() };
    let mut first = submit(&queue, &first);
    while received(&mut first).0.is_empty() {
        assert_eq!(scheduler.step().ok(), Some(Progress::Ran));
    }
    let new = scored(160);
    let mut events = submit(&queue, &new);
    while value(&metrics, "dsv4_num_preemptions_total") == 0 {
        assert_eq!(scheduler.step().ok(), Some(Progress::Ran));
    }
    let (mut scored, _) = told(&mut events);
    assert!((1..159).contains(&scored.len()), "{} tokens before it is preempted", scored.len());
    while scheduler.step().expect("no step fails") == Progress::Ran {}
    assert_eq!(received(&mut first).1, Some(Event::Finished(Finish::Length)));
    let (rest, others) = told(&mut events);
    scored.extend(rest);
    assert_eq!(scored, scores(&new.prompt, 2));
    assert_eq!(others.len(), 3, "two tokens and the end: {others:?}");
}

/// A text and its ids are echoed alike, in every completion, whole and in a stream, and are no part of what stops it.
#[test]
fn a_prompt_is_echoed() {
    let server = Running::start(4, settings());
    let expected = format!("aé{}", alone("aé", None, 4));
    for prompt in [json!("aé"), json!("aé".as_bytes())] {
        for stream in [false, true] {
            let asked = request(json!({
                "prompt": prompt, "echo": true, "max_tokens": 4, "n": 2, "stop": "aé", "stream": stream,
            }));
            let answer = server.send("POST", "/v1/completions", &asked.to_string());
            let choices = match stream {
                true => Value::from(streamed(&answer.events()).0),
                false => answer.json()["choices"].clone(),
            };
            for index in 0..2 {
                assert_eq!(choices[index]["text"], expected, "{prompt}");
                assert_eq!(choices[index]["finish_reason"], "length");
            }
        }
    }
    let nothing = server.complete(&request(json!({ "echo": true, "max_tokens": 0 })));
    assert_eq!(nothing["choices"][0]["text"], "ab");
    server.ended();
}

/// Asserts that a choice has these tokens of a prompt in front, with their probabilities and those of likelier tokens.
fn assert_scored(choice: &Value, prompt: &[u32]) {
    let logprobs = &choice["logprobs"];
    assert!(logprobs["token_logprobs"][0].is_null() && logprobs["top_logprobs"][0].is_null());
    for (index, score) in (1_usize..).zip(scores(prompt, 1)) {
        let logprob = logprobs["token_logprobs"][index].as_f64().map(|logprob| logprob as f32);
        assert_eq!(logprob, Some(score.picked.logprob), "token {index}");
        let name = logprobs["tokens"][index].as_str().expect("a name");
        let top = logprobs["top_logprobs"][index].as_object().expect("an object");
        assert_eq!(top[name], logprobs["token_logprobs"][index]);
        let most = top.values().filter_map(Value::as_f64).fold(f64::MIN, f64::max);
        assert_eq!(most as f32, score.top[0].logprob, "token {index}");
    }
}

/// What lm-eval sends for log likelihoods: it cuts one token off the end, and sums up those of the continuation.
#[test]
fn a_prompt_is_scored_for_lm_eval() {
    let text = "once, é";
    let prompt = Vec::from_iter(text.bytes().map(u32::from));
    let generated = tokens_alone(text, None, 1);
    // The same also if the one token that is generated ends the text.
    for (end, reason) in [(Vec::new(), "length"), (generated, "stop")] {
        let server = Running::start(2, Settings { end, ..settings() });
        for stream in [false, true] {
            let asked = request(json!({
                "prompt": [prompt], "max_tokens": 1, "logprobs": 1, "echo": true, "seed": 1234, "stream": stream,
            }));
            let answer = server.send("POST", "/v1/completions", &asked.to_string());
            let choice = match stream {
                true => streamed(&answer.events()).0[0].clone(),
                false => answer.json()["choices"][0].clone(),
            };
            assert_eq!(choice["finish_reason"], reason);
            for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                let list = choice["logprobs"][list].as_array().expect("an array");
                assert_eq!(list.len(), prompt.len() + 1);
            }
            assert_scored(&choice, &prompt);
            let offsets = json!([0, 1, 2, 3, 4, 5, 6, 6, 7]);
            assert_eq!(choice["logprobs"]["text_offset"], offsets);
        }
        // Nothing but the prompt.
        let asked = json!({ "prompt": text, "max_tokens": 0, "logprobs": 1, "echo": true });
        let choice = server.complete(&request(asked))["choices"][0].clone();
        assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(text), &json!("length")));
        assert_eq!(choice["logprobs"]["tokens"].as_array().map(Vec::len), Some(prompt.len()));
        assert_scored(&choice, &prompt);
        server.ended();
    }
}
