//! The prompt in front of a completion, for requests with `echo`.

use dsv4_kv_model::text::{Text, TextStream};

/// A prompt as a client gets it back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Echo {
    /// Its text.
    pub text: String,
    /// Its first token.
    pub first: u32,
    /// For each token, the number of characters before it.
    pub offsets: Vec<usize>,
}

impl Echo {
    /// The echo of a prompt of token ids. Special tokens have no text, as in a completion.
    pub fn of_tokens(tokens: &[u32], tokenizer: &Text) -> Self {
        let (mut stream, mut text, mut characters) = (TextStream::default(), String::new(), 0);
        let mut offsets = Vec::with_capacity(tokens.len());
        for &token in tokens {
            offsets.push(characters);
            let decoded = stream.push(tokenizer, token);
            characters += decoded.chars().count();
            text += &decoded;
        }
        text += &stream.finish();
        Self { text, first: first(tokens), offsets }
    }

    /// The echo of a text with these tokens: the text itself. A token that is not in the text, such as one that the
    /// tokenizer puts before it, has no characters.
    pub fn of_text(text: String, tokens: &[u32], tokenizer: &Text) -> Self {
        let (mut at, mut characters) = (0, 0);
        let mut offsets = Vec::with_capacity(tokens.len());
        for &token in tokens {
            offsets.push(characters);
            let bytes = tokenizer.bytes_or_special(token).unwrap_or_default();
            if text.as_bytes()[at..].starts_with(&bytes) {
                // A character counts as before a token if it ends there.
                let ends = at + 1..=at + bytes.len();
                characters += ends.filter(|&end| text.is_char_boundary(end)).count();
                at += bytes.len();
            }
        }
        Self { text, first: first(tokens), offsets }
    }
}

/// The first token of a prompt, which has one.
fn first(tokens: &[u32]) -> u32 {
    tokens.first().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A character counts with the token that completes it, and the text of ids is that of a completion.
    #[test]
    fn offsets_are_in_characters() {
        let tokens = Text::Bytes.encode("aé€z").expect("text");
        let offsets = vec![0, 1, 1, 2, 2, 2, 3];
        for echo in [
            Echo::of_text("aé€z".into(), &tokens, &Text::Bytes),
            Echo::of_tokens(&tokens, &Text::Bytes),
        ] {
            assert_eq!(echo, Echo { text: "aé€z".into(), first: 97, offsets: offsets.clone() });
        }
        let echo = Echo::of_tokens(&[0x61, 0xC3], &Text::Bytes);
        assert_eq!((echo.text.as_str(), echo.offsets), ("a\u{FFFD}", vec![0, 1]));
    }

    /// A token before the text has no characters, and shifts none.
    #[test]
    fn a_token_before_the_text_has_no_characters() {
        let echo = Echo::of_text("ab".into(), &[0, 97, 98], &Text::Bytes);
        assert_eq!(echo, Echo { text: "ab".into(), first: 0, offsets: vec![0, 0, 1] });
    }
}
