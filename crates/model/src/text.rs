//! Text to tokens and back.

use std::path::{Path, PathBuf};

/// How text is encoded as tokens.
#[derive(Clone, Debug)]
pub enum Text {
    /// One token per byte, for models with a vocabulary of 256.
    Bytes,
    /// The tokenizer of the checkpoint's `tokenizer.json`.
    #[cfg(feature = "tokenizers")]
    Tokenizer(Box<tokenizers::Tokenizer>),
}

/// Why text cannot be encoded, or a tokenizer cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// There is no tokenizer, and the vocabulary is not one of bytes.
    #[error(
        "{path} does not exist, and a vocabulary of {vocabulary} tokens is not one of bytes; \
         give token ids instead of text",
        path = path.display()
    )]
    NoTokenizer {
        /// The path at which it was expected.
        path: PathBuf,
        /// Size of the vocabulary.
        vocabulary: u32,
    },
    /// This program was built without the feature `tokenizers`.
    #[error("{path} needs the feature `tokenizers`, without which this program was built", path = path.display())]
    NotBuiltIn {
        /// The file.
        path: PathBuf,
    },
    /// A file that is no usable tokenizer, or text that the tokenizer refuses.
    #[error("{path}: {reason}", path = path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// The error.
        reason: String,
    },
}

impl Text {
    /// The tokenizer of the checkpoint in `folder`: its `tokenizer.json`, or bytes for a vocabulary of 256.
    ///
    /// # Errors
    /// [`TextError`].
    pub fn of_checkpoint(folder: &Path, vocabulary: u32) -> Result<Self, TextError> {
        let path = folder.join("tokenizer.json");
        match path.exists() {
            true => Self::from_file(path),
            false if vocabulary == 256 => Ok(Self::Bytes),
            false => Err(TextError::NoTokenizer { path, vocabulary }),
        }
    }

    #[cfg(feature = "tokenizers")]
    fn from_file(path: PathBuf) -> Result<Self, TextError> {
        let refused = |path, reason| TextError::Refused { path, reason };
        let mut tokenizer = match tokenizers::Tokenizer::from_file(&path) {
            Ok(tokenizer) => tokenizer,
            Err(reason) => return Err(refused(path, reason.to_string())),
        };
        // Truncation and padding settings in the file would shorten or lengthen prompts.
        tokenizer.with_padding(None);
        if let Err(reason) = tokenizer.with_truncation(None) {
            return Err(refused(path, reason.to_string()));
        }
        if let tokenizers::ModelWrapper::BPE(bpe) = tokenizer.get_model()
            && let Some(dropout) = bpe.dropout.filter(|&dropout| dropout > 0.0)
        {
            let reason = format!(
                "the same text would get other tokens each time: dropout is {dropout}; set it to null"
            );
            return Err(refused(path, reason));
        }
        Ok(Self::Tokenizer(Box::new(tokenizer)))
    }

    #[cfg(not(feature = "tokenizers"))]
    fn from_file(path: PathBuf) -> Result<Self, TextError> {
        Err(TextError::NotBuiltIn { path })
    }

    /// The tokens of a text.
    ///
    /// # Errors
    /// [`TextError::Refused`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        match self {
            Self::Bytes => Ok(text.bytes().map(u32::from).collect()),
            #[cfg(feature = "tokenizers")]
            Self::Tokenizer(tokenizer) => match tokenizer.encode(text, true) {
                Ok(encoding) => Ok(encoding.get_ids().to_vec()),
                Err(reason) => {
                    Err(TextError::Refused { path: "text".into(), reason: reason.to_string() })
                }
            },
        }
    }

    /// Most bytes of text that one token encodes, which bounds a text's tokens from below. `None` if the tokenizer may
    /// drop text, or encode text of any length as one token.
    #[must_use]
    pub fn most_bytes_per_token(&self) -> Option<usize> {
        match self {
            Self::Bytes => Some(1),
            #[cfg(feature = "tokenizers")]
            Self::Tokenizer(tokenizer) => most_bytes_per_token(tokenizer),
        }
    }

    /// The name of a token: its text, or if that is not valid text, its bytes or its name in the vocabulary.
    #[must_use]
    pub fn name(&self, token: u32) -> String {
        match self {
            Self::Bytes => match String::from_utf8(self.bytes(&[token])) {
                Ok(text) => text,
                Err(error) => bytes_name(error.as_bytes()),
            },
            #[cfg(feature = "tokenizers")]
            Self::Tokenizer(tokenizer) => match tokenizer.decode(&[token], false) {
                Ok(text) if !text.is_empty() && !text.contains(char::REPLACEMENT_CHARACTER) => text,
                _ => match tokenizer.id_to_token(token) {
                    Some(name) => {
                        bytes_of(tokenizer, &name).map_or(name, |bytes| bytes_name(&bytes))
                    }
                    None => format!("token:{token}"),
                },
            },
        }
    }

    /// The bytes that `tokens` decode to at the start of a text; the last character may still be incomplete.
    fn bytes(&self, tokens: &[u32]) -> Vec<u8> {
        match self {
            Self::Bytes => tokens.iter().map(|&token| token as u8).collect(),
            #[cfg(feature = "tokenizers")]
            Self::Tokenizer(tokenizer) => {
                tokenizer.decode(tokens, true).unwrap_or_default().into_bytes()
            }
        }
    }
}

