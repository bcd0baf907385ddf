//! Kernel arguments: buffers of any length, scalars and indices of any value. An operation must refuse them with a
//! typed error, or run without touching memory outside its arguments. The emulator checks every access.

use std::num::NonZeroU32;

use dsv4_kv::device::{Buffer, DeviceError, EmuDevice, EmuOptions, Emulator, Stream, bf16};
use dsv4_kv::ops::{
    self, BlockTable, Entries, GatheredRows, IndexKeys, Scored, StatePart, StepQueries, SwaRing,
};
use dsv4_kv::{LayerId, SlotId};
use kv_layout::geometry::{CompressorKind, CsaCompressor, csa_state_rows};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

/// Maximum length of a buffer, in elements.
const MOST: u64 = 1 << 14;

/// Bytes that decide a case; 0 after their end.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    /// A number below 40, or in one case of 256 any number.
    fn number(&mut self) -> u32 {
        match self.byte() {
            255 => u32::from_le_bytes([0; 4].map(|_: u8| self.byte())),
            small => u32::from(small % 40),
        }
    }

    /// An index from -2 to 17, or in one case of 256 another number.
    fn index(&mut self) -> i32 {
        match self.byte() {
            255 => self.number() as i32,
            small => i32::from(small % 20) - 2,
        }
    }

    /// A number of elements: mostly `right`, else one less or any number.
    fn length(&mut self, right: u64) -> u64 {
        let found = match self.byte() {
            0..240 => right,
            240..248 => right.saturating_sub(1),
            _ => u64::from(self.number()),
        };
        found.min(MOST)
    }
}

/// A stream of the device, and the bytes that decide lengths and contents.
struct Case<'a> {
    stream: Stream<Emulator>,
    choices: Choices<'a>,
}

impl Case<'_> {
    fn buffer<T: bytemuck::Pod>(&mut self, right: u64) -> Buffer<Emulator, T> {
        let elements = self.choices.length(right);
        self.stream.device().allocate("argument", elements).expect("little memory")
    }

    fn indices(&mut self, right: u64) -> Buffer<Emulator, i32> {
        let values: Vec<i32> =
            (0..self.choices.length(right)).map(|_| self.choices.index()).collect();
        let buffer =
            self.stream.device().allocate("argument", values.len() as u64).expect("little memory");
        self.stream.upload(&values, &buffer, 0).expect("it fits");
        buffer
    }
}

/// Runs an operation that the bytes choose, with arguments that they choose.
///
/// # Panics
/// If a kernel faults, for example by an access outside its arguments.
pub fn arguments(bytes: &[u8]) {
    let device = EmuDevice::new(EmuOptions { memory: 1 << 30, seed: 0 });
    let stream = device.stream().expect("the CPU has streams");
    let mut case = Case { stream, choices: Choices(bytes) };
    let result = match case.choices.byte() % 6 {
        0 => append(&mut case),
        1 => window(&mut case),
        2 => list(&mut case),
        3 => all(&mut case),
        4 => reset(&mut case),
        _ => lengths(&mut case),
    };
    if let Err(error @ (DeviceError::Fault { .. } | DeviceError::KernelFault { .. })) = result {
        panic!("a kernel was let loose on wrong arguments: {error}");
    }
}

fn format(choices: &mut Choices<'_>) -> MainFormat {
    MainFormat::ALL[usize::from(choices.byte()) % MainFormat::ALL.len()]
}

fn append(case: &mut Case<'_>) -> Result<(), DeviceError> {
    let (tokens, ring, slots) =
        (case.choices.number(), case.choices.number(), case.choices.number());
    let format = format(&mut case.choices);
    let rows = u64::from(ring) * u64::from(slots);
    let kv = case.buffer(u64::from(tokens) * 512);
    // Distinct, as the operation requires: consecutive numbers from `first` on, some of which may name no row.
    let first = case.choices.index();
    let count = case.choices.length(tokens.into());
    let at: Vec<i32> = (0..count as i32).map(|i| first.wrapping_add(i)).collect();
    let row = case.stream.device().allocate("rows", at.len() as u64)?;
    case.stream.upload(&at, &row, 0)?;
    let (data, scale) = (
        case.buffer(rows.saturating_mul(576)),
        case.buffer(rows.saturating_mul(format.scale_bytes())),
    );
    let faults = case.buffer(1);
    let ring = SwaRing { data: &data, scale: &scale, format, ring, slots };
    ops::append_swa(
        &case.stream,
        &ops::WindowAppend { kv: &kv, row: &row, ring: &ring, faults: &faults, tokens },
    )
}

