//! Checkpoints: a request that continues from one has the bytes that it would have alone.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::ops::{
    self, CheckpointCopy, CheckpointRows, CopyArena, CopyDirection, CopyPieces, LayerImage,
    StateCopies, StateRing, StateUpdate, StepProjections, StepTokens, SwaRing, WindowAppend,
};
use dsv4_kv::poison::{POISON, PoisonedRow};
use dsv4_kv::schema::{Pool, PoolUnit};
use dsv4_kv::{
    CacheConfig, CheckpointId, KvError, Launches, LayerId, PoolKind, RequestId, SavedCheckpoint,
    SlotId, StepRequest,
};
use kv_layout::geometry::{CsaCompressor, LayerKind, csa_own_rows, csa_previous_rows};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::fed::{Fed, Padding, Part, assert_pools, begin};
use crate::inputs::{assert_same, download, filled, upload};
use crate::refused::named;
use crate::stories::{Formats, Story, config, tiny};

const FORMATS: [Formats; 2] =
    [(MainFormat::Ue8m0, IndexFormat::Mxfp4), (MainFormat::F32, IndexFormat::Nvfp4)];
const REQUESTS: u32 = 3;

fn fed<B: Backend>(device: &Device<B>, formats: Formats, max_draft: u32) -> Fed<B> {
    let base = config(&tiny(), formats, REQUESTS);
    Fed::new(device, CacheConfig { max_draft, num_checkpoints: 2, poison: true, ..base })
}

/// The pools of all layers with this kind of unit.
fn pools_of<B: Backend>(fed: &Fed<B>, unit: PoolUnit) -> Vec<(LayerId, Pool)> {
    let layers = fed.manager.schema().layers.iter();
    let pools = layers.flat_map(|layer| layer.pools.iter().map(|pool| (layer.layer, *pool)));
    pools.filter(|(_, pool)| pool.unit == unit).collect()
}

/// Gives `to` blocks for `tokens` tokens, and copies the contents of the blocks of `from` to them.
fn copy_blocks<B: Backend>(
    fed: &mut Fed<B>,
    story: &Story,
    from: RequestId,
    to: RequestId,
    tokens: usize,
) {
    fed.lose(&[Part::new(to, story, 0..tokens)]);
    let [from, to] = [from, to].map(|id| fed.manager.block_table(id).unwrap());
    for (layer, pool) in pools_of(fed, PoolUnit::Block) {
        let buffer = fed.manager.writable_pool(layer, pool.kind).unwrap();
        let block = |id: dsv4_kv::BlockId| {
            buffer.slice(u64::from(id.0) * pool.unit_bytes(), pool.unit_bytes()).unwrap()
        };
        for (&from, &to) in from.iter().zip(&to) {
            fed.stream.copy(&block(from), &block(to)).unwrap();
        }
    }
}

/// The rows of a slot of this pool that a checkpoint at `boundary` keeps, in order of position.
fn kept(kind: LayerKind, pool: Pool, max_draft: u32, boundary: u32) -> Vec<u32> {
    let own = csa_own_rows(max_draft + 1);
    let (first, ring, rows) = match (pool.kind, kind) {
        (PoolKind::SwaData | PoolKind::SwaScale, _) => (0, 128 + max_draft, 128),
        (PoolKind::MainState | PoolKind::IndexState, LayerKind::Csa) => {
            (own, csa_previous_rows(own), 4)
        }
        _ => return Vec::new(),
    };
    (boundary - rows..boundary).map(|position| first + position % ring).collect()
}