/// The name of bytes that are not valid text, in OpenAI's notation.
fn bytes_name(bytes: &[u8]) -> String {
    let bytes: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
    format!("bytes:{bytes}")
}

/// The bytes of a token, if its name states them: as `<0xE2>`, or as the characters of a byte-level vocabulary.
#[cfg(feature = "tokenizers")]
fn bytes_of(tokenizer: &tokenizers::Tokenizer, name: &str) -> Option<Vec<u8>> {
    let digits = name.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    if let Some(byte) = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
        return Some(vec![byte]);
    }
    let is_byte_level =
        matches!(tokenizer.get_decoder(), Some(tokenizers::DecoderWrapper::ByteLevel(_)));
    if is_byte_level { byte_level(name) } else { None }
}

/// The bytes of a token of a byte-level vocabulary. Its name has one character per byte: printable bytes as in Latin-1,
/// the others as characters from U+0100 on, in order (`bytes_to_unicode` of GPT-2). `None` for other names.
#[cfg(feature = "tokenizers")]
fn byte_level(name: &str) -> Option<Vec<u8>> {
    let is_printable = |byte: &u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let byte = |character: char| match u32::from(character) {
        code @ 0..=0xFF => Some(code as u8).filter(is_printable),
        code => (0..=0xFF).filter(|byte| !is_printable(byte)).nth(code as usize - 0x100),
    };
    name.chars().map(byte).collect()
}

/// As [`Text::most_bytes_per_token`]: known for a byte-level BPE that has all bytes and gets the whole text unchanged.
#[cfg(feature = "tokenizers")]
fn most_bytes_per_token(tokenizer: &tokenizers::Tokenizer) -> Option<usize> {
    use tokenizers::pre_tokenizers::PreTokenizerWrapper as Before;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::{ModelWrapper, NormalizerWrapper, SplitDelimiterBehavior};

    let normalizes = tokenizer.get_normalizer().is_some_and(
        |first| !matches!(first, NormalizerWrapper::Sequence(all) if all.as_ref().is_empty()),
    );
    let before = tokenizer.get_pre_tokenizer()?;
    let before = match before {
        Before::Sequence(all) => all.as_ref(),
        one => std::slice::from_ref(one),
    };
    let keeps = |one: &Before| match one {
        Before::Split(split) => split.behavior != SplitDelimiterBehavior::Removed,
        Before::ByteLevel(_) | Before::Digits(_) => true,
        _ => false,
    };
    let is_byte_level = before.iter().any(|one| matches!(one, Before::ByteLevel(_)));
    let ModelWrapper::BPE(bpe) = tokenizer.get_model() else { return None };
    let is_plain = bpe.continuing_subword_prefix.is_none() && bpe.end_of_word_suffix.is_none();
    let vocabulary = tokenizer.get_vocab(true);
    let has_all =
        ByteLevel::alphabet().iter().all(|byte| vocabulary.contains_key(&byte.to_string()));
    // An added token that strips adjacent spaces may encode any number of them.
    let added = tokenizer.get_added_tokens_decoder();
    let is_exact = added.values().all(|token| !token.lstrip && !token.rstrip);
    let is_known = !normalizes && before.iter().all(keeps) && is_byte_level && is_plain && has_all;
    // A token's name has a character for each byte, or is the text that it encodes.
    let longest = vocabulary.keys().map(String::len).max()?;
    (is_known && is_exact).then_some(longest)
}

