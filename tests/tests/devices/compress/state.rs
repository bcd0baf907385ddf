//! Compressor state: the view of it, and copies of rows between slots.

use dsv4_kv::device::{Backend, Device, DeviceError};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::ops::{self, StatePart, StateRing, StateSource};
use dsv4_kv::state::{StateRow, StateView};
use dsv4_kv::step::CompressorInputs;
use dsv4_kv::{
    Accepted, CacheConfig, KvCacheManager, KvError, Launches, LayerId, PoolKind, SlotId,
    StepRequest,
};
use kv_layout::geometry::{CompressorKind, CsaCompressor, LayerKind};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::fed::update;
use crate::hca;
use crate::history::History;
use crate::inputs::{assert_same, download, upload, upload_bf16};

fn random(count: usize, seed: u64) -> Vec<f32> {
    let mut random = StdRng::seed_from_u64(seed);
    (0..count).map(|_| random.random_range(-4.0..4.0)).collect()
}

/// The state of CSA compressors after any number of tokens, as open window and previous window, with their halves and
/// scores (gate plus bias); and the running sums of the HCA compressor.
pub fn a_view_shows_the_state<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let model = ModelConfig::preset("tiny").unwrap();
    let config = CacheConfig { num_blocks: 8, ..CacheConfig::new(model) };
    let cases = [
        (LayerId(1), PoolKind::MainState, 1024, 512),
        (LayerId(1), PoolKind::IndexState, 256, 128),
    ];
    for tokens in [1_u32, 3, 4, 6, 128, 131] {
        let mut manager = KvCacheManager::new(device.clone(), config.clone()).unwrap();
        let id = manager.admit().unwrap();
        let input = |columns: usize, seed| random(tokens as usize * columns, seed);
        let weights = upload(&stream, &random(128 * 512, 9));
        let [main, index, hca] = [1024, 256, 512].map(|columns| {
            let (kv, gate) = (input(columns, 1), input(columns, 2));
            (upload(&stream, &kv), upload(&stream, &gate))
        });
        let kv = upload_bf16(&stream, &vec![0; tokens as usize * 512]);
        let inputs = |(kv, gate)| CompressorInputs { kv, gate, ape: &weights, norm: &weights };
        let (main, index) = (inputs((&main.0, &main.1)), inputs((&index.0, &index.1)));
        let hca = inputs((&hca.0, &hca.1));
        let step = [StepRequest { id, start: 0, tokens }];
        let mut step = manager.begin_step(&stream, Launches::Eager, &step).unwrap();
        for (layer, kind) in step.layer_kinds() {
            let compressors = match kind {
                LayerKind::Swa => vec![],
                LayerKind::Csa => vec![main, index],
                LayerKind::Hca => vec![hca],
            };
            update(&mut step, layer, &kv, &compressors).unwrap().append().unwrap();
        }
        step.commit(&[Accepted::count(id, tokens)]).unwrap();
        let bias = random(128 * 512, 9);
        for (layer, pool, columns, channels) in cases {
            let (kv, gate) = (input(columns, 1), input(columns, 2));
            let row = |position: u32, column: usize| {
                let at = position as usize * columns + column;
                let bias = &bias[(position % 4) as usize * columns + column..][..channels];
                let scores = gate[at..].iter().zip(bias).map(|(gate, bias)| gate + bias);
                StateRow {
                    position,
                    keys: kv[at..at + channels].to_vec(),
                    scores: scores.collect(),
                }
            };
            let view = manager.state_view(&stream, layer, id, pool).unwrap();
            let StateView::Csa { open_window, previous_window } = view else { panic!("{view:?}") };
            let open = tokens - tokens % 4;
            let own: Vec<_> = (open..tokens).map(|p| row(p, columns - channels)).collect();
            assert_same(&open_window, &own, "open_window");
            let previous = open.saturating_sub(4)..open;
            assert_same(
                &previous_window,
                &previous.map(|p| row(p, 0)).collect::<Vec<_>>(),
                "previous_window",
            );
        }
        let history = History {
            stream: CompressorKind::Hca,
            kv: input(512, 1),
            gate: input(512, 2),
            ape: bias,
            norm: Vec::new(),
        };
        let view = manager.state_view(&stream, LayerId(2), id, PoolKind::MainState).unwrap();
        assert_eq!(view, StateView::Hca(hca::running_sums(&history)[tokens as usize].clone()));
        let error = manager.state_view(&stream, LayerId(0), id, PoolKind::MainState).unwrap_err();
        assert!(matches!(error, KvError::NoSuchPool { layer: LayerId(0), .. }), "{error}");
        let error = manager.state_view(&stream, LayerId(1), id, PoolKind::EntryData).unwrap_err();
        assert!(matches!(error, KvError::NoSuchPool { layer: LayerId(1), .. }), "{error}");
        let layers = manager.schema().layers.len() as u32;
        let view = manager.state_view(&stream, LayerId(layers), id, PoolKind::MainState);
        let error = view.unwrap_err();
        assert!(
            matches!(error, KvError::NoSuchLayer { layer, layers: of } if layer == LayerId(layers) && of == layers),
            "{error}"
        );
    }
}