/// All pools have random bytes. A save copies the rows that a checkpoint keeps, in order of position, and changes no
/// pool. A restore copies exactly these rows to another slot, each to the row of its position, and changes no other
/// byte of any pool.
pub fn a_copy_moves_every_byte_it_names<B: Backend>(device: &Device<B>) {
    let mut random = StdRng::seed_from_u64(91);
    for (formats, max_draft, boundary) in
        [(FORMATS[0], 0, 128), (FORMATS[1], 1, 256), (FORMATS[0], 2, 384), (FORMATS[1], 7, 256)]
    {
        let mut fed = fed(device, formats, max_draft);
        let story = Story::random(&tiny(), 1, 1);
        let empty = |id, tokens| Part { id, pieces: vec![(&story, 0..tokens)] };
        let [a, b] = [0, 1].map(|_| fed.manager.admit().unwrap());
        for id in [a, b] {
            fed.lose(&[empty(id, boundary as usize)]);
        }
        for (layer, pool) in
            [pools_of(&fed, PoolUnit::Slot), pools_of(&fed, PoolUnit::Block)].concat()
        {
            let pool = fed.manager.writable_pool(layer, pool.kind).unwrap();
            let bytes: Vec<u8> = (0..pool.len()).map(|_| random.random()).collect();
            fed.stream.upload(&bytes, &pool, 0).unwrap();
        }
        let mut want = fed.pool_bytes();
        let saved = fed.manager.save_checkpoints(&fed.stream, &[(a, boundary)]).unwrap().remove(0);
        assert_pools(&fed, &want, "after a save");
        let mut image = Vec::new();
        for (layer, pool) in pools_of(&fed, PoolUnit::Slot) {
            let name = format!("{layer:?} {:?}", pool.kind);
            let bytes = &mut want.iter_mut().find(|(found, _)| *found == name).unwrap().1;
            let row_bytes = pool.row_bytes as usize;
            let at = |id: RequestId, row: u32| (id.slot().0 * pool.rows + row) as usize * row_bytes;
            for row in kept(fed.kind(layer), pool, max_draft, boundary) {
                let from = at(a, row)..at(a, row) + row_bytes;
                image.extend_from_slice(&bytes[from.clone()]);
                bytes.copy_within(from, at(b, row));
            }
        }
        assert_same(
            &download(&fed.stream, &fed.manager.writable_checkpoint(&saved)),
            &image,
            "the checkpoint",
        );
        fed.manager.restore_from_other(&fed.stream, b, &saved).unwrap();
        assert_pools(&fed, &want, "after a restore");
        fed.manager.check_faults(&fed.stream).unwrap();
    }
}

/// Feeds `id` with `tokens` of its story in chunks, sometimes with drafts that are rejected.
fn feed<B: Backend>(
    fed: &mut Fed<B>,
    id: RequestId,
    (story, wrong): (&Story, &Story),
    tokens: std::ops::Range<usize>,
    random: &mut StdRng,
) {
    let drafts = fed.manager.config().max_draft as usize;
    let mut done = tokens.start;
    while done < tokens.end {
        let left = tokens.end - done;
        let is_chunk = random.random();
        let most = if is_chunk { left } else { left.min(drafts + 1) };
        let accepted = random.random_range(1..=most);
        let end = if is_chunk {
            done + accepted
        } else {
            done + random.random_range(accepted..=drafts + 1)
        };
        let pieces = vec![(story, done..done + accepted), (wrong, done + accepted..end)];
        let written = (end - done) as u32;
        fed.run(&[Part { id, pieces }], Padding::None, &[accepted as u32], &mut |_, layer| {
            layer.read_windows(written)
        });
        fed.manager.check_poison(&fed.stream).unwrap();
        done += accepted;
    }
}

