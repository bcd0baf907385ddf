//! Every kernel of the table with garbage in every array: indices, work lists, lengths, block tables, rings and planes.
//! A kernel may write garbage for it. It must not touch memory outside its arguments, overflow, or loop for ever. The
//! emulator checks every access, against allocations of exactly the bytes that the table states.
//!
//! Scalars have values that `dsv4_kv::ops` accepts. A new kernel does not compile here until it implements [`Scalars`].

use dsv4_kv::device::{Buffer, DeviceError, EmuDevice, EmuOptions, Emulator, Operation, Stream};
use kernels_gpu::launch::*;
use kernels_gpu::params::*;
use kernels_gpu::table::KERNELS;
use kernels_gpu::table::shape::*;
use rand::Rng;

use super::garbage::{Choices, Garbage};
use crate::inputs::download;

/// An array that a kernel was launched with.
pub struct Array {
    /// Its name in the kernel table.
    pub name: &'static str,
    /// Its bytes before the launch.
    pub before: Vec<u8>,
    /// Its bytes after the launch.
    pub after: Vec<u8>,
}

/// A stream of the device, and the choices that decide the case.
pub(super) struct Case<'a> {
    stream: Stream<Emulator>,
    choices: Choices<'a>,
    /// The bytes of each array that was filled.
    filled: Vec<Vec<u8>>,
}

impl Case<'_> {
    /// A buffer of `bytes` bytes and `more` further elements, filled with garbage.
    fn array<T: Garbage>(&mut self, bytes: u64, more: u64) -> Buffer<Emulator, T> {
        let count = bytes / size_of::<T>() as u64 + more;
        let device = self.stream.device();
        let buffer = device.allocate("argument", count).expect("little memory");
        let random = &mut self.choices.random;
        // Many kernels do something only where several elements are valid: mostly so in half of the arrays.
        let valid = if random.random() { 15 } else { 0 };
        let mut element = || match random.random_ratio(valid, 16) {
            true => T::valid(random),
            false => T::garbage(random),
        };
        // Large planes repeat their first 4,099 elements, to save time.
        let part: Vec<T> = (0..count.min(4099)).map(|_| element()).collect();
        let values: Vec<T> = part.iter().copied().cycle().take(count as usize).collect();
        self.stream.upload(&values, &buffer, 0).expect("it fits");
        self.filled.push(bytemuck::cast_slice(&values).to_vec());
        buffer
    }

    /// The bytes of an array.
    fn bytes<T: Garbage>(&self, array: &Buffer<Emulator, T>) -> Vec<u8> {
        bytemuck::cast_slice(&download(&self.stream, array)).to_vec()
    }
}

/// Scalars of an operation that the host would accept.
trait Scalars: Operation {
    /// The parameter struct.
    type Params;

    fn choose(choices: &mut Choices<'_>, variant: Self::Variant) -> Self::Params;
}

macro_rules! scalars {
    ($( $operation:ident: |$choices:ident, $variant:pat_param| $params:ident $fields:tt )*) => {
        $(
            impl Scalars for $operation {
                type Params = $params;

                fn choose($choices: &mut Choices<'_>, $variant: Self::Variant) -> $params {
                    $params $fields
                }
            }
        )*
    };
}

impl Scalars for Attend {
    type Params = AttendParams;