/// Rows are copied to the ring rows of their positions, from a slot and from an image; other rows stay.
pub fn rows_move_to_their_phase<B: Backend>(device: &Device<B>) {
    const RING: u32 = 9;
    let stream = device.stream().unwrap();
    let parts = [
        (StatePart::Own(CsaCompressor::Main), 1024, (0, RING, 2 * RING + 4)),
        (StatePart::Previous(CsaCompressor::Main), 1024, (RING, RING + 4, 2 * RING + 4)),
        (StatePart::Previous(CsaCompressor::Index), 256, (RING, RING + 4, 2 * RING + 4)),
        (StatePart::Sums, 1536, (0, RING, RING)),
    ];
    for (part, words, (first, ring, slot_rows)) in parts {
        let [first, ring, slot_rows] = [first, ring, slot_rows].map(|rows| rows as usize);
        let before = random(3 * slot_rows * words, 3);
        let rows = upload(&stream, &before);
        let state = StateRing { rows: &rows, ring: RING, slots: 3 };
        let image = random(4 * words, 4);
        let uploaded = upload(&stream, &image);
        let rotate = |from, slot, position, rows| {
            let to = ops::StateSlot { state: &state, part, slot };
            ops::rotate_state(&stream, &to, &ops::StateMove { from, position, rows })
        };
        rotate(StateSource::Slot(SlotId(2)), SlotId(0), 25, 7).unwrap();
        let image_of = || StateSource::Image(&uploaded);
        rotate(image_of(), SlotId(1), 7, 4).unwrap();
        let mut want = before.clone();
        let row = |slot: usize, position: usize| {
            let at = (slot * slot_rows + first + position % ring) * words;
            at..at + words
        };
        for position in 25..32 {
            want.copy_within(row(2, position), row(0, position).start);
        }
        for (i, position) in (7..11).enumerate() {
            want[row(1, position)].copy_from_slice(&image[i * words..][..words]);
        }
        assert_same(&download(&stream, state.rows), &want, "rotated");
        ops::reset_state(
            &stream,
            &ops::StateSlot { state: &state, part, slot: SlotId(1) },
            f32::NAN.to_bits(),
        )
        .unwrap();
        let after = download(&stream, state.rows);
        for (at, (got, want)) in after.iter().zip(&want).enumerate() {
            let poisoned = at / words / slot_rows == 1;
            assert!(if poisoned { got.is_nan() } else { got == want }, "element {at}");
        }
        let none = rotate(image_of(), SlotId(3), 0, 4).unwrap_err();
        assert!(matches!(none, DeviceError::Length { what: "state slots", .. }), "{none}");
        let many = rotate(image_of(), SlotId(0), 0, ring as u32 + 1).unwrap_err();
        assert!(matches!(many, DeviceError::Length { what: "rows of the ring", .. }), "{many}");
        // Positions that wrap around would share ring rows.
        rotate(image_of(), SlotId(0), u32::MAX - 3, 4).unwrap();
        let behind = rotate(image_of(), SlotId(0), u32::MAX - 2, 4).unwrap_err();
        let what = "position of the last row";
        assert!(matches!(behind, DeviceError::Argument { what: it, .. } if it == what), "{behind}");
    }
}