/// A request is saved at a boundary, when it is there or up to `max_draft` tokens after it, and its slot becomes
/// poison. Another request continues from the checkpoint in another slot, in any chunks and with drafts that are
/// rejected. Every window, entry and key equals that of the story alone.
pub fn a_restored_request_goes_on_as_if_alone<B: Backend>(device: &Device<B>) {
    let mut random = StdRng::seed_from_u64(92);
    let cases = [0, 1, 3, 8].into_iter().zip(FORMATS.iter().cycle());
    for (max_draft, &formats) in cases {
        let [story, wrong] = [93, 94].map(|seed| Story::random(&tiny(), 420, seed));
        let stored = story.stored(device, formats);
        for boundary in [128_usize, 256] {
            let mut fed = fed(device, formats, max_draft);
            // Takes a slot, so that the two requests have other slots.
            let _other = fed.manager.admit().unwrap();
            let (a, b) = (fed.manager.admit().unwrap(), fed.manager.admit().unwrap());
            let before = boundary - 1 - random.random_range(0..=max_draft as usize);
            feed(&mut fed, a, (&story, &wrong), 0..before, &mut random);
            // The step that passes the boundary accepts some or all of its tokens.
            let accepted = random.random_range(boundary - before..=max_draft as usize + 1);
            let end = before + max_draft as usize + 1;
            let pieces =
                vec![(&story, before..before + accepted), (&wrong, before + accepted..end)];
            fed.run(&[Part { id: a, pieces }], Padding::None, &[accepted as u32], &mut |_, _| {
                Ok(())
            });
            let saves = [(a, boundary as u32)];
            let saved = fed.manager.save_checkpoints(&fed.stream, &saves).unwrap().remove(0);
            assert_eq!((saved.boundary(), saved.has_draft()), (boundary as u32, true));
            copy_blocks(&mut fed, &story, a, b, boundary);
            fed.manager.release(a).unwrap();
            fed.manager.restore_from_other(&fed.stream, b, &saved).unwrap();
            fed.assert_holds(b, &story, &stored, boundary);
            feed(&mut fed, b, (&story, &wrong), boundary..boundary + 150, &mut random);
            fed.assert_holds(b, &story, &stored, boundary + 150);
            fed.manager.check_faults(&fed.stream).unwrap();
            fed.manager.discard_checkpoint(saved).unwrap();
            assert_eq!(fed.manager.ledger().free_checkpoints(), 2);
        }
    }
}

/// A saved request in slot 0, and a request in slot 1 with blocks of the same contents.
fn two_requests<B: Backend>(
    device: &Device<B>,
    story: &Story,
) -> (Fed<B>, RequestId, RequestId, SavedCheckpoint) {
    let mut fed = fed(device, FORMATS[0], 1);
    let [a, b] = [0, 1].map(|_| fed.manager.admit().unwrap());
    fed.step(&[Part::new(a, story, 0..128)], Padding::None);
    let saved = fed.manager.save_checkpoints(&fed.stream, &[(a, 128)]).unwrap().remove(0);
    copy_blocks(&mut fed, story, a, b, 128);
    (fed, a, b, saved)
}

