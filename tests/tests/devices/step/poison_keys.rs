//! Poisoned caches: keys that no kernel wrote are found when the indexer scores them, and are reported by name.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::poison::{PoisonRead, PoisonedRow};
use dsv4_kv::{CacheConfig, KvError, LayerId};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

use crate::fed::{Fed, Padding, Part};
use crate::stories::{Story, config, tiny};

/// The CSA layers of the preset `tiny`.
const LAYERS: [LayerId; 2] = [LayerId(1), LayerId(3)];

fn poisoned<B: Backend>(device: &Device<B>, format: IndexFormat) -> Fed<B> {
    let config = config(&tiny(), (MainFormat::Ue8m0, format), 1);
    Fed::new(device, CacheConfig { poison: true, max_draft: 7, ..config })
}

/// Runs a step in which every CSA layer scores its queries, except those that see at most `skip` entries. Returns the
/// reported reads.
fn found<B: Backend>(
    fed: &mut Fed<B>,
    part: Part<'_>,
    accepted: u32,
    skip: u32,
) -> (u32, Vec<PoisonRead>) {
    let (config, queries) = (fed.manager.config().clone(), part.request().tokens);
    fed.run(&[part], Padding::None, &[accepted], &mut |_, updated| {
        updated.score(&config, 0..queries, skip)
    });
    match fed.manager.check_poison(&fed.stream) {
        Ok(()) => (0, Vec::new()),
        Err(KvError::PoisonRead { count, rows }) => (count, rows),
        Err(error) => panic!("{error}"),
    }
}

/// With every token written nothing is found. Then the kernels of two tokens do not run. The key that the second should
/// have closed is found for every query that scores it, and so are the two keys that were pooled from the poisoned
/// state of the first; nothing else is.
pub fn scores_of_what_nobody_wrote_are_named<B: Backend>(device: &Device<B>) {
    for format in IndexFormat::ALL {
        let story = Story::random(&tiny(), 136, 61);
        let mut fed = poisoned(device, format);
        let id = fed.manager.admit().unwrap();
        let clean = found(&mut fed, Part::new(id, &story, 0..127), 127, 1);
        assert_eq!(clean, (0, Vec::new()), "{format:?}");
        fed.manager.release(id).unwrap();

        let id = fed.manager.admit().unwrap();
        for (written, lost) in [(0..2, 2), (3..127, 127)] {
            fed.step(&[Part::new(id, &story, written)], Padding::None);
            fed.lose(&[Part::new(id, &story, lost..lost + 1)]);
        }
        let want = |first| -> Vec<_> {
            let queries =
                LAYERS.iter().flat_map(|&layer| (first..136).map(move |query| (layer, query)));
            // Entry 1 is also pooled from the window of entry 0, which has token 2.
            queries
                .flat_map(|(layer, position)| {
                    [0, 1, 31].map(|entry| PoisonRead {
                        layer,
                        slot: id.slot(),
                        request: Some(id),
                        position,
                        row: PoisonedRow::Key(entry),
                    })
                })
                .collect()
        };
        let part = || Part::new(id, &story, 128..136);
        assert_eq!(found(&mut fed, part(), 0, 1), (48, want(128)), "{format:?}");
        // The other queries see 32 and 33 entries, and are not scored.
        assert_eq!(found(&mut fed, part(), 8, 33), (6, want(135)), "{format:?}");
        fed.manager.check_faults(&fed.stream).unwrap();
    }
}

/// A request whose table names blocks that another request had and gave back: all of its keys are found.
pub fn scores_of_what_another_held_are_named<B: Backend>(device: &Device<B>) {
    for format in IndexFormat::ALL {
        let story = Story::random(&tiny(), 133, 62);
        let mut fed = poisoned(device, format);
        let first = fed.manager.admit().unwrap();
        let clean = found(&mut fed, Part::new(first, &story, 0..132), 132, 1);
        assert_eq!(clean, (0, Vec::new()), "{format:?}");
        fed.manager.release(first).unwrap();

        let next = fed.manager.admit().unwrap();
        fed.lose(&[Part::new(next, &story, 0..132)]);
        let (count, rows) = found(&mut fed, Part::new(next, &story, 132..133), 1, 1);
        // 33 in each of two layers, of which 64 are recorded.
        assert_eq!((count, rows.len()), (66, 64), "{format:?}");
        assert!(rows.iter().all(|read| read.request == Some(next) && read.position == 132));
        assert!(rows.iter().all(|read| matches!(read.row, PoisonedRow::Key(0..33))));
    }
}
