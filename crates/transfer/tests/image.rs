//! Images: a written image can be read, and any changed image is refused, without a panic.

use dsv4_kv::CacheConfig;
use dsv4_kv::transfer::{PartLayout, Positions};
use dsv4_kv_transfer::image::{Fact, decode_opening, verify};
use dsv4_kv_transfer::transport::Fabric;
use dsv4_kv_transfer::{
    Expected, Fingerprint, Image, ImageError, ImageKind, Manifest, Section, Source,
};
use kv_layout::config::ModelConfig;
use kv_layout::geometry::LayerKind;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Bytes of the header, of a row of the table, and of the digest after the tokens.
const HEADER: usize = 152;
const ROW: usize = 40;
const DIGEST: usize = 32;

fn config() -> CacheConfig {
    CacheConfig::new(ModelConfig::preset("tiny").unwrap())
}

/// A model with an HCA layer and a draft layer, whose checkpoints are small.
fn two_layers() -> CacheConfig {
    let model = config().model;
    let layers = vec![LayerKind::Hca, LayerKind::Swa];
    CacheConfig::new(ModelConfig { layers, mtp_layers: 1, ..model })
}

/// An image of random bytes.
struct Sample {
    fingerprint: Fingerprint,
    layout: PartLayout,
    manifest: Manifest,
    payload: Vec<u8>,
}

impl Sample {
    fn new(at: Positions, random: &mut StdRng) -> Self {
        Self::of(ImageKind::Request, at, random)
    }

    fn prefix(at: Positions, random: &mut StdRng) -> Self {
        Self::of(ImageKind::Prefix, at, random)
    }

    fn of(kind: ImageKind, at: Positions, random: &mut StdRng) -> Self {
        let config = if kind == ImageKind::Prefix { two_layers() } else { config() };
        let fingerprint = Fingerprint::new(&config, b"weights", b"salt", b"").unwrap();
        let layout = PartLayout::new(&config);
        let parts = kind.parts(&layout, at);
        let bytes: u64 = parts.iter().map(|part| part.bytes).sum();
        let payload: Vec<u8> = (0..bytes).map(|_| random.random()).collect();
        let mut rest = &payload[..];
        let section = |part: &dsv4_kv::transfer::Part| {
            let bytes;
            (bytes, rest) = rest.split_at(part.bytes as usize);
            Section::of(*part, bytes)
        };
        let sections = parts.iter().map(section).collect();
        let tokens = (0..at.trunk).map(|_| random.random_range(0..100_000)).collect();
        let source = Source { epoch: random.random(), lease: random.random() };
        let manifest = Manifest { kind, fingerprint, at, source, tokens, sections };
        Self { fingerprint, layout, manifest, payload }
    }

    fn expected(&self) -> Expected<'_> {
        let tokens = Some(&self.manifest.tokens[..]);
        let (fingerprint, layout) = (&self.fingerprint, &self.layout);
        Expected { fingerprint, layout, tokens, max_context: 300 }
    }

    fn bytes(&self) -> Vec<u8> {
        [self.manifest.encode(), self.payload.clone()].concat()
    }

    fn manifest_bytes(&self) -> usize {
        HEADER + ROW * self.manifest.sections.len() + 4 * self.manifest.tokens.len() + DIGEST
    }

    /// Updates the digest of the manifest after a change.
    fn seal(&self, bytes: &mut [u8]) {
        let end = self.manifest_bytes() - DIGEST;
        let digest = blake3::hash(&bytes[..end]);
        bytes[end..end + DIGEST].copy_from_slice(digest.as_bytes());
    }
}

fn at(trunk: u32, draft: u32) -> Positions {
    Positions { trunk, draft }
}

