//! An image: the bytes of one object of a store, which holds a part of a prefix.
//!
//! Little-endian. A header of 208 bytes, then four sections, one after the other:
//!
//! | bytes | |
//! |---|---|
//! | 0 | `DSV4COLD` |
//! | 8 | version, u32 |
//! | 12 | flags, u32: bit 0 = the checkpoint has the windows of draft layers; bits 8..16 = its origin |
//! | 16, 24 | bytes of a block's image, and of a checkpoint, u64 |
//! | 32 | blocks of the prefix that come before those of this image, u32 |
//! | 36 | blocks of the prefix, u32 |
//! | 40, 44 | bytes of the identity, and of the root, u32 |
//! | 48 | SHA-256 of each section |
//! | 176 | SHA-256 of the 176 bytes before |
//!
//! | section | |
//! |---|---|
//! | owner | identity of the model, then root |
//! | tokens | all tokens of the prefix, u32 |
//! | blocks | images of the blocks |
//! | checkpoint | the checkpoint at their end |
//!
//! A reader passes the expected identity, root and tokens, which are compared byte by byte. Sections are compared by
//! their digests, and the length of the object must be exact.

use dsv4_kv::kv_layout::geometry::BLOCK_TOKENS;
use sha2::{Digest, Sha256};

/// First bytes of an image.
const MAGIC: [u8; 8] = *b"DSV4COLD";
/// The version that is written, and the only one that is read.
pub const VERSION: u32 = 1;
/// Bytes of the header.
pub const HEADER: usize = 208;
/// Bytes of the header that its digest covers.
const SIGNED: usize = 176;
/// Tokens of a block.
pub const BLOCK: usize = BLOCK_TOKENS as usize;

/// A part of an image that has a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// The header.
    Header,
    /// Identity of the model, and root.
    Owner,
    /// Tokens of the prefix.
    Tokens,
    /// Images of blocks.
    Blocks,
    /// The checkpoint.
    Checkpoint,
}

/// Why an object is not an image of the requested prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// It does not begin with the magic bytes of an image.
    #[error("this is no image of a prefix")]
    Magic,
    /// Another version wrote it.
    #[error("this is an image of version {found}; version {VERSION} is read")]
    Version {
        /// Its version.
        found: u32,
    },
    /// It is shorter or longer than its header says.
    #[error("the image has {found} bytes, and must have {needed}")]
    Length {
        /// Bytes that it must have.
        needed: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// It is longer than any image of the requested prefix. It was not read.
    #[error("the object has {found} bytes, and an image of this prefix has {most} at most")]
    TooLong {
        /// Most bytes of an image of the prefix.
        most: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// The digest of a section does not match.
    #[error("the image's section {section:?} is damaged")]
    Damaged {
        /// The section.
        section: Section,
    },
    /// It is of another model, format, salt or adapter.
    #[error("the image is of another model, format, salt or adapter")]
    Foreign,
    /// Blocks or checkpoints have other sizes.
    #[error(
        "the image has blocks and checkpoints of {found:?} bytes, and those of this cache have {needed:?}; give each configuration a store of its own"
    )]
    Sizes {
        /// Bytes of a block's image and of a checkpoint in this cache.
        needed: [u64; 2],
        /// The same sizes in the image.
        found: [u64; 2],
    },
    /// It is of other tokens.
    #[error("the image is of other tokens")]
    OtherTokens,
}

/// The host has no memory for the bytes of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the host has no {bytes} bytes of memory for the image of a prefix, which is not stored; give the process more, or a smaller host tier"
)]
pub struct NoMemory {
    /// Bytes of the image.
    pub bytes: u64,
}

/// The prefix of an image: all of this must be equal when the image is read.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'s> {
    /// Identity of the model's weights, and of anything else that changes the bytes.
    pub identity: &'s [u8],
    /// Salt, adapter, model and formats.
    pub root: &'s [u8],
    /// All tokens of the prefix: whole blocks.
    pub tokens: &'s [[u32; BLOCK]],
    /// Bytes of the image of a block.
    pub block_bytes: u64,
    /// Bytes of a checkpoint.
    pub checkpoint_bytes: u64,
}

