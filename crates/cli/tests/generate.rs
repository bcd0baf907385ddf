//! The command `generate`: what it refuses, what it writes, and when it ends.

#![cfg(feature = "generate")]

mod program;

use std::fs::{self, File};
use std::path::Path;
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use program::{TIMEOUT, end, kv, process, refusal, text};

/// What the model or the cache cannot do is refused as an option is.
#[test]
fn generate_refuses_tokens_and_lengths_that_the_model_lacks() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokens = folder.path().join("tokens");
    fs::write(&tokens, "1 300").expect("room for it");
    let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e/hash");
    let refused = |options: &str| {
        let mut command = kv("generate --device cpu --model");
        refusal(command.arg(&checkpoint).args(options.split_whitespace()))
    };
    let message = refused(&format!("--prompt-tokens {}", tokens.display()));
    assert!(message.contains("`300`: the model has tokens from 0 to 255"), "{message}");
    let message = refused("--prompt x --max-tokens 1048576");
    assert!(message.contains("max_context"), "{message}");
    for option in ["--seed 3", "--temperature 0 --top-p 0.5", "--temperature 0 --seed 3"] {
        let message = refused(&format!("--prompt x {option}"));
        assert!(message.contains("needs --temperature above 0"), "{option}: {message}");
    }
    for place in ["", "--attention host"] {
        let message = refused(&format!("--prompt x --attention-cluster one-block {place}"));
        assert!(message.contains("--attention-cluster needs attention on the device"), "{message}");
    }
}

#[test]
fn logits_do_not_replace_the_prompt() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokens = folder.path().join("tokens");
    fs::write(&tokens, "1 3").expect("room for it");
    let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e/hash");
    let mut command = kv("generate --device cpu --max-tokens 1 --model");
    command.arg(&checkpoint).arg("--prompt-tokens").arg(&tokens).arg("--logits").arg(&tokens);
    let message = refusal(&mut command);
    assert!(message.contains("this is the file of --prompt-tokens"), "{message}");
    assert_eq!(fs::read_to_string(&tokens).expect("it is there"), "1 3");
}

#[test]
fn logits_do_not_replace_the_model() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e/hash");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(from.join(name), folder.path().join(name)).expect("room for it");
    }
    for name in ["config.json", "model.safetensors"] {
        let mut command = kv("generate --device cpu --prompt Once --max-tokens 1 --model");
        command.arg(folder.path()).arg("--logits").arg(folder.path().join(name));
        let message = refusal(&mut command);
        assert!(message.contains("this is the file of --model"), "{message}");
        let read = |folder: &Path| fs::read(folder.join(name)).expect("it is there");
        assert!(read(folder.path()) == read(&from), "{name} was changed");
    }
}

/// Nobody reads the tokens: all of them would take an hour.
#[test]
fn generate_ends_with_its_reader() {
    let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e/hash");
    let mut command = process("generate --device cpu --prompt Once --max-tokens 20000 --model");
    command.arg(&checkpoint).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it starts");
    drop(child.stdout.take());
    let started = Instant::now();
    while child.try_wait().expect("it was started").is_none() {
        if started.elapsed() > TIMEOUT {
            child.kill().expect("it runs");
            panic!("it goes on without a reader");
        }
        sleep(Duration::from_millis(5));
    }
    let output = end(child);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
}

/// A full disk ends a run at its first token, after it has opened the file of `--logits`.
#[test]
fn a_run_that_fails_leaves_the_file_of_logits_as_it_was() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (new, old) = (folder.path().join("new"), folder.path().join("old"));
    fs::write(&old, "older logits").expect("room for it");
    let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e/hash");
    let generate = |logits: &Path| {
        let mut command = process("generate --device cpu --prompt Once --max-tokens 2 --model");
        command.arg(&checkpoint).arg("--logits").arg(logits);
        command
    };
    for logits in [&new, &old] {
        let full = File::options().write(true).open("/dev/full").expect("Linux has it");
        let output = generate(logits).stdout(full).output().expect("it starts");
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("No space left on device"));
    }
    assert!(!new.exists(), "a run that fails leaves no empty file");
    assert_eq!(fs::read_to_string(&old).expect("it is there"), "older logits");
    for logits in [&new, &old] {
        let output = generate(logits).output().expect("it starts");
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    // Logits of the prompt and of the first token, each of 256 tokens in f32.
    let bytes = fs::read(&new).expect("it was written");
    assert!(bytes.len() > 5 * 256 * 4 && bytes == fs::read(&old).expect("it was replaced"));
}
