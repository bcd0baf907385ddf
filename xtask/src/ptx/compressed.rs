//! PTX is committed compressed with Zstandard, at a tenth of its size.
//!
//! The encoder is the reference library, which is C: the only encoder in Rust with its compression ratio takes three
//! minutes to compile. Only this program depends on the encoder; crates that embed the PTX decode it in Rust
//! (`ruzstd`). The bytes can differ between versions of the encoder, but nothing depends on them: PTX is compared and
//! hashed as text, before compression.

use anyhow::{Context, Result, ensure};

/// The highest level that needs no longer window than every decoder must accept. Higher levels save 0.1 % more.
const LEVEL: i32 = 19;

/// Largest PTX text in bytes. It limits the memory that a damaged file can request.
const LIMIT: usize = 64 << 20;

/// Compresses `text`.
///
/// # Errors
/// It is longer than [`decompress`] accepts, or the encoder fails.
pub fn compress(text: &str) -> Result<Vec<u8>> {
    ensure!(text.len() <= LIMIT, "{} bytes of PTX are more than {LIMIT}", text.len());
    zstd::bulk::compress(text.as_bytes(), LEVEL).context("cannot compress PTX")
}

/// Decompresses `bytes` to PTX text.
///
/// # Errors
/// `bytes` are not the output of [`compress`].
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