/// A row that is missing in a checkpoint is poison when it is gathered. A row of another position shows in the bytes.
pub fn stale_rows_are_found<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 129, 95);
    for stale in [false, true] {
        let (mut fed, a, b, saved) = two_requests(device, &story);
        let checkpoint = fed.manager.writable_checkpoint(&saved);
        // The window of the first layer comes first in a checkpoint. This is the row of a position.
        let row = |position: u64| checkpoint.slice(position * 576, 576).unwrap();
        if stale {
            fed.stream.copy(&row(6), &row(5)).unwrap();
        } else {
            fed.stream.fill(&row(5), POISON).unwrap();
        }
        fed.manager.restore_from_other(&fed.stream, b, &saved).unwrap();
        let slot = |fed: &Fed<B>, id: RequestId| {
            let pool = fed.manager.pool(LayerId(0), PoolKind::SwaData).unwrap();
            let slot = pool.slice(u64::from(id.slot().0) * 129 * 576, 128 * 576).unwrap();
            download(&fed.stream, &slot)
        };
        let differ = slot(&fed, a)
            .chunks(576)
            .zip(slot(&fed, b).chunks(576))
            .enumerate()
            .filter(|(_, (a, b))| a != b)
            .map(|(row, _)| row)
            .collect::<Vec<_>>();
        assert_eq!(differ, [5]);
        let stream = fed.stream.clone();
        fed.run(&[Part::new(b, &story, 128..129)], Padding::None, &[1], &mut |_, layer| {
            layer.gather_window(0..1, &filled(&stream, 128 * 512), &filled(&stream, 1))
        });
        match fed.manager.check_poison(&fed.stream) {
            Ok(()) => assert!(stale, "poison is found"),
            Err(KvError::PoisonRead { rows, .. }) => {
                assert!(
                    !stale && rows.len() == 1 && rows[0].row == PoisonedRow::Window(5),
                    "{rows:?}"
                );
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// A step that was leaked (`std::mem::forget`) does not prevent a restore of its request: it is rejected first.
pub fn a_leaked_step_is_rejected_before_a_restore<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 260, 97);
    let (mut fed, _, b, saved) = two_requests(device, &story);
    let stream = fed.stream.clone();
    let step = [StepRequest { id: b, start: 128, tokens: 1 }];
    std::mem::forget(fed.manager.begin_step(&stream, Launches::Eager, &step).unwrap());
    fed.manager.restore_from_other(&stream, b, &saved).unwrap();
    assert_eq!(fed.manager.ledger().committed(b).unwrap(), 128);
}

/// A block that a request took for rejected drafts does not prevent its restore.
pub fn a_block_of_rejected_drafts_does_not_prevent_a_restore<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 260, 98);
    let stored = story.stored(device, FORMATS[0]);
    let mut fed = fed(device, FORMATS[0], 8);
    let (stream, id) = (fed.stream.clone(), fed.manager.admit().unwrap());
    fed.step(&[Part::new(id, &story, 0..126)], Padding::None);
    fed.run(&[Part::new(id, &story, 126..134)], Padding::None, &[2], &mut |_, _| Ok(()));
    let blocks = fed.manager.config().num_blocks;
    assert_eq!(blocks - fed.manager.ledger().free_blocks(), 2, "one block is for a rejected token");
    let saved = fed.manager.save_checkpoints(&stream, &[(id, 128)]).unwrap().remove(0);
    let rejected = [Part::new(id, &story, 128..148)];
    fed.inputs.load(&stream, &rejected, 20);
    for mut step in begin(&mut fed.manager, &stream, &rejected, Padding::None).unwrap() {
        fed.inputs.run(&mut step, &mut |_, _| Ok(())).unwrap();
    }
    let next = [Part::new(id, &story, 128..129)];
    let refused = begin(&mut fed.manager, &stream, &next, Padding::None).err().unwrap();
    assert!(matches!(refused, KvError::Overwritten { .. }), "{refused}");
    fed.manager.restore_checkpoint(&stream, id, &saved).unwrap();
    assert_eq!(fed.manager.ledger().committed(id).unwrap(), 128);
    fed.step(&[Part::new(id, &story, 128..260)], Padding::None);
    fed.assert_holds(id, &story, &stored, 260);
    fed.manager.ledger().audit().unwrap();
    fed.manager.discard_checkpoint(saved).unwrap();
}

/// Refusals name the cause, and leave every byte, request and checkpoint as it was.
pub fn what_cannot_be_copied_changes_nothing<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 260, 96);
    let (mut fed, a, b, saved) = two_requests(device, &story);
    let stream = fed.stream.clone();
    fed.step(&[Part::new(a, &story, 128..131)], Padding::None);
    let before = fed.pool_bytes();
    let mut refused =
        |saves: &[(RequestId, u32)]| fed.manager.save_checkpoints(&stream, saves).unwrap_err();
    // Three tokens were written after boundary 128, and rings allow two. The other boundaries cannot be saved either.
    for boundary in [0, 64, 128, 256] {
        let error = refused(&[(b, 128), (a, boundary)]);
        let is_named = matches!(error, KvError::NotSavable { request, boundary: found, committed: 131, .. }
            if (request, found) == (a, boundary));
        assert!(is_named, "{error}");
    }
    let error = refused(&[(b, 128), (b, 128)]);
    assert!(matches!(error, KvError::OutOfCheckpoints { needed: 2, free: 1 }), "{error}");
    let c = fed.manager.admit().unwrap();
    let error = fed.manager.restore_from_other(&stream, c, &saved).unwrap_err();
    let is_named =
        matches!(error, KvError::NotRestorable { blocks: 0, needed: 1, boundary: 128, .. });
    assert!(is_named, "{error}");
    // The request has the block, but not all tokens of it.
    fed.lose(&[Part::new(c, &story, 0..127)]);
    let error = fed.manager.restore_from_other(&stream, c, &saved).unwrap_err();
    let is_named =
        matches!(error, KvError::NotRestorable { committed: 127, blocks: 1, needed: 1, .. });
    assert!(is_named, "{error}");
    assert_eq!(fed.manager.ledger().committed(c).unwrap(), 127);
    fed.manager.release(c).unwrap();
    let error = fed.manager.restore_from_other(&stream, c, &saved).unwrap_err();
    assert!(matches!(error, KvError::UnknownRequest { .. }), "{error}");
    assert_pools(&fed, &before, "after refusals");
    assert_eq!(fed.manager.ledger().free_checkpoints(), 1);
    assert_eq!([a, b].map(|id| fed.manager.ledger().committed(id).unwrap()), [131, 128]);
}

