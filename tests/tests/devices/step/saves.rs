//! Checkpoints that steps save while they run.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::{Accepted, CacheConfig, KvError, Launches, LayerGroup, RequestId, StepRequest};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::told::{self, trunk};
use crate::fed::{Fed, Padding, Part};
use crate::inputs::assert_same;
use crate::rings::assert_ring_is_zero;
use crate::stories::{STEP_TOKENS, Story, config, tiny};

const FORMATS: (MainFormat, IndexFormat) = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
const TOKENS: usize = 400;
const BOUNDARIES: [u32; 3] = [128, 256, 384];

fn fed<B: Backend>(device: &Device<B>, max_draft: u32, num_checkpoints: u32) -> Fed<B> {
    let base = config(&tiny(), FORMATS, 2);
    Fed::new(device, CacheConfig { max_draft, num_checkpoints, ..base })
}

/// The checkpoint of a request at each boundary, when a chunk ends there.
fn images<B: Backend>(device: &Device<B>, story: &Story, max_draft: u32) -> Vec<Vec<u8>> {
    let mut fed = fed(device, max_draft, 1);
    let id = fed.manager.admit().unwrap();
    let image = |boundary: u32| {
        fed.step(
            &[Part::new(id, story, boundary as usize - 128..boundary as usize)],
            Padding::None,
        );
        told::image(&mut fed, id, boundary as usize).expect("a checkpoint is free")
    };
    BOUNDARIES.map(image).to_vec()
}

fn want<B: Backend>(fed: &mut Fed<B>, id: RequestId) {
    for boundary in BOUNDARIES {
        fed.manager.want_checkpoint(id, boundary).unwrap();
    }
}

/// Asserts that the saved checkpoints are those of all boundaries, in order, with the bytes `images`.
fn check<B: Backend>(fed: &mut Fed<B>, id: RequestId, images: &[Vec<u8>], what: &str) {
    let all = fed.manager.take_saved();
    let found: Vec<_> = all.iter().map(|(id, saved)| (*id, saved.boundary())).collect();
    assert_eq!(found, BOUNDARIES.map(|boundary| (id, boundary)), "{what}");
    for ((_, saved), image) in all.into_iter().zip(images) {
        assert_same(&trunk(fed, &saved), image, &format!("{} of {what}", saved.boundary()));
        fed.manager.discard_checkpoint(saved).unwrap();
    }
    fed.manager.check_faults(&fed.stream).unwrap();
}

/// A prompt is cut in several ways and runs eagerly, padded, and by captured graphs. Chunks save at each boundary the
/// bytes of a request whose chunks end there; steps with few tokens save after their commit. Another request in the
/// steps changes nothing, and is not saved.
pub fn any_cut_saves_the_same<B: Backend>(device: &Device<B>) {
    let mut random = StdRng::seed_from_u64(71);
    for max_draft in [0, 3] {
        let [story, other] = [72, 73].map(|seed| Story::random(&tiny(), TOKENS, seed));
        let images = images(device, &story, max_draft);
        let mut fed = fed(device, max_draft, 4);
        let padding = fed.bucket(STEP_TOKENS, STEP_TOKENS);
        let graphs = fed.capture(padding, &[], &mut |_, _| Ok(()));
        for case in 0..6 {
            let [id, beside] = [0, 1].map(|_| fed.manager.admit().unwrap());
            want(&mut fed, id);
            let (mut done, mut behind) = (0, 0);
            let most = [400, 300, 150, 90, 20, 130][case];
            while done < TOKENS {
                let tokens = random.random_range(1..=most).min(TOKENS - done);
                let of_other = random.random_range(1..=9).min(TOKENS - behind);
                let parts = [
                    Part::new(beside, &other, behind..behind + of_other),
                    Part::new(id, &story, done..done + tokens),
                ];
                let parts = if of_other > 0 && random.random() { &parts[..] } else { &parts[1..] };
                match case % 3 {
                    0 => fed.step(parts, Padding::None),
                    1 => fed.step(parts, padding),
                    _ => {
                        let all: Vec<_> = parts.iter().map(|part| part.request().tokens).collect();
                        fed.replay(parts, padding, &graphs, &all);
                    }
                }
                fed.manager.save_wanted(&fed.stream).unwrap();
                behind += if parts.len() == 2 { of_other } else { 0 };
                done += tokens;
            }
            check(&mut fed, id, &images, &format!("cut {case}, {max_draft} drafts"));
            assert_eq!(fed.manager.ledger().free_checkpoints(), 4);
            fed.manager.release(id).unwrap();
            fed.manager.release(beside).unwrap();
        }
    }
}

