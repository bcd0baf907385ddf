//! Encodes and decodes manifests.

use bytemuck::{Pod, Zeroable};
use dsv4_kv::transfer::{Part, PartKind, Positions};

use super::{Fingerprint, ImageError, ImageKind, Manifest, Section, Source, VERSION};

/// The first bytes of a manifest.
const MAGIC: [u8; 8] = *b"DSV4MOVE";
/// The flag of an opening, whose digests are not known yet.
const OPENING: u16 = 1;
/// Bytes of the digest at the end.
const DIGEST: usize = blake3::OUT_LEN;

const _: () = assert!(cfg!(target_endian = "little"), "numbers are read as they lie in memory");

/// The fixed-size part of a manifest.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: u32,
    flags: u16,
    kind: u16,
    shape: [u8; 32],
    weights: [u8; 32],
    owner: [u8; 32],
    trunk: u32,
    draft: u32,
    sections: u32,
    tokens: u32,
    epoch: u64,
    lease: u64,
    payload: u64,
}

/// A row of the table.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Row {
    kind: u32,
    unit: u32,
    first: u32,
    entries: u32,
    bytes: u64,
    digest: [u8; 16],
}

const _: () = assert!(size_of::<Header>() == 152 && size_of::<Row>() == 40);

impl Header {
    /// Bytes of the whole manifest.
    fn manifest_bytes(&self) -> u64 {
        let table = u64::from(self.sections) * size_of::<Row>() as u64;
        size_of::<Self>() as u64 + table + u64::from(self.tokens) * 4 + DIGEST as u64
    }
}

impl Row {
    fn new(section: &Section) -> Self {
        let Part { kind, unit, first, entries, bytes } = section.part;
        let digest = section.digest.to_le_bytes();
        Self { kind: kind as u32, unit, first, entries, bytes, digest }
    }

    fn section(self, section: usize) -> Result<Section, ImageError> {
        let Self { kind, unit, first, entries, bytes, digest } = self;
        let known = PartKind::ALL.get(kind as usize);
        let kind = *known.ok_or(ImageError::Kind { section, kind })?;
        let part = Part { kind, unit, first, entries, bytes };
        Ok(Section { part, digest: u128::from_le_bytes(digest) })
    }
}

impl Manifest {
    /// Encodes the manifest of an offer.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        self.encode_with(0)
    }

    /// Encodes the manifest of an opening: without digests, for a request that is still being computed
    /// ([`decode_opening`]).
    #[must_use]
    pub fn encode_opening(&self) -> Vec<u8> {
        self.without_digests().encode_with(OPENING)
    }

    fn encode_with(&self, flags: u16) -> Vec<u8> {
        let Self { kind, fingerprint: Fingerprint { shape, weights, owner }, at, source, .. } =
            *self;
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            flags,
            kind: kind as u16,
            shape,
            weights,
            owner,
            trunk: at.trunk,
            draft: at.draft,
            sections: self.sections.len() as u32,
            tokens: self.tokens.len() as u32,
            epoch: source.epoch,
            lease: source.lease,
            payload: self.payload_bytes(),
        };
        let mut bytes = bytemuck::bytes_of(&header).to_vec();
        let rows = self.sections.iter().map(Row::new);
        rows.for_each(|row| bytes.extend_from_slice(bytemuck::bytes_of(&row)));
        bytes.extend_from_slice(bytemuck::cast_slice(&self.tokens));
        let digest = blake3::hash(&bytes);
        bytes.extend_from_slice(digest.as_bytes());
        bytes
    }
}

/// Reads the manifest at the start of `bytes`. Returns it, and the bytes after it.
///
/// # Errors
/// [`ImageError`]. Nothing is allocated before the length and the digest were checked.
pub fn decode_manifest(bytes: &[u8]) -> Result<(Manifest, &[u8]), ImageError> {
    decode(bytes, 0)
}

/// Reads the manifest of an opening, whose digests are 0; no bytes may follow it.
///
/// # Errors
/// As [`decode_manifest`].
pub fn decode_opening(bytes: &[u8]) -> Result<Manifest, ImageError> {
    let (manifest, behind) = decode(bytes, OPENING)?;
    check_end(bytes, behind)?;
    Ok(manifest)
}

/// Refuses bytes that follow a manifest.
pub(crate) fn check_end(bytes: &[u8], behind: &[u8]) -> Result<(), ImageError> {
    let found = bytes.len() as u64;
    let needed = found - behind.len() as u64;
    if behind.is_empty() { Ok(()) } else { Err(ImageError::Length { needed, found }) }
}

fn decode(bytes: &[u8], flags: u16) -> Result<(Manifest, &[u8]), ImageError> {
    let found = bytes.len() as u64;
    let header = size_of::<Header>();
    let Some((start, _)) = bytes.split_at_checked(header) else {
        return Err(ImageError::Length { needed: header as u64, found });
    };
    let header: Header = bytemuck::pod_read_unaligned(start);
    if header.magic != MAGIC {
        return Err(ImageError::Magic);
    }
    if header.version != VERSION {
        return Err(ImageError::Version { found: header.version });
    }
    // The sum of two scaled u32 and constants does not overflow.
    let needed = header.manifest_bytes();
    if needed > found {
        return Err(ImageError::Length { needed, found });
    }
    let (manifest, payload) = bytes.split_at(needed as usize);
    let (signed, digest) = manifest.split_at(manifest.len() - DIGEST);
    if blake3::hash(signed) != *digest.as_array::<DIGEST>().expect("so many are left") {
        return Err(ImageError::Damaged);
    }
    if header.flags != flags {
        return Err(ImageError::Flags { found: header.flags, needed: flags });
    }
    let unknown = ImageError::UnknownKind { found: header.kind };
    let kind = *ImageKind::ALL.get(usize::from(header.kind)).ok_or(unknown)?;
    let (table, tokens) =
        signed[size_of::<Header>()..].split_at(size_of::<Row>() * header.sections as usize);
    let rows = table.chunks_exact(size_of::<Row>()).map(bytemuck::pod_read_unaligned::<Row>);
    let sections = rows.enumerate().map(|(at, row)| row.section(at));
    let sections = sections.collect::<Result<Vec<_>, _>>()?;
    check_payload(&sections, header.payload)?;
    let tokens = tokens.as_chunks().0.iter().map(|&token| u32::from_le_bytes(token)).collect();
    let Header { shape, weights, owner, trunk, draft, epoch, lease, .. } = header;
    let manifest = Manifest {
        kind,
        fingerprint: Fingerprint { shape, weights, owner },
        at: Positions { trunk, draft },
        source: Source { epoch, lease },
        tokens,
        sections,
    };
    Ok((manifest, payload))
}

/// Refuses sections whose total size is not the payload size of the header, or overflows.
fn check_payload(sections: &[Section], found: u64) -> Result<(), ImageError> {
    let bytes = sections.iter().map(|section| section.part.bytes);
    let needed = bytes.fold(0, u64::saturating_add);
    if needed == u64::MAX || needed != found {
        return Err(ImageError::Length { needed, found });
    }
    Ok(())
}
