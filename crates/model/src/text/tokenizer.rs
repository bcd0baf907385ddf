//! The tokenizer of a `tokenizer.json`, as far as it can be trusted to give each text its tokens.

use std::path::Path;

use serde_json::Value;
use tokenizers::pre_tokenizers::PreTokenizerWrapper as Before;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{
    DecoderWrapper, Encoding, ModelWrapper, NormalizerWrapper, SplitDelimiterBehavior, Tokenizer,
};

/// Most bytes of a word (pre-token). `fancy-regex` gives up after a million steps back, which takes more than 100,000
/// characters without a match; `tokenizers` then takes the rest of the text for one word, without an error.
const MAX_WORD_BYTES: usize = 100_000;

/// Reads a tokenizer, and refuses settings by which a text would lose tokens or get other ones.
pub fn load(path: &Path) -> Result<Tokenizer, String> {
    let mut tokenizer = Tokenizer::from_file(path).map_err(|reason| reason.to_string())?;
    // Truncation and padding settings in the file would shorten or lengthen prompts.
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).map_err(|reason| reason.to_string())?;
    if let ModelWrapper::BPE(bpe) = tokenizer.get_model()
        && let Some(dropout) = bpe.dropout.filter(|&dropout| dropout > 0.0)
    {
        return Err(format!(
            "the same text would get other tokens each time: dropout is {dropout}; set it to null"
        ));
    }
    if !matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
        let reason =
            "its decoder must be `ByteLevel`: else the bytes of a token depend on its text";
        return Err(reason.to_owned());
    }
    let processor = serde_json::to_value(tokenizer.get_post_processor());
    check_templates(&processor.map_err(|reason| reason.to_string())?)?;
    Ok(tokenizer)
}

/// Checks the templates of a post-processor, which `tokenizers` reads without a check and then panics in: a template for
/// one text has no second text, and each special token in it is defined.
fn check_templates(processor: &Value) -> Result<(), String> {
    if let Some(processors) = processor["processors"].as_array() {
        processors.iter().try_for_each(check_templates)?;
    }
    for piece in processor["single"].as_array().into_iter().flatten() {
        if piece["Sequence"]["id"] == "B" {
            return Err("its template for one text has a second one (`B`)".into());
        }
        let special = piece["SpecialToken"]["id"].as_str();
        if let Some(id) = special.filter(|&id| processor["special_tokens"].get(id).is_none()) {
            return Err(format!("its template has `{id}`, which is not in `special_tokens`"));
        }
    }
    Ok(())
}

/// The tokens of a text.
pub fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, String> {
    let encoding = tokenizer.encode(text, true).map_err(|reason| reason.to_string())?;
    let longest = longest_word(&encoding);
    if longest > MAX_WORD_BYTES {
        return Err(format!(
            "a word of {longest} bytes; at most {MAX_WORD_BYTES}, since a longer one may hide errors of the tokenizer's \
             regular expression"
        ));
    }
    Ok(encoding.get_ids().to_vec())
}

/// The number of bytes of the longest word of a text.
fn longest_word(encoding: &Encoding) -> usize {
    let tokens = encoding.get_word_ids().iter().zip(encoding.get_offsets());
    let tokens: Vec<_> = tokens.filter_map(|(word, range)| Some(((*word)?, *range))).collect();
    let words = tokens.chunk_by(|(one, _), (next, _)| one == next);
    words.map(|word| word[word.len() - 1].1.1.saturating_sub(word[0].1.0)).max().unwrap_or(0)
}

/// As [`super::Text::most_bytes_per_token`]: known for a byte-level BPE that has all bytes and gets the whole text unchanged.
pub fn most_bytes_per_token(tokenizer: &Tokenizer) -> Option<usize> {
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::text::Text;

    /// A byte-level tokenizer whose words are runs of spaces or of other characters. A merge joins a space and an `a`,
    /// which are never in one word.
    fn of_words(post_processor: &Value) -> Value {
        let mut alphabet: Vec<String> = ByteLevel::alphabet().iter().map(char::to_string).collect();
        alphabet.sort_unstable();
        alphabet.push("\u{120}a".into());
        let vocabulary = alphabet.into_iter().enumerate().map(|(id, name)| (name, id.into()));
        let split = json!({ "type": "Split", "pattern": { "Regex": "\\s+(?!\\S)|\\s+|\\S+" },
                            "behavior": "Isolated", "invert": false });
        let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                            "use_regex": false });
        json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "added_tokens": [],
            "pre_tokenizer": { "type": "Sequence", "pretokenizers": [split, bytes] },
            "post_processor": post_processor, "decoder": bytes,
            "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                       "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                       "vocab": Value::Object(vocabulary.collect()), "merges": ["\u{120} a"] }
        })
    }

    fn read(tokenizer: &Value) -> Result<Tokenizer, String> {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), tokenizer.to_string()).expect("room");
        load(file.path())
    }

    /// Beyond a million steps back the regular expression fails, and the rest of the text is one word.
    #[test]
    fn text_after_a_very_long_word_has_its_tokens_or_is_refused() {
        let tokenizer = read(&of_words(&Value::Null)).expect("a tokenizer");
        let of = |spaces: usize| encode(&tokenizer, &format!("{}{}", " ".repeat(spaces), "a a a"));
        let (short, tail) = (of(100).expect("tokens"), 5);
        for spaces in [1_000, 90_000] {
            let tokens = of(spaces).expect("tokens");
            assert_eq!(tokens[tokens.len() - tail..], short[short.len() - tail..], "{spaces}");
        }
        for spaces in [100_002, 1_000_100] {
            let refused = of(spaces).expect_err("a word that is too long");
            assert!(refused.contains("at most 100000"), "{refused}");
        }
    }

    /// The post-processor alone says what begins a text: a flag beside the file puts no token before it, as in
    /// transformers 5.
    #[test]
    fn a_flag_of_another_file_adds_no_token() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, json: &Value| {
            std::fs::write(folder.path().join(name), json.to_string()).expect("room");
        };
        write("tokenizer.json", &of_words(&Value::Null));
        write("tokenizer_config.json", &json!({ "add_bos_token": true, "bos_token": "!" }));
        let text = Text::of_model(folder.path(), 257).expect("a tokenizer");
        assert_eq!(text.encode("b").expect("tokens").len(), 1);
    }

    /// Such a template is read without an error, and `tokenizers` panics when it is used.
    #[test]
    fn templates_that_cannot_be_used_are_refused() {
        let template = |single: Value| {
            json!({ "type": "TemplateProcessing", "single": single, "pair": [],
                    "special_tokens": { "<s>": { "id": "<s>", "ids": [0], "tokens": ["!"] } } })
        };
        let text = |id| json!({ "Sequence": { "id": id, "type_id": 0 } });
        let special = |id| json!({ "SpecialToken": { "id": id, "type_id": 0 } });
        let right = template(json!([special("<s>"), text("A")]));
        let tokenizer = read(&of_words(&right)).expect("a tokenizer");
        assert_eq!(encode(&tokenizer, "b").expect("tokens").len(), 2);
        for (wrong, reason) in
            [(json!([special("<e>"), text("A")]), "`<e>`"), (json!([text("A"), text("B")]), "`B`")]
        {
            let nested = json!({ "type": "Sequence", "processors": [template(wrong.clone())] });
            for processor in [template(wrong), nested] {
                let refused = read(&of_words(&processor)).expect_err("it would panic");
                assert!(refused.contains(reason), "{refused}");
            }
        }
    }
}