#[test]
fn what_is_written_is_read() {
    let mut random = StdRng::seed_from_u64(1);
    let requests = [at(0, 0), at(1, 0), at(3, 3), at(130, 129), at(256, 256)];
    let requests = requests.map(|at| (ImageKind::Request, at));
    let prefixes = [at(128, 0), at(128, 128), at(256, 256)].map(|at| (ImageKind::Prefix, at));
    for (kind, position) in requests.into_iter().chain(prefixes) {
        let sample = Sample::of(kind, position, &mut random);
        let bytes = sample.bytes();
        assert_eq!(bytes.len(), sample.manifest_bytes() + sample.payload.len());
        let image = Image::decode(&bytes, &sample.expected()).unwrap();
        assert_eq!((image.manifest(), image.payload()), (&sample.manifest, &sample.payload[..]));
        // Manifest and payload separately, with tokens that the target does not know.
        let expected = Expected { tokens: None, ..sample.expected() };
        Image::new(sample.manifest.clone(), &sample.payload, &expected).unwrap();
        verify(&sample.manifest, &sample.payload).unwrap();
        let opening = sample.manifest.encode_opening();
        assert_eq!(decode_opening(&opening).unwrap(), sample.manifest.without_digests());
        let longer = decode_opening(&[&opening[..], &[0]].concat()).unwrap_err();
        assert!(matches!(longer, ImageError::Length { .. }), "{longer}");
    }
}

/// A random number, often an extreme one.
fn number(random: &mut StdRng) -> u32 {
    match random.random_range(0..5) {
        0 => u32::MAX - random.random_range(0..4),
        1 => random.random_range(0..4),
        2 => 1 << random.random_range(0..32),
        _ => random.random(),
    }
}

/// Changes an image at random, and returns a description of the change.
fn mutate(sample: &Sample, bytes: &mut Vec<u8>, random: &mut StdRng) -> &'static str {
    let (manifest, len) = (sample.manifest_bytes(), bytes.len());
    let rows = sample.manifest.sections.len();
    match random.random_range(0..8) {
        0 => {
            for _ in 0..random.random_range(1..=3) {
                bytes[random.random_range(0..len)] ^= 1 << random.random_range(0..8);
            }
            "flipped bits"
        }
        1 => {
            bytes.truncate(random.random_range(0..len));
            "cut"
        }
        2 => {
            bytes.extend((0..random.random_range(1..100)).map(|_| random.random::<u8>()));
            "longer"
        }
        3 => {
            // Swaps two rows of the table.
            let [a, b] = [0; 2].map(|_| random.random_range(0..rows));
            let (a, b) = (HEADER + ROW * a.min(b), HEADER + ROW * a.max(b));
            if a < b {
                let (low, high) = bytes.split_at_mut(b);
                low[a..a + ROW].swap_with_slice(&mut high[..ROW]);
            }
            sample.seal(bytes);
            "sections of the table swapped, sealed"
        }
        4 => {
            let [a, b] = [0; 2].map(|_| random.random_range(manifest..len));
            let n = a.abs_diff(b).min(len - a.max(b));
            let (low, high) = bytes.split_at_mut(a.max(b));
            low[a.min(b)..][..n].swap_with_slice(&mut high[..n]);
            "payload swapped"
        }
        5 => {
            let field = random.random_range(16..112);
            bytes[field] = random.random();
            sample.seal(bytes);
            "foreign fingerprint, sealed"
        }
        6 => {
            // Any number except the source's, which cannot be checked.
            let words = (HEADER + ROW * rows + 4 * sample.manifest.tokens.len()) / 4;
            let word = random.random_range(0..words);
            if !(32..36).contains(&word) {
                bytes[4 * word..][..4].copy_from_slice(&number(random).to_le_bytes());
            }
            sample.seal(bytes);
            "another number, sealed"
        }
        _ => {
            let from = random.random_range(0..len);
            let end = (from + random.random_range(1..200)).min(len);
            bytes[from..end].iter_mut().for_each(|byte| *byte = random.random());
            "overwritten"
        }
    }
}

#[test]
fn a_hundred_thousand_mutated_images_are_refused() {
    let mut random = StdRng::seed_from_u64(2);
    let samples = [at(1, 1), at(2, 1), at(6, 5)].map(|at| Sample::new(at, &mut random));
    refuse_mutations(&samples, &mut random);
}

#[test]
fn a_hundred_thousand_mutated_prefixes_are_refused() {
    let mut random = StdRng::seed_from_u64(5);
    let samples = [at(128, 0), at(128, 128)].map(|at| Sample::prefix(at, &mut random));
    refuse_mutations(&samples, &mut random);
}

