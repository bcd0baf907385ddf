//! Completions over HTTP: clients get the same answers as from the model alone.

use dsv4_kv_device::EmuOptions;
use dsv4_kv_model::EngineLimits;
use dsv4_kv_model::sequence::Finish;
use dsv4_kv_model::text::{Text, TextStream};
use dsv4_kv_server::queue::Submission;
use dsv4_kv_server::scheduler::SchedulerLimits;
use dsv4_kv_server::{Ended, Server, ServerError, Settings};
use dsv4_kv_tests::failing::{self, Failing};
use serde_json::{Value, json};

use crate::client::{Running, settings};
use crate::small::{self, HASH};

/// A request for a completion of the small model with these fields.
pub fn request(fields: Value) -> Value {
    let mut request = json!({ "model": "small/hash", "prompt": "ab", "temperature": 0 });
    for (name, value) in fields.as_object().expect("an object") {
        request[name] = value.clone();
    }
    request
}

/// The tokens that the model generates when no other request runs.
pub fn tokens_alone(prompt: &str, seed: Option<u64>, max_tokens: usize) -> Vec<u32> {
    let continuation = match seed {
        None => small::continuation(max_tokens),
        Some(seed) => small::sampled(seed, max_tokens),
    };
    let prompt = prompt.bytes().map(u32::from).collect();
    let mut engine = small::engine(&small::emulated(), &HASH, small::limits(1, 8));
    let (tokens, finish) =
        small::alone(&mut engine, &Submission { prompt, continuation, salt: Vec::new() });
    assert_eq!(finish, Finish::Length);
    tokens.iter().map(|token| token.picked.token).collect()
}

/// The text that the model generates when no other request runs.
pub fn alone(prompt: &str, seed: Option<u64>, max_tokens: usize) -> String {
    let mut stream = TextStream::default();
    let tokens = tokens_alone(prompt, seed, max_tokens);
    let text: String = tokens.iter().map(|&token| stream.push(&Text::Bytes, token)).collect();
    text + &stream.finish()
}

/// The completions of a stream: texts, reasons, logprobs, and the usage.
pub fn streamed(events: &[String]) -> (Vec<Value>, Value) {
    let (end, events) = events.split_last().expect("events");
    assert_eq!(end, "[DONE]");
    let mut choices: Vec<Value> = Vec::new();
    let mut usage = Value::Null;
    for event in events {
        let event: Value = serde_json::from_str(event).expect("JSON");
        assert_eq!(event["object"], "text_completion");
        usage = event["usage"].clone();
        for piece in event["choices"].as_array().expect("an array") {
            let index = piece["index"].as_u64().expect("a number") as usize;
            choices.resize(choices.len().max(index + 1), Value::Null);
            match &mut choices[index] {
                Value::Null => choices[index] = piece.clone(),
                choice => append(choice, piece),
            }
        }
    }
    (choices, usage)
}

/// Appends a piece of a completion to those before it.
fn append(choice: &mut Value, piece: &Value) {
    assert_eq!(choice["finish_reason"], Value::Null, "a piece behind the last");
    let text = |value: &Value| value["text"].as_str().expect("text").to_owned();
    choice["text"] = (text(choice) + &text(piece)).into();
    choice["finish_reason"] = piece["finish_reason"].clone();
    for (name, more) in piece["logprobs"].as_object().into_iter().flatten() {
        let more = more.as_array().expect("an array").clone();
        choice["logprobs"][name].as_array_mut().expect("an array").extend(more);
    }
}

