//! Refusals of the layers of a step.

use std::ops::Range;

use dsv4_kv::device::{Backend, Buffer, Device, DeviceError, bf16};
use dsv4_kv::step::{AttentionTensors, CompressorInputs, EntryLists, QueryForm};
use dsv4_kv::{Accepted, KvError, LayerGroup, LayerId, Layers};
use kv_layout::geometry::LayerKind;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

use crate::fed::{Fed, Padding, Part, Updated, assert_pools, begin, update};
use crate::inputs::filled;
use crate::stories::{Formats, STEP_TOKENS, Story, config, tiny};

const FORMATS: Formats = (MainFormat::F32, IndexFormat::Mxfp4);

/// Impossible calls on a layer are refused with the value and the limit. No pool changes, and the step continues as if
/// they had not been made.
pub fn bad_input_changes_no_pool<B: Backend>(device: &Device<B>) {
    const TOKENS: u32 = 8;
    let story = Story::random(&tiny(), 136, 41);
    let mut fed = Fed::new(device, config(&tiny(), FORMATS, 2));
    let id = fed.manager.admit().unwrap();
    fed.step(&[Part::new(id, &story, 0..128)], Padding::None);
    let before = fed.pool_bytes();

    // The tensors fit the longest step exactly, so launches of that size need every element.
    let (parts, bucket) = ([Part::new(id, &story, 128..136)], fed.bucket(STEP_TOKENS, STEP_TOKENS));
    fed.inputs.load(&fed.stream, &parts, STEP_TOKENS);
    let mut steps = begin(&mut fed.manager, &fed.stream, &parts, bucket).unwrap();
    refuse_wrong_layers(&mut steps[0]);
    refuse_short_tensors(&mut steps[0], &fed.inputs);
    drop(steps);
    assert_pools(&fed, &before, "after refusals");

    let mut steps = begin(&mut fed.manager, &fed.stream, &parts, Padding::None).unwrap();
    fed.inputs
        .run(&mut steps[0], &mut |_, updated| {
            refuse_bad_gathers(updated, TOKENS);
            Ok(())
        })
        .unwrap();
    fed.inputs.run(&mut steps[1], &mut |_, _| Ok(())).unwrap();
    steps.into_iter().for_each(|step| step.commit(&[Accepted::count(id, TOKENS)]).unwrap());
    fed.manager.check_faults(&fed.stream).unwrap();
    fed.assert_holds(id, &story, &story.stored(device, FORMATS), 136);
}

/// A layer is of one kind and one group.
fn refuse_wrong_layers<B: Backend>(layers: &mut Layers<'_, B>) {
    for (id, kind) in layers.layer_kinds() {
        let refusals = [
            (LayerKind::Swa, layers.swa(id).err()),
            (LayerKind::Csa, layers.csa(id).err()),
            (LayerKind::Hca, layers.hca(id).err()),
        ];
        for (wanted, refusal) in refusals {
            match refusal {
                None => assert_eq!(kind, wanted),
                Some(KvError::WrongLayerKind { layer, found, needed }) => {
                    assert_eq!((layer, found, needed), (id, kind, wanted));
                    assert_ne!(kind, wanted);
                }
                Some(other) => panic!("{other}"),
            }
        }
    }
    for layer in [LayerId(4), LayerId(99)] {
        let error = layers.swa(layer).expect_err("no layer of the group");
        let KvError::WrongLayerGroup { layer: at, group, first, end } = error else {
            panic!("{error}")
        };
        assert_eq!((at, group, first..end), (layer, LayerGroup::Trunk, 0..4));
    }
}

/// Each tensor of each compressor, and the window rows, one element short.
fn refuse_short_tensors<B: Backend>(layers: &mut Layers<'_, B>, inputs: &crate::fed::Inputs<B>) {
    for (layer, _) in layers.layer_kinds() {
        let (kv, whole) = (inputs.rows(layer), inputs.compressors(layer));
        let short = kv.slice(0, kv.len() - 1).unwrap();
        let result = update(layers, layer, &short, &whole).map(drop);
        assert_short(result, "window rows", kv.len() - 1, kv.len());
        for (which, CompressorInputs { kv: keys, gate, ape, norm }) in whole.iter().enumerate() {
            let names = ["key projections", "gate projections", "position bias", "norm weights"];
            for (tensor, name) in names.into_iter().enumerate() {
                let mut tensors = [*keys, *gate, *ape, *norm];
                let needed = tensors[tensor].len();
                let short = tensors[tensor].slice(0, needed - 1).unwrap();
                tensors[tensor] = &short;
                let [keys, gate, ape, norm] = tensors;
                let mut bad = whole.clone();
                bad[which] = CompressorInputs { kv: keys, gate, ape, norm };
                let result = update(layers, layer, kv, &bad).map(drop);
                assert_short(result, name, needed - 1, needed);
            }
        }
    }
}

