//! Digests of sections of a payload, compared with those of `twox-hash`.

use std::ops::Range;

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::ops::{self, DIGEST_RECORD, SectionRecords};
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};
use twox_hash::XxHash3_128;

use crate::inputs::{download, upload};

/// The digests of `sections`, which are in words of 8 bytes, and the number of refused sections.
fn digests<B: Backend>(
    device: &Device<B>,
    payload: &[u8],
    sections: &[Range<u32>],
) -> (Vec<u128>, u32) {
    let stream = device.stream().unwrap();
    let words: Vec<_> = sections.iter().flat_map(|of| [of.start, of.end - of.start]).collect();
    let secret = upload(&stream, &ops::digest_secret());
    let records = upload(&stream, &vec![0_u32; sections.len() * DIGEST_RECORD as usize]);
    let faults = upload(&stream, &[0_u32]);
    let records_of = SectionRecords {
        payload: &upload(&stream, payload),
        sections: &upload(&stream, &words).view(),
        secret: &secret.view(),
        count: sections.len() as u32,
        records: &records,
        faults: &faults,
    };
    ops::digest_sections(&stream, &records_of).unwrap();
    let records = download(&stream, &records.view());
    let records = records.as_chunks::<{ DIGEST_RECORD as usize }>().0;
    let digest = |(record, of): (&[u32; DIGEST_RECORD as usize], &Range<u32>)| {
        let bytes = 8 * (of.end - of.start) as usize;
        ops::digest(record, bytes as u64)
            .unwrap_or_else(|| XxHash3_128::oneshot(&bytemuck::cast_slice(record)[..bytes]))
    };
    let found = records.iter().zip(sections).map(digest).collect();
    (found, download(&stream, &faults.view())[0])
}

fn random(bytes: usize, seed: u64) -> Vec<u8> {
    let mut payload = vec![0; bytes];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut payload);
    payload
}

/// Every length up to a few blocks of XXH3, lengths around its tiles of 32 blocks, and long ones, at random places.
pub fn sections_have_the_digests_of_their_bytes<B: Backend>(device: &Device<B>) {
    let payload = random(600_000, 1);
    let mut random = SmallRng::seed_from_u64(2);
    let around = |word: u32| word - 2..word + 3;
    let mut lengths: Vec<u32> = (0..=3 * 128 + 2).collect();
    lengths.extend([32, 33, 64, 96].into_iter().flat_map(|blocks| around(128 * blocks)));
    lengths.extend((0..20).map(|_| random.random_range(0..=75_000)));
    let sections: Vec<_> = lengths
        .into_iter()
        .map(|words| {
            let start = random.random_range(0..=75_000 - words);
            start..start + words
        })
        .collect();
    let (found, refused) = digests(device, &payload, &sections);
    assert_eq!(refused, 0);
    for (found, of) in found.into_iter().zip(sections) {
        let bytes = &payload[8 * of.start as usize..8 * of.end as usize];
        assert_eq!(found, XxHash3_128::oneshot(bytes), "words {of:?}");
    }
}

/// Sections that reach beyond the payload are refused; the others in the launch are right.
pub fn sections_beyond_the_payload_are_refused<B: Backend>(device: &Device<B>) {
    let payload = random(8_004, 3);
    let sections = [0..1001, 0..1000, 999..1001, 1000..1000, u32::MAX - 5..u32::MAX, 600..1000];
    let (found, refused) = digests(device, &payload, &sections);
    assert_eq!(refused, 3);
    for right in [1, 5] {
        let of = 8 * sections[right].start as usize..8 * sections[right].end as usize;
        assert_eq!(found[right], XxHash3_128::oneshot(&payload[of]), "section {right}");
    }
}
