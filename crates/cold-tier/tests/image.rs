//! Images: a written image can be read, and any change of it is noticed.

use dsv4_kv_cold_tier::image::{HEADER, Image, NoMemory, Subject, decode, encode};
use dsv4_kv_cold_tier::{ImageError, Section};

const BLOCK_BYTES: u64 = 48;
const CHECKPOINT_BYTES: u64 = 80;

fn tokens() -> Vec<[u32; 128]> {
    (0..3).map(|block| std::array::from_fn(|at| 1000 * block + at as u32)).collect()
}

fn subject(tokens: &[[u32; 128]]) -> Subject<'_> {
    let (block_bytes, checkpoint_bytes) = (BLOCK_BYTES, CHECKPOINT_BYTES);
    Subject { identity: b"weights", root: b"salt", tokens, block_bytes, checkpoint_bytes }
}

/// An image of the last two of three blocks.
fn image(subject: &Subject<'_>) -> Vec<u8> {
    let blocks = |bytes: &mut Vec<u8>| bytes.extend((0..2 * BLOCK_BYTES).map(|at| at as u8));
    let checkpoint = |bytes: &mut Vec<u8>| bytes.extend([7; CHECKPOINT_BYTES as usize]);
    encode(subject, (1, 2, true), blocks, checkpoint).unwrap()
}

/// An image for which there is no memory is an error, which names its bytes, and none of it is copied.
#[test]
fn an_image_without_memory_is_refused() {
    fn never(_: &mut Vec<u8>) {
        panic!("nothing is copied");
    }
    let tokens = tokens();
    for block_bytes in [1 << 62, u64::MAX] {
        let longest = Subject { block_bytes, ..subject(&tokens) };
        let NoMemory { bytes } = encode(&longest, (1, 2, true), never, never).unwrap_err();
        assert!(bytes >= block_bytes, "{bytes}");
    }
}

#[test]
fn what_is_written_is_read() {
    let tokens = tokens();
    let bytes = image(&subject(&tokens));
    let blocks: Vec<u8> = (0..2 * BLOCK_BYTES).map(|at| at as u8).collect();
    let checkpoint = [7; CHECKPOINT_BYTES as usize];
    let (blocks, checkpoint) = (&blocks[..], &checkpoint[..]);
    let want = Image { first: 1, blocks, checkpoint, origin: 2, has_draft: true };
    assert_eq!(decode(&bytes, &subject(&tokens)), Ok(want));
}

/// For every flipped bit the error names the section.
#[test]
fn every_flipped_bit_is_noticed() {
    let tokens = tokens();
    let (subject, bytes) = (subject(&tokens), image(&subject(&tokens)));
    let owner = HEADER + subject.identity.len() + subject.root.len();
    let blocks = owner + 4 * 128 * tokens.len();
    let checkpoint = blocks + 2 * BLOCK_BYTES as usize;
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << bit;
            let error = decode(&bytes, &subject).expect_err("a bit was flipped");
            let section = match at {
                0..8 => {
                    assert_eq!(error, ImageError::Magic);
                    continue;
                }
                8..12 => {
                    assert!(matches!(error, ImageError::Version { .. }), "{error}");
                    continue;
                }
                _ if at < HEADER => Section::Header,
                _ if at < owner => Section::Owner,
                _ if at < blocks => Section::Tokens,
                _ if at < checkpoint => Section::Blocks,
                _ => Section::Checkpoint,
            };
            assert_eq!(error, ImageError::Damaged { section }, "byte {at}");
        }
    }
}

#[test]
fn every_other_length_is_noticed() {
    let tokens = tokens();
    let (subject, mut bytes) = (subject(&tokens), image(&subject(&tokens)));
    for len in 0..bytes.len() {
        let error = decode(&bytes[..len], &subject).expect_err("it was cut");
        assert!(
            matches!(error, ImageError::Length { found, .. } if found == len as u64),
            "{error}"
        );
    }
    bytes.push(0);
    assert!(matches!(decode(&bytes, &subject), Err(ImageError::Length { .. })));
}

/// Complete images of other subjects, whose digests are right, are refused.
#[test]
fn foreign_images_are_refused() {
    let (tokens, mut others) = (tokens(), tokens());
    others[2][127] += 1;
    let own = subject(&tokens);
    let foreign = [
        (Subject { identity: b"other weights", ..own }, ImageError::Foreign),
        (Subject { root: b"other salt", ..own }, ImageError::Foreign),
        // The same bytes, split at another place.
        (Subject { identity: b"weightss", root: b"alt", ..own }, ImageError::Foreign),
        (Subject { tokens: &others, ..own }, ImageError::OtherTokens),
        (Subject { tokens: &tokens[..2], ..own }, ImageError::OtherTokens),
    ];
    for (subject, want) in foreign {
        let blocks = (subject.tokens.len() as u64 - 1) * BLOCK_BYTES;
        let bytes = encode(
            &subject,
            (1, 0, false),
            |bytes| bytes.resize(bytes.len() + blocks as usize, 1),
            |bytes| bytes.resize(bytes.len() + CHECKPOINT_BYTES as usize, 2),
        )
        .unwrap();
        assert!(decode(&bytes, &subject).is_ok());
        assert_eq!(decode(&bytes, &own), Err(want));
    }
    let sizes = Subject { block_bytes: BLOCK_BYTES + 16, ..own };
    let [needed, found] =
        [BLOCK_BYTES, BLOCK_BYTES + 16].map(|block_bytes| [block_bytes, CHECKPOINT_BYTES]);
    let bytes = encode(
        &sizes,
        (1, 0, false),
        |bytes| bytes.resize(bytes.len() + 2 * (BLOCK_BYTES as usize + 16), 1),
        |bytes| bytes.resize(bytes.len() + CHECKPOINT_BYTES as usize, 2),
    )
    .unwrap();
    assert_eq!(decode(&bytes, &own), Err(ImageError::Sizes { needed, found }));
}