fn refuse_mutations(samples: &[Sample], random: &mut StdRng) {
    let mut done = 0;
    while done < 100_000 {
        let sample = &samples[random.random_range(0..samples.len())];
        let right = sample.bytes();
        let mut bytes = right.clone();
        let what = mutate(sample, &mut bytes, random);
        if bytes == right {
            continue;
        }
        let decoded = Image::decode(&bytes, &sample.expected());
        assert!(decoded.is_err(), "{what}: mutation {done} was not noticed");
        done += 1;
    }
}

/// Each change of an image gets its own refusal.
#[test]
fn refusals_name_what_is_wrong() {
    let mut random = StdRng::seed_from_u64(3);
    let sample = Sample::new(at(6, 5), &mut random);
    let decode = |bytes: &[u8]| Image::decode(bytes, &sample.expected()).unwrap_err();
    let changed = |place: usize, value: u32| {
        let mut bytes = sample.bytes();
        bytes[place..][..4].copy_from_slice(&value.to_le_bytes());
        sample.seal(&mut bytes);
        decode(&bytes)
    };
    assert_eq!(changed(0, 0), ImageError::Magic);
    assert_eq!(changed(8, 1), ImageError::Version { found: 1 });
    assert_eq!(changed(12, 1), ImageError::Flags { found: 1, needed: 0 });
    assert_eq!(changed(12, 2 << 16), ImageError::UnknownKind { found: 2 });
    // A request whose header says that it is a prefix.
    assert_eq!(changed(12, 1 << 16), ImageError::NoBoundary { at: at(6, 5) });
    // The message has the beginnings of both digests, and what they are of.
    let Fingerprint { shape, weights, owner } = sample.manifest.fingerprint;
    for (place, wanted, digest, of) in [
        (16, Fact::Shape, shape, "attention cluster"),
        (48, Fact::Weights, weights, "identity of the weights"),
        (80, Fact::Owner, owner, "salt and adapter"),
    ] {
        let error = changed(place, 1);
        let start = u32::from_be_bytes(digest[..4].try_into().unwrap());
        assert_eq!(error, ImageError::Foreign { fact: wanted, needed: start, found: 1 << 24 });
        let message = error.to_string();
        assert!(message.contains("01000000") && message.contains(of), "{message}");
        assert!(message.contains(&format!("{start:08x}")), "{message}");
    }
    assert_eq!(changed(112, 7), ImageError::Tokens { tokens: 6, at: at(7, 5) });
    assert!(matches!(changed(116, 6), ImageError::Section { .. }));
    assert_eq!(changed(116, 7), ImageError::Drafts { at: at(6, 7) });
    for value in [7, u32::MAX] {
        assert!(matches!(changed(120, value), ImageError::Length { .. } | ImageError::Damaged));
        assert!(matches!(changed(124, value), ImageError::Length { .. } | ImageError::Damaged));
    }
    assert!(matches!(changed(148, u32::MAX), ImageError::Length { .. }));
    assert_eq!(changed(HEADER, 99), ImageError::Kind { section: 0, kind: 99 });
    assert!(matches!(changed(HEADER + 4, 99), ImageError::Section { section: 0, .. }));
    assert!(matches!(changed(HEADER + 20, u32::MAX), ImageError::Length { .. }));
    assert!(matches!(changed(HEADER + 24, 0), ImageError::Digest { section: 0, .. }));
    let tokens = HEADER + ROW * sample.manifest.sections.len();
    assert_eq!(changed(tokens + 8, 100_000), ImageError::OtherTokens { position: 2 });
    let mut bytes = sample.bytes();
    bytes[20] ^= 1;
    assert_eq!(decode(&bytes), ImageError::Damaged);
    let short = Expected { tokens: Some(&sample.manifest.tokens[..4]), ..sample.expected() };
    let refused = Image::decode(&sample.bytes(), &short).unwrap_err();
    assert_eq!(refused, ImageError::OtherTokens { position: 4 });
    let near = Expected { max_context: 5, ..sample.expected() };
    let refused = Image::decode(&sample.bytes(), &near).unwrap_err();
    assert_eq!(refused, ImageError::TooLong { at: at(6, 5), limit: 5 });
    let trunk = CacheConfig::new(ModelConfig { mtp_layers: 0, ..config().model });
    let layout = PartLayout::new(&trunk);
    let expected = Expected { layout: &layout, ..sample.expected() };
    let refused = Image::decode(&sample.bytes(), &expected).unwrap_err();
    assert_eq!(refused, ImageError::NoDraftLayers { found: 5 });
}

