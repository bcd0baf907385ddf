//! Every BF16 value through every quantiser, in the order of its bits and in scrambled order.

use dsv4_kv::SlotId;
use dsv4_kv::device::{Backend, Device};
use dsv4_kv::ops::{self, BlockTable, Entries, IndexKeys, SwaRing};
use dsv4_kv::step_meta::Chunk;
use dsv4_kv_oracle::index::KeyFormat;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::{DATA_BYTES, MainFormat};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use crate::inputs::{assert_same, download, oracle, plane_row, upload, upload_bf16};
use crate::model::Step;

/// Number of quantised channels in a main row.
const QUANTISED: usize = 448;
/// Number of channels in an indexer key.
const KEY: usize = 128;

/// All BF16 values: in order, so that neighbours share a scale; and shuffled, so that most share a scale with much
/// larger ones.
fn all_values() -> [Vec<u16>; 2] {
    let ordered: Vec<u16> = (0..=u16::MAX).collect();
    let mut shuffled = ordered.clone();
    shuffled.shuffle(&mut StdRng::seed_from_u64(80));
    [ordered, shuffled]
}

pub fn main_rows_equal_the_oracle<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    for values in all_values() {
        let rows: Vec<Vec<u16>> = values
            .chunks(QUANTISED)
            .map(|channels| {
                let mut row = channels.to_vec();
                row.resize(512, 0x3F80);
                row
            })
            .collect();
        let count = rows.len() as u32;
        let kv = upload_bf16(&stream, &rows.concat());
        let at = upload(&stream, &(0..count as i32).collect::<Vec<_>>());
        let faults = device.allocate("fault word", 1).unwrap();
        for format in MainFormat::ALL {
            let plane = |bytes| device.allocate("plane", u64::from(count) * bytes).unwrap();
            let (data, scale) = (plane(DATA_BYTES), plane(format.scale_bytes()));
            let ring = SwaRing { data: &data, scale: &scale, format, ring: count, slots: 1 };
            ops::append_swa(
                &stream,
                &ops::WindowAppend {
                    kv: &kv,
                    row: &at,
                    ring: &ring,
                    faults: &faults,
                    tokens: count,
                },
            )
            .unwrap();
            let (data, scale) = (download(&stream, &data), download(&stream, &scale));
            for (at, row) in rows.iter().enumerate() {
                let want = oracle(format).encode(row);
                let what = format!("{format:?} row {at}");
                assert_same(plane_row(&data, at, DATA_BYTES), &want.data, &what);
                assert_same(plane_row(&scale, at, format.scale_bytes()), &want.scale, &what);
            }
        }
    }
}

pub fn indexer_keys_equal_the_oracle<B: Backend>(device: &Device<B>) {
    const KEYS: u32 = (1 << 16) / KEY as u32;
    const BLOCKS: u32 = KEYS / 32;
    let stream = device.stream().unwrap();
    let step = Step::new(&stream, 0, &[Chunk { slot: SlotId(0), start: 0, end: 4 * KEYS }]);
    let (tokens, plan) = (step.tokens(), step.plan(0));
    let table = upload(&stream, &(0..BLOCKS as i32).collect::<Vec<_>>());
    let table = BlockTable { table: &table, slots: 1, max_blocks: BLOCKS };
    let faults = device.allocate("fault word", 1).unwrap();
    let capacity = plan.records.len();
    let entries = device.allocate("entries", capacity * 512).unwrap();
    let plane = |bytes| device.allocate("plane", u64::from(KEYS) * bytes).unwrap();
    let main = MainFormat::Ue8m0;
    let (data, scale) = (plane(DATA_BYTES), plane(main.scale_bytes()));
    let to = Entries {
        data: &data,
        scale: &scale,
        format: main,
        entries_per_block: 32,
        num_blocks: BLOCKS,
    };
    for values in all_values() {
        let mut padded = values.clone();
        padded.resize(capacity as usize * KEY, 0);
        let keys = upload_bf16(&stream, &padded);
        for format in IndexFormat::ALL {
            let (code, scale) = (plane(format.code_bytes()), plane(format.scale_bytes()));
            let planes = IndexKeys {
                code: &code,
                scale: &scale,
                format,
                hadamard: false,
                num_blocks: to.num_blocks,
            };
            ops::flush_csa(
                &stream,
                &ops::Flush {
                    tokens: &tokens,
                    closing: &plan,
                    entries: &entries,
                    table: &table,
                    state_slots: table.slots,
                    to: &to,
                    faults: &faults,
                },
                &ops::KeyFlush { keys: &keys, to: &planes },
            )
            .unwrap();
            let (code, scale) = (download(&stream, &code), download(&stream, &scale));
            for (at, key) in values.chunks(KEY).enumerate() {
                let want = KeyFormat::from_name(format.name()).unwrap().encode(key);
                let what = format!("{format:?} key {at}");
                assert_same(plane_row(&code, at, format.code_bytes()), &want.codes, &what);
                assert_same(plane_row(&scale, at, format.scale_bytes()), &want.scale, &what);
            }
        }
    }
    assert_eq!(download(&stream, &faults), [0]);
}
