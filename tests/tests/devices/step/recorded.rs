//! Launches that are only recorded, by a capture other than that of a whole step, do not count as run in the step.

use dsv4_kv::device::{Backend, Buffer, Device, DeviceError, bf16};
use dsv4_kv::layer_progress::LayerProgress;
use dsv4_kv::step::{AttentionTensors, QueryForm};
use dsv4_kv::{Accepted, Bucket, KvError, Launches, LayerId, Layers, StepRequest};
use kv_layout::geometry::LayerKind::Swa;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

use crate::fed::{Fed, Padding, Part, Updated, begin};
use crate::inputs::{download_bits, filled, upload};
use crate::stories::{Formats, Story, config, tiny};

const FORMATS: Formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);

fn is_forbidden(error: &KvError) -> bool {
    matches!(error, KvError::Device(DeviceError::ForbiddenInCapture { .. }))
}

/// Updates and appends, fused and of a long chunk, are refused in a capture that is not the step's own. The step
/// continues as if they had not been called.
pub fn rows_that_are_only_recorded_are_refused<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 9, 44);
    let mut fed = Fed::new(device, config(&tiny(), FORMATS, 1));
    let id = fed.manager.admit().unwrap();
    let retained = [fed.manager.memory(), fed.inputs.memory()].concat();
    let stream = fed.stream.clone();
    for range in [0..8, 8..9] {
        let (is_chunk, count) = (range.len() > 1, range.len() as u32);
        let parts = [Part::new(id, &story, range)];
        fed.inputs.load(&stream, &parts, count);
        let mut steps = begin(&mut fed.manager, &stream, &parts, Padding::None).unwrap();
        for step in &mut steps {
            for layer in step.layer_kinds().map(|(layer, _)| layer).collect::<Vec<_>>() {
                let update = || fed.inputs.update(step, layer).map(drop);
                let error = stream.capture(retained.clone(), update).err().unwrap();
                assert!(is_forbidden(&error), "{error}");
                assert_eq!(step.progress(layer).unwrap(), LayerProgress::NotStarted);
                let updated = fed.inputs.update(step, layer).unwrap();
                let appended = stream.capture(retained.clone(), || updated.append());
                if is_chunk {
                    let error = appended.err().unwrap();
                    assert!(is_forbidden(&error), "{error}");
                    assert_eq!(step.progress(layer).unwrap(), LayerProgress::Updated);
                    fed.inputs.resume(step, layer).unwrap().append().unwrap();
                } else {
                    assert_eq!(appended.unwrap().nodes(), 0, "the update did that too");
                }
            }
        }
        steps.into_iter().for_each(|step| step.commit(&[Accepted::count(id, count)]).unwrap());
    }
    fed.manager.check_faults(&stream).unwrap();
    fed.assert_holds(id, &story, &story.stored(device, FORMATS), 9);
}

/// Attention and gathers are refused too, before and after they have run: a graph of them could be replayed beside
/// other steps, whose memory it would use. Calls that do run read the step's own rows.
pub fn reads_that_are_only_recorded_are_refused<B: Backend>(device: &Device<B>) {
    const TOKENS: usize = 8;
    let story = Story::random(&[Swa], TOKENS, 45);
    let results = [false, true].map(|are_refused| {
        let mut fed = Fed::new(device, config(&[Swa], FORMATS, 1));
        let id = fed.manager.admit().unwrap();
        let stream = fed.stream.clone();
        let query = upload(&stream, &vec![bf16::from_f32(0.5); TOKENS * 512]);
        let sinks = upload(&stream, &[0.0_f32]);
        let out: Buffer<B, bf16> = filled(&stream, TOKENS * 512);
        let tile: Buffer<B, bf16> = filled(&stream, TOKENS * 128 * 512);
        let lengths: Buffer<B, i32> = filled(&stream, TOKENS);
        let tensors = [query.memory(), sinks.memory(), out.memory(), tile.memory()].to_vec();
        let retained = [fed.manager.memory(), fed.inputs.memory(), tensors].concat();
        let parts = [Part::new(id, &story, 0..TOKENS)];
        fed.inputs.load(&stream, &parts, TOKENS as u32);
        let mut steps = begin(&mut fed.manager, &stream, &parts, Padding::None).unwrap();
        let layer = steps[0].layer_kinds().next().unwrap().0;
        let updated = fed.inputs.update(&mut steps[0], layer).unwrap();
        let Updated::Swa(layer) = &updated else { panic!("it has a window alone") };
        let form = QueryForm::Rotated;
        let all =
            AttentionTensors { heads: 1, query: &query, form, sinks: &sinks, out: &out, lse: None };
        let attend = || layer.attend(0..TOKENS as u32, &all);
        let gather = || layer.gather_window(0..TOKENS as u32, &tile, &lengths);
        let refuse = || {
            for read in [&attend as &dyn Fn() -> Result<(), KvError>, &gather] {
                let retained = [retained.clone(), vec![lengths.memory()]].concat();
                let error = stream.capture(retained, read).err().unwrap();
                assert!(is_forbidden(&error), "{error}");
            }
        };
        if are_refused {
            refuse();
        }
        attend().unwrap();
        gather().unwrap();
        if are_refused {
            refuse();
        }
        let results = (download_bits(&stream, &out), download_bits(&stream, &tile));
        updated.append().unwrap();
        steps.remove(0).commit(&[Accepted::count(id, TOKENS as u32)]).unwrap();
        results
    });
    assert!(results[0] == results[1], "what was refused changed what ran");
}

