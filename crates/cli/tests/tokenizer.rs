//! A checkpoint with a `tokenizer.json`, in `generate` and `serve`. Only in builds with the feature `serve`.
//!
//! The model is the small one of `tests/e2e`. A run without a tokenizer shows which tokens it draws. Then these tokens
//! get bytes of characters that consist of several tokens, and one becomes a special token.
#![cfg(feature = "serve")]

mod serving;

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use assert_cmd::cargo::cargo_bin;
use serde_json::{Value, json};
use serving::Serving;
use tempfile::TempDir;

/// Tokens of the prompt. The first one precedes every text, the others are [`PROMPT`].
const PROMPT_TOKENS: [u32; 5] = [7, 100, 3, 200, 41];
/// Each byte is a token of the vocabulary, except that a merge makes one token of "l" and "o".
const PROMPT: &str = "h\u{e9}lo";
/// Options of the draws: often another token than the most likely one, but the same in every run.
const DRAWN: [&str; 6] = ["--temperature", "1.5", "--seed", "11", "--max-tokens", "20"];
/// The text of the first drawn tokens, one byte per token.
const SPELLED: &str = "\u{20ac}\u{1f600} \u{e9}A\u{4f60}\n";

/// The bytes of each token of the vocabulary.
type Vocabulary = BTreeMap<u32, Vec<u8>>;

/// A copy of the small checkpoint.
fn copy() -> TempDir {
    let folder = tempfile::tempdir().expect("a directory");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(serving::checkpoint().join(file), folder.path().join(file)).expect("room");
    }
    folder
}

/// The JSON that `generate` prints.
fn generate(folder: &Path, prompt: [&str; 2]) -> Value {
    let mut command = Command::new(cargo_bin("dsv4-kv"));
    command.args(["generate", "--device", "cpu", "--json", "--model"]).arg(folder);
    let output = command.args(prompt).args(DRAWN).output().expect("a program");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn tokens(report: &Value) -> Vec<u32> {
    let tokens = report["tokens"].as_array().expect("tokens").iter();
    tokens.map(|token| token.as_u64().expect("an id") as u32).collect()
}

/// The character that stands for a byte in a byte-level vocabulary: printable bytes as in Latin-1, the others from
/// U+0100, in order.
fn written(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&other| !is_printable(other)).count() as u32;
    char::from_u32(0x100 + before).expect("a character")
}

fn name(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| written(byte)).collect()
}

/// A byte-level BPE tokenizer with these tokens and two special tokens: `before`, which precedes a text, and `special`.
fn tokenizer(vocabulary: &Vocabulary, before: u32, special: u32) -> Value {
    let mut names: BTreeMap<String, u32> =
        vocabulary.iter().map(|(&id, bytes)| (name(bytes), id)).collect();
    let added = [("<before>", before), ("<special>", special)];
    names.extend(added.map(|(content, id)| (content.to_owned(), id)));
    let added = added.map(|(content, id)| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true })
    });
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                        "use_regex": true });
    let sequence = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let first = json!({ "SpecialToken": { "id": "<before>", "type_id": 0 } });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": bytes, "decoder": bytes,
        "post_processor": {
            "type": "TemplateProcessing", "single": [first, sequence], "pair": [sequence, sequence],
            "special_tokens": { "<before>": { "id": "<before>", "ids": [before], "tokens": ["<before>"] } },
        },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": names, "merges": ["l o"],
        },
    })
}

/// Gives bytes to the model's 256 tokens. Of the distinct drawn tokens that are not in the prompt, the second becomes
/// special.
fn vocabulary(drawn: &[u32]) -> (Vocabulary, u32) {
    let mut vocabulary = Vocabulary::new();
    let [before, prompt @ ..] = PROMPT_TOKENS;
    for (id, bytes) in prompt.into_iter().zip([&b"h"[..], b"\xc3", b"\xa9", b"lo"]) {
        vocabulary.insert(id, bytes.to_vec());
    }
    let mut others: Vec<u32> = Vec::new();
    for &id in drawn {
        if id != before && !vocabulary.contains_key(&id) && !others.contains(&id) {
            others.push(id);
        }
    }
    let special = others.remove(1);
    others.extend((0..=255).filter(|id| !drawn.contains(id) && !PROMPT_TOKENS.contains(id)));
    // Bytes that occur in no text are left out, so that there are tokens for the special ones and the merge.
    let spelled = SPELLED.bytes();
    let more = (0..=0xF4).filter(|byte| !matches!(byte, 0xC0 | 0xC1));
    for byte in spelled.chain(more) {
        if !vocabulary.values().any(|bytes| *bytes == [byte])
            && let Some(id) = (!others.is_empty()).then(|| others.remove(0))
        {
            vocabulary.insert(id, vec![byte]);
        }
    }
    (vocabulary, special)
}

/// The text of tokens. Special tokens have none.
fn text(vocabulary: &Vocabulary, tokens: &[u32]) -> String {
    let bytes = tokens.iter().filter_map(|id| vocabulary.get(id)).flatten().copied();
    String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
}