fn assert_short(result: Result<(), KvError>, name: &str, had: u64, wanted: u64) {
    let Err(KvError::Device(DeviceError::Length { what, found, needed })) = result else {
        panic!("{name}: {result:?}")
    };
    assert_eq!((what, found, needed), (name, had, wanted));
}

fn refuse_bad_gathers<B: Backend>(layer: &Updated<'_, B>, count: u32) {
    const ROWS: u32 = 4;
    if layer.schema().kind == LayerKind::Swa {
        return;
    }
    let elements = count * ROWS;
    let (words, lengths) = (canaries(layer, elements), canaries(layer, count));
    let tile = canaries::<B, bf16>(layer, elements * 512);
    let backwards = Range { start: 2, end: 1 };
    for queries in [0..count + 1, count..u32::MAX, backwards] {
        let lists = EntryLists { queries: queries.clone(), k: ROWS, indices: &words };
        let listed = layer.gather_entries(queries.clone(), &lists, &tile);
        let all = layer.gather_all(queries.clone(), ROWS, &tile, &lengths);
        for result in [listed, all] {
            let Err(KvError::NoSuchQueries { first, end, tokens }) = result else {
                panic!("{queries:?}: {result:?}")
            };
            assert_eq!((first..end, tokens), (queries.clone(), count));
        }
    }
    for (of, queries) in [(0..count - 1, 0..count), (1..count, 0..1)] {
        let lists = EntryLists { queries: of.clone(), k: ROWS, indices: &words };
        let result = layer.gather_entries(queries.clone(), &lists, &tile);
        let Err(KvError::ListsMismatch(found)) = result else { panic!("{of:?}: {result:?}") };
        assert_eq!((found.queries, found.lists), (queries, of));
    }
    let (elements, count) = (u64::from(elements), u64::from(count));
    let short_tile = tile.slice(0, elements * 512 - 1).unwrap();
    let short_words = words.slice(0, elements - 1).unwrap();
    let short_lengths = lengths.slice(0, count - 1).unwrap();
    let queries = 0..count as u32;
    let listed = |entries, tile| {
        let lists = EntryLists { queries: queries.clone(), k: ROWS, indices: entries };
        layer.gather_entries(queries.clone(), &lists, tile)
    };
    let all = |tile, out| layer.gather_all(queries.clone(), ROWS, tile, out);
    for (result, name, element, elements) in [
        (listed(&words, &short_tile), "tile", 2, elements * 512),
        (listed(&short_words, &tile), "selected", 4, elements),
        (all(&short_tile, &lengths), "tile", 2, elements * 512),
        (all(&tile, &short_lengths), "lengths", 4, count),
    ] {
        let Err(KvError::Device(DeviceError::TooShort { argument, found, needed, .. })) = result
        else {
            panic!("{name}: {result:?}")
        };
        let wanted = element * elements;
        assert_eq!((argument, found, needed), (name, wanted - element, wanted));
    }
}

fn canaries<B: Backend, T: bytemuck::Pod>(layer: &Updated<'_, B>, elements: u32) -> Buffer<B, T> {
    filled(layer.stream(), elements as usize)
}

