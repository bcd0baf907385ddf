//! The programs that `docs/tutorial.md` includes by their anchors, run on the CPU.

use dsv4_kv::device::{Buffer, EmuDevice, EmuOptions, Emulator, Stream};
use dsv4_kv::kv_layout::{config::ModelConfig, geometry::LayerKind};
use dsv4_kv::transfer::Positions;
use dsv4_kv::{
    Accepted, Bucket, CacheConfig, KvCacheManager, KvError, Launches, LayerGroup, Layers,
    RequestId, StepRequest, bf16,
};

type Cache = KvCacheManager<Emulator>;
type Tensors = Buffer<Emulator, bf16>;

/// A cache of a trunk layer and a draft layer, in which two drafts are verified; the rows of a step.
fn cache(device: &EmuDevice) -> Result<(Cache, Stream<Emulator>, Tensors), KvError> {
    let tiny = ModelConfig::preset("tiny").expect("a preset");
    let model = ModelConfig { layers: vec![LayerKind::Swa; 2], mtp_layers: 1, ..tiny };
    let config =
        CacheConfig { max_draft: 2, max_requests: 4, max_suspended: 4, ..CacheConfig::new(model) };
    let config = CacheConfig { num_blocks: 16, max_context: 512, max_step_tokens: 64, ..config };
    let kv = device.allocate("KV rows", 64 * 512)?;
    Ok((Cache::new(device.clone(), config)?, device.stream()?, kv))
}

/// The layers of a group, from the tensors of a program.
fn run_layers(layers: &mut Layers<'_, Emulator>, kv: &Tensors) -> Result<(), KvError> {
    for (layer, _) in layers.layer_kinds() {
        layers.swa(layer)?.update(kv)?.append()?;
    }
    Ok(())
}

/// A step of the trunk with all of its tokens.
fn trunk(
    cache: &mut Cache,
    stream: &Stream<Emulator>,
    kv: &Tensors,
    part: StepRequest,
) -> Result<(), KvError> {
    let mut step = cache.begin_step(stream, Launches::Eager, &[part])?;
    run_layers(&mut step, kv)?;
    step.commit(&[Accepted::count(part.id, part.tokens)])
}

#[rustfmt::skip]
fn draft_and_verify(cache: &mut Cache, stream: &Stream<Emulator>, kv: &Tensors, id: RequestId) -> Result<(), KvError> {
    // ANCHOR: draft
    // Both groups have the tokens 0..5. The draft layers run two tokens ahead of the trunk, to propose two drafts.
    for start in 5..7 {
        let mut drafts = cache.group(LayerGroup::Draft)?;
        let requests = [StepRequest { id, start, tokens: 1 }];
        let mut step = drafts.begin_step(stream, Launches::Eager, &requests)?;
        run_layers(&mut step, kv)?; // `step.layer_kinds()` are the draft layers here
        step.commit(&[Accepted::count(id, 1)])?;
    }
    // The trunk verifies its next token and both drafts, and accepts one token.
    let mut step = cache.begin_step(stream, Launches::Eager, &[StepRequest { id, start: 5, tokens: 3 }])?;
    run_layers(&mut step, kv)?; // and here those of the trunk
    step.commit(&[Accepted::count(id, 1)])?;
    // The draft layers go back to where the trunk is.
    cache.rewind_draft(id, 6)?;
    // ANCHOR_END: draft
    Ok(())
}

#[rustfmt::skip]
fn verify_by_a_graph(cache: &mut Cache, stream: &Stream<Emulator>, kv: &Tensors, ids: &[RequestId]) -> Result<(), KvError> {
    // ANCHOR: graph
    // Up to four requests with up to three tokens each: a token and two drafts (`max_draft: 2`).
    let bucket = Bucket { tokens: 12, tokens_per_request: 3, ..Bucket::decode(cache.config(), 4) };
    let graph = cache.capture(stream, &bucket, vec![kv.memory()], |layers| run_layers(layers, kv))?;
    let requests: Vec<_> = ids.iter().map(|&id| StepRequest { id, start: 0, tokens: 3 }).collect();
    let mut step = cache.begin_step(stream, Launches::Bucket(&bucket), &requests)?;
    step.replay(&graph)?;
    let accepted: Vec<_> = ids.iter().map(|&id| Accepted::count(id, 2)).collect();
    step.commit(&accepted)?;
    // ANCHOR_END: graph
    Ok(())
}

#[rustfmt::skip]
fn move_a_request(
    (from, to): (&mut Cache, &mut Cache),
    stream: &Stream<Emulator>,
    id: RequestId,
) -> Result<RequestId, Box<dyn std::error::Error>> {
    // ANCHOR: move
    let mut staging_out = from.new_transfer_staging()?;
    let mut staging_in = to.new_transfer_staging()?;
    let mut export = from.export(stream, &mut staging_out, id)?;
    let at = export.positions(); // of this export: they say what the bytes are
    let mut bytes = vec![0; export.layout().bytes(at) as usize];
    export.all(&mut bytes)?;
    let id = to.import(stream, &mut staging_in, (at, &bytes))?;
    // ANCHOR_END: move
    Ok(id)
}