#[test]
fn whole_and_streamed_completions_are_those_of_the_model_alone() {
    let server = Running::start(4, settings());
    let sampled = json!({
        "prompt": ["ab", "c"], "n": 2, "seed": 7, "temperature": 1.0, "top_p": 0.9,
        "max_tokens": 9, "logprobs": 2,
    });
    let whole = server.complete(&request(sampled.clone()));
    let choices = whole["choices"].as_array().expect("an array");
    assert_eq!(choices.len(), 4);
    for (index, (prompt, seed)) in [("ab", 7), ("ab", 8), ("c", 7), ("c", 8)].iter().enumerate() {
        let choice = &choices[index];
        assert_eq!(choice["index"], index);
        assert_eq!(choice["text"], alone(prompt, Some(*seed), 9));
        assert_eq!(choice["finish_reason"], "length");
        check_logprobs(choice);
    }
    let usage = json!({
        "prompt_tokens": 3, "completion_tokens": 36, "total_tokens": 39,
        "prompt_tokens_details": { "cached_tokens": 0 },
    });
    assert_eq!(whole["usage"], usage);

    let mut asked = request(sampled);
    asked["stream"] = true.into();
    asked["stream_options"] = json!({ "include_usage": true });
    let answer = server.send("POST", "/v1/completions", &asked.to_string());
    for header in ["content-type: text/event-stream", "x-accel-buffering: no"] {
        assert!(answer.head.contains(header), "{}", answer.head);
    }
    let (streamed, streamed_usage) = streamed(&answer.events());
    assert_eq!(Value::from(streamed), whole["choices"]);
    assert_eq!(streamed_usage, usage);
    assert_eq!(server.metric("dsv4_requests_total{outcome=\"completed\"}"), 2);
    assert_eq!(server.ended(), Ended::Done);
}

/// Each token begins where the text before it ends.
fn check_logprobs(choice: &Value) {
    let logprobs = &choice["logprobs"];
    let length = choice["text"].as_str().expect("text").chars().count() as u64;
    let tokens = logprobs["tokens"].as_array().expect("an array");
    assert_eq!(tokens.len(), 9);
    let mut last = 0;
    for (index, token) in tokens.iter().enumerate() {
        let offset = logprobs["text_offset"][index].as_u64().expect("a number");
        assert!((last..=length).contains(&offset), "{choice}");
        last = offset;
        let token = token.as_str().expect("text");
        let top = logprobs["top_logprobs"][index].as_object().expect("an object");
        assert_eq!(top[token], logprobs["token_logprobs"][index]);
        assert!((2..=3).contains(&top.len()), "{choice}");
        if !token.starts_with("bytes:") {
            let text = choice["text"].as_str().expect("text");
            let there: String = text.chars().skip(offset as usize).take(1).collect();
            assert!(there == token || there == "\u{FFFD}", "{choice}");
        }
    }
}

/// Without a seed, equal prompts of a request get independent answers; with a seed, equal ones.
#[test]
fn equal_prompts_are_drawn_independently() {
    let server = Running::start(4, settings());
    let texts = |fields: Value| -> Vec<Value> {
        let answer = server.send("POST", "/v1/completions", &request(fields).to_string()).json();
        answer["choices"].as_array().expect("an array").iter().map(|c| c["text"].clone()).collect()
    };
    let fields = json!({ "prompt": ["ab", "ab", "ab", "ab"], "temperature": 1, "max_tokens": 9 });
    let random = texts(fields.clone());
    assert!(random.iter().any(|text| *text != random[0]), "{random:?}");
    let mut fields = fields;
    fields["seed"] = json!(5);
    let same = texts(fields);
    assert!(same.iter().all(|text| *text == same[0]), "{same:?}");
    assert_eq!(server.ended(), Ended::Done);
}

#[test]
fn a_stop_ends_a_completion_and_is_never_sent() {
    let server = Running::start(2, settings());
    let text = alone("ab", None, 16);
    let characters: Vec<char> = text.chars().collect();
    // The end of one token and the start of the next, so that it spans their border.
    let stop: String = characters[6..8].iter().collect();
    let before = &text[..text.find(&stop).expect("it is in the text")];
    for stream in [false, true] {
        let asked = request(json!({
            "stop": [stop, "never in it"], "max_tokens": 16, "stream": stream, "logprobs": 0,
        }));
        let answer = server.send("POST", "/v1/completions", &asked.to_string());
        let choice = match stream {
            true => streamed(&answer.events()).0[0].clone(),
            false => answer.json()["choices"][0].clone(),
        };
        assert_eq!(choice["text"], before);
        assert_eq!(choice["finish_reason"], "stop");
        let offsets = choice["logprobs"]["text_offset"].as_array().expect("an array");
        let length = before.chars().count() as u64;
        assert!(offsets.iter().all(|offset| offset.as_u64() < Some(length)), "{choice}");
    }
    server.wait_for("dsv4_num_requests_running", 0);
    for ended in
        ["dsv4_requests_total{outcome=\"completed\"}", "dsv4_e2e_request_latency_seconds_count"]
    {
        assert_eq!(server.metric(ended), 2, "{ended}");
    }
    assert_eq!(server.ended(), Ended::Done);
}

