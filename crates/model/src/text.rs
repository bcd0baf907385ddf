//! Text to tokens and back.

#[cfg(feature = "tokenizers")]
mod tokenizer;

use std::path::{Path, PathBuf};

/// How text is encoded as tokens.
#[derive(Clone, Debug)]
pub enum Text {
    /// One token per byte, for models with a vocabulary of 256.
    Bytes,
    /// The tokenizer of the model's `tokenizer.json`.
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
    /// The tokenizer of the model in `folder`: its `tokenizer.json`, or bytes for a vocabulary of 256.
    ///
    /// `tokenizer_config.json` is not read: the post-processor in `tokenizer.json` says which tokens begin a text.
    /// transformers 5 ignores the flag `add_bos_token` too.
    ///
    /// # Errors
    /// [`TextError`].
    pub fn of_model(folder: &Path, vocabulary: u32) -> Result<Self, TextError> {
        let path = folder.join("tokenizer.json");
        match path.exists() {
            true => Self::from_file(path),
            false if vocabulary == 256 => Ok(Self::Bytes),
            false => Err(TextError::NoTokenizer { path, vocabulary }),
        }
    }

    #[cfg(feature = "tokenizers")]
    fn from_file(path: PathBuf) -> Result<Self, TextError> {
        match tokenizer::load(&path) {
            Ok(tokenizer) => Ok(Self::Tokenizer(Box::new(tokenizer))),
            Err(reason) => Err(TextError::Refused { path, reason }),
        }
    }

    #[cfg(not(feature = "tokenizers"))]
    fn from_file(path: PathBuf) -> Result<Self, TextError> {
        Err(TextError::NotBuiltIn { path })
    }

    /// The tokens of a text.
    ///
    /// # Errors
    /// [`TextError::Refused`]; also for a word of more than 100,000 bytes, in which a tokenizer's regular expression may
    /// find no end.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        match self {
            Self::Bytes => Ok(text.bytes().map(u32::from).collect()),
            #[cfg(feature = "tokenizers")]
            Self::Tokenizer(tokenizer) => tokenizer::encode(tokenizer, text)
                .map_err(|reason| TextError::Refused { path: "text".into(), reason }),
        }
    }

    /// Most bytes of text that one token encodes, which bounds a text's tokens from below. `None` if the tokenizer may
    /// drop text, or encode text of any length as one token.
    #[must_use]
    pub fn most_bytes_per_token(&self) -> Option<usize> {
        match self {
            Self::Bytes => Some(1),
            #[cfg(feature = "tokenizers")]
            Self::Tokenizer(tokenizer) => tokenizer::most_bytes_per_token(tokenizer),
        }
    }

    /// The name of a token: its text, or if that is not valid text, its bytes.
    #[must_use]
    pub fn name(&self, token: u32) -> String {
        let Some(bytes) = self.bytes_or_special(token) else { return format!("token:{token}") };
        String::from_utf8(bytes).unwrap_or_else(|error| bytes_name(error.as_bytes()))
    }

    /// The bytes of a token in a text, which may begin and end inside a character. Special tokens have none.
    fn bytes(&self, token: u32) -> Vec<u8> {
        #[cfg(feature = "tokenizers")]
        if let Self::Tokenizer(tokenizer) = self
            && let Some(name) = tokenizer.id_to_token(token)
            && tokenizer.get_added_vocabulary().is_special_token(&name)
        {
            return Vec::new();
        }
        self.bytes_or_special(token).unwrap_or_default()
    }

    /// The bytes of a token, or the name of a special token. `None` if there is no such token.
    #[must_use]
    pub fn bytes_or_special(&self, token: u32) -> Option<Vec<u8>> {
        match self {
            Self::Bytes => u8::try_from(token).ok().map(|byte| vec![byte]),
            #[cfg(feature = "tokenizers")]
            Self::Tokenizer(tokenizer) => {
                let name = tokenizer.id_to_token(token)?;
                Some(byte_level(&name).unwrap_or_else(|| name.into_bytes()))
            }
        }
    }
}