#[rustfmt::skip]
fn resume(cache: &mut Cache, stream: &Stream<Emulator>, id: RequestId) -> Result<[usize; 2], KvError> {
    let (mut running, mut waiting) = (Vec::new(), Vec::new());
    // ANCHOR: resume
    let suspended = cache.suspend(stream, id)?;
    // Later, and again while all slots are taken:
    match cache.resume(stream, suspended) {
        Ok(id) => running.push(id),
        Err(refused) => waiting.push(refused.into_suspended()),
    }
    // ANCHOR_END: resume
    Ok([running.len(), waiting.len()])
}

#[test]
fn draft_layers_run_ahead_and_go_back() -> Result<(), Box<dyn std::error::Error>> {
    let device = EmuDevice::new(EmuOptions::default());
    let ((mut cache, stream, kv), (mut other, ..)) = (cache(&device)?, cache(&device)?);
    let id = cache.admit()?;
    let part = StepRequest { id, start: 0, tokens: 5 };
    trunk(&mut cache, &stream, &kv, part)?;
    let mut drafts = cache.group(LayerGroup::Draft)?;
    let mut step = drafts.begin_step(&stream, Launches::Eager, &[part])?;
    run_layers(&mut step, &kv)?;
    step.commit(&[Accepted::count(id, 5)])?;
    draft_and_verify(&mut cache, &stream, &kv, id)?;
    assert_eq!(cache.ledger().committed_in(LayerGroup::Draft, id)?, 6);
    // Seven tokens were written, and `max_draft` + 1 = 3 can be undone: the draft layers can go back to four tokens.
    assert!(matches!(cache.rewind_draft(id, 3), Err(KvError::CannotRewind { earliest: 4, .. })));
    cache.rewind_draft(id, 4)?;
    assert_eq!(cache.positions(id)?, Positions { trunk: 6, draft: 4 });
    // A request that moves has the position of each group, and continues there.
    let id = move_a_request((&mut cache, &mut other), &stream, id)?;
    assert_eq!(other.positions(id)?, Positions { trunk: 6, draft: 4 });
    let mut drafts = other.group(LayerGroup::Draft)?;
    let part = StepRequest { id, start: 4, tokens: 2 };
    let mut step = drafts.begin_step(&stream, Launches::Eager, &[part])?;
    run_layers(&mut step, &kv)?;
    step.commit(&[Accepted::count(id, 2)])?;
    trunk(&mut other, &stream, &kv, StepRequest { id, start: 6, tokens: 1 })?;
    assert_eq!(other.positions(id)?, Positions { trunk: 7, draft: 6 });
    Ok(())
}

/// A request moves with its draft layers cut off at the trunk's position; if they are too far ahead, it is refused.
#[test]
fn a_request_moves_with_its_drafts_cut_off() -> Result<(), Box<dyn std::error::Error>> {
    let device = EmuDevice::new(EmuOptions::default());
    let ((mut from, stream, kv), (mut to, ..)) = (cache(&device)?, cache(&device)?);
    let id = from.admit()?;
    for start in 0..9 {
        let mut drafts = from.group(LayerGroup::Draft)?;
        let part = StepRequest { id, start, tokens: 1 };
        let mut step = drafts.begin_step(&stream, Launches::Eager, &[part])?;
        run_layers(&mut step, &kv)?;
        step.commit(&[Accepted::count(id, 1)])?;
    }
    trunk(&mut from, &stream, &kv, StepRequest { id, start: 0, tokens: 5 })?;
    let refused =
        from.positions(id).expect_err("the draft layers are four tokens ahead").to_string();
    assert!(refused.contains("run the trunk on"), "{refused}");
    trunk(&mut from, &stream, &kv, StepRequest { id, start: 5, tokens: 1 })?;
    let there = move_a_request((&mut from, &mut to), &stream, id)?;
    assert_eq!(to.positions(there)?, Positions { trunk: 6, draft: 6 });
    Ok(())
}

#[test]
fn a_graph_verifies_drafts() -> Result<(), KvError> {
    let device = EmuDevice::new(EmuOptions::default());
    let (mut cache, stream, kv) = cache(&device)?;
    let ids = [cache.admit()?, cache.admit()?];
    verify_by_a_graph(&mut cache, &stream, &kv, &ids)?;
    assert_eq!(cache.ledger().committed(ids[1])?, 2);
    Ok(())
}

#[test]
fn a_request_is_resumed() -> Result<(), KvError> {
    let device = EmuDevice::new(EmuOptions::default());
    let (mut cache, stream, _) = cache(&device)?;
    let id = cache.admit()?;
    assert_eq!(resume(&mut cache, &stream, id)?, [1, 0]);
    Ok(())
}