/// The kernel counts jobs with units or images that do not exist, and writes nothing for them.
pub fn jobs_out_of_range_are_counted<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    // One row of 512 bytes in each of two slots and of two checkpoints.
    let pieces = upload(&stream, &[0_u32, 0, 32, 32, 1, 1, 0, 0]);
    let memory = |seed: u8| upload(&stream, &[[seed; 512], [seed + 1; 512]].concat());
    let (slots, checkpoints, faults) = (memory(1), memory(3), upload(&stream, &[0_u32]));
    let arena = CopyArena {
        units: &slots,
        number_of_units: 2,
        images: &checkpoints,
        number_of_images: 2,
        image_bytes: 512,
    };
    let copy = |slot, checkpoint, direction| {
        let (slot, checkpoint) = (SlotId(slot), CheckpointId(checkpoint));
        let job = CheckpointCopy { slot, checkpoint, boundary: 1, end: 1 };
        let copies = StateCopies {
            arena: &arena,
            pieces: CopyPieces(&pieces),
            jobs: &upload(&stream, &job.words()),
            count: 1,
            direction,
            faults: &faults,
        };
        ops::copy_state(&stream, &copies).unwrap();
    };
    for direction in [CopyDirection::Pack, CopyDirection::Unpack, CopyDirection::Copy] {
        copy(2, 0, direction);
        copy(0, 2, direction);
        copy(u32::MAX, 1, direction);
    }
    assert_eq!(download(&stream, &faults), [9]);
    assert_same(&download(&stream, &slots), &download(&stream, &memory(1)), "slots");
    assert_same(&download(&stream, &checkpoints), &download(&stream, &memory(3)), "checkpoints");
    copy(0, 1, CopyDirection::Copy);
    copy(1, 0, CopyDirection::Pack);
    // The target includes the first word of all, which threads without a word of their own must not read meanwhile.
    copy(1, 0, CopyDirection::Copy);
    assert_eq!(download(&stream, &slots), [1; 1024]);
    assert_eq!(download(&stream, &checkpoints), [[1; 512], [4; 512]].concat());
}

/// A copy without memory for the units or for the images is refused by the name of what is missing.
pub fn copies_without_memory_are_refused<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let pieces = upload(&stream, &[0_u32, 0, 32, 32, 1, 1, 0, 0]);
    let (memory, images) = (filled::<B, u8>(&stream, 1024), filled::<B, u8>(&stream, 1024));
    let (jobs, faults) = (upload(&stream, &[0_i32, 1, 1, 1]), upload(&stream, &[0_u32]));
    let copy = |units: u64, number_of_images, image_bytes, direction| {
        let arena = CopyArena {
            units: &memory.slice(0, units).unwrap(),
            number_of_units: 2,
            images: &images,
            number_of_images,
            image_bytes,
        };
        let pieces = CopyPieces(&pieces);
        let (arena, jobs, faults) = (&arena, &jobs, &faults);
        let copies = StateCopies { arena, pieces, jobs, count: 1, direction, faults };
        ops::copy_state(&stream, &copies)
    };
    let all = "256-byte granules of all slots or blocks";
    copy(1024, 0, 0, CopyDirection::Copy).unwrap();
    assert_eq!(named(copy(255, 0, 0, CopyDirection::Copy)), all);
    for direction in [CopyDirection::Pack, CopyDirection::Unpack] {
        copy(1024, 2, 512, direction).unwrap();
        assert_eq!(named(copy(255, 2, 512, direction)), all);
        assert_eq!(named(copy(1024, 0, 512, direction)), "number of images");
        for bytes in [0, 255, 1 << 40] {
            let refused = named(copy(1024, 2, bytes, direction));
            assert_eq!(refused, "256-byte granules of an image", "{bytes} bytes");
        }
        assert_eq!(named(copy(1024, 2, 500, direction)), "bytes of an image");
    }
}