/// The name of bytes that are not valid text, in OpenAI's notation.
fn bytes_name(bytes: &[u8]) -> String {
    let bytes: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
    format!("bytes:{bytes}")
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

/// Decodes tokens that arrive one by one. Each character is returned with the token that completes it.
#[derive(Debug, Default)]
pub struct TextStream {
    /// The bytes of a last, incomplete character, three at most.
    open: Vec<u8>,
}

impl TextStream {
    /// Takes a token, and returns the text that it completes, which may be empty. Bytes that begin no character are
    /// replaced.
    pub fn push(&mut self, text: &Text, token: u32) -> String {
        self.open.extend(text.bytes(token));
        let complete = self.open.len() - open_bytes(&self.open);
        let given = String::from_utf8_lossy(&self.open[..complete]).into_owned();
        self.open.drain(..complete);
        given
    }

    /// Ends the text: returns a replacement character if it ends inside a character.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.open)).into_owned()
    }
}

/// Number of bytes of an incomplete character at the end.
fn open_bytes(bytes: &[u8]) -> usize {
    let last = bytes.utf8_chunks().last().map_or(&[][..], |last| last.invalid());
    match std::str::from_utf8(last) {
        Err(error) if error.error_len().is_none() => last.len(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::{Text, TextStream};

    #[test]
    fn characters_come_whole() {
        let (text, mut stream) = (Text::Bytes, TextStream::default());
        let tokens = text.encode("aé€😀z").expect("text");
        let parts: Vec<String> = tokens.iter().map(|&t| stream.push(&text, t)).collect();
        assert_eq!(parts, ["a", "", "é", "", "", "€", "", "", "", "😀", "z"]);
        assert_eq!(stream.finish(), "");
    }

    /// Bytes that never become a character are replaced, and do not wait.
    #[test]
    fn few_bytes_wait() {
        let (text, mut stream) = (Text::Bytes, TextStream::default());
        let mut all = String::new();
        for byte in std::iter::repeat_n(0xF0, 100) {
            all += &stream.push(&text, byte);
            assert!(stream.open.len() < 4, "{} bytes", stream.open.len());
        }
        assert_eq!(all + &stream.finish(), "\u{FFFD}".repeat(100));
    }

    /// A byte-level tokenizer with these tokens, and the special token `<e>`.
    #[cfg(feature = "tokenizers")]
    fn byte_level(tokens: &[&[u8]]) -> tokenizers::Tokenizer {
        let name = |bytes: &&[u8]| -> String {
            let is_printable =
                |byte: u8| super::byte_level(&char::from(byte).to_string()).is_some();
            let character = |&byte: &u8| match is_printable(byte) {
                true => char::from(byte),
                false => {
                    let before = (0..byte).filter(|&byte| !is_printable(byte)).count();
                    char::from_u32(0x100 + before as u32).expect("a character")
                }
            };
            bytes.iter().map(character).collect()
        };
        let names = tokens.iter().map(name).enumerate();
        let vocabulary: serde_json::Value =
            serde_json::Value::Object(names.map(|(id, name)| (name, id.into())).collect());
        let special = tokens.len();
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
            "post_processor": null,
            "added_tokens": [{ "id": special, "content": "<e>", "single_word": false, "lstrip": false,
                               "rstrip": false, "normalized": false, "special": true }],
            "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
            "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                       "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                       "ignore_merges": false, "vocab": vocabulary, "merges": [] }
        });
        json.to_string().parse().expect("a tokenizer")
    }

    /// The text of any tokens is that of the library, which decodes them together; each character comes at once.
    #[cfg(feature = "tokenizers")]
    #[test]
    fn any_tokens_have_the_text_of_all_of_them_together() {
        use rand::rngs::StdRng;
        use rand::{Rng, SeedableRng};
        // Parts of characters, some of which end inside one and begin inside another, and bytes of no character.
        let parts: [&[u8]; 16] = [
            b"a",
            b" ",
            b"\n",
            b"bc",
            b"\xD7",
            b"\x97\xD7",
            b"\x97",
            b"\xE2\x82",
            b"\xAC",
            b"\xAC\xF0\x9F",
            b"\x98\x80",
            b"\xF0",
            b"\xFF",
            b"\x80",
            b"z\xC3",
            b"\xEF\xBF\xBD",
        ];
        let tokenizer = byte_level(&parts);
        let text = Text::Tokenizer(Box::new(tokenizer.clone()));
        let mut random = StdRng::seed_from_u64(1);
        for _ in 0..3_000 {
            let count = random.random_range(0..40);
            let tokens = Vec::from_iter((0..count).map(|_| random.random_range(0..17)));
            let (mut stream, mut all) = (TextStream::default(), String::new());
            for (i, &token) in tokens.iter().enumerate() {
                all += &stream.push(&text, token);
                let decoded = tokenizer.decode(&tokens[..=i], true).expect("text");
                let complete = match stream.open.is_empty() {
                    true => &decoded,
                    false => decoded.strip_suffix('\u{FFFD}').expect("an incomplete character"),
                };
                assert_eq!(all, complete, "{:?}", &tokens[..=i]);
                assert!(stream.open.len() < 4);
            }
            all += &stream.finish();
            assert_eq!(all, tokenizer.decode(&tokens, true).expect("text"), "{tokens:?}");
        }
    }

    /// As the tokenizer of DeepSeek-V4 encodes ten times the same Hebrew letter: every token but the last ends inside one.
    #[cfg(feature = "tokenizers")]
    #[test]
    fn tokens_that_end_inside_characters_do_not_wait() {
        let text = Text::Tokenizer(Box::new(byte_level(&[b"\xD7", b"\x97\xD7", b"\x97"])));
        for count in 0..40 {
            let mut stream = TextStream::default();
            let tokens = std::iter::once(0).chain(std::iter::repeat_n(1, count)).chain([2]);
            let parts = Vec::from_iter(tokens.map(|token| stream.push(&text, token)));
            assert_eq!(parts[0], "");
            assert!(parts[1..].iter().all(|part| part == "\u{5D7}"), "{parts:?}");
            assert_eq!((parts.len(), stream.finish().as_str()), (count + 2, ""));
        }
    }

    /// Text of other decoders depends on the tokens before it.
    #[cfg(feature = "tokenizers")]
    #[test]
    fn other_decoders_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tokenizer.json");
        let read = |tokenizer: &tokenizers::Tokenizer| {
            tokenizer.save(&path, false).expect("room");
            Text::of_model(folder.path(), 3)
        };
        let mut tokenizer = byte_level(&[b"a", b"b", b"c"]);
        assert!(matches!(read(&tokenizer), Ok(Text::Tokenizer(_))));
        tokenizer.with_decoder(Some(tokenizers::decoders::fuse::Fuse::new()));
        assert!(read(&tokenizer).unwrap_err().to_string().contains("must be `ByteLevel`"));
        tokenizer.with_decoder(None::<tokenizers::DecoderWrapper>);
        assert!(read(&tokenizer).unwrap_err().to_string().contains("must be `ByteLevel`"));
    }

    #[test]
    fn tokens_have_names() {
        assert_eq!([0x41, 0xC3].map(|token| Text::Bytes.name(token)), ["A", "bytes:\\xc3"]);
    }

    /// A token of incomplete bytes is named by its bytes, not by the characters that stand for them.
    #[cfg(feature = "tokenizers")]
    #[test]
    fn tokens_of_a_byte_level_vocabulary_have_names() {
        let tokens: [&[u8]; 6] = [b"a", b"\xE2", b"\xC3\xA2", b"\xE2\x82", b" b", b"\xEF\xBF\xBD"];
        let text = Text::Tokenizer(Box::new(byte_level(&tokens)));
        let names = [0, 1, 2, 3, 4, 5, 6, 7].map(|token| text.name(token));
        let expected =
            ["a", "bytes:\\xe2", "\u{e2}", "bytes:\\xe2\\x82", " b", "\u{FFFD}", "<e>", "token:7"];
        assert_eq!(names, expected);
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
        assert_eq!(stream.finish(), "\u{FFFD}");
    }
}