/// The parts of a stream's text, and its finish reason.
fn streamed(serving: &Serving, model: &str) -> (Vec<String>, String) {
    let body = json!({ "model": model, "prompt": PROMPT, "max_tokens": 20, "temperature": 1.5,
                       "seed": 11, "stream": true });
    let mut answer = String::new();
    serving.complete(&body.to_string()).read_to_string(&mut answer).expect("valid UTF-8");
    let (mut parts, mut finish) = (Vec::new(), String::new());
    for event in answer.lines().filter_map(|line| line.strip_prefix("data: {")) {
        let event: Value = serde_json::from_str(&format!("{{{event}")).expect("JSON");
        let choice = &event["choices"][0];
        parts.push(choice["text"].as_str().expect("text").to_owned());
        finish.extend(choice["finish_reason"].as_str());
    }
    (parts, finish)
}

/// The small checkpoint with a tokenizer.
struct Small {
    folder: TempDir,
    vocabulary: Vocabulary,
    /// The tokens that are drawn after the prompt.
    drawn: Vec<u32>,
    /// One of the drawn tokens, which has no text.
    special: u32,
}

impl Small {
    fn new() -> Self {
        static DRAWN_TOKENS: OnceLock<Vec<u32>> = OnceLock::new();
        let folder = copy();
        let draw = || {
            let ids = folder.path().join("prompt.txt");
            fs::write(&ids, format!("{PROMPT_TOKENS:?}")).expect("room");
            let by_ids = ["--prompt-tokens", ids.to_str().expect("a path")];
            tokens(&generate(folder.path(), by_ids))
        };
        let drawn = DRAWN_TOKENS.get_or_init(draw).clone();
        let (vocabulary, special) = vocabulary(&drawn);
        let json = tokenizer(&vocabulary, PROMPT_TOKENS[0], special).to_string();
        fs::write(folder.path().join("tokenizer.json"), json).expect("room");
        Self { folder, vocabulary, drawn, special }
    }

    /// Generates from text, and sends the same request to a server. Both must end after the first `count` tokens with
    /// text, for the reasons `finish`: that of `generate`, and that of the server.
    fn check(&self, count: usize, finish: [&str; 2]) {
        let Self { folder, vocabulary, drawn, .. } = self;
        let expected = text(vocabulary, &drawn[..count]);
        let report = generate(folder.path(), ["--prompt", PROMPT]);
        assert_eq!(report["prompt_tokens"], PROMPT_TOKENS.len());
        assert_eq!(tokens(&report)[..count], drawn[..count], "the prompt has other tokens");
        assert_eq!((&report["text"], &report["finish"]), (&json!(expected), &json!(finish[0])));
        let name = folder.path().file_name().expect("a name").to_string_lossy();
        let serving = Serving::start(folder.path(), "");
        let (parts, found) = streamed(&serving, &name);
        assert_eq!((parts.concat(), &found[..]), (expected, finish[1]));
        assert!(parts.len() * 2 > count, "{parts:?}");
        serving.signal("TERM");
        assert_eq!(serving.exit_code(), Some(0));
    }
}

/// The text of a prompt, of generated tokens and of a stream is that of the vocabulary.
#[test]
fn text_goes_through_the_tokenizer() {
    let small = Small::new();
    let all = text(&small.vocabulary, &small.drawn);
    assert!(SPELLED.chars().take(3).all(|character| all.contains(character)), "{all}");
    small.check(small.drawn.len(), ["length", "length"]);
}

/// Settings for training in the file do not truncate or pad a prompt. A tokenizer that draws tokens at random is
/// refused, and with token ids told.
#[test]
fn a_prompt_has_the_tokens_of_its_text() {
    let small = Small::new();
    let path = small.folder.path().join("tokenizer.json");
    let mut file: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
    file["truncation"] =
        json!({ "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0 });
    file["padding"] = json!({ "strategy": { "Fixed": 9 }, "direction": "Right", "pad_to_multiple_of": null,
                              "pad_id": 0, "pad_type_id": 0, "pad_token": "<special>" });
    fs::write(&path, file.to_string()).expect("room");
    let report = generate(small.folder.path(), ["--prompt", PROMPT]);
    assert_eq!(report["prompt_tokens"], PROMPT_TOKENS.len());
    assert_eq!(tokens(&report), small.drawn);

    file["model"]["dropout"] = json!(0.5);
    fs::write(&path, file.to_string()).expect("room");
    let ids = small.folder.path().join("prompt.txt");
    fs::write(&ids, format!("{PROMPT_TOKENS:?}")).expect("room");
    let ran = |prompt: [&str; 2], code| {
        let mut command = Command::new(cargo_bin("dsv4-kv"));
        command.args(["generate", "--device", "cpu", "--json", "--model"]).arg(small.folder.path());
        let output = command.args(prompt).args(DRAWN).output().expect("a program");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{error}");
        assert!(error.contains("dropout is 0.5"), "{error}");
        output
    };
    ran(["--prompt", PROMPT], 2);
    // Ids need no tokenizer; that there is no text has a reason.
    let output = ran(["--prompt-tokens", ids.to_str().expect("a path")], 0);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(tokens(&report), small.drawn);
    assert_eq!(report["text"], Value::Null);
}

/// A token that ends a text is not part of the text.
#[test]
fn the_end_is_a_special_token() {
    let small = Small::new();
    let config = small.folder.path().join("config.json");
    let mut fields: Value =
        serde_json::from_slice(&fs::read(&config).expect("a file")).expect("JSON");
    fields["eos_token_id"] = small.special.into();
    fs::write(&config, fields.to_string()).expect("room");
    let end = small.drawn.iter().position(|&id| id == small.special).expect("it is drawn");
    small.check(end, ["end", "stop"]);
}