/// Most tokens without text that are kept at the start.
const MOST_EMPTY: usize = 4;
/// Bytes of the longest UTF-8 character.
const CHARACTER: usize = 4;
/// Most tokens that wait for a character to be complete. After that, replacement characters are returned, except for
/// what may still become a character.
const MOST_WAITING: usize = MOST_EMPTY + CHARACTER;

/// Decodes tokens that arrive one by one. Characters are returned only once they are complete.
#[derive(Debug, Default)]
pub struct TextStream {
    tokens: Vec<u32>,
    /// Tokens before `given` were returned. Those from `context` on are decoded again with the next ones, as a token's
    /// text may depend on the one before it.
    given: usize,
    context: usize,
}

impl TextStream {
    /// Takes a token, and returns the text that it completes, which may be empty. Few tokens wait, so that the time per
    /// token does not grow with their number.
    pub fn push(&mut self, text: &Text, token: u32) -> String {
        self.tokens.push(token);
        let (decoded, waiting) = (self.pending(text), self.tokens.len() - self.given);
        // Drop tokens that decode to nothing, such as special tokens. At the start they may be spaces, which decoders
        // leave out there.
        if decoded.is_empty() && (self.given > 0 || waiting > MOST_EMPTY) {
            self.tokens.truncate(self.given);
            return String::new();
        }
        let end = self.tokens.len();
        if is_complete(&decoded) {
            return self.give(end, &decoded);
        }
        if waiting <= MOST_WAITING {
            return String::new();
        }
        // Keep as many tokens as may begin one character, if the tokens before them decode to the text before it.
        let before = without_last(&decoded);
        let open = (1..CHARACTER).rev().find(|open| self.decode(text, end - open) == before);
        match open {
            Some(open) => self.give(end - open, before),
            None => self.give(end, &decoded),
        }
    }

    /// Returns `decoded` as text, and marks the tokens before index `end` as returned.
    fn give(&mut self, end: usize, decoded: &[u8]) -> String {
        self.context = self.given;
        self.given = end;
        String::from_utf8_lossy(decoded).into_owned()
    }

    /// Returns the remaining text at the end, with replacement characters for invalid bytes.
    pub fn finish(&mut self, text: &Text) -> String {
        let decoded = self.pending(text);
        self.given = self.tokens.len();
        String::from_utf8_lossy(&decoded).into_owned()
    }

    /// The bytes of the tokens that were not returned yet.
    fn pending(&self, text: &Text) -> Vec<u8> {
        self.decode(text, self.tokens.len())
    }

    /// The bytes of the tokens from `given` to `end`.
    fn decode(&self, text: &Text, end: usize) -> Vec<u8> {
        let before = text.bytes(&self.tokens[self.context..self.given]);
        let all = text.bytes(&self.tokens[self.context..end]);
        all.get(before.len()..).unwrap_or_default().to_vec()
    }
}

/// Whether text ends with a complete character. Decoders replace bytes that begin no character.
fn is_complete(bytes: &[u8]) -> bool {
    let Some(last) = bytes.utf8_chunks().last() else { return false };
    let replaced = last.valid().ends_with(char::REPLACEMENT_CHARACTER) && last.invalid().is_empty();
    !ends_open(bytes) && !replaced
}

/// Text without the incomplete character at its end, or without its last replacement character.
fn without_last(bytes: &[u8]) -> &[u8] {
    let open = bytes.utf8_chunks().last().map_or(0, |last| last.invalid().len());
    let last = if open > 0 { open } else { char::REPLACEMENT_CHARACTER.len_utf8() };
    &bytes[..bytes.len().saturating_sub(last)]
}

