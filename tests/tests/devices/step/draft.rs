//! Draft (MTP) layers: they have positions of their own, and run ahead of an open step of the trunk.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::step_meta::{Section, StepLayout};
use dsv4_kv::{Accepted, CacheConfig, Groups, KvError, Launches, LayerGroup, LayerId, StepRequest};
use kv_layout::geometry::LayerKind::{Csa, Swa};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::fed::{Fed, Padding, Part};
use crate::rings::assert_ring;
use crate::stories::{Story, config};

const DRAFT_LAYER: LayerId = LayerId(2);
const DRAFTS: usize = 3;

/// While the trunk verifies drafts, the draft layer runs ahead token by token; then it goes back to the tokens that the
/// trunk accepted. The windows of both then hold the accepted tokens, as if there had been no drafts.
pub fn drafts_run_ahead_of_an_open_step<B: Backend>(device: &Device<B>) {
    let layers = [Swa, Csa, Swa];
    let formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
    let base = config(&layers, formats, 2);
    let config = CacheConfig {
        max_draft: DRAFTS as u32,
        model: dsv4_kv::kv_layout::config::ModelConfig { mtp_layers: 1, ..base.model.clone() },
        ..base
    };
    let [story, wrong] = [31, 32].map(|seed| Story::random(&layers, 320, seed));
    let stored = story.stored(device, formats);
    let mut fed = Fed::new(device, config);
    let id = fed.manager.admit().unwrap();
    fed.step(&[Part::new(id, &story, 0..125)], Padding::None);
    let (mut random, mut done) = (StdRng::seed_from_u64(5), 125);
    while done < 300 {
        let drafts = random.random_range(0..=DRAFTS);
        let accepted = random.random_range(1..=drafts + 1);
        let end = done + 1 + drafts;
        let parts = [Part {
            id,
            pieces: vec![(&story, done..done + accepted), (&wrong, done + accepted..end)],
        }];
        let Fed { manager, stream, inputs } = &mut fed;
        let Groups { mut trunk, draft } = manager.groups();
        let mut draft = draft.expect("the model has a draft layer");
        inputs.load(stream, &parts, drafts as u32 + 1);
        let step = [parts[0].request()];
        let mut verify = trunk.begin_step(stream, Launches::Eager, &step).unwrap();
        inputs.run(&mut verify, &mut |_, _| Ok(())).unwrap();
        // The verifying step of the trunk is open, and the draft layer takes the same tokens one by one.
        for (at, position) in (done..end).enumerate() {
            let own = if at < accepted { &story } else { &wrong };
            inputs.load(stream, &[Part::new(id, own, position..position + 1)], 1);
            let start = position as u32;
            let step = [StepRequest { id, start, tokens: 1 }];
            let mut ahead = draft.begin_step(stream, Launches::Eager, &step).unwrap();
            assert_eq!(ahead.group(), LayerGroup::Draft);
            inputs.run(&mut ahead, &mut |_, _| Ok(())).unwrap();
            ahead.commit(&[Accepted::count(id, 1)]).unwrap();
        }
        verify.commit(&[Accepted::count(id, accepted as u32)]).unwrap();
        done += accepted;
        fed.manager.rewind_draft(id, done as u32).unwrap();
        let committed = |group| fed.manager.ledger().committed_in(group, id).unwrap();
        assert_eq!(LayerGroup::ALL.map(committed), [done as u32; 2]);
        assert_ring(
            &fed.manager,
            &fed.stream,
            DRAFT_LAYER,
            id,
            &story.window_rows(DRAFT_LAYER)[..done],
        );
    }
    fed.assert_holds(id, &story, &stored, done);
    fed.manager.check_faults(&fed.stream).unwrap();
}

/// A layer belongs to one group. A model without draft layers has no draft steps.
pub fn groups_are_kept_apart<B: Backend>(device: &Device<B>) {
    let formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
    let mut fed = Fed::new(device, config(&[Swa, Swa], formats, 1));
    let error = fed.manager.group(LayerGroup::Draft).err().unwrap();
    assert!(matches!(error, KvError::NoSuchGroup { group: LayerGroup::Draft }), "{error}");
    assert!(fed.manager.groups().draft.is_none());
    let mut config = config(&[Swa, Csa], formats, 1);
    config.model.mtp_layers = 1;
    let error = dsv4_kv::KvCacheManager::new(device.clone(), config).err().unwrap();
    assert!(matches!(error, KvError::DraftLayerKind { layer: LayerId(1), kind: Csa }), "{error}");
}

/// A step of the draft layers does not report faults of the trunk's open step; the trunk's step does.
pub fn a_step_is_told_its_own_faults<B: Backend>(device: &Device<B>) {
    let mut config = config(&[Swa, Swa], (MainFormat::Ue8m0, IndexFormat::Mxfp4), 1);
    config.model.mtp_layers = 1;
    let (mut fed, story) = (Fed::new(device, config), Story::random(&[Swa, Swa], 1, 33));
    let id = fed.manager.admit().unwrap();
    let step_meta = fed.manager.writable_step_meta(LayerGroup::Trunk).unwrap();
    let ring_row = StepLayout::new(1, 0).range(Section::RingRow).start as u64;
    let Fed { manager, stream, inputs } = &mut fed;
    let Groups { mut trunk, draft } = manager.groups();
    let mut draft = draft.expect("the model has a draft layer");
    let parts = [Part::new(id, &story, 0..1)];
    inputs.load(stream, &parts, 1);
    let mut verify = trunk.begin_step(stream, Launches::Eager, &[parts[0].request()]).unwrap();
    stream.upload(&[i32::MAX], &step_meta, ring_row).unwrap();
    inputs.run(&mut verify, &mut |_, _| Ok(())).unwrap();
    let mut ahead = draft.begin_step(stream, Launches::Eager, &[parts[0].request()]).unwrap();
    inputs.run(&mut ahead, &mut |_, _| Ok(())).unwrap();
    ahead.check_faults().unwrap();
    let error = verify.check_faults().unwrap_err();
    assert!(matches!(error, KvError::KernelRefused { .. }), "{error}");
    ahead.commit(&[Accepted::count(id, 1)]).unwrap();
    drop(verify);
    fed.manager.check_faults(&fed.stream).unwrap();

    // `check_faults` of the cache reports both groups.
    let draft_meta = fed.manager.writable_step_meta(LayerGroup::Draft).unwrap();
    fed.manager.release(id).unwrap();
    let other = fed.manager.admit().unwrap();
    let Fed { manager, stream, inputs } = &mut fed;
    let parts = [Part::new(other, &story, 0..1)];
    inputs.load(stream, &parts, 1);
    for (group, meta) in LayerGroup::ALL.into_iter().zip([&step_meta, &draft_meta]) {
        let mut groups = manager.group(group).unwrap();
        let mut step = groups.begin_step(stream, Launches::Eager, &[parts[0].request()]).unwrap();
        stream.upload(&[i32::MAX], meta, ring_row).unwrap();
        inputs.run(&mut step, &mut |_, _| Ok(())).unwrap();
        step.commit(&[Accepted::count(other, 1)]).unwrap();
    }
    let error = manager.check_faults(stream).unwrap_err();
    let KvError::KernelRefused { refusals } = error else { panic!("{error}") };
    assert_eq!(refusals.iter().map(|refusal| refusal.count).sum::<u32>(), 2, "{refusals:?}");
    manager.check_faults(stream).unwrap();
}