    fn choose(c: &mut Choices<'_>, kernel: AttendKernel) -> AttendParams {
        let heads = c.one_of(&[1, 3, 64, 65]);
        let of_entries = |value: u32| if kernel.keys() == AttendedKeys::Window { 0 } else { value };
        let first = c.range(0, 2);
        let tokens = c.range(0, 1 + 3 * u32::from(kernel.is_consecutive()));
        // `num_splits` may exceed what the keys fill: the clusters of such splits have nothing to do. `most` gives the
        // spread forms long rows; 640 entries are the most of `AttendForm::Spread`.
        let most = if let AttendForm::SpreadSplits(_) = kernel.form { 1024 } else { 640 };
        AttendParams {
            first,
            tokens,
            skipped: c.range(0, 2),
            heads,
            lse_heads: c.one_of(&[0, heads]),
            raw_queries: c.one_of(&[0, 1]),
            num_splits: if kernel.keys() == AttendedKeys::All { c.one_of(&[1, 2, 3]) } else { 1 },
            ring: c.range(128, 140),
            slots: c.range(0, 2),
            own_rows: c.one_of(&[0, first + tokens]),
            entry_rows: of_entries(c.one_of(&[1, 40, 90, most])),
            ratio_log2: c.one_of(&[2, 7]),
            entries_log2: c.one_of(&[5, 0]),
            max_blocks: of_entries(c.range(1, 4)),
            num_blocks: of_entries(c.range(0, 3)),
            blocks_per_split: c.one_of(&[1, kernel.keys().blocks()]),
            channel_halves: c.one_of(&[1, 2]),
            key_halves: c.one_of(&[1, 2]),
            queries_per_block: c.range(0, 3),
        }
    }
}

scalars! {
    AppendSwa: |c, _| AppendSwaParams {
        tokens: c.range(0, 9), rows: c.range(0, 300), checkpoints: c.range(0, 3),
        // Checkpoints of one layer: 128 rows of data, then their scales.
        checkpoint_granules: 288 + 4, data_granules: 0, scale_granules: 288,
    }
    GatherSwa: |c, _| GatherSwaParams {
        first: c.range(0, 3), tokens: c.range(0, 4), ring: c.range(128, 140), slots: c.range(0, 3),
    }
    UpdateTable: |c, _| UpdateTableParams { count: c.range(0, 200), elements: c.range(0, 60) }
    ListClosingTokens: |c, _| ListClosingTokensParams {
        tokens: c.range(0, 40), csa_capacity: c.range(0, 12), hca_capacity: c.range(0, 4),
    }
    Compress: |c, _| CompressParams {
        capacity: c.range(0, 5), ring: c.range(4, 8), slots: c.range(0, 3), tokens: c.range(0, 9),
    }
    CompressHca: |c, _| CompressHcaParams {
        capacity: c.range(0, 3), ring: c.range(2, 7), slots: c.range(0, 2), tokens: c.range(0, 9),
        part: c.one_of(&[CompressHcaParams::CONTINUING, CompressHcaParams::STARTING]),
    }
    WriteState: |c, _| WriteStateParams {
        ring: c.range(4, 8), slots: c.range(0, 2), tokens: c.range(0, 9), checkpoints: c.range(0, 3),
        checkpoint_granules: 64 + 3, row_granules: c.range(0, 3),
    }
    RotateState: |c, _| RotateStateParams {
        rows: c.range(0, 8),
        position: c.one_of(&[0, 3, 127, 1 << 20, i32::MAX as u32, u32::MAX]),
        from: c.one_of(&[RotateStateParams::IMAGE, 0, 1, 2]),
        to: c.range(0, 2),
        ring: c.range(8, 12),
        slot_rows: c.range(24, 26),
        first_row: c.range(0, 12),
        row_words: c.one_of(&[256, 1024, 1536]),
    }
    ResetState: |c, _| ResetStateParams {
        slot: c.range(0, 2), slot_rows: c.range(0, 9), row_words: c.one_of(&[256, 1024, 1536]), word: u32::MAX,
    }
    CopyState: |c, _| CopyStateParams {
        mode: c.one_of(&[CopyStateParams::PACK, CopyStateParams::UNPACK, CopyStateParams::COPY]),
        pieces: c.range(0, 5), jobs: c.range(0, 3), units: c.range(1, 5), memory_granules: c.range(1, 40),
        images: c.range(1, 5), image_granules: c.range(1, 9),
    }
    DigestSections: |c, _| DigestParams { sections: c.range(0, 5), words: c.range(0, 9000) }
    FlushCsa: |c, _| FlushParams {
        capacity: c.range(0, 5), slots: c.range(0, 3), max_blocks: c.range(0, 4),
        num_blocks: c.range(0, 4), hadamard: c.range(0, 1), tokens: c.range(0, 9),
    }
    FlushHca: |c, _| FlushParams {
        capacity: c.range(0, 9), slots: c.range(0, 3), max_blocks: c.range(0, 4),
        num_blocks: c.range(0, 4), hadamard: 0, tokens: c.range(0, 9),
    }
    DecodeCsa: |c, _| DecodeParams {
        tokens: c.range(0, 4), slots: c.range(0, 3), window_rows: c.range(0, 300),
        state_ring: c.range(4, 9), max_blocks: c.range(0, 4), num_blocks: c.range(0, 4),
    }
    DecodeHca: |c, _| DecodeParams {
        tokens: c.range(0, 20), slots: c.range(0, 2), window_rows: c.range(0, 300),
        state_ring: c.range(2, 7), max_blocks: c.range(0, 4), num_blocks: c.range(0, 4),
    }
    GatherEntries: |c, _| GatherEntriesParams { ..entries(c) }
    GatherAll: |c, _| GatherEntriesParams { ..entries(c) }
    CountEntries: |c, _| CountEntriesParams {
        first: c.range(0, 3), tokens: c.range(0, 200), ratio: c.one_of(&[1, 4, 128]),
    }
    IndexQuery: |c, _| IndexQueryParams {
        first: c.range(0, 3), tokens: c.range(0, 3), heads: c.range(1, 64),
    }
    IndexScore: |c, _| IndexScoreParams {
        first: c.range(0, 3), heads: c.range(1, 64), skip: c.one_of(&[0, 1, 40, 512]),
        columns: 32 * c.range(1, 20), group_log2: c.one_of(&[3, 5]), tiles: 4 * c.range(1, 6),
        slots: c.range(0, 3), max_blocks: c.range(0, 5), num_blocks: c.range(1, 4), tokens: c.range(0, 3),
    }
    IndexScoreChunk: |c, _| IndexScoreChunkParams {
        first: c.range(0, 3), heads: c.range(1, 64), skip: c.one_of(&[0, 1, 40, 512]),
        columns: 32 * c.range(1, 20), group_log2: c.one_of(&[3, 5]), tiles: c.range(1, 20),
        slots: c.range(0, 3), max_blocks: c.range(0, 5), num_blocks: c.range(1, 4), tokens: c.range(0, 14),
        block_queries: c.range(1, 5),
    }
    ScoreMaxima: |c, _| ScoreMaximaParams {
        columns: 32 * c.range(1, 200), group_log2: c.one_of(&[3, 5]), rows: c.range(0, 3),
    }
    TopkSelectShort: |c, _| TopkSelectParams {
        columns: 32 * c.range(1, 64), group_log2: 3, k: k(c), rows: c.range(0, 2),
    }
    TopkSelectLong: |c, _| TopkSelectParams { ..long_rows(c) }
    IndexTopkShort: |c, _| IndexTopkParams {
        first: c.range(0, 3), columns: 32 * c.range(1, 64), group_log2: 3, k: k(c), tokens: c.range(0, 2),
    }
    IndexTopkLong: |c, _| IndexTopkParams { ..long_queries(c) }
    IndexTopkMany: |c, _| IndexTopkParams { ..long_queries(c) }
    IndexScoreTopk: |c, _| IndexScoreTopkParams {
        first: c.range(0, 3), heads: c.range(1, 64), k: k(c), columns: 32 * c.range(1, 64),
        slots: c.range(0, 3), max_blocks: c.range(0, 5), num_blocks: c.range(1, 4), tokens: c.range(0, 2),
    }
    FindPoison: |c, _| FindPoisonParams {
        first: c.range(0, 3), tokens: c.range(0, 3), rows: c.range(0, 40), layer: c.range(0, 60),
        source: c.range(0, 2), capacity: c.range(0, 3),
    }
    FindPoisonedKeys: |c, _| FindPoisonedKeysParams {
        first: c.range(0, 3), tokens: c.range(0, 3), skip: c.one_of(&[0, 5]), columns: 32 * c.range(1, 9),
        layer: c.range(0, 60), capacity: c.range(0, 3), slots: c.range(0, 3), max_blocks: c.range(0, 4),
        num_blocks: c.range(1, 4),
    }
    ActivationTopk: |c, v| ActivationTopkParams {
        tokens: c.range(0, 9), experts: experts(c, v), selected: c.range(1, 8), scaling_bits: 1.5f32.to_bits(),
    }
    HashRouter: |c, _| HashRouterParams {
        tokens: c.range(0, 20), experts: 32 * c.range(1, 16), selected: c.range(1, 8),
        vocabulary: c.range(0, 9), scaling_bits: 1.5f32.to_bits(),
    }
    DenseRouterDecode: |c, v| DenseRouterDecodeParams {
        tokens: c.range(1, 64), experts: experts(c, v), hidden: 32 * c.range(1, 4), selected: c.range(1, 8),
        scaling_bits: 1.5f32.to_bits(),
    }
    HashRouterDecode: |c, v| HashRouterDecodeParams {
        tokens: c.range(1, 64), experts: experts(c, v), hidden: 32 * c.range(1, 4), selected: c.range(1, 8),
        vocabulary: c.range(0, 9), scaling_bits: 1.5f32.to_bits(),
    }
    Bf16Linear: |c, _| Bf16LinearParams {
        tokens: c.range(1, 70), columns: c.range(1, 130), inner: 32 * c.range(1, 18),
    }
    Bf16Narrow: |c, _| Bf16LinearParams {
        tokens: c.range(1, 70), columns: c.range(1, 40), inner: 32 * c.range(1, 70),
    }
    Bf16LinearMany: |c, _| Bf16LinearManyParams {
        tokens: c.range(1, 200), columns: c.range(1, 140), inner: 32 * c.range(1, 6), splits: c.range(1, 3),
    }
    Bf16IndexQuery: |c, _| Bf16IndexQueryParams {
        first: c.range(0, 3), tokens: c.range(1, 200), heads: c.range(1, 2), inner: 32 * c.range(1, 4),
        splits: c.range(1, 5),
    }
    Nvfp4Linear: |c, _| Nvfp4LinearParams {
        tokens: c.range(1, 70), columns: c.range(1, 130), inner: 32 * c.range(1, 18), scale_bits: 1.5f32.to_bits(),
    }
    Nvfp4IndexQuery: |c, _| Nvfp4IndexQueryParams {
        first: c.range(0, 3), tokens: c.range(1, 9), heads: c.range(1, 64), inner: 32 * c.range(1, 4),
        scale_bits: 1.5f32.to_bits(),
    }
    RouterLogits: |c, _| RouterLogitsParams {
        tokens: c.range(0, 140), experts: 32 * c.range(1, 3), hidden: 32 * c.range(1, 5),
    }
}

fn entries(c: &mut Choices<'_>) -> GatherEntriesParams {
    let (ratio_log2, entries_log2) = c.one_of(&[(2, 5), (7, 0)]);
    GatherEntriesParams {
        first: c.range(0, 3),
        tokens: c.range(0, 4),
        rows: c.range(0, 40),
        ratio_log2,
        entries_log2,
        slots: c.range(0, 3),
        max_blocks: c.range(0, 4),
        num_blocks: c.range(0, 4),
    }
}

/// Lengths of an indexer's list.
fn k(c: &mut Choices<'_>) -> u32 {
    c.one_of(&[1, 2, 31, 512, 1024, 2048])
}

fn long_rows(c: &mut Choices<'_>) -> TopkSelectParams {
    let (columns, group_log2) = long(c);
    TopkSelectParams { columns, group_log2, k: k(c), rows: c.range(0, 2) }
}

fn long_queries(c: &mut Choices<'_>) -> IndexTopkParams {
    let (first, (columns, group_log2)) = (c.range(0, 3), long(c));
    IndexTopkParams { first, columns, group_log2, k: k(c), tokens: c.range(0, 2) }
}

/// Numbers of columns for rows of any length, and log2 of the scores of a group in such a row.
fn long(c: &mut Choices<'_>) -> (u32, u32) {
    let columns = c.one_of(&[32, 2080, 4096, 4128, 20_000 / 32 * 32, 65_536, 131_072]);
    (columns, if columns > 65_536 { 5 } else { 3 })
}

/// A number of experts that this kernel takes.
fn experts(c: &mut Choices<'_>, width: ExpertWidth) -> u32 {
    let fits: Vec<u32> =
        (1..=16).map(|n| 32 * n).filter(|&n| ExpertWidth::of(n) == Some(width)).collect();
    c.one_of(&fits)
}

/// A defect of an argument other than garbage contents.
#[derive(Clone, Copy)]
pub(super) enum Wrong {
    Nothing,
    /// The pointer at this place starts one element late.
    Shifted(usize),
    /// The pointer at this place has one element less than the launch may touch.
    Short(usize),
}

/// An operation of the table.
pub(super) struct Entry {
    pub run: fn(&mut Case<'_>, usize, Wrong) -> Result<Vec<Array>, DeviceError>,
    /// The kernel index of each of its variants, in order.
    pub kernels: fn() -> Vec<usize>,
}

macro_rules! pointer {
    (const $buffer:expr) => {
        $buffer.ptr()
    };
    (mut $buffer:expr) => {
        $buffer.ptr_mut()
    };
}

macro_rules! operations {
    ($(
        $operation:ident<$variant:ty> |$p:ident, $f:ident|
        $doc:literal
        (
            $( $(#[$pointer_doc:meta])* $pointer:ident: $mutability:ident $element:ident
               $(align $align:literal)? [$($extent:tt)+] ),* ;
            $params:ident
        )
        $launch:tt
        bodies $bodies:tt
    )*) => {
        /// Every operation of the table.
        pub(super) const OPERATIONS: &[Entry] = &[$( Entry {
            run: |case, variant, wrong| {
                let variant = $operation::VARIANTS[variant];
                let params: $params = $operation::choose(&mut case.choices, variant);
                let mut bytes = $operation::bytes(&params, variant).into_iter().enumerate();
                $(
                    let (place, bytes_of) = bytes.next().expect("one for each pointer");
                    let more = u64::from(matches!(wrong, Wrong::Shifted(at) if at == place));
                    let less = u64::from(matches!(wrong, Wrong::Short(at) if at == place && bytes_of > 0));
                    let $pointer = case.array(bytes_of, more);
                    let $pointer = $pointer.slice(more, $pointer.len() - more - less).expect("inside");
                )*
                let operation = $operation { $( $pointer: pointer!($mutability $pointer), )* params };
                // SAFETY: the emulator checks every access; nothing else runs.
                unsafe { case.stream.launch(variant, &operation) }?;
                let after = [$( (stringify!($pointer), case.bytes(&$pointer)) ),*];
                let arrays = case.filled.drain(..).zip(after);
                Ok(arrays.map(|(before, (name, after))| Array { name, before, after }).collect())
            },
            kernels: || $operation::VARIANTS.iter().map(|&v| $operation::kernel(v)).collect(),
        } ),*];
    };
}

kernels_gpu::for_each_operation!(operations);

/// The case that these bytes decide.
pub(super) fn case(bytes: &[u8]) -> Case<'_> {
    let device = EmuDevice::allowing_races(EmuOptions { memory: 1 << 30, seed: 0 });
    let stream = device.stream().expect("the CPU has streams");
    Case { stream, choices: Choices::new(bytes), filled: Vec::new() }
}

/// Runs a kernel on garbage, both chosen by the bytes. Races are allowed, since garbage may let several threads write
/// to one place.
///
/// # Panics
/// If the kernel faults, for example by an access outside its arguments.
pub fn kernels(bytes: &[u8]) {
    let _ = launch(bytes);
}

/// As [`kernels`]; returns the arrays of the launch. There is no launch if the scalars give a grid without blocks.
///
/// # Panics
/// As [`kernels`].
#[must_use]
pub fn launch(bytes: &[u8]) -> Option<Vec<Array>> {
    let mut case = case(bytes);
    let operation = &OPERATIONS[usize::from(case.choices.byte()) % OPERATIONS.len()];
    let variant = usize::from(case.choices.byte()) % (operation.kernels)().len();
    match (operation.run)(&mut case, variant, Wrong::Nothing) {
        Ok(arrays) => Some(arrays),
        Err(DeviceError::BadGrid { .. }) => None,
        Err(error) => panic!("garbage in memory: {error}"),
    }
}

/// The names of the kernels of each operation of the table. The first byte that [`kernels`] takes chooses the
/// operation, the second its kernel.
pub fn kernel_names() -> impl Iterator<Item = Vec<&'static str>> {
    let name = |kernel: usize| KERNELS[kernel].name;
    OPERATIONS.iter().map(move |of| (of.kernels)().into_iter().map(name).collect::<Vec<_>>())
}