/// Whether text ends inside a character.
fn ends_open(bytes: &[u8]) -> bool {
    let last = bytes.utf8_chunks().last().map_or(&[][..], |last| last.invalid());
    matches!(std::str::from_utf8(last), Err(error) if error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "tokenizers")]
    use super::bytes_of;
    use super::{Text, TextStream};

    #[test]
    fn characters_come_whole() {
        let (text, mut stream) = (Text::Bytes, TextStream::default());
        let tokens = text.encode("aé€😀z").expect("text");
        let parts: Vec<String> = tokens.iter().map(|&t| stream.push(&text, t)).collect();
        assert_eq!(parts, ["a", "", "é", "", "", "€", "", "", "", "😀", "z"]);
        assert_eq!(stream.finish(&text), "");
    }

    /// Bytes that never become a character are returned too, so that the time per token does not grow.
    #[test]
    fn few_tokens_wait() {
        let (text, mut stream) = (Text::Bytes, TextStream::default());
        // Replacement characters, which could also stand for an incomplete character.
        let tokens = text.encode(&"\u{FFFD}".repeat(100)).expect("text");
        let (mut all, mut most) = (String::new(), 0);
        for token in tokens {
            all += &stream.push(&text, token);
            most = most.max(stream.tokens.len() - stream.context);
        }
        all += &stream.finish(&text);
        assert_eq!(all, "\u{FFFD}".repeat(100));
        assert!(most <= 2 * (super::MOST_WAITING + 1), "{most} tokens were decoded at once");
        // A character after them is not cut, wherever it begins.
        for count in 0..12 {
            let text_of = format!("{}\u{1F600}{}", "\u{FFFD}".repeat(count), "\u{FFFD}é".repeat(3));
            let (tokens, mut stream) =
                (text.encode(&text_of).expect("text"), TextStream::default());
            let mut all: String = tokens.iter().map(|&token| stream.push(&text, token)).collect();
            all += &stream.finish(&text);
            assert_eq!(all, text_of);
        }
        // Bytes that begin characters but never complete one.
        let mut stream = TextStream::default();
        for byte in std::iter::repeat_n(0xF0, 100) {
            stream.push(&text, byte);
            let decoded = stream.tokens.len() - stream.context;
            assert!(decoded <= 2 * (super::MOST_WAITING + 1), "{decoded} tokens");
        }
    }

    /// Tokens without text are not decoded again with later tokens, nor do they change later text.
    #[cfg(feature = "tokenizers")]
    #[test]
    fn tokens_without_a_text_do_not_wait() {
        let json = r#"{
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "added_tokens": [{ "id": 2, "content": "<e>", "single_word": false, "lstrip": false,
                               "rstrip": false, "normalized": false, "special": true }],
            "pre_tokenizer": null, "post_processor": null,
            "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
            "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                       "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                       "vocab": { "a": 0, "\u00c3": 1, "<e>": 2, "\u00a9": 3 }, "merges": [] }
        }"#;
        let text = Text::Tokenizer(Box::new(json.parse().expect("a tokenizer")));
        let mut stream = TextStream::default();
        let mut tokens = vec![2; 50];
        tokens.extend([0, 2, 2, 1, 3]);
        tokens.extend([2; 50]);
        tokens.extend([1, 3, 0]);
        let mut all = String::new();
        for token in tokens {
            all += &stream.push(&text, token);
            let decoded = stream.tokens.len() - stream.context;
            assert!(decoded <= super::MOST_WAITING + 1, "{decoded} tokens were decoded at once");
        }
        assert_eq!(all, "aééa");
        assert_eq!(stream.finish(&text), "");
    }

    /// As with bytes: each token is a byte, which a decoder replaces until its character is complete.
    #[cfg(feature = "tokenizers")]
    #[test]
    fn a_character_behind_replaced_ones_is_not_cut() {
        let json = r#"{
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "added_tokens": [],
            "pre_tokenizer": null, "post_processor": null,
            "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
            "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                       "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                       "vocab": { "ð": 0, "Ł": 1, "ĺ": 2, "Ģ": 3, "ÿ": 4, "a": 5 }, "merges": [] }
        }"#;
        let text = Text::Tokenizer(Box::new(json.parse().expect("a tokenizer")));
        for count in 0..24 {
            let mut tokens = vec![4; count];
            tokens.extend([0, 1, 2, 0, 0, 1, 2, 3, 5]);
            let mut stream = TextStream::default();
            let mut all = String::new();
            for token in tokens {
                all += &stream.push(&text, token);
                let decoded = stream.tokens.len() - stream.context;
                assert!(decoded <= 2 * (super::MOST_WAITING + 1), "{decoded} tokens");
            }
            all += &stream.finish(&text);
            let expected = format!("{}\u{FFFD}\u{FFFD}\u{1F600}a", "\u{FFFD}".repeat(count));
            assert_eq!(all, expected, "behind {count}");
        }
    }

    #[test]
    fn tokens_have_names() {
        assert_eq!([0x41, 0xC3].map(|token| Text::Bytes.name(token)), ["A", "bytes:\\xc3"]);
    }

    /// A token of incomplete bytes is named by its bytes, not by the character that stands for them.
    #[cfg(feature = "tokenizers")]
    #[test]
    fn tokens_of_a_byte_level_vocabulary_have_names() {
        let json = r#"{
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null,
            "decoder": DECODER,
            "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                       "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                       "vocab": { "a": 0, "\u00e2": 1, "\u00c3\u00a2": 2, "\u00e2\u0124": 3, "\u0120b": 4 },
                       "merges": [] }
        }"#;
        let bytes = r#"{ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true }"#;
        let with = |decoder| json.replace("DECODER", decoder).parse().expect("a tokenizer");
        let text = Text::Tokenizer(Box::new(with(bytes)));
        let names = [0, 1, 2, 3, 4, 5].map(|token| text.name(token));
        assert_eq!(names, ["a", "bytes:\\xe2", "\u{e2}", "bytes:\\xe2\\x82", " b", "token:5"]);
        // A vocabulary that is not byte-level.
        let plain: tokenizers::Tokenizer = with("null");
        let names = ["<0xE2>", "\u{e2}", "<0xG0>"].map(|name| bytes_of(&plain, name));
        assert_eq!(names, [Some(vec![0xE2]), None, None]);
    }

    /// A text has at least its bytes divided by the longest token as tokens, if the tokenizer drops no text.
    #[cfg(feature = "tokenizers")]
    #[test]
    fn bytes_of_a_token_are_limited_where_no_text_is_dropped() {
        use tokenizers::pre_tokenizers::byte_level::ByteLevel;
        let mut bytes: Vec<char> = ByteLevel::alphabet().into_iter().collect();
        bytes.sort_unstable();
        let with = |normalizer: &str, stripped: bool, alphabet: usize| {
            let names = bytes.iter().take(alphabet).map(char::to_string);
            let names = names.chain(["aa", "aaaa"].map(Into::into));
            let vocabulary: Vec<String> = names
                .enumerate()
                .map(|(id, name)| {
                    format!(r#""{}": {id}"#, name.replace('\\', r"\\").replace('"', r#"\""#))
                })
                .collect();
            let json = format!(
                r#"{{ "version": "1.0", "truncation": null, "padding": null, "normalizer": {normalizer},
                "added_tokens": [{{ "id": 258, "content": "<|end|>", "single_word": false, "lstrip": {stripped},
                                   "rstrip": false, "normalized": false, "special": true }}],
                "pre_tokenizer": {{ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                                   "use_regex": false }},
                "post_processor": null, "decoder": null,
                "model": {{ "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                           "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                           "ignore_merges": false, "vocab": {{ {} }}, "merges": ["a a", "aa aa"] }} }}"#,
                vocabulary.join(", ")
            );
            Text::Tokenizer(Box::new(json.parse().expect("a tokenizer")))
        };
        let text = with("null", false, 256);
        let most = text.most_bytes_per_token().expect("it drops nothing");
        assert_eq!(most, "<|end|>".len());
        for some in ["<|end|><|end|>", "aaaaaaaa", "a b\u{20ac}\n\0"] {
            let tokens = text.encode(some).expect("text").len();
            assert!(tokens >= some.len().div_ceil(most), "{some}: {tokens}");
        }
        assert_eq!(text.encode("aaaa<|end|>").expect("text").len(), 2);
        let strip = r#"{ "type": "Strip", "strip_left": true, "strip_right": true }"#;
        for other in [with(strip, false, 256), with("null", true, 256), with("null", false, 255)] {
            assert_eq!(other.most_bytes_per_token(), None);
        }
        assert_eq!(Text::Bytes.most_bytes_per_token(), Some(1));
    }

    #[test]
    fn what_is_no_text_is_replaced() {
        let (text, mut stream) = (Text::Bytes, TextStream::default());
        let parts: Vec<String> =
            [0xFF, 0xC3, 0x41, 0xE2, 0x82].map(|t| stream.push(&text, t)).into();
        assert_eq!(parts.concat(), "\u{FFFD}\u{FFFD}A");
        assert_eq!(stream.finish(&text), "\u{FFFD}");
    }
}