fn window(case: &mut Case<'_>) -> Result<(), DeviceError> {
    let (first, count) = (case.choices.number() % 4, case.choices.number() % 8);
    // At least 100 rows, mostly up to a few more than a window; the data of two such rings takes little memory.
    let ring = case.choices.number().saturating_add(100);
    let slots = case.choices.number() % 3;
    let format = format(&mut case.choices);
    let (end, rows) = (u64::from(first + count), u64::from(ring.min(300)) * u64::from(slots));
    let (position, slot) = (case.indices(end), case.indices(end));
    let index = case.indices(end);
    let kv = case.buffer(end * 512);
    let data = case.stream.device().allocate("data", rows * 576)?;
    let scale = case.buffer(rows.saturating_mul(format.scale_bytes()));
    let tile = case.stream.device().allocate("tile", u64::from(count) * 128 * 512)?;
    let (lengths, faults) = (case.buffer(count.into()), case.buffer(1));
    let queries = StepQueries { position: &position, slot: &slot, index: &index, first, count };
    let ring = SwaRing { data: &data, scale: &scale, format, ring, slots };
    let stream = &case.stream;
    ops::gather_swa(
        stream,
        &ops::WindowGather {
            kv: &kv,
            queries: &queries,
            ring: &ring,
            tile: &tile,
            lengths: &lengths,
            faults: &faults,
        },
    )
}

/// The arguments that both gathers of entries share.
struct Paged {
    position: Buffer<Emulator, i32>,
    slot: Buffer<Emulator, i32>,
    table: Buffer<Emulator, i32>,
    data: Buffer<Emulator, u8>,
    scale: Buffer<Emulator, u8>,
    faults: Buffer<Emulator, u32>,
    format: MainFormat,
    first: u32,
    count: u32,
    rows: u32,
    slots: u32,
    max_blocks: u32,
    num_blocks: u32,
    entries_per_block: u32,
}

impl Paged {
    fn new(case: &mut Case<'_>) -> Self {
        let choices = &mut case.choices;
        let (first, count, rows) = (choices.number() % 4, choices.number() % 6, choices.number());
        let (slots, max_blocks) = (choices.number(), choices.number());
        let (num_blocks, format) = (choices.number() % 4, format(choices));
        let entries_per_block = [32, 1, 0, 3, 128][usize::from(choices.byte()) % 5];
        let planes = u64::from(num_blocks) * u64::from(entries_per_block);
        let end = u64::from(first + count);
        Self {
            position: case.indices(end),
            slot: case.indices(end),
            table: case.indices(u64::from(slots) * u64::from(max_blocks)),
            data: case.stream.device().allocate("data", planes * 576).expect("little memory"),
            scale: case.buffer(planes * format.scale_bytes()),
            faults: case.buffer(1),
            format,
            first,
            count,
            rows,
            slots,
            max_blocks,
            num_blocks,
            entries_per_block,
        }
    }

    fn queries(&self) -> StepQueries<'_, Emulator> {
        let Self { position, slot, first, count, .. } = self;
        StepQueries { position, slot, index: slot, first: *first, count: *count }
    }

    fn table(&self) -> BlockTable<'_, Emulator> {
        BlockTable { table: &self.table, slots: self.slots, max_blocks: self.max_blocks }
    }

    fn entries(&self) -> Entries<'_, Emulator> {
        let Self { data, scale, format, entries_per_block, num_blocks, .. } = self;
        let (format, entries_per_block, num_blocks) = (*format, *entries_per_block, *num_blocks);
        Entries { data, scale, format, entries_per_block, num_blocks }
    }

    fn tile(&self, case: &mut Case<'_>) -> Buffer<Emulator, bf16> {
        let elements = u64::from(self.count) * u64::from(self.rows) * 512;
        case.stream.device().allocate("tile", elements.min(64 * MOST)).expect("little memory")
    }
}

