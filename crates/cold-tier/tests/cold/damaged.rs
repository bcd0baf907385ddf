//! Objects that are damaged, foreign or missing.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use dsv4_kv::CacheConfig;
use dsv4_kv::Origin;
use dsv4_kv_cold_tier::image::{Subject, encode};
use dsv4_kv_cold_tier::{ColdError, ImageError, Section};

use super::{Cache, Setup, settings, tokens};

/// The byte of an object that has the number of its prefix's blocks.
const BLOCKS_AT: usize = 36;
/// Far longer than the work takes, even on a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Runs part of a test that might hang, on a separate thread, and fails after `TIMEOUT`.
fn ends(some: impl FnOnce() + Send + 'static) {
    let (tell, told) = channel();
    let thread = std::thread::spawn(move || {
        some();
        tell.send(()).unwrap();
    });
    let is_late = told.recv_timeout(TIMEOUT) == Err(RecvTimeoutError::Timeout);
    assert!(!is_late, "it does not end");
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// Each section of the longest prefix's object is damaged, truncated, or replaced: the error names the reason, a
/// shorter prefix is used, and every byte is right.
#[test]
fn damaged_files_are_misses() {
    let setup = Setup::new();
    let files = setup.files();
    let whole = fs::read(&files[2]).unwrap();
    let damage = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x40;
        bytes
    };
    let word = |at: usize| u32::from_le_bytes(whole[at..at + 4].try_into().unwrap()) as usize;
    let tokens_at = 208 + word(40) + word(44);
    let blocks_at = tokens_at + 4 * 128 * word(36);
    let damaged = |section| move |error: &ImageError| *error == ImageError::Damaged { section };
    let end = whole.len();
    type Check = Box<dyn Fn(&ImageError) -> bool>;
    let cases: Vec<(Vec<u8>, Check)> = vec![
        (damage(0), Box::new(|error| *error == ImageError::Magic)),
        (damage(8), Box::new(|error| matches!(error, ImageError::Version { .. }))),
        (damage(100), Box::new(damaged(Section::Header))),
        (damage(210), Box::new(damaged(Section::Owner))),
        (damage(tokens_at), Box::new(damaged(Section::Tokens))),
        (damage(blocks_at - 1), Box::new(damaged(Section::Tokens))),
        (damage(blocks_at), Box::new(damaged(Section::Blocks))),
        (damage(end - 1), Box::new(damaged(Section::Checkpoint))),
        (whole[..end - 1].to_vec(), Box::new(|error| matches!(error, ImageError::Length { .. }))),
        (Vec::new(), Box::new(|error| matches!(error, ImageError::Length { .. }))),
        // Another prefix's object under this one's name.
        (fs::read(&files[1]).unwrap(), Box::new(|error| *error == ImageError::OtherTokens)),
    ];
    for (bytes, is_right) in cases {
        setup.assert_miss(&bytes, is_right);
    }
    // The first object of the chain is missing: objects that rest on it are misses, and are not fetched again.
    fs::remove_file(&files[0]).unwrap();
    let mut cache = setup.cache(b"weights");
    let errors = cache.fetch(b"a");
    assert!(matches!(errors[..], [ColdError::Store(_)]), "{errors:?}");
    assert_eq!(cache.ask(b"a").unwrap(), None);
    assert_eq!(cache.run(b"a", &setup.story, &setup.stored), 0);
    assert_eq!(cache.cold.stats().stored, 3, "all of it is stored anew");
    let mut cache = setup.cache(b"weights");
    assert!(cache.fetch(b"a").is_empty());
    assert_eq!(cache.run(b"a", &setup.story, &setup.stored), 384);
}

/// Objects with right digests whose headers have numbers that no cache writes: one without blocks of its own, which
/// would be read again and again, and one whose checkpoint has an unknown origin.
#[test]
fn an_object_of_no_blocks_or_no_origin_is_damaged() {
    let setup = Setup::new();
    let whole = fs::read(&setup.files()[2]).unwrap();
    let word = |at: usize| u32::from_le_bytes(whole[at..at + 4].try_into().unwrap()) as usize;
    let (identity, root) = whole[208..].split_at(word(40));
    let tokens = tokens();
    let subject = Subject {
        identity,
        root: &root[..word(44)],
        tokens: tokens.as_chunks().0,
        block_bytes: word(16) as u64,
        checkpoint_bytes: word(24) as u64,
    };
    let image = |first: usize, origin: u8| {
        let blocks = |bytes: &mut Vec<u8>| bytes.resize(bytes.len() + (3 - first) * word(16), 0);
        let checkpoint = |bytes: &mut Vec<u8>| bytes.resize(bytes.len() + word(24), 0);
        encode(&subject, (first as u32, origin, false), blocks, checkpoint).unwrap()
    };
    let images = [image(3, 0), image(0, 200), image(2, Origin::ALL.len() as u8)];
    ends(move || {
        for image in images {
            let is_right =
                |error: &ImageError| *error == ImageError::Damaged { section: Section::Header };
            setup.assert_miss(&image, is_right);
        }
    });
}