#[test]
fn what_is_wrong_is_refused_in_openais_shape() {
    let server = Running::start(1, settings());
    let post = |fields| ("POST", "/v1/completions", request(fields).to_string());
    let cases = [
        (post(json!({ "model": "other" })), 404, json!("model"), json!("model_not_found")),
        (post(json!({ "prompt": "" })), 400, json!("prompt"), Value::Null),
        (post(json!({ "prompt": [1, 256] })), 400, json!("prompt"), Value::Null),
        (post(json!({ "presence_penalty": 1 })), 400, json!("presence_penalty"), Value::Null),
        (
            post(json!({ "max_tokens": 1023 })),
            400,
            json!("max_tokens"),
            json!("context_length_exceeded"),
        ),
        (post(json!({ "n": 9 })), 400, json!("n"), Value::Null),
        (post(json!({ "prompt": "x".repeat(5000) })), 413, Value::Null, Value::Null),
        (("POST", "/v1/completions", "{".into()), 400, Value::Null, Value::Null),
        (("POST", "/v1/completions", "[]".into()), 400, Value::Null, Value::Null),
        (("GET", "/v1/completions", String::new()), 405, Value::Null, Value::Null),
        (("GET", "/v1/models/other", String::new()), 404, json!("model"), json!("model_not_found")),
        (("GET", "/v1/models/%ff", String::new()), 400, Value::Null, Value::Null),
        (("POST", "/v1/chat/completions", "{}".into()), 404, Value::Null, Value::Null),
    ];
    for ((method, path, body), status, param, code) in cases {
        let answer = server.send(method, path, &body);
        assert_eq!(answer.status, status, "{body}");
        let error = &answer.json()["error"];
        assert_eq!((&error["param"], &error["code"]), (&param, &code), "{error}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{error}");
    }
    let unknown = request(json!({ "x".repeat(2000): 1 })).to_string();
    let text = server.send("POST", "/v1/completions", &unknown).text();
    assert!(text.contains("a name of 2000 bytes is not known") && text.len() < 400, "{text}");
    // A body that cannot be parsed is quoted only in part, too.
    let string = json!("\u{7f}".repeat(2000)).to_string();
    let answer = server.send("POST", "/v1/completions", &string);
    assert_eq!(answer.status, 400);
    let text = answer.text();
    assert!(text.contains("invalid type: string") && text.len() < 800, "{text}");
    let answer = server.send_as("text/plain", "POST", "/v1/completions", "{}");
    assert_eq!(answer.status, 415);
    assert!(answer.json()["error"]["message"].is_string());

    let models = server.send("GET", "/v1/models", "").json();
    assert_eq!(models["data"][0]["id"], "small/hash");
    assert_eq!(server.send("GET", "/v1/models/small/hash", "").json(), models["data"][0]);
    assert_eq!(server.send("GET", "/health", "").status, 200);
    let nothing = server.complete(&request(json!({ "max_tokens": 0 })));
    assert_eq!(nothing["choices"][0]["text"], "");
    assert_eq!(nothing["choices"][0]["finish_reason"], "length");
    assert_eq!(server.metric("dsv4_generation_tokens_total"), 0);
    assert_eq!(server.ended(), Ended::Done);
}

