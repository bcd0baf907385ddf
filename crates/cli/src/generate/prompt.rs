//! The prompt's tokens.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::Result;
use dsv4_kv_model::text::{Text, TextError};

use super::GenerateArgs;
use crate::error::InputError;

/// Most bytes of a file of token ids.
const MAX_BYTES: u64 = 64 << 20;

/// The tokens of the prompt that the options give.
pub fn tokens(
    args: &GenerateArgs,
    text: &Result<Text, TextError>,
    vocabulary: u32,
) -> Result<Vec<u32>> {
    let tokens = match (&args.prompt, &args.prompt_tokens) {
        (Some(prompt), _) => {
            let text = text.as_ref().map_err(|error| InputError::Text(error.to_string()))?;
            text.encode(prompt).map_err(|error| InputError::Text(error.to_string()))?
        }
        (None, Some(path)) => of_file(path, vocabulary)?,
        (None, None) => Vec::new(),
    };
    if tokens.is_empty() {
        return Err(InputError::EmptyPrompt.into());
    }
    Ok(tokens)
}

fn of_file(path: &Path, vocabulary: u32) -> Result<Vec<u32>, InputError> {
    let refused = |reason: String| InputError::PromptTokens { path: path.into(), reason };
    // The length of a pipe or a device is known only at its end.
    let mut content = String::new();
    let read =
        File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut content));
    read.map_err(|error| refused(error.to_string()))?;
    if content.len() as u64 > MAX_BYTES {
        return Err(refused(format!(
            "it has more than {MAX_BYTES} bytes; so many are read at most"
        )));
    }
    let content = content.trim();
    let list = content.strip_prefix('[').and_then(|list| list.strip_suffix(']')).unwrap_or(content);
    // A server takes lists of prompts, and here they would be one.
    if list.contains(['[', ']']) {
        let reason = "it has to be one list, of one prompt: between `[` and `]`, or without both";
        return Err(refused(reason.to_owned()));
    }
    let between = |c: char| c.is_whitespace() || c == ',';
    let numbers = list.split(between).filter(|number| !number.is_empty());
    let number = |number: &str| {
        let token =
            number.parse::<u32>().map_err(|error| refused(format!("`{number}`: {error}")))?;
        if token >= vocabulary {
            let most = vocabulary - 1;
            return Err(refused(format!("`{number}`: the model has tokens from 0 to {most}")));
        }
        Ok(token)
    };
    numbers.map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_token_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let read = |content: &str| {
            std::fs::write(file.path(), content).expect("it is written");
            of_file(file.path(), 301)
        };
        for content in ["1 20\n300", "[1, 20, 300]", "1,20,\t300,", " [1 20 300]\n"] {
            assert_eq!(read(content).expect("three tokens"), [1, 20, 300], "{content}");
        }
        for content in ["1 -5", "1.5", "301", "{\"tokens\": [1]}", "4294967296"] {
            let refused = read(content).expect_err("no token");
            assert!(matches!(refused, InputError::PromptTokens { .. }), "{content}: {refused}");
        }
        for content in ["[[1, 2], [3]]", "[[1]]", "[1] [2]", "[1, 2", "1]", "["] {
            let refused = read(content).expect_err("no list of ids").to_string();
            assert!(refused.contains("it has to be one list"), "{content}: {refused}");
        }
    }

    /// A file without a known length is read only up to the limit.
    #[cfg(unix)]
    #[test]
    fn a_device_without_an_end_is_refused() {
        let refused = of_file(Path::new("/dev/zero"), 301).expect_err("it has no end");
        let InputError::PromptTokens { reason, .. } = refused else { panic!("{refused}") };
        assert!(reason.contains(&MAX_BYTES.to_string()), "{reason}");
    }
}