impl Subject<'_> {
    /// Bytes of the longest image of this prefix: the one with all of its blocks.
    pub(crate) fn most_bytes(&self) -> u64 {
        let Self { identity, root, tokens, block_bytes, checkpoint_bytes } = *self;
        let block = (4 * BLOCK as u64).saturating_add(block_bytes);
        let sizes = [
            (identity.len() + root.len()) as u64,
            block.saturating_mul(tokens.len() as u64),
            checkpoint_bytes,
        ];
        sizes.iter().fold(HEADER as u64, |sum, &size| sum.saturating_add(size))
    }
}

/// Contents of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Image<'i> {
    /// Number of blocks of the prefix before its own.
    pub first: u32,
    /// Images of its blocks, one after the other.
    pub blocks: &'i [u8],
    /// The checkpoint.
    pub checkpoint: &'i [u8],
    /// Number of the checkpoint's origin.
    pub origin: u8,
    /// Whether it has the windows of draft layers.
    pub has_draft: bool,
}

/// The bytes of an image. `blocks` appends the images of its blocks, then `checkpoint` the checkpoint.
///
/// # Errors
/// [`NoMemory`]; neither of the two was called then.
pub fn encode(
    subject: &Subject<'_>,
    (first, origin, has_draft): (u32, u8, bool),
    blocks: impl FnOnce(&mut Vec<u8>),
    checkpoint: impl FnOnce(&mut Vec<u8>),
) -> Result<Vec<u8>, NoMemory> {
    let Subject { identity, root, tokens, block_bytes, checkpoint_bytes } = *subject;
    let flags = u32::from(has_draft) | u32::from(origin) << 8;
    let own = tokens.len().saturating_sub(first as usize);
    let most = Subject { tokens: &tokens[..own], ..*subject }.most_bytes();
    let mut bytes = reserved(most.saturating_add(u64::from(first) * (4 * BLOCK as u64)))?;
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&flags.to_le_bytes());
    bytes.extend_from_slice(&block_bytes.to_le_bytes());
    bytes.extend_from_slice(&checkpoint_bytes.to_le_bytes());
    for number in [first, tokens.len() as u32, identity.len() as u32, root.len() as u32] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    bytes.resize(HEADER, 0);
    let mut ends = vec![HEADER];
    bytes.extend_from_slice(identity);
    bytes.extend_from_slice(root);
    ends.push(bytes.len());
    tokens.as_flattened().iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
    ends.push(bytes.len());
    blocks(&mut bytes);
    ends.push(bytes.len());
    checkpoint(&mut bytes);
    ends.push(bytes.len());
    let digests: Vec<_> =
        ends.windows(2).map(|ends| Sha256::digest(&bytes[ends[0]..ends[1]])).collect();
    for (at, digest) in digests.iter().enumerate() {
        bytes[48 + 32 * at..][..32].copy_from_slice(digest);
    }
    let digest = Sha256::digest(&bytes[..SIGNED]);
    bytes[SIGNED..HEADER].copy_from_slice(&digest);
    Ok(bytes)
}

/// An empty vector with room for all `bytes` of an image: one that grew would be copied, and would end the process where
/// memory is short.
fn reserved(bytes: u64) -> Result<Vec<u8>, NoMemory> {
    let (mut all, refused) = (Vec::new(), NoMemory { bytes });
    let room = usize::try_from(bytes).map_err(|_| refused)?;
    all.try_reserve_exact(room).map_err(|_| refused)?;
    Ok(all)
}

/// Access to the numbers of a header, by byte offset.
struct Numbers<'b>(&'b [u8]);

impl Numbers<'_> {
    fn u32(&self, at: usize) -> u32 {
        let mut word = [0; 4];
        word.copy_from_slice(&self.0[at..at + 4]);
        u32::from_le_bytes(word)
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from(self.u32(at)) | u64::from(self.u32(at + 4)) << 32
    }

    /// Bytes of each section.
    fn sections(&self) -> [u64; 4] {
        let [first, blocks, identity, root] = [32, 36, 40, 44].map(|at| u64::from(self.u32(at)));
        let (block_bytes, checkpoint_bytes) = (self.u64(16), self.u64(24));
        [
            identity + root,
            blocks * (4 * BLOCK as u64),
            blocks.saturating_sub(first).saturating_mul(block_bytes),
            checkpoint_bytes,
        ]
    }
}