/// After the append of a chunk longer than the ring's slack, its windows cannot be gathered.
pub fn windows_of_a_long_chunk_are_gathered_before_its_append<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 8, 42);
    let mut fed = Fed::new(device, config(&tiny(), FORMATS, 1));
    let id = fed.manager.admit().unwrap();
    let parts = [Part::new(id, &story, 0..2)];
    fed.inputs.load(&fed.stream, &parts, 2);
    let (tile, lengths) = (filled(&fed.stream, 2 * 128 * 512), filled(&fed.stream, 2));
    let mut steps = begin(&mut fed.manager, &fed.stream, &parts, Padding::None).unwrap();
    let step = &mut steps[0];
    let error = fed.inputs.resume(step, LayerId(0)).err().expect("it is not updated");
    assert!(matches!(error, KvError::LayerNotUpdated { layer: LayerId(0), .. }), "{error}");
    let layer = fed.inputs.update(step, LayerId(0)).unwrap();
    layer.gather_window(0..2, &tile, &lengths).unwrap();
    let other = tile.slice(0, 2 * 512).unwrap();
    let error = step.swa(LayerId(0)).unwrap().already_updated(&other).map(drop).unwrap_err();
    assert!(matches!(&error, KvError::RowsMismatch(other) if other.layer == LayerId(0)), "{error}");
    fed.inputs.resume(step, LayerId(0)).unwrap().append().unwrap();
    let layer = fed.inputs.resume(step, LayerId(0)).unwrap();
    let error = layer.gather_window(0..2, &tile, &lengths).unwrap_err();
    assert!(matches!(error, KvError::WindowOverwritten { tokens: 2, limit: 1 }), "{error}");
}

/// Outputs of reads must not overlap the step's rows: the append of a long chunk still reads these rows, and gathers of
/// windows read them in every step.
pub fn results_do_not_replace_the_steps_rows<B: Backend>(device: &Device<B>) {
    for tokens in [8, 1] {
        results_are_elsewhere(device, tokens);
    }
}

fn results_are_elsewhere<B: Backend>(device: &Device<B>, tokens: u32) {
    let story = Story::random(&tiny(), tokens as usize, 43);
    let mut fed = Fed::new(device, config(&tiny(), FORMATS, 1));
    let id = fed.manager.admit().unwrap();
    let parts = [Part::new(id, &story, 0..tokens as usize)];
    fed.inputs.load(&fed.stream, &parts, tokens);
    let (query, sinks) = (filled(&fed.stream, 8 * 512), filled(&fed.stream, 1));
    let (words, elsewhere) = (filled(&fed.stream, 8), filled(&fed.stream, 8 * 512));
    let lists = EntryLists { queries: 0..tokens, k: 1, indices: &words };
    let mut steps = begin(&mut fed.manager, &fed.stream, &parts, Padding::None).unwrap();
    let mut kinds = 0;
    for id in steps[0].layer_kinds().map(|(id, _)| id).collect::<Vec<_>>() {
        let kv = fed.inputs.rows(id);
        // The last of the step's rows, and the memory after it.
        let over = kv.slice(u64::from(tokens - 1) * 512, 9 * 512).unwrap();
        let (counts, lse) = (kv.slice(0, 16).unwrap().cast().unwrap(), kv.slice(0, 16).unwrap());
        let lse = lse.cast().unwrap();
        let attend = |layer: &Updated<'_, B>,
                      out: &Buffer<B, bf16>,
                      lse: Option<&Buffer<B, f32>>| {
            let form = QueryForm::Rotated;
            let heads = AttentionTensors { heads: 1, query: &query, form, sinks: &sinks, out, lse };
            layer.attend(0..tokens, &lists, &heads)
        };
        let layer = fed.inputs.update(&mut steps[0], id).unwrap();
        let mut results = vec![
            (attend(&layer, &over, None), "out"),
            (attend(&layer, &elsewhere, Some(&lse)), "lse"),
        ];
        if layer.schema().kind != LayerKind::Swa {
            kinds += 1;
            results.push((layer.gather_entries(0..1, &lists, &over), "tile"));
            results.push((layer.gather_all(0..1, 1, &over, &words), "tile"));
            results.push((layer.gather_all(0..1, 1, &elsewhere, &counts), "lengths"));
            results.push((layer.entry_counts(0..1, &counts), "lengths"));
        }
        for (result, name) in results {
            let error = result.unwrap_err();
            let KvError::Device(DeviceError::Aliased { argument, other: "kv", .. }) = error else {
                panic!("{name}: {error}")
            };
            assert_eq!(argument, name);
        }
        attend(&layer, &elsewhere, None).unwrap();
        layer.append().unwrap();
    }
    assert!(kinds > 1);
}
