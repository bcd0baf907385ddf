//! Digests of payloads.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! digest_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            DigestSections<()> |p, f|
            "Computes XXH3 of sections of a payload: the accumulators of each, or the bytes of a short one."
            (
                /// `[words, 8]` u8, the payload.
                payload: const u8 align 8 [p.words, 8],
                /// `[sections, 2]` u32: first word of 8 bytes, words.
                sections: const u32 align 8 [p.sections, 2],
                /// `[48]` u32, the secret: see `digest::secret_words`.
                secret: const u32 align 8 [48],
                /// `[sections, 64]` u32: eight accumulators of 64 bits each, of a section of more than 240 bytes; else its bytes.
                records: mut u32 align 8 [p.sections, params::DigestParams::RECORD],
                /// `[1]` count of sections refused: beyond the payload.
                faults: mut u32 [1];
                DigestParams
            )
            { block: digest::THREADS, min_blocks: 2, shared: digest::SHARED_BYTES, min_sm: 90,
              grid: [p.sections, 1] }
            bodies {
                [()] => digest_sections: digest::sections,
            }
        } }
    };
}
