//! The prompt's tokens.

use std::path::Path;

use anyhow::Result;
use dsv4_kv_model::text::{Text, TextError};

use super::GenerateArgs;
use crate::error::InputError;

/// Most bytes of a file of token ids.
const MOST_BYTES: u64 = 64 << 20;

/// The tokens that the options give.
pub fn tokens(args: &GenerateArgs, text: &Result<Text, TextError>) -> Result<Vec<u32>> {
    let tokens = match (&args.prompt, &args.prompt_tokens) {
        (Some(prompt), _) => {
            let text = text.as_ref().map_err(|error| InputError::Text(error.to_string()))?;
            text.encode(prompt).map_err(|error| InputError::Text(error.to_string()))?
        }
        (None, Some(path)) => of_file(path)?,
        (None, None) => Vec::new(),
    };
    if tokens.is_empty() {
        return Err(InputError::EmptyPrompt.into());
    }
    Ok(tokens)
}

fn of_file(path: &Path) -> Result<Vec<u32>, InputError> {
    let refused = |reason: String| InputError::PromptTokens { path: path.into(), reason };
    let size = std::fs::metadata(path).map_err(|error| refused(error.to_string()))?.len();
    if size > MOST_BYTES {
        return Err(refused(format!("it has {size} bytes; at most {MOST_BYTES} are read")));
    }
    let content = std::fs::read_to_string(path).map_err(|error| refused(error.to_string()))?;
    let numbers = content.split(|c: char| !c.is_ascii_digit()).filter(|number| !number.is_empty());
    let number = |number: &str| {
        number.parse::<u32>().map_err(|error| refused(format!("`{number}`: {error}")))
    };
    numbers.map(number).collect()
}
