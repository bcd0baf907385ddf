//! What load generators, balancers and `curl` rely on.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use dsv4_kv_server::{Ended, Settings};
use serde_json::{Value, json};

use crate::client::{Answer, Running, settings};
use crate::http::{alone, request, streamed, tokens_alone};

/// With `ignore_eos` a completion has all its tokens, with and without drafts: the load of a benchmark is the same in
/// every run.
#[test]
fn a_benchmark_gets_all_its_tokens() {
    let tokens = tokens_alone("ab", None, 9);
    let end = tokens[2];
    let before = 1 + tokens.iter().position(|&token| token == end).expect("it is the third");
    for drafts in [0, 2] {
        let server = Running::start(2, Settings { drafts, end: vec![end], ..settings() });
        let short = server.complete(&request(json!({ "max_tokens": 9 })));
        assert_eq!(short["choices"][0]["finish_reason"], "stop");
        assert_eq!(short["usage"]["completion_tokens"], before);
        for stream in [false, true] {
            // As `vllm bench serve` sends it.
            let mut asked = request(json!({
                "max_tokens": 9, "min_tokens": 9, "ignore_eos": true, "repetition_penalty": 1.0, "logprobs": null,
                "stream": stream,
            }));
            if stream {
                asked["stream_options"] = json!({ "include_usage": true });
            }
            let answer = server.send("POST", "/v1/completions", &asked.to_string());
            let (choice, usage) = match stream {
                true => {
                    let (choices, usage) = streamed(&answer.events());
                    (choices[0].clone(), usage)
                }
                false => {
                    let answer = answer.json();
                    (answer["choices"][0].clone(), answer["usage"].clone())
                }
            };
            assert_eq!(choice["text"], alone("ab", None, 9));
            assert_eq!(choice["finish_reason"], "length");
            assert_eq!(usage["completion_tokens"], 9);
        }
        assert_eq!(server.ended(), Ended::Done);
    }
}

/// The first model has the fields by which clients of vLLM choose its name, and the length of prompts.
#[test]
fn the_model_has_the_fields_of_vllm() {
    let server = Running::start(1, settings());
    let model = server.send("GET", "/v1/models", "").json()["data"][0].clone();
    assert_eq!(model["root"], "small/hash");
    assert_eq!((&model["parent"], &model["max_model_len"]), (&Value::Null, &json!(1024)));
    server.ended();
}

/// As GuideLLM asks: each event has the token counts so far.
#[test]
fn a_stream_counts_its_tokens() {
    let server = Running::start(1, settings());
    let options = json!({ "include_usage": true, "continuous_usage_stats": true });
    let asked = request(json!({ "max_tokens": 6, "stream": true, "stream_options": options }));
    let events = server.send("POST", "/v1/completions", &asked.to_string()).events();
    let count = |event: &String| {
        let event: Value = serde_json::from_str(event).expect("JSON");
        assert_eq!(event["usage"]["prompt_tokens"], 2);
        event["usage"]["completion_tokens"].as_u64().expect("a count")
    };
    let (_, events) = events.split_last().expect("events");
    let counts = Vec::from_iter(events.iter().map(count));
    assert!(counts[0] > 0 && counts.is_sorted(), "{counts:?}");
    assert_eq!(counts.last(), Some(&6));
    server.ended();
}

/// Sends a GET through a connection that stays open. Returns the head of the answer.
fn health(connection: &mut BufReader<TcpStream>) -> String {
    let asked = b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n";
    connection.get_mut().write_all(asked).expect("it is sent");
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert!(connection.read_line(&mut head).expect("a line") > 0, "it ends early: {head}");
    }
    let head = head.to_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length = length.and_then(|length| length.parse().ok()).expect("a length");
    connection.read_exact(&mut vec![0; length]).expect("a body");
    head
}

/// A server that shuts down closes a connection with its next answer, so that a retry goes to another server. Streams
/// run on.
#[test]
fn a_refused_client_does_not_come_back() {
    let server = Running::start(1, settings());
    let asked = request(json!({ "max_tokens": 60, "stream": true }));
    let mut stream = server.send("POST", "/v1/completions", &asked.to_string());
    stream.chunk().expect("an event");
    let mut kept = BufReader::new(server.connect());
    assert!(!health(&mut kept).contains("connection: close"));
    server.stop();
    while server.send("GET", "/health", "").status == 200 {}
    let head = health(&mut kept);
    assert!(head.starts_with("http/1.1 503") && head.contains("connection: close"), "{head}");
    assert_eq!(kept.read(&mut [0]).expect("the end"), 0);
    assert!(stream.text().ends_with("data: [DONE]\n\n"));
    assert_eq!(server.ended(), Ended::Done);
}

/// Sends the head of a request with these headers, and the beginning of a body.
fn begin(server: &Running, headers: &str, body: &str) -> TcpStream {
    let mut connection = server.connect();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\nconnection: close\r\n";
    write!(connection, "{head}{headers}\r\n\r\n{body}").expect("it is sent");
    connection
}

/// A client that asks first is told before it sends a body that is refused.
#[test]
fn who_asks_sends_no_body_in_vain() {
    let server = Running::start(1, settings());
    let asks = "expect: 100-continue\r\ncontent-type";
    for (headers, status) in [
        (format!("{asks}: application/json\r\ncontent-length: 1000000000"), 413),
        (format!("{asks}: text/plain\r\ncontent-length: 2"), 415),
        (format!("{asks}: application/json\r\ncontent-encoding: gzip\r\ncontent-length: 2"), 415),
        (format!("{asks}: Application/vnd.x+JSON; charset=utf-8\r\ncontent-length: 2"), 100),
    ] {
        assert_eq!(Answer::read(begin(&server, &headers, "")).status, status, "{headers}");
    }
    // Who does not ask gets the same answers.
    let kind = "content-type: application/json\r\ncontent-encoding";
    for (encoding, status) in [("gzip", 415), ("identity", 404)] {
        let headers = format!("{kind}: {encoding}\r\ncontent-length: 28");
        let body = r#"{"model": "x", "prompt": ""}"#;
        let answer = Answer::read(begin(&server, &headers, body));
        assert_eq!(answer.status, status, "{encoding}");
    }
    server.ended();
}

/// A client that leaves while it sends its body is not counted as refused; one whose body is no body is.
#[test]
fn who_leaves_while_sending_has_left() {
    let server = Running::start(1, settings());
    let headers = "content-type: application/json\r\ncontent-length: 100";
    drop(begin(&server, headers, r#"{"model": "#));
    server.wait_for("dsv4_requests_total{outcome=\"cancelled\"}", 1);
    assert_eq!(server.metric("dsv4_requests_total{outcome=\"refused\"}"), 0);
    let headers = "content-type: application/json\r\ntransfer-encoding: chunked";
    let _broken = begin(&server, headers, "no length\r\n");
    server.wait_for("dsv4_requests_total{outcome=\"refused\"}", 1);
    assert_eq!(server.metric("dsv4_requests_total{outcome=\"cancelled\"}"), 1);
    server.ended();
}