/// A rejected step saves nothing and gives its checkpoints back, and the step after it saves. A released request is not
/// saved. Without a free checkpoint a step runs as without saves.
pub fn only_what_is_committed_is_saved<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), TOKENS, 74);
    let images = images(device, &story, 3);
    let mut fed = fed(device, 3, 3);
    let id = fed.manager.admit().unwrap();
    want(&mut fed, id);
    let stream = fed.stream.clone();
    let step = [StepRequest { id, start: 0, tokens: TOKENS as u32 }];
    for _ in 0..2 {
        let rejected = fed.manager.begin_step(&stream, Launches::Eager, &step).unwrap();
        assert_eq!(rejected.plan().ring_copies, Some(0), "all rows are of the chunk");
        drop(rejected);
        assert_eq!(fed.manager.ledger().free_checkpoints(), 3);
        assert_eq!(fed.manager.take_saved(), []);
    }
    fed.step(&[Part::new(id, &story, 0..TOKENS)], Padding::None);
    assert_eq!(fed.manager.ledger().free_checkpoints(), 0);
    // All checkpoints are taken, so the next request gets none.
    let other = fed.manager.admit().unwrap();
    want(&mut fed, other);
    fed.step(&[Part::new(other, &story, 0..TOKENS)], Padding::None);
    fed.manager.save_wanted(&stream).unwrap();
    check(&mut fed, id, &images, "after rejected steps");
    let error = fed.manager.want_checkpoint(other, 384).unwrap_err();
    assert!(matches!(error, KvError::NotSavable { boundary: 384, committed: 400, .. }), "{error}");
    fed.manager.want_checkpoint(other, 512).unwrap();
    fed.manager.release(other).unwrap();
    let next = fed.manager.admit().unwrap();
    assert_eq!(next.slot(), other.slot());
    fed.step(&[Part::new(next, &story, 0..TOKENS)], Padding::None);
    assert_eq!(fed.manager.take_saved(), [], "another's wish");
}

/// A chunk saves no windows of draft layers: they are zero in a request that continues from its checkpoint.
pub fn draft_windows_that_were_not_saved_are_zero<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 200, 75);
    let mut fed = fed(device, 1, 1);
    let [a, b] = [0, 1].map(|_| fed.manager.admit().unwrap());
    fed.manager.want_checkpoint(a, 128).unwrap();
    fed.step(&[Part::new(a, &story, 0..200)], Padding::None);
    let (_, saved) = fed.manager.take_saved().pop().expect("it was saved");
    assert!(!saved.has_draft());
    fed.lose(&[Part::new(b, &story, 0..128)]);
    let before = fed.pool_bytes();
    fed.manager.restore_from_other(&fed.stream, b, &saved).unwrap();
    let draft = fed.layer_ids().last().unwrap();
    assert_ring_is_zero(&fed.manager, &fed.stream, draft, b);
    assert_ne!(before, fed.pool_bytes());
    for group in LayerGroup::ALL {
        assert_eq!(fed.manager.ledger().committed_in(group, b).unwrap(), 128);
    }
}

/// Draft layers that ran far ahead of the trunk have overwritten rows of the window at the boundary, so it is not
/// saved: the window is zero in a request that continues from the checkpoint.
pub fn draft_windows_that_are_overwritten_are_not_saved<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 200, 76);
    let mut fed = fed(device, 1, 1);
    let [a, b] = [0, 1].map(|_| fed.manager.admit().unwrap());
    fed.step(&[Part::new(a, &story, 0..128), Part::new(b, &story, 0..128)], Padding::None);
    let parts = [Part::new(a, &story, 128..200)];
    let Fed { manager, stream, inputs } = &mut fed;
    inputs.load(stream, &parts, 72);
    let mut draft = manager.group(LayerGroup::Draft).unwrap();
    let mut ahead = draft.begin_step(stream, Launches::Eager, &[parts[0].request()]).unwrap();
    inputs.run(&mut ahead, &mut |_, _| Ok(())).unwrap();
    ahead.commit(&[Accepted::count(a, 72)]).unwrap();
    let saved = manager.save_checkpoints(stream, &[(a, 128)]).unwrap().remove(0);
    assert!(!saved.has_draft());
    manager.restore_from_other(stream, b, &saved).unwrap();
    let draft = fed.layer_ids().last().unwrap();
    assert_ring_is_zero(&fed.manager, &fed.stream, draft, b);
}