/// A step can queue the reads that it recorded of its updated layers any number of times, each time with its own rows.
/// Updates are refused in such a recording. After the recording is dropped the step continues.
pub fn a_step_queues_its_recorded_reads<B: Backend>(device: &Device<B>) {
    const TOKENS: usize = 8;
    const LAYERS: [LayerId; 2] = [LayerId(0), LayerId(1)];
    let story = Story::random(&[Swa, Swa], TOKENS, 45);
    let mut fed = Fed::new(device, config(&[Swa, Swa], FORMATS, 1));
    let id = fed.manager.admit().unwrap();
    let stream = fed.stream.clone();
    let query = upload(&stream, &vec![bf16::from_f32(0.5); TOKENS * 512]);
    let sinks = upload(&stream, &[0.0_f32]);
    let [out, eager] = [0; 2].map(|_| filled::<B, bf16>(&stream, TOKENS * 512));
    let retained = [fed.inputs.memory(), vec![query.memory(), sinks.memory(), out.memory()]];
    let parts = [Part::new(id, &story, 0..TOKENS)];
    let Fed { manager, inputs, .. } = &mut fed;
    inputs.load(&stream, &parts, TOKENS as u32);
    let mut step = begin(manager, &stream, &parts, Padding::None).unwrap().remove(0);
    let attend = |layers: &mut Layers<'_, B>, out: &Buffer<B, bf16>| {
        let updated = inputs.resume(layers, LAYERS[0])?;
        let Updated::Swa(layer) = &updated else { panic!("it has a window alone") };
        let form = QueryForm::Rotated;
        let all = AttentionTensors { heads: 1, query: &query, form, sinks: &sinks, out, lse: None };
        layer.attend(0..TOKENS as u32, &all)
    };
    drop(inputs.update(&mut step, LAYERS[0]).unwrap());
    attend(&mut step, &eager).unwrap();
    let expected = download_bits(&stream, &eager);
    let update = |layers: &mut Layers<'_, B>| inputs.update(layers, LAYERS[1]).map(drop);
    let refused = step.record_reads(retained.concat(), update).map(drop).unwrap_err();
    assert!(is_forbidden(&refused), "{refused}");
    let graph = step.record_reads(retained.concat(), |layers| attend(layers, &out)).unwrap();
    assert_eq!(graph.nodes(), 2, "the rows, and attention");
    for _ in 0..2 {
        stream.fill(&out, 0).unwrap();
        graph.replay().unwrap();
        assert!(download_bits(&stream, &out) == expected, "other results than by a launch");
    }
    drop(graph);
    drop(inputs.update(&mut step, LAYERS[1]).unwrap());
    for layer in LAYERS {
        inputs.resume(&mut step, layer).unwrap().append().unwrap();
    }
    step.commit(&[Accepted::count(id, TOKENS as u32)]).unwrap();
    fed.assert_holds(id, &story, &story.stored(device, FORMATS), TOKENS);
}

/// A refused replay, for example into a stream that is being captured, leaves the step as it was.
pub fn a_replay_that_is_refused_changes_nothing<B: Backend>(device: &Device<B>) {
    let mut fed = Fed::new(device, config(&[Swa], FORMATS, 1));
    let id = fed.manager.admit().unwrap();
    let story = Story::random(&[Swa], 1, 46);
    let stream = fed.stream.clone();
    let bucket = Bucket { tokens: 1, tokens_per_request: 1, requests: 1, context: 100 };
    let graphs = fed.capture(Padding::Bucket(bucket), &[], &mut |_, _| Ok(()));
    fed.inputs.load(&stream, &[Part::new(id, &story, 0..1)], 1);
    let part = [StepRequest { id, start: 0, tokens: 1 }];
    let mut step = fed.manager.begin_step(&stream, Launches::Bucket(&bucket), &part).unwrap();
    let error = stream.capture(Vec::new(), || step.replay(&graphs[0])).err().unwrap();
    assert!(is_forbidden(&error), "{error}");
    step.replay(&graphs[0]).unwrap();
    step.commit(&[Accepted::count(id, 1)]).unwrap();
    fed.assert_holds(id, &story, &story.stored(device, FORMATS), 1);
}