#[test]
fn who_leaves_is_forgotten_and_a_full_queue_refuses() {
    let scheduler = SchedulerLimits { chunk: 24, waiting: 1 };
    let server = Running::start(1, Settings { scheduler, ..settings() });
    assert!(server.metric("dsv4_kv_blocks_capacity") > 0);
    let long = |stream| request(json!({ "max_tokens": 900, "stream": stream })).to_string();
    let begin = |stream| server.begin("application/json", "POST", "/v1/completions", &long(stream));
    let running = begin(true);
    server.wait_for("dsv4_num_requests_running", 1);
    let waiting = begin(false);
    server.wait_for("dsv4_num_requests_waiting", 1);
    assert_eq!(server.metric("dsv4_kv_slots_used"), 1);
    let refused = server.send("POST", "/v1/completions", &long(false));
    assert_eq!(refused.status, 429);
    assert!(refused.head.contains("retry-after: 1"), "{}", refused.head);
    let error = refused.json();
    assert_eq!(
        (&error["error"]["code"], &error["error"]["type"]),
        (&json!("queue_full"), &json!("rate_limit_error"))
    );
    drop(waiting);
    server.wait_for("dsv4_num_requests_waiting", 0);
    // The last client has a running request whose answer has not begun.
    drop(running);
    server.wait_for("dsv4_num_requests_running", 0);
    let running = begin(false);
    server.wait_for("dsv4_num_requests_running", 1);
    drop(running);
    server.wait_for("dsv4_num_requests_running", 0);
    for blocks in ["dsv4_kv_blocks_used", "dsv4_kv_blocks_cached"] {
        assert_eq!(server.metric(blocks), 0, "{blocks}");
    }
    server.wait_for("dsv4_requests_total{outcome=\"cancelled\"}", 3);
    assert_eq!(server.metric("dsv4_requests_total{outcome=\"refused\"}"), 1);
    assert_eq!(server.ended(), Ended::Done);
}

/// Only completions with the same `cache_salt` share prefixes. Each is told how much it has found.
#[test]
fn another_salt_shares_nothing() {
    let limits = EngineLimits { checkpoints: 4, ..small::limits(1, 8) };
    let engine = small::engine(&small::emulated(), &HASH, limits);
    let server = Running::of(engine, settings());
    let prompt = "0123456789".repeat(13);
    let mut texts = Vec::new();
    let mut hits = 0;
    for (salt, cached) in [(json!("a"), 0), (json!("b"), 0), (json!("a"), 128), (Value::Null, 0)] {
        let asked = json!({ "prompt": prompt, "cache_salt": salt, "max_tokens": 2 });
        let answer = server.complete(&request(asked));
        texts.push(answer["choices"][0]["text"].clone());
        hits += cached;
        assert_eq!(server.metric("dsv4_kv_prefix_cache_hits_total"), hits, "{salt}");
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], cached, "{salt}");
    }
    texts.dedup();
    assert_eq!(texts.len(), 1);
    // Nothing runs: all checkpoints, one for each salt and one without, can be evicted.
    server.wait_for("dsv4_kv_checkpoints_cached", 3);
    assert_eq!(server.metric("dsv4_kv_checkpoints_used"), 0);
    assert_eq!(server.metric("dsv4_kv_checkpoints_capacity"), 4);
    assert_eq!(server.ended(), Ended::Done);
}

/// A failed step is an error for the requests in it, in both kinds of answers, and not for later ones.
#[test]
fn a_step_that_fails_is_told() {
    let device = Failing::emulated(EmuOptions { memory: 2 << 30, seed: 1 });
    let server = Running::of(small::engine(&device, &HASH, small::limits(1, 8)), settings());
    for stream in [false, true] {
        device.backend().fail(20, failing::Failure::Instead);
        let asked = request(json!({ "max_tokens": 2, "stream": stream })).to_string();
        let answer = server.send("POST", "/v1/completions", &asked);
        assert_eq!(answer.status, if stream { 200 } else { 500 });
        let error = match stream {
            true => serde_json::from_str(answer.events().last().expect("an event")).expect("JSON"),
            false => answer.json(),
        };
        assert_eq!(error["error"]["code"], "step_failed", "{error}");
        assert!(device.backend().failed().is_some(), "nothing failed");
        let text = server.complete(&request(json!({ "max_tokens": 2 })))["choices"][0].clone();
        assert_eq!(text["text"], alone("ab", None, 2));
    }
    assert_eq!(server.metric("dsv4_requests_total{outcome=\"failed\"}"), 2);
    assert_eq!(server.ended(), Ended::Done);
}

