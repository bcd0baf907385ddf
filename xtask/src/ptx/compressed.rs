//! PTX is committed compressed: Zstandard, a tenth of its size.
//!
//! The encoder is the reference library, which is C: the one encoder in Rust that reaches its ratio
//! takes three minutes to compile. Only this program has it; what embeds the PTX decodes it in Rust
//! (`ruzstd`). One version of the encoder makes the same bytes of the same text, and nothing depends on
//! that: text is compared, and hashed, before it is compressed.

use anyhow::{Context, Result, ensure};

/// As far as Zstandard goes without a longer window than a decoder has to accept; the levels above it
/// save 0.1 % more.
const LEVEL: i32 = 19;

/// The most that a PTX file may hold, bytes. It bounds what a damaged file can ask for.
const LIMIT: usize = 64 << 20;

/// `text`, compressed.
///
/// # Errors
/// It is longer than what [`decompress`] accepts, or the encoder fails.
pub fn compress(text: &str) -> Result<Vec<u8>> {
    ensure!(text.len() <= LIMIT, "{} bytes of PTX are more than {LIMIT}", text.len());
    zstd::bulk::compress(text.as_bytes(), LEVEL).context("cannot compress PTX")
}

/// The text that was compressed to `bytes`.
///
/// # Errors
/// `bytes` are not what [`compress`] made.
pub fn decompress(bytes: &[u8]) -> Result<String> {
    let text = zstd::bulk::decompress(bytes, LIMIT).context("cannot decompress PTX")?;
    String::from_utf8(text).context("decompressed PTX is no text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_comes_back_and_its_bytes_are_always_the_same() {
        let text = "st.global.v4.b32 \t[%rd1], {%r1, %r2, %r3, %r4};\n".repeat(1000);
        let bytes = compress(&text).expect("it is short");
        assert!(bytes.len() < text.len() / 50, "{} bytes", bytes.len());
        assert_eq!(compress(&text).expect("it is short"), bytes);
        assert_eq!(decompress(&bytes).expect("whole"), text);
    }

    #[test]
    fn damage_is_an_error() {
        let bytes = compress(&"bar.sync 0;\n".repeat(100)).expect("it is short");
        assert!(decompress(&bytes[..bytes.len() - 1]).is_err());
        assert!(decompress(b"// PTX").is_err());
        let binary = zstd::bulk::compress(&[0xff; 4], LEVEL).expect("it is short");
        assert!(decompress(&binary).expect_err("no text").to_string().contains("no text"));
    }
}
