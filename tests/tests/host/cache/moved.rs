//! Requests that leave a cache and arrive in one, in its ledger: the positions from which they continue, and those to
//! which they cannot go back.

use dsv4_kv::device::NullDevice;
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::transfer::Positions;
use dsv4_kv::{Accepted, CacheConfig, KvCacheManager, KvError, Launches, LayerGroup, Ledger};
use dsv4_kv::{RequestId, StepRequest};

/// A configuration in which a request can take back four tokens.
fn config() -> CacheConfig {
    CacheConfig {
        max_requests: 3,
        num_blocks: 10,
        num_checkpoints: 2,
        max_context: 640,
        max_step_tokens: 512,
        max_draft: 3,
        ..CacheConfig::new(ModelConfig::preset("tiny").unwrap())
    }
}

/// Gives a request tokens in one layer group.
fn step(ledger: &mut Ledger, group: LayerGroup, id: RequestId, (start, tokens): (u32, u32)) {
    let mut array = vec![0; ledger.largest_layout().elements()];
    ledger.begin_step(group, &[StepRequest { id, start, tokens }], &mut array).unwrap();
    ledger.commit_step(group, &[Accepted::count(id, tokens)]).unwrap();
}

/// An arrived request has the rows that its position needs, but not those of earlier positions. A request that was
/// computed here has these too.
#[test]
fn a_request_that_came_does_not_go_back() {
    let mut ledger = Ledger::new(&config()).unwrap();
    let came = ledger.admit_imported(Positions { trunk: 131, draft: 131 }).unwrap();
    let own = ledger.admit().unwrap();
    for group in LayerGroup::ALL {
        step(&mut ledger, group, own, (0, 131));
    }
    for position in [130, 127] {
        ledger.rewind_draft(own, position).unwrap();
        let error = ledger.rewind_draft(came, position).unwrap_err();
        assert!(
            matches!(error, KvError::CannotRewind { request, to, committed: 131, earliest: 131 }
                if (request, to) == (came, position)),
            "{error}"
        );
    }
    ledger.rewind_draft(came, 131).unwrap();
    // It can go back over tokens that it has computed here.
    step(&mut ledger, LayerGroup::Draft, came, (131, 2));
    ledger.rewind_draft(came, 131).unwrap();
}

/// An arrived request is not saved at an earlier position, for which its slot does not have the rows.
#[test]
fn a_request_that_came_is_not_saved_behind_its_position() {
    let mut cache = KvCacheManager::new(NullDevice::null(1 << 40), config()).unwrap();
    let (stream, mut staging) =
        (cache.device().stream().unwrap(), cache.new_transfer_staging().unwrap());
    let [behind, at] = [131, 128].map(|tokens| {
        let at = Positions { trunk: tokens, draft: tokens };
        let payload = vec![0; staging.layout().bytes(at) as usize];
        cache.import(&stream, &mut staging, (at, &payload)).unwrap()
    });
    let own = cache.admit().unwrap();
    let request = StepRequest { id: own, start: 0, tokens: 131 };
    let mut step = cache.begin_step(&stream, Launches::Eager, &[request]).unwrap();
    step.skip_kernels();
    step.commit(&[Accepted::count(own, 131)]).unwrap();
    let error = cache.save_checkpoints(&stream, &[(own, 128), (behind, 128)]).unwrap_err();
    assert!(
        matches!(error, KvError::NotSavable { request, boundary: 128, committed: 131, .. }
            if request == behind),
        "{error}"
    );
    assert_eq!(cache.ledger().free_checkpoints(), 2);
    let saved = cache.save_checkpoints(&stream, &[(own, 128), (at, 128)]).unwrap();
    assert!(saved.iter().all(|saved| saved.boundary() == 128));
}

/// Draft layers that ran far ahead of the trunk have overwritten rows that the trunk's position needs. The request
/// cannot leave until the trunk is near enough.
#[test]
fn a_request_whose_drafts_are_far_ahead_does_not_leave() {
    let mut ledger = Ledger::new(&config()).unwrap();
    let id = ledger.admit().unwrap();
    step(&mut ledger, LayerGroup::Draft, id, (0, 200));
    let mut start = 0;
    for trunk in [100, 195, 196, 200] {
        step(&mut ledger, LayerGroup::Trunk, id, (start, trunk - start));
        start = trunk;
        match ledger.positions(id) {
            Ok(at) => assert!(trunk >= 196 && at == Positions { trunk, draft: trunk }, "{at:?}"),
            Err(KvError::Overwritten { request, group: LayerGroup::Draft, committed }) => {
                assert!(trunk < 196 && (request, committed) == (id, trunk), "{trunk}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
