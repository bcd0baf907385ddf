//! A minimal HTTP client for the indexer's interface.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::Value;

/// Sends a request to the indexer at `port`. Returns its answer, if it is JSON with a status of 2xx.
pub fn ask(port: u16, method: &str, path: &str, body: Option<&Value>) -> Result<Value, String> {
    let body = body.map(Value::to_string).unwrap_or_default();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).map_err(|error| error.to_string())?;
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    let mut answer = Vec::new();
    stream.write_all((head + &body).as_bytes()).map_err(|error| error.to_string())?;
    stream.read_to_end(&mut answer).map_err(|error| error.to_string())?;
    let answer = String::from_utf8(answer).map_err(|error| error.to_string())?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("no answer")?;
    if !head.starts_with("HTTP/1.0 2") && !head.starts_with("HTTP/1.1 2") {
        return Err(format!("{head}\n{body}"));
    }
    Ok(serde_json::from_str(body).unwrap_or(Value::Null))
}
