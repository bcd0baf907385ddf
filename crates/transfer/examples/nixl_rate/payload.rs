//! A payload with the parts of a request of V4-Flash, of bytes that both processes know.

use anyhow::{Result, ensure};
use dsv4_kv::CacheConfig;
use dsv4_kv::device::{CudaOptions, CudaSurvey};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::transfer::{Part, PartLayout, Positions};
use dsv4_kv_transfer::image::ImageKind;
use dsv4_kv_transfer::transport::Storage;
use dsv4_kv_transfer::{Expected, Fingerprint, Manifest, Section, Source};

pub struct Payload {
    pub parts: Vec<Part>,
    fingerprint: Fingerprint,
    layout: PartLayout,
    at: Positions,
}

impl Payload {
    /// The payload of a request of `tokens` tokens.
    pub fn new(tokens: u32) -> Self {
        let model = ModelConfig::preset("flash").expect("a preset");
        let config = CacheConfig { max_context: tokens, ..CacheConfig::new(model) };
        let layout = PartLayout::new(&config);
        let draft = if layout.has_draft_layers() { tokens } else { 0 };
        let at = Positions { trunk: tokens, draft };
        let fingerprint = Fingerprint::new(&config, b"weights", b"salt", b"")
            .expect("the weights have an identity");
        Self { parts: layout.parts(at), fingerprint, layout, at }
    }

    pub fn bytes(&self) -> usize {
        self.layout.bytes(self.at) as usize
    }

    /// Its bytes.
    pub fn pattern(&self) -> Vec<u8> {
        let mut word = 0x9E37_79B9_7F4A_7C15_u64;
        let len = self.bytes();
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// The manifest of the payload.
    pub fn manifest(&self, bytes: &[u8]) -> Manifest {
        let mut rest = bytes;
        let section = |&part: &Part| {
            Section::of(part, rest.split_off(..part.bytes as usize).expect("they add up"))
        };
        Manifest {
            kind: ImageKind::Request,
            fingerprint: self.fingerprint,
            at: self.at,
            source: Source { epoch: 1, lease: 1 },
            tokens: (0..self.at.trunk).collect(),
            sections: self.parts.iter().map(section).collect(),
        }
    }

    pub fn expected(&self) -> Expected<'_> {
        let Self { fingerprint, layout, at, .. } = self;
        Expected { fingerprint, layout, tokens: None, max_context: at.trunk }
    }
}

/// The number of the last GPU; 0 where there is none.
pub fn last_gpu() -> u32 {
    CudaSurvey::of_machine().map_or(0, |survey| survey.gpus.len().max(1) as u32 - 1)
}

/// Memory of the host, or of a GPU.
pub fn storage(kind: &str, ordinal: u32) -> Result<Storage> {
    if kind == "host" {
        return Ok(Storage::host());
    }
    ensure!(kind == "cuda", "{kind} is no kind of memory");
    let device = dsv4_kv::open_cuda(CudaOptions { ordinal, ..CudaOptions::default() })?;
    Ok(Storage::device(&device, ordinal)?)
}