/// An object that is longer than any object of its prefix is not read, since it could fill the memory.
#[test]
fn an_object_that_is_too_long_is_not_read() {
    const BYTES: u64 = 1 << 42;
    let setup = Setup::new();
    let last = &setup.files()[2];
    let whole = fs::read(last).unwrap();
    fs::OpenOptions::new().write(true).open(last).unwrap().set_len(BYTES).unwrap();
    let mut cache = setup.cache(b"weights");
    let errors = cache.fetch(b"a");
    let [ColdError::Image { error: ImageError::TooLong { found: BYTES, most }, .. }] = errors[..]
    else {
        panic!("{errors:?}")
    };
    assert!(most > whole.len() as u64 && most < 8 << 20, "{most}");
    let stats = cache.cold.stats();
    assert_eq!((stats.damaged, stats.restored_tokens), (1, 256), "the shorter prefix is had");
    assert_eq!(cache.run(b"a", &setup.story, &setup.stored), 256);
    assert_eq!(fs::read(last).unwrap(), whole, "it is stored anew");
}

/// A new object does not rest on one that the store's expiry policy has deleted while the server ran, even if a later
/// object of that chain still exists.
#[test]
fn what_expired_is_stored_again() {
    for left in [0, 1] {
        let setup = Setup::new();
        let directory = tempfile::tempdir().unwrap();
        let cache = || Cache::new(&setup.device, directory.path(), b"weights");
        let mut first = cache();
        let (id, _) = first.compute(b"a", &setup.story, 300);
        first.fed.manager.release(id).unwrap();
        first.settle();
        let folder = fs::read_dir(directory.path().join("v1")).unwrap();
        let mut files: Vec<_> = folder.map(|entry| entry.unwrap().path()).collect();
        // Oldest first: the object with fewer tokens was written first.
        files.sort_by_key(|file| fs::metadata(file).unwrap().modified().unwrap());
        assert_eq!(files.len(), 2);
        // A tier that was reopened has no memory of them.
        first.reopen(directory.path(), b"weights");
        files.iter().take(2 - left).for_each(|file| fs::remove_file(file).unwrap());
        assert_eq!(first.run(b"a", &setup.story, &setup.stored), 256);
        first.settle();
        let mut second = cache();
        second.fetch(b"a");
        assert_eq!(second.run(b"a", &setup.story, &setup.stored), 384, "{left} were left");
    }
}

/// The objects of the first two blocks of the story, the shorter prefix first, which `first` has stored; it does not
/// remember that it has seen their chain whole.
fn two_objects(setup: &Setup, first: &mut Cache, directory: &Path) -> Vec<PathBuf> {
    let (id, _) = first.compute(b"a", &setup.story, 300);
    first.fed.manager.release(id).unwrap();
    first.settle();
    first.reopen(directory, b"weights");
    let files = fs::read_dir(directory.join("v1")).unwrap();
    let mut files: Vec<_> = files.map(|entry| entry.unwrap().path()).collect();
    files.sort_by_key(|file| fs::read(file).unwrap()[BLOCKS_AT]);
    assert_eq!(files.len(), 2);
    files
}

/// An empty file, as a loss of power may leave it, is a damaged object: the next prefix rests on the one before it, and
/// not all blocks are stored again. The same holds for a damaged header, and for a file that ends too early. All are counted.
#[test]
fn nothing_is_stored_on_a_damaged_object() {
    let setup = Setup::new();
    let damages: [fn(&mut Vec<u8>); 3] =
        [Vec::clear, |bytes| bytes[100] ^= 0x40, |bytes| bytes.truncate(bytes.len() - 1)];
    for damage in damages {
        let directory = tempfile::tempdir().unwrap();
        let cache = || Cache::new(&setup.device, directory.path(), b"weights");
        let mut first = cache();
        let files = two_objects(&setup, &mut first, directory.path());
        let mut bytes = fs::read(&files[1]).unwrap();
        damage(&mut bytes);
        fs::write(&files[1], bytes).unwrap();
        assert_eq!(first.run(b"a", &setup.story, &setup.stored), 256);
        let (stats, errors) = (first.cold.stats(), first.cold.take_errors());
        assert_eq!((stats.stored, stats.damaged, stats.failed), (1, 1, 0), "{errors:?}");
        let (block, checkpoint) = first.fed.manager.host_image_bytes().unwrap();
        let two = 2 * block + checkpoint;
        assert!(
            (two..two + block).contains(&stats.bytes_written),
            "the two blocks that are missing"
        );
        let mut second = cache();
        assert!(second.fetch(b"a").is_empty());
        assert_eq!(second.run(b"a", &setup.story, &setup.stored), 384);
    }
}

/// Nor does it rest on an existing object whose own base was deleted before the store was opened.
#[test]
fn nothing_is_stored_on_half_a_chain() {
    let setup = Setup::new();
    let directory = tempfile::tempdir().unwrap();
    let mut first = Cache::new(&setup.device, directory.path(), b"weights");
    let (id, _) = first.compute(b"a", &setup.story, 300);
    first.fed.manager.release(id).unwrap();
    first.settle();
    let files = fs::read_dir(directory.path().join("v1")).unwrap();
    let files: Vec<_> = files.map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 2);
    let first_file = files.iter().find(|file| fs::read(file).unwrap()[BLOCKS_AT] == 1).unwrap();
    fs::remove_file(first_file).unwrap();
    // Only the last checkpoint is stored.
    let wide = CacheConfig { checkpoint_interval: 384, ..settings() };
    let mut second = Cache::with(&setup.device, directory.path(), b"weights", wide);
    assert_eq!(second.run(b"a", &setup.story, &setup.stored), 0);
    assert_eq!(second.cold.stats().stored, 1);
    let mut third = Cache::new(&setup.device, directory.path(), b"weights");
    let errors = third.fetch(b"a");
    assert!(errors.is_empty(), "{errors:?}");
    assert_eq!(third.run(b"a", &setup.story, &setup.stored), 384);
}