/// Rows that a step saves must lie in a checkpoint to their last byte.
pub fn rows_that_no_checkpoint_has_are_refused<B: Backend>(device: &Device<B>) {
    const DATA: u64 = 128 * 576;
    const SCALES: u64 = 128 * 8;
    const HALVES: u64 = 4 * 4 * 1024;
    let stream = device.stream().unwrap();
    let (words, faults) = (upload(&stream, &[0_i32]), upload(&stream, &[0_u32]));
    let (floats, kv) = (filled(&stream, 1 << 16), filled(&stream, 512));
    let [data, scale] = [DATA, SCALES].map(|bytes| filled::<B, u8>(&stream, bytes as usize));
    let (state, checkpoints) = (filled(&stream, 1 << 16), filled(&stream, 1 << 18));
    let rows = |checkpoint_bytes, image| CheckpointRows {
        checkpoints: &checkpoints,
        number: 1,
        checkpoint_bytes,
        row: &words,
        image,
    };
    let append = |checkpoint_bytes, window| {
        let ring =
            SwaRing { data: &data, scale: &scale, format: FORMATS[0].0, ring: 128, slots: 1 };
        let (kv, row, ring, faults, tokens) = (&kv, &words, &ring, &faults, 1);
        let append = WindowAppend { kv, row, ring, faults, tokens };
        let rows = rows(checkpoint_bytes, LayerImage { window, ..LayerImage::default() });
        ops::append_swa_saving(&stream, &append, Some(&rows))
    };
    let write = |checkpoint_bytes, halves| {
        let tokens = StepTokens {
            position: &words,
            slot: &words,
            index: &words,
            remaining: &words,
            count: 1,
        };
        let update = StateUpdate {
            tokens: &tokens,
            projections: &StepProjections { kv: &floats, gate: &floats },
            ape: &floats,
            state: &StateRing { rows: &state, ring: csa_own_rows(1), slots: 1 },
        };
        let rows = rows(checkpoint_bytes, LayerImage { halves, ..LayerImage::default() });
        ops::write_state_saving(&stream, CsaCompressor::Main, &update, Some(&rows))
    };
    let last = u64::MAX - 255;
    for (result, fits) in [
        (append(DATA + SCALES, [0, DATA]), true),
        (append(DATA + SCALES, [SCALES, 0]), true),
        (append(DATA + SCALES - 256, [0, DATA]), false),
        (append(DATA + SCALES - 256, [SCALES, 0]), false),
        (append(DATA + SCALES, [0, last]), false),
        (append(DATA + SCALES, [last, 0]), false),
        (write(HALVES, [0, last]), true),
        (write(HALVES - 256, [0, 0]), false),
        (write(HALVES, [256, 0]), false),
        (write(HALVES, [last, 0]), false),
    ] {
        if fits {
            result.unwrap();
        } else {
            assert_eq!(named(result), "bytes of a checkpoint");
        }
    }
    // A kernel counts in granules of 256 bytes: other numbers would be rounded down.
    assert_eq!(named(append(DATA + SCALES + 100, [0, DATA])), "bytes of a checkpoint");
    assert_eq!(named(write(HALVES + 255, [0, 0])), "bytes of a checkpoint");
    for place in [1, 128, 255] {
        assert_eq!(named(append(DATA + SCALES + 256, [place, DATA])), "place in a checkpoint");
        assert_eq!(named(append(DATA + SCALES + 256, [0, DATA + place])), "place in a checkpoint");
        assert_eq!(named(write(HALVES + 256, [place, 0])), "place in a checkpoint");
    }
}
