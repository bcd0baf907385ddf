//! Stores whose list of objects does not end, or is long.

use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};

use super::asking::{below, listing};
use super::failing::{long, prompt, stored};
use super::*;
use crate::objects::{LIST_TIMEOUT, MAX_LISTED};

/// A store that lists nothing is not waited for longer than the limit.
#[test]
fn a_store_that_lists_nothing_is_an_error() {
    let (mut fed, begin) = (cache(), Instant::now());
    let Err(error) = listing(&mut fed, &stored(), (0, Duration::ZERO)) else {
        panic!("it has listed nothing")
    };
    assert!(matches!(error, ColdError::NotListed { after } if after == LIST_TIMEOUT), "{error}");
    let took = begin.elapsed();
    assert!((LIST_TIMEOUT..Duration::from_secs(60)).contains(&took), "{took:?}");
}

/// What a store has listed in time is enough to open the tier. The rest is a miss.
#[test]
fn part_of_a_list_is_enough() {
    let (objects, mut fed) = (stored(), cache());
    let mut cold = listing(&mut fed, &objects, (2, Duration::ZERO)).unwrap();
    let stats = cold.stats();
    assert_eq!((stats.listed, stats.is_list_partial), (2, true));
    cold.fetch(&fed.manager, &prompt(&long())).unwrap().expect("two of its objects are known");
    cold.settle(&mut fed.manager);
    let (stats, errors) = (cold.stats(), cold.take_errors());
    assert_eq!((stats.restored, stats.failed, stats.damaged), (1, 0, 0), "{errors:?}");
    let stats = below(&mut cache(), &objects, |_| Ok(())).stats();
    assert!(stats.listed >= 4 && !stats.is_list_partial, "{stats:?}");
}

/// A store that was slow to open has less time for its list, and what it has listed by then is enough too.
#[test]
fn a_slow_store_opens_with_part_of_its_list() {
    let (objects, mut fed) = (stored(), cache());
    let cold = listing(&mut fed, &objects, (2, LIST_TIMEOUT / 3)).unwrap();
    let stats = cold.stats();
    assert_eq!((stats.listed, stats.is_list_partial), (2, true));
}

/// No more names are taken from a list than there is memory for.
#[test]
fn a_list_takes_no_more_names() {
    let objects = Arc::<InMemory>::default();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for count in 1..=MAX_LISTED + 1 {
        let name = Path::from(format!("v1/{count:064x}"));
        runtime.block_on(objects.put(&name, PutPayload::new())).unwrap();
        if count >= MAX_LISTED {
            let stats = below(&mut cache(), &objects, |_| Ok(())).stats();
            let is_partial = count > MAX_LISTED;
            assert_eq!((stats.listed, stats.is_list_partial), (MAX_LISTED as u64, is_partial));
        }
    }
}
