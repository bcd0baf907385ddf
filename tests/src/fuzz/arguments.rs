//! Kernel arguments: buffers of any length, scalars and indices of any value. An operation must refuse them with a
//! typed error, or run without touching memory outside its arguments. The emulator checks every access.

use std::num::NonZeroU32;

use dsv4_kv::device::{Buffer, DeviceError, EmuDevice, EmuOptions, Emulator, Stream, bf16};
use dsv4_kv::ops::{
    self, BlockTable, Entries, GatheredRows, IndexKeys, Scored, StatePart, StepQueries, SwaRing,
};
use dsv4_kv::{LayerId, SlotId};
use kv_layout::geometry::{CompressorKind, CsaCompressor, WINDOW, csa_state_rows};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

/// Maximum length of a buffer, in elements: more than the planes of two slots have.
const MAX_ELEMENTS: u64 = 1 << 18;

/// Largest position of a query, beyond the rows of a ring.
const POSITIONS: u32 = 252;

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

    /// Rows of a request's window: up to 11 more than are needed, or in one case of 16 another number.
    fn ring(&mut self) -> u32 {
        match self.byte() {
            240.. => self.number(),
            more => WINDOW + u32::from(more % 12),
        }
    }

    /// One or two slots, or in one case of 16 another number.
    fn slots(&mut self) -> u32 {
        match self.byte() {
            240.. => self.number(),
            more => 1 + u32::from(more % 2),
        }
    }

    /// An index from -1 to `end`, the first one that is too large, but at most 253; in one case of 256 another number.
    fn index(&mut self, end: u32) -> i32 {
        match self.byte() {
            255 => self.number() as i32,
            small => i32::from(small) % (end.min(253) as i32 + 2) - 1,
        }
    }

    /// A number of elements: mostly `right`, else one less or any number.
    fn length(&mut self, right: u64) -> u64 {
        let found = match self.byte() {
            0..240 => right,
            240..248 => right.saturating_sub(1),
            _ => u64::from(self.number()),
        };
        found.min(MAX_ELEMENTS)
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

    /// Indices from -1 to `end`, and others.
    fn indices(&mut self, right: u64, end: u32) -> Buffer<Emulator, i32> {
        let values: Vec<i32> =
            (0..self.choices.length(right)).map(|_| self.choices.index(end)).collect();
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
    let _ = ran(bytes);
}

/// As [`arguments`]; returns the name of the operation if its kernels ran: it was not refused, and had something to do.
///
/// # Panics
/// As [`arguments`].
#[must_use]
pub fn ran(bytes: &[u8]) -> Option<&'static str> {
    let device = EmuDevice::new(EmuOptions { memory: 1 << 30, seed: 0 });
    let stream = device.stream().expect("the CPU has streams");
    let mut case = Case { stream, choices: Choices(bytes) };
    let (name, result) = match case.choices.byte() % 6 {
        0 => ("append_swa", append(&mut case)),
        1 => ("gather_swa", window(&mut case)),
        2 => ("gather_entries", list(&mut case)),
        3 => ("gather_all", all(&mut case)),
        4 => ("reset_state", reset(&mut case)),
        _ => ("count_entries", lengths(&mut case)),
    };
    match result {
        Err(error @ (DeviceError::Fault { .. } | DeviceError::KernelFault { .. })) => {
            panic!("a kernel was let loose on wrong arguments: {error}")
        }
        result => result.unwrap_or(false).then_some(name),
    }
}

fn format(choices: &mut Choices<'_>) -> MainFormat {
    MainFormat::ALL[usize::from(choices.byte()) % MainFormat::ALL.len()]
}

/// Returns whether there was something to do, as the functions below.
fn append(case: &mut Case<'_>) -> Result<bool, DeviceError> {
    let (tokens, ring, slots) = (case.choices.number(), case.choices.ring(), case.choices.slots());
    let format = format(&mut case.choices);
    let rows = u64::from(ring) * u64::from(slots);
    let kv = case.buffer(u64::from(tokens) * 512);
    // Distinct, as the operation requires: consecutive numbers from `first` on, some of which may name no row.
    let first = case.choices.index(rows.try_into().unwrap_or(u32::MAX));
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
    )?;
    Ok(tokens > 0)
}

