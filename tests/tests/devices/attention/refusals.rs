//! Inconsistent numbers in a launch of attention.

use dsv4_kv::device::{Backend, Device, DeviceError, bf16};
use dsv4_kv::ops::{
    self, Attended, AttendedEntries, Attention, BlockTable, Entries, OwnRows, QueryForm,
    StepQueries, SwaRing,
};
use kv_layout::attention::KeyCluster;
use kv_layout::main_row::MainFormat;

use crate::inputs::{filled, upload};
use crate::refused::named;

/// The numbers of a launch with one query.
#[derive(Clone, Copy)]
struct Numbers {
    /// Number of the query in the step.
    first: u32,
    heads: u32,
    /// Rows per ring, and number of rings.
    ring: [u32; 2],
    /// Rows of the step, if they are not in the ring.
    own: Option<u32>,
    /// Slots of the block table, and blocks per request.
    table: [u32; 2],
    entries_per_block: u32,
    entries: MainFormat,
    /// Length of the list.
    rows: u32,
}

/// Numbers that fit together.
const FITTING: Numbers = Numbers {
    first: 1,
    heads: 1,
    ring: [128, 2],
    own: Some(2),
    table: [2, 1],
    entries_per_block: 32,
    entries: MainFormat::Ue8m0,
    rows: 1,
};

fn attend<B: Backend>(device: &Device<B>, numbers: Numbers) -> Result<(), DeviceError> {
    let Numbers { first, heads, ring, own, table, entries_per_block, entries, rows } = numbers;
    let stream = &device.stream().unwrap();
    // Memory for everything that is read. The contents do not matter; there is more than any argument needs.
    let bytes = filled::<B, u8>(stream, 1 << 18);
    let (floats, words) = (upload(stream, &[0.5_f32; 128]), upload(stream, &[0_i32; 2]));
    let (query, out) = (filled::<B, bf16>(stream, 1 << 17), filled::<B, bf16>(stream, 1 << 17));
    let (data, scale, format) = (&bytes, &bytes, MainFormat::Ue8m0);
    let entries = Entries { data, scale, format: entries, entries_per_block, num_blocks: 1 };
    let [slots, max_blocks] = table;
    let attention = Attention {
        queries: &StepQueries { position: &words, slot: &words, index: &words, first, count: 1 },
        query: &query,
        form: QueryForm::Rotated,
        heads,
        cluster: KeyCluster::TwoBlocks,
        multiprocessors: 0,
        exchange: None,
        sinks: &floats,
        frequencies: &floats,
        ring: &SwaRing { data, scale, format, ring: ring[0], slots: ring[1] },
        own: own.map(|rows| OwnRows { data: &bytes, scale: &bytes, rows }),
        entries: Some(AttendedEntries {
            entries: &entries,
            table: &BlockTable { table: &words, slots, max_blocks },
            which: Attended::List(&words),
            splits: None,
            rows,
        }),
        out: &out,
        lse: None,
        faults: &upload(stream, &[0_u32]),
    };
    let checked = ops::check_attend(stream, &attention);
    // SAFETY: the step's arrays were uploaded before, in this stream, and nothing writes them again.
    let attended = unsafe { ops::attend(stream, &attention) };
    assert_eq!(checked.is_ok(), attended.is_ok(), "the check says what the launch does");
    attended
}

/// A launch of consistent numbers runs, and each inconsistent number is refused by its name.
pub fn what_does_not_fit_is_refused_by_name<B: Backend>(device: &Device<B>) {
    attend(device, FITTING).unwrap();
    attend(device, Numbers { own: None, ..FITTING }).unwrap();
    for (wrong, what) in [
        (Numbers { heads: 0, ..FITTING }, "heads"),
        (Numbers { heads: 129, ..FITTING }, "heads"),
        (Numbers { first: u32::MAX, ..FITTING }, "first + count of queries"),
        (Numbers { ring: [1 << 30, 2], ..FITTING }, "ring rows"),
        (Numbers { ring: [127, 2], ..FITTING }, "rows of the ring"),
        (Numbers { own: Some(1), ..FITTING }, "rows of the step"),
        (Numbers { entries: MainFormat::F32, ..FITTING }, "bytes of an entry's scales"),
        (Numbers { entries_per_block: 3, ..FITTING }, "entries of a block"),
        (Numbers { table: [1, 1], ..FITTING }, "slots of the block table"),
        (Numbers { table: [2, 0], ..FITTING }, "blocks of a request"),
        (Numbers { table: [2, 1 << 31], ..FITTING }, "blocks of a request"),
        (Numbers { rows: 0, ..FITTING }, "entries of a query"),
    ] {
        assert_eq!(named(attend(device, wrong)), what);
    }
}