/// The refusals that only prefixes have.
#[test]
fn refusals_of_prefixes_name_what_is_wrong() {
    let mut random = StdRng::seed_from_u64(6);
    let sample = Sample::prefix(at(128, 128), &mut random);
    let check = |at: Positions, kind| {
        let tokens =
            sample.manifest.tokens.iter().copied().cycle().take(at.trunk as usize).collect();
        let sections = sample.manifest.sections.clone();
        let manifest = Manifest { at, kind, tokens, sections, ..sample.manifest.clone() };
        manifest.check(&Expected { tokens: None, ..sample.expected() })
    };
    check(at(128, 128), ImageKind::Prefix).unwrap();
    for position in [at(0, 0), at(127, 127), at(129, 0), at(128, 1), at(256, 128)] {
        let refused = check(position, ImageKind::Prefix).unwrap_err();
        assert_eq!(refused, ImageError::NoBoundary { at: position });
    }
    let refused = check(at(128, 129), ImageKind::Prefix).unwrap_err();
    assert_eq!(refused, ImageError::Drafts { at: at(128, 129) });
    // A prefix has draft windows or has none; and a request has no checkpoint.
    let refused = check(at(128, 0), ImageKind::Prefix).unwrap_err();
    assert!(matches!(refused, ImageError::Section { section: 1, .. }), "{refused}");
    let refused = check(at(128, 128), ImageKind::Request).unwrap_err();
    assert!(matches!(refused, ImageError::Section { section: 1, .. }), "{refused}");
}

/// A manifest that was not decoded may state any number of bytes.
#[test]
fn sections_longer_than_memory_are_refused() {
    let mut random = StdRng::seed_from_u64(4);
    let mut sample = Sample::new(at(6, 5), &mut random);
    let len = sample.payload.len() as u64;
    for bytes in [[u64::MAX, len + 1], [len + 1, u64::MAX], [u64::MAX, u64::MAX]] {
        for (section, bytes) in sample.manifest.sections.iter_mut().zip(bytes) {
            section.part.bytes = bytes;
        }
        let refused = verify(&sample.manifest, &sample.payload).unwrap_err();
        assert_eq!(refused, ImageError::Length { needed: u64::MAX, found: len });
    }
    assert!(!Fabric::default().write(1, usize::MAX, &[1]));
}

/// A fingerprint depends on model, formats, weights, salt and adapter, and not on the size of the cache.
#[test]
fn a_fingerprint_is_of_what_makes_other_bytes() {
    use kv_layout::index_row::IndexFormat;
    let of = |config: &CacheConfig, weights: &[u8], salt: &[u8], adapter: &[u8]| {
        Fingerprint::new(config, weights, salt, adapter).unwrap()
    };
    let own = of(&config(), b"w", b"s", b"a");
    let larger = CacheConfig { max_draft: 3, num_blocks: 9, max_requests: 4, ..config() };
    assert_eq!(of(&larger, b"w", b"s", b"a"), own);
    // The same model read from a checkpoint's `config.json`, where it has another name.
    let read = ModelConfig::from_json(include_str!("../../../tests/configs/flash.json")).unwrap();
    let preset = ModelConfig::preset("flash").unwrap();
    assert_ne!(read.name, preset.name);
    let [read, preset] = [read, preset].map(CacheConfig::new);
    assert_eq!(of(&read, b"w", b"", b""), of(&preset, b"w", b"", b""));
    let other = CacheConfig { index_format: IndexFormat::Fp8, ..config() };
    assert_ne!(of(&other, b"w", b"s", b"a").shape, own.shape);
    let theta = ModelConfig { rope_theta: 1e6, ..config().model };
    let other = CacheConfig { model: theta, ..config() };
    assert_ne!(of(&other, b"w", b"s", b"a").shape, own.shape);
    assert_ne!(of(&config(), b"x", b"s", b"a").weights, own.weights);
    assert_ne!(of(&config(), b"w", b"sa", b"").owner, own.owner);
    // Without an identity, unlike weights would pass as equal.
    assert_eq!(Fingerprint::new(&config(), b"", b"s", b"a"), Err(ImageError::NoIdentity));
    assert_eq!(Fingerprint::weights_of(b""), Err(ImageError::NoIdentity));
}