/// Refuses an image of `found` bytes whose header and sections have others.
fn check_length(sections: &[u64; 4], found: u64) -> Result<(), ImageError> {
    let needed = sections.iter().fold(HEADER as u64, |sum, &size| sum.saturating_add(size));
    if needed == found { Ok(()) } else { Err(ImageError::Length { needed, found }) }
}

/// Number of blocks of the prefix before those of the image of `size` bytes with this header. The image must end after
/// `blocks` blocks of the prefix.
///
/// # Errors
/// [`ImageError`].
pub(crate) fn first(header: &[u8], size: u64, blocks: usize) -> Result<usize, ImageError> {
    let (header, _) = split_header(header)?;
    let numbers = Numbers(header);
    let [first, end] = [32, 36].map(|at| numbers.u32(at) as usize);
    if end != blocks {
        return Err(ImageError::OtherTokens);
    }
    check_length(&numbers.sections(), size)?;
    // An image without blocks would make the chain endless.
    let is_part = first < end;
    is_part.then_some(first).ok_or(ImageError::Damaged { section: Section::Header })
}

/// Reads an image that must be of `subject`.
///
/// # Errors
/// [`ImageError`].
pub fn decode<'b>(bytes: &'b [u8], subject: &Subject<'_>) -> Result<Image<'b>, ImageError> {
    let (header, sections) = split_header(bytes)?;
    let numbers = Numbers(header);
    let (flags, block_bytes, checkpoint_bytes) =
        (numbers.u32(12), numbers.u64(16), numbers.u64(24));
    let [first, blocks, identity] = [32, 36, 40].map(|at| numbers.u32(at));
    let (sizes, found) = (numbers.sections(), bytes.len() as u64);
    check_length(&sizes, found)?;
    if first > blocks {
        return Err(ImageError::Damaged { section: Section::Header });
    }
    let [owner, tokens, blocks, checkpoint] = split_sections(header, sections, sizes)?;
    let (of_identity, of_root) = owner.split_at(identity as usize);
    if of_identity != subject.identity || of_root != subject.root {
        return Err(ImageError::Foreign);
    }
    let (needed, found) =
        ([subject.block_bytes, subject.checkpoint_bytes], [block_bytes, checkpoint_bytes]);
    if needed != found {
        return Err(ImageError::Sizes { needed, found });
    }
    let wanted = subject.tokens.as_flattened();
    let read = tokens.as_chunks().0.iter().map(|&token| u32::from_le_bytes(token));
    if tokens.len() != 4 * wanted.len() || !read.eq(wanted.iter().copied()) {
        return Err(ImageError::OtherTokens);
    }
    let (origin, has_draft) = ((flags >> 8) as u8, flags & 1 == 1);
    Ok(Image { first, blocks, checkpoint, origin, has_draft })
}

/// Splits an image into its header, which is verified, and the sections after it.
fn split_header(bytes: &[u8]) -> Result<(&[u8], &[u8]), ImageError> {
    let Some((header, behind)) = bytes.split_at_checked(HEADER) else {
        return Err(ImageError::Length { needed: HEADER as u64, found: bytes.len() as u64 });
    };
    if header[..8] != MAGIC {
        return Err(ImageError::Magic);
    }
    let version = Numbers(header).u32(8);
    if version != VERSION {
        return Err(ImageError::Version { found: version });
    }
    if header[SIGNED..] != *Sha256::digest(&header[..SIGNED]) {
        return Err(ImageError::Damaged { section: Section::Header });
    }
    Ok((header, behind))
}

/// Splits `bytes` into the sections, and checks their digests. `sizes` add up to the length of `bytes`.
fn split_sections<'b>(
    header: &[u8],
    mut bytes: &'b [u8],
    sizes: [u64; 4],
) -> Result<[&'b [u8]; 4], ImageError> {
    let sections = [Section::Owner, Section::Tokens, Section::Blocks, Section::Checkpoint];
    let mut parts = [&[][..]; 4];
    for (at, (section, size)) in sections.into_iter().zip(sizes).enumerate() {
        let (part, behind) = bytes.split_at(size as usize);
        if header[48 + 32 * at..][..32] != *Sha256::digest(part) {
            return Err(ImageError::Damaged { section });
        }
        (parts[at], bytes) = (part, behind);
    }
    Ok(parts)
}