fn window(case: &mut Case<'_>) -> Result<bool, DeviceError> {
    let (first, count) = (case.choices.number() % 4, case.choices.number() % 8);
    let (ring, slots) = (case.choices.ring(), case.choices.slots());
    let format = format(&mut case.choices);
    let (end, rows) = (u64::from(first + count), u64::from(ring) * u64::from(slots));
    let (position, slot) = (case.indices(end, POSITIONS), case.indices(end, slots));
    let index = case.indices(end, first + count);
    let kv = case.buffer(end * 512);
    let data = case.buffer(rows.saturating_mul(576));
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
    )?;
    Ok(count > 0)
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
        let (slots, max_blocks) = (choices.slots(), choices.number());
        let (num_blocks, format) = (choices.number() % 4, format(choices));
        let entries_per_block = [32, 1, 4, 128, 32, 1, 0, 3][usize::from(choices.byte()) % 8];
        let planes = u64::from(num_blocks) * u64::from(entries_per_block);
        let end = u64::from(first + count);
        Self {
            position: case.indices(end, POSITIONS),
            slot: case.indices(end, slots),
            table: case.indices(u64::from(slots) * u64::from(max_blocks), num_blocks),
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
        case.stream
            .device()
            .allocate("tile", elements.min(4 * MAX_ELEMENTS))
            .expect("little memory")
    }
}

fn list(case: &mut Case<'_>) -> Result<bool, DeviceError> {
    let paged = Paged::new(case);
    let tile = paged.tile(case);
    let selected = case.indices(u64::from(paged.count) * u64::from(paged.rows), POSITIONS / 4);
    let (queries, table, entries) = (paged.queries(), paged.table(), paged.entries());
    let (stream, faults) = (&case.stream, &paged.faults);
    ops::gather_entries(
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
) -> Result<bool, DeviceError> {
    let format = IndexFormat::ALL[usize::from(case.choices.byte()) % IndexFormat::ALL.len()];
    let rows = u64::from(paged.num_blocks) * 32;
    let code = case.buffer(rows * format.code_bytes());
    let scale = case.buffer(rows * format.scale_bytes());
    let num_blocks = paged.num_blocks;
    let keys = IndexKeys { code: &code, scale: &scale, format, hadamard: true, num_blocks };
    let (skip, columns) = (case.choices.number() % 8, case.choices.number().min(1 << 12));
    let search = ops::PoisonedKeySearch {
        queries: &paged.queries(),
        layer: LayerId(0),
        table: &paged.table(),
        keys: &keys,
        scored: Scored { skip, columns },
        found,
    };
    ops::find_poisoned_keys(&case.stream, &search)?;
    Ok(paged.count > 0 && columns > skip)
}

fn all(case: &mut Case<'_>) -> Result<bool, DeviceError> {
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
    )?;
    Ok(paged.count > 0)
}

fn reset(case: &mut Case<'_>) -> Result<bool, DeviceError> {
    let choices = &mut case.choices;
    let (ring, slots) = (choices.number(), choices.slots());
    let which = usize::from(choices.byte());
    // Up to the first one that is too large.
    let slot = SlotId(choices.number() % slots.saturating_add(1));
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
    ops::reset_state(&case.stream, &ops::StateSlot { state: &state, part, slot }, u32::MAX)?;
    Ok(true)
}

fn lengths(case: &mut Case<'_>) -> Result<bool, DeviceError> {
    let (first, count) = (case.choices.number() % 4, case.choices.number());
    let Some(ratio) = NonZeroU32::new(case.choices.number()) else { return Ok(false) };
    let end = u64::from(first) + u64::from(count);
    let (position, slot) = (case.indices(end, POSITIONS), case.indices(end, 1));
    let lengths = case.buffer(count.into());
    let queries = StepQueries { position: &position, slot: &slot, index: &slot, first, count };
    let counts = ops::EntryCounts { queries: &queries, ratio, lengths: &lengths };
    ops::count_entries(&case.stream, &counts)?;
    Ok(count > 0)
}