/// A panic is told as a failure of the server, and not as a shutdown, to those that run and those that wait.
#[test]
fn a_step_that_panics_is_told() {
    for stream in [false, true] {
        let device = Failing::emulated(EmuOptions { memory: 2 << 30, seed: 1 });
        let server = Running::of(small::engine(&device, &HASH, small::limits(1, 8)), settings());
        device.backend().run_before(20, || panic!("on demand"));
        let asked = request(json!({ "n": 2, "max_tokens": 2, "stream": stream })).to_string();
        let answer = server.send("POST", "/v1/completions", &asked);
        assert_eq!(answer.status, if stream { 200 } else { 500 });
        let error = match stream {
            true => serde_json::from_str(answer.events().last().expect("an event")).expect("JSON"),
            false => answer.json(),
        };
        assert_eq!(error["error"]["code"], "server_failed", "{error}");
        assert!(device.backend().has_run(), "nothing panicked");
        let end = server.ended_within(std::time::Duration::from_secs(60));
        assert!(matches!(end, Err(ServerError::Panicked)), "{end:?}");
    }
}

/// If the function panics that says when to stop, the scheduler ends too, and its cache is freed.
#[test]
fn a_stop_that_panics_ends_the_scheduler() {
    let device = small::emulated();
    let free = device.free_memory().expect("the emulator counts");
    let engine = small::engine(&device, &HASH, small::limits(1, 8));
    assert!(device.free_memory().expect("the emulator counts") < free);
    let server = Server::bind("127.0.0.1:0", engine, Text::Bytes, settings()).expect("a server");
    let run = std::panic::AssertUnwindSafe(|| server.run(|| panic!("on demand")));
    assert!(std::panic::catch_unwind(run).is_err());
    let begin = std::time::Instant::now();
    while device.free_memory().expect("the emulator counts") < free {
        assert!(begin.elapsed() < std::time::Duration::from_secs(60), "the scheduler still runs");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// Settings that do not fit the engine, and an address that is taken, are refused before anything is served.
#[test]
fn a_server_that_cannot_be_is_refused() {
    let bind = |address: &str, drafts| {
        let engine = small::engine(&small::emulated(), &HASH, small::limits(1, 8));
        Server::bind(address, engine, Text::Bytes, Settings { drafts, ..settings() }).err()
    };
    let refused = bind("127.0.0.1:0", 3);
    assert!(matches!(refused, Some(ServerError::TooManyDrafts { drafts: 3, most: 2 })));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("an address");
    let refused = bind(&taken.local_addr().expect("an address").to_string(), 2);
    assert!(matches!(refused, Some(ServerError::System { .. })));
}

#[test]
fn shutting_down_ends_what_was_taken_and_takes_nothing() {
    let server = Running::start(1, settings());
    let asked = request(json!({ "max_tokens": 60, "stream": true }));
    let mut answer = server.send("POST", "/v1/completions", &asked.to_string());
    let first = answer.chunk().expect("an event");
    server.stop();
    while server.send("GET", "/health", "").status == 200 {}
    let refused = server.send("POST", "/v1/completions", &request(json!({})).to_string());
    assert_eq!(refused.status, 503);
    assert_eq!(refused.json()["error"]["code"], "shutting_down");
    let rest = answer.text();
    assert!(rest.ends_with("data: [DONE]\n\n"), "{first}{rest}");
    assert_eq!(server.ended(), Ended::Done);
}

#[test]
fn a_shutdown_has_a_timeout() {
    let shutdown_timeout = std::time::Duration::from_millis(1);
    let server = Running::start(1, Settings { shutdown_timeout, ..settings() });
    let asked = request(json!({ "max_tokens": 900, "stream": true }));
    let mut answer = server.send("POST", "/v1/completions", &asked.to_string());
    answer.chunk().expect("an event");
    server.stop();
    let events = answer.events();
    let last: Value = serde_json::from_str(events.last().expect("events")).expect("JSON");
    assert_eq!(last["error"]["code"], "shutting_down");
    assert_eq!(server.ended(), Ended::Cut);
}