fn list(case: &mut Case<'_>) -> Result<(), DeviceError> {
    let paged = Paged::new(case);
    let tile = paged.tile(case);
    let selected = case.indices(u64::from(paged.count) * u64::from(paged.rows));
    let (queries, table, entries) = (paged.queries(), paged.table(), paged.entries());
    let (stream, faults) = (&case.stream, &paged.faults);
    ops::gather_kv(
        stream,
        &ops::EntryGather {
            queries: &queries,
            rows: paged.rows,
            table: &table,
            entries: &entries,
            tile: &tile,
            faults,
        },
        &selected,
    )?;
    let found = case.buffer(2 + 5 * 2);
    let kind = GatheredRows::List(&selected, paged.rows);
    ops::find_poison(
        &case.stream,
        &ops::PoisonSearch {
            queries: &queries,
            layer: LayerId(0),
            tile: &tile,
            rows: kind,
            found: &found,
        },
    )?;
    poisoned_keys(case, &paged, &found)
}

fn poisoned_keys(
    case: &mut Case<'_>,
    paged: &Paged,
    found: &Buffer<Emulator, u32>,
) -> Result<(), DeviceError> {
    let format = IndexFormat::ALL[usize::from(case.choices.byte()) % IndexFormat::ALL.len()];
    let rows = u64::from(paged.num_blocks) * 32;
    let code = case.buffer(rows * format.code_bytes());
    let scale = case.buffer(rows * format.scale_bytes());
    let num_blocks = paged.num_blocks;
    let keys = IndexKeys { code: &code, scale: &scale, format, hadamard: true, num_blocks };
    let scored =
        Scored { skip: case.choices.number(), columns: case.choices.number().min(1 << 12) };
    let search = ops::PoisonedKeySearch {
        queries: &paged.queries(),
        layer: LayerId(0),
        table: &paged.table(),
        keys: &keys,
        scored,
        found,
    };
    ops::find_poisoned_keys(&case.stream, &search)
}

fn all(case: &mut Case<'_>) -> Result<(), DeviceError> {
    let paged = Paged::new(case);
    let tile = paged.tile(case);
    let lengths = case.buffer(paged.count.into());
    let (queries, table, entries) = (paged.queries(), paged.table(), paged.entries());
    let (stream, faults) = (&case.stream, &paged.faults);
    ops::gather_all(
        stream,
        &ops::EntryGather {
            queries: &queries,
            rows: paged.rows,
            table: &table,
            entries: &entries,
            tile: &tile,
            faults,
        },
        &lengths,
    )?;
    let found = case.buffer(2 + 5 * 2);
    let kind = GatheredRows::All(&lengths, paged.rows);
    ops::find_poison(
        &case.stream,
        &ops::PoisonSearch {
            queries: &queries,
            layer: LayerId(0),
            tile: &tile,
            rows: kind,
            found: &found,
        },
    )
}

fn reset(case: &mut Case<'_>) -> Result<(), DeviceError> {
    let choices = &mut case.choices;
    let (ring, slots) = (choices.number(), choices.number());
    let (which, slot) = (usize::from(choices.byte()), SlotId(choices.number()));
    let parts = [
        (StatePart::Own(CsaCompressor::Main), CompressorKind::CsaMain),
        (StatePart::Previous(CsaCompressor::Index), CompressorKind::CsaIndex),
        (StatePart::Sums, CompressorKind::Hca),
    ];
    let (part, kind) = parts[which % parts.len()];
    let rows = if kind == CompressorKind::Hca { ring } else { csa_state_rows(ring) };
    let right = u64::from(rows) * u64::from(slots);
    let rows = case.buffer(right.saturating_mul(kind.row_floats().into()));
    let state = ops::StateRing { rows: &rows, ring, slots };
    ops::reset_state(&case.stream, &ops::StateSlot { state: &state, part, slot }, u32::MAX)
}

fn lengths(case: &mut Case<'_>) -> Result<(), DeviceError> {
    let (first, count) = (case.choices.number() % 4, case.choices.number());
    let Some(ratio) = NonZeroU32::new(case.choices.number()) else { return Ok(()) };
    let end = u64::from(first) + u64::from(count);
    let (position, slot) = (case.indices(end), case.indices(end));
    let lengths = case.buffer(count.into());
    let queries = StepQueries { position: &position, slot: &slot, index: &slot, first, count };
    ops::valid_lens(&case.stream, &ops::EntryCounts { queries: &queries, ratio, lengths: &lengths })
}
