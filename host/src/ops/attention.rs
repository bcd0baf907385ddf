//! Attention over the rows of the cache where they lie.

use std::ops::Range;

use kernels_gpu::attention::HEADS;
use kernels_gpu::launch::Attend;
use kernels_gpu::params::AttendParams;
pub use kernels_gpu::table::MULTIPROCESSORS;
use kv_layout::attention::{
    AttendForm, AttendKernel, AttendedKeys, KeySplit, MOST_HEADS, ManyEntries, SHORT_SPREAD_TILES,
    SPREAD_BLOCKS, SPREAD_TILES, TILE_KEYS,
};
use kv_layout::geometry::WINDOW;
use kv_layout::main_row::MainFormat;

use super::attention_exchange::spread_clusters;
use super::{
    AttentionExchange, AttentionParts, BlockTable, Entries, GatherQueries, SwaRing, check_argument,
    check_length,
};
use crate::device::{Backend, Buffer, DeviceError, Stream, View, bf16};

/// The entries that queries attend to.
pub enum Attended<'a, B: Backend> {
    /// Those of a list, `[queries, rows]` i32 entry indices, -1 = none: entries first, as [`super::index_topk`] lists them.
    /// Elements past the first `min(rows, entries that the query sees)` of a list are not read.
    List(&'a View<B, i32>),
    /// All that a query sees.
    All,
}

/// Compressed entries and which of them queries attend to.
pub struct AttendedEntries<'a, B: Backend> {
    /// The layer's entries.
    pub entries: &'a Entries<'a, B>,
    /// The blocks of the queries' requests.
    pub table: &'a BlockTable<'a, B>,
    /// Which.
    pub which: Attended<'a, B>,
    /// Workspace for keys that are split into parts (split-KV). If one query needs more than it holds, the call is refused; if all queries together do,
    /// the call becomes several launches.
    pub parts: Option<&'a AttentionParts<B>>,
    /// Most entries of a query, 1 to `i32::MAX`: the length of its list, or the most that it may see.
    pub rows: u32,
}

/// The step's own window rows as the ring will hold them, while they are not there yet.
pub struct OwnRows<'a, B: Backend> {
    /// `[step, 576]` u8.
    pub data: &'a View<B, u8>,
    /// `[step, 8]` UE8M0 or `[step]` f32, as bytes.
    pub scale: &'a View<B, u8>,
    /// Rows.
    pub rows: u32,
}

/// What has been done to queries before attention gets them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum QueryForm {
    /// RMS norm of each head and RoPE.
    #[default]
    Rotated,
    /// Nothing: as the query projection gives them. The kernel norms each head (no weight, `rms_norm_eps` 1e-6), rotates
    /// its last 64 channels by the query's position, both in f32, and rounds to BF16 once.
    Raw,
}

/// Attention of queries, and where its results go.
pub struct Attention<'a, B: Backend> {
    /// The queries.
    pub queries: &'a GatherQueries<'a, B>,
    /// `[queries, heads, 512]` BF16.
    pub query: &'a View<B, bf16>,
    /// Whether that is after norm and RoPE.
    pub form: QueryForm,
    /// Heads, 1 to 128.
    pub heads: u32,
    /// Among how many blocks a query's keys are split, in layers with entries: the same in all launches of a cache, or a
    /// query's bits depend on the launch.
    pub split: KeySplit,
    /// Multiprocessors of the GPU, about ([`MULTIPROCESSORS`]). A launch with few work items (a query, a part of its keys, and up to 64 heads) has
    /// more blocks for each. That changes no bit.
    ///
    /// - With `exchange`, and queries that are [`QueryForm::Rotated`], a work item of up to 1,152 keys, or half of one where keys are split, is spread
    ///   over eight blocks, if nine tenths of the multiprocessors are enough for all.
    /// - Else a work item has twice as many blocks, each with half of the channels of its values, if there are at most an eighth as many as
    ///   multiprocessors.
    pub multiprocessors: u32,
    /// Workspace of work items that are spread over eight blocks.
    pub exchange: Option<&'a AttentionExchange<B>>,
    /// `[heads]` f32: each head's sink.
    pub sinks: &'a View<B, f32>,
    /// `[32]` f32: the layer's rotary frequencies, radians per token.
    pub frequencies: &'a View<B, f32>,
    /// The window.
    pub ring: &'a SwaRing<'a, B>,
    /// The step's own rows, if the ring does not hold them yet.
    pub own: Option<OwnRows<'a, B>>,
    /// The entries, in layers that have some.
    pub entries: Option<AttendedEntries<'a, B>>,
    /// `[queries, heads, 512]` BF16.
    pub out: &'a Buffer<B, bf16>,
    /// `[queries, heads]` f32: natural logarithm of the softmax's denominator, the sink included.
    pub lse: Option<&'a Buffer<B, f32>>,
    /// `[1]` count of what is refused.
    pub faults: &'a Buffer<B, u32>,
}

/// Queues `attend`: for each query and head the sum of its keys by softmax of their scores, rotary channels turned back
/// by the query's position. The outputs of padding, whose slot is negative, stay untouched. No queries are nothing, whatever the rest is.
///
/// Each of these adds 1 to `faults`:
/// - a listed entry, not -1, that the query does not see, or an entry whose block is missing; it is left out of the softmax;
/// - without a list, a query that sees more entries than `rows`; it attends to the oldest `rows`;
/// - a query whose slot is past the last, whose position is negative, or whose row or index does not fit the own rows; its outputs stay
///   untouched.
///
/// # Errors
/// - [`DeviceError::Argument`]: a number of heads, `rows` or `max_blocks` out of range, entries scaled otherwise than the ring.
/// - [`DeviceError::NotADivisor`]: `entries_per_block` does not divide 128.
/// - [`DeviceError::Length`]: a ring shorter than a window or of more than `i32::MAX` rows, fewer own rows than the queries
///   end at, a table of fewer slots than the ring, no room for the parts of one query, queries past `u32::MAX`.
/// - [`DeviceError::TooShort`]: a buffer shorter than its shape. As [`Stream::launch`].
pub fn attend<B: Backend>(
    stream: &Stream<B>,
    attention: &Attention<'_, B>,
) -> Result<(), DeviceError> {
    if attention.queries.count == 0 {
        return Ok(());
    }
    let spread = attention.spread()?;
    let (kernel, mut launches) = (attention.kernel(spread)?, attention.launches(spread)?);
    if launches.len() > 1 {
        check_attend(stream, attention)?;
    }
    launches.try_for_each(|queries| {
        let operation = attention.operation(queries, spread)?;
        // SAFETY: the launch checks every buffer; the kernel refuses slots outside the ring and the table, entries that a
        // query does not see, and blocks outside the planes; work of one stream runs in order, so that parts of one
        // launch are added up before the next leaves its own; their counters are 0 then.
        unsafe { stream.launch(kernel, &operation) }
    })
}

/// Refuses what [`attend`] would refuse before it is queued.
///
/// # Errors
/// As [`attend`].
pub fn check_attend<B: Backend>(
    stream: &Stream<B>,
    attention: &Attention<'_, B>,
) -> Result<(), DeviceError> {
    if attention.queries.count == 0 {
        return Ok(());
    }
    let spread = attention.spread()?;
    let kernel = attention.kernel(spread)?;
    attention
        .launches(spread)?
        .try_for_each(|queries| stream.check(kernel, &attention.operation(queries, spread)?))
}

/// None of the elements of `view`.
fn empty<B: Backend, T: bytemuck::Pod>(view: &View<B, T>) -> View<B, T> {
    view.slice(0, 0).expect("every buffer has an empty part")
}

impl<B: Backend> Attention<'_, B> {
    /// The queries of each launch: of as many as the memory for parts is enough for.
    fn launches(
        &self,
        spread: Option<SpreadLaunch>,
    ) -> Result<impl ExactSizeIterator<Item = Range<u32>> + use<B>, DeviceError> {
        let (count, at_once) = (self.queries.count, self.at_once(spread)?);
        let launch = move |at: u32| at * at_once..(at * at_once).saturating_add(at_once).min(count);
        Ok((0..count.div_ceil(at_once)).map(launch))
    }

    /// Most queries of a launch.
    fn at_once(&self, spread: Option<SpreadLaunch>) -> Result<u32, DeviceError> {
        let (count, params) = (self.queries.count, self.params(0..self.queries.count)?);
        if params.parts == 1 {
            return Ok(count);
        }
        let clusters = u64::from(params.parts) * u64::from(params.heads.div_ceil(HEADS));
        let there = self.parts().map_or(0, AttentionParts::clusters);
        check_length("clusters that have memory for parts of a query", there, clusters)?;
        // Spread queries have memory of their own, which is enough for all.
        Ok(if spread.is_some() { count } else { (there / clusters).min(count.into()) as u32 })
    }

    fn parts(&self) -> Option<&AttentionParts<B>> {
        self.entries.as_ref().and_then(|entries| entries.parts)
    }

    /// The launch of some queries.
    fn operation(
        &self,
        range: Range<u32>,
        spread: Option<SpreadLaunch>,
    ) -> Result<Attend, DeviceError> {
        let Self { query, sinks, frequencies, ring, out, faults, queries, .. } = *self;
        let params = self.params(range)?;
        let halves = spread.map_or(params.halves, |spread| spread.halves);
        let params = AttendParams { halves, ..params };
        let (no_bytes, no_words) = (empty(ring.data), empty(&faults.view().cast::<i32>()?));
        let own = self.own.as_ref().map_or([&no_bytes; 2], |own| [own.data, own.scale]);
        let entries = self.entries.as_ref();
        let planes = entries.map_or([&no_bytes; 2], |of| [of.entries.data, of.entries.scale]);
        let selected = match entries.map(|of| &of.which) {
            Some(Attended::List(selected)) => selected,
            _ => &no_words,
        };
        let no_counts = faults.slice(0, 0).expect("every buffer has an empty part");
        // As aligned as the kernel asks for, unless `out` is not, which the launch refuses by its name.
        let no_results = out.slice(0, 0).expect("every buffer has an empty part");
        let no_floats = no_results.cast::<f32>().or_else(|_| no_counts.cast())?;
        let no_exchange = no_floats.cast::<u32>()?;
        let shares = if spread.is_some() {
            self.exchange.map(|of| (&of.sums, &of.denominators, &of.arrivals))
        } else {
            let parts = self.parts().filter(|_| params.parts > 1);
            parts.map(|of| (&of.sums, &of.lse, &of.arrivals))
        };
        let (part_sums, part_lse, arrivals) =
            shares.unwrap_or((&no_floats, &no_floats, &no_counts));
        Ok(Attend {
            query: query.ptr(),
            sinks: sinks.ptr(),
            frequencies: frequencies.ptr(),
            token_position: queries.position.ptr(),
            token_slot: queries.slot.ptr(),
            token_index: queries.index.ptr(),
            ring_data: ring.data.ptr(),
            ring_scale: ring.scale.ptr(),
            own_data: own[0].ptr(),
            own_scale: own[1].ptr(),
            selected: selected.ptr(),
            table: entries.map_or(&no_words, |of| of.table.table).ptr(),
            entry_data: planes[0].ptr(),
            entry_scale: planes[1].ptr(),
            out: out.ptr_mut(),
            lse: self.lse.unwrap_or(&no_floats).ptr_mut(),
            part_sums: part_sums.ptr_mut(),
            part_lse: part_lse.ptr_mut(),
            arrivals: arrivals.ptr_mut(),
            exchange: self.exchange.map_or(&no_exchange, |of| &of.weights).ptr_mut(),
            faults: faults.ptr_mut(),
            params,
        })
    }

    fn keys(&self) -> AttendedKeys {
        match self.entries.as_ref().map(|of| &of.which) {
            None => AttendedKeys::Window,
            Some(Attended::List(_)) => AttendedKeys::List,
            Some(Attended::All) => AttendedKeys::All,
        }
    }

    fn kernel(&self, spread: Option<SpreadLaunch>) -> Result<AttendKernel, DeviceError> {
        let params = self.params(0..self.queries.count)?;
        let form = form_of(self.keys(), spread, params.parts, params.entry_rows);
        Ok(AttendKernel { format: self.ring.format, form })
    }

    /// How all queries are spread, if they are.
    fn spread(&self) -> Result<Option<SpreadLaunch>, DeviceError> {
        let params = self.params(0..self.queries.count)?;
        let exchange = self.exchange.filter(|_| self.form == QueryForm::Rotated);
        let Some(exchange) = exchange else { return Ok(None) };
        let clusters = [params.tokens, params.parts, params.heads.div_ceil(HEADS)];
        let limit = exchange.clusters().min(spread_clusters(self.multiprocessors).into());
        Ok(SpreadLaunch::of((self.keys(), params.split), clusters, params.entry_rows, limit))
    }

    fn params(&self, range: Range<u32>) -> Result<AttendParams, DeviceError> {
        let Self { queries, ring, heads, .. } = *self;
        check_argument("heads", heads, 1, MOST_HEADS)?;
        ring.rows()?;
        queries.check()?;
        check_length("rows of the ring", ring.ring.into(), WINDOW.into())?;
        let own_rows = self.own.as_ref().map_or(0, |own| own.rows);
        if self.own.is_some() {
            let end = queries.first + queries.count;
            check_length("rows of the step", own_rows.into(), end.into())?;
        }
        let params = AttendParams {
            first: queries.first + range.start,
            tokens: range.end - range.start,
            skipped: range.start,
            heads,
            lse_heads: if self.lse.is_some() { heads } else { 0 },
            raw_queries: u32::from(self.form == QueryForm::Raw),
            parts: 1,
            ring: ring.ring,
            slots: ring.slots,
            own_rows,
            entry_rows: 0,
            ratio_log2: 0,
            entries_log2: 0,
            max_blocks: 0,
            num_blocks: 0,
            split: self.split.blocks(self.keys()),
            halves: 1,
        };
        let params =
            self.entries.as_ref().map_or(Ok(params), |entries| entries.add_to(params, ring))?;
        let clusters = [params.tokens, params.parts, heads.div_ceil(HEADS)];
        Ok(AttendParams { halves: halves(clusters, self.multiprocessors), ..params })
    }
}

impl<B: Backend> AttendedEntries<'_, B> {
    fn add_to(
        &self,
        params: AttendParams,
        ring: &SwaRing<'_, B>,
    ) -> Result<AttendParams, DeviceError> {
        let Self { entries, table, rows, .. } = *self;
        let ratio_log2 = entries.ratio()?.ilog2();
        let [value, needed] = [entries.format, ring.format].map(MainFormat::scale_bytes);
        if value != needed {
            let what = "bytes of an entry's scales";
            return Err(DeviceError::Argument { what, value, multiple: needed, most: needed });
        }
        check_length("slots of the block table", table.slots.into(), ring.slots.into())?;
        check_argument("blocks of a request", table.max_blocks, 1, i32::MAX as u32)?;
        check_argument("entries of a query", rows, 1, i32::MAX as u32)?;
        let keys = match self.which {
            Attended::List(_) => AttendedKeys::List,
            Attended::All => AttendedKeys::All,
        };
        Ok(AttendParams {
            parts: keys.parts(WINDOW + rows),
            entry_rows: rows,
            ratio_log2,
            entries_log2: entries.entries_per_block.ilog2(),
            max_blocks: table.max_blocks,
            num_blocks: entries.num_blocks,
            ..params
        })
    }
}

/// Tiles of a window and `rows` entries.
fn tiles_of(rows: u32) -> u64 {
    (u64::from(WINDOW) + u64::from(rows)).div_ceil(TILE_KEYS.into())
}

/// How a launch spreads its queries over clusters of eight blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SpreadLaunch {
    /// Clusters of each part of a query's keys and 64 heads, 1 or 2: two have half of the keys each.
    halves: u32,
}

impl SpreadLaunch {
    /// For so many queries, parts of the keys of each, a window and `rows` entries, and 64 heads, whose keys are split between `split`
    /// blocks; `None` if these were more than `limit` clusters, or had more keys than a cluster may.
    fn of(
        (keys, split): (AttendedKeys, u32),
        [queries, parts, groups]: [u32; 3],
        rows: u32,
        limit: u64,
    ) -> Option<Self> {
        let clusters = queries.saturating_mul(parts).saturating_mul(groups);
        // No query of the launch has longer parts: those with fewer tiles than the most have as few parts as are enough.
        let can_have = |halves: u32| {
            tiles_of(rows) <= u64::from(SPREAD_TILES) * u64::from(parts) * u64::from(halves)
                && u64::from(clusters) * u64::from(halves) <= limit
        };
        // What adding up takes is gained where a cluster would have more (docs/experiments-attention.md).
        let few = match keys {
            AttendedKeys::List => SPREAD_BLOCKS,
            AttendedKeys::Window | AttendedKeys::All => SHORT_SPREAD_TILES,
        };
        if split > 1 && tiles_of(rows) > few.into() && can_have(2) {
            return Some(Self { halves: 2 });
        }
        can_have(1).then_some(Self { halves: 1 })
    }
}

/// The form of the kernel for queries of up to so many parts and `rows` entries.
fn form_of(keys: AttendedKeys, spread: Option<SpreadLaunch>, parts: u32, rows: u32) -> AttendForm {
    let Some(SpreadLaunch { halves }) = spread else { return AttendForm::Whole(keys) };
    let is_short = parts == 1 && halves == 1 && tiles_of(rows) <= SHORT_SPREAD_TILES.into();
    match keys {
        AttendedKeys::List if !is_short => AttendForm::SpreadParts(ManyEntries::List),
        AttendedKeys::All if !is_short => AttendForm::SpreadParts(ManyEntries::All),
        _ => AttendForm::Spread(keys),
    }
}

/// Clusters that have the same keys of a query, and as large a part of the channels of its values each, in a launch of so many
/// queries, parts of each and 64 heads.
const fn halves([queries, parts, groups]: [u32; 3], multiprocessors: u32) -> u32 {
    /// Of the multiprocessors, so that 64 blocks at most leave half of an H100 to the next kernel, whose blocks start before
    /// these end: with twice as many a decode step takes longer, though attention takes less time (docs/performance.md).
    const SHARE: u32 = 8;
    let clusters = queries.saturating_mul(parts).saturating_mul(groups);
    if clusters <= multiprocessors / SHARE { 2 } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::{
        AttendForm, AttendedKeys, MULTIPROCESSORS, ManyEntries, SpreadLaunch, form_of, halves,
    };

    #[test]
    fn few_queries_of_few_keys_are_spread() {
        let of =
            |clusters, rows| SpreadLaunch::of((AttendedKeys::All, 1), clusters, rows, 14).is_some();
        assert!(of([14, 1, 1], 1024) && of([7, 1, 2], 0) && of([1, 1, 1], 1));
        assert!(!of([15, 1, 1], 1024) && !of([8, 1, 2], 0) && !of([1, 1, 1], 1025));
        assert!(of([7, 2, 1], 2176) && !of([8, 2, 1], 2176) && !of([1, 2, 1], 2177));
        assert!(of([1, 4, 2], 4480) && !of([1, 4, 1], 4481) && !of([1, 1, 1], u32::MAX));
        assert!(!of([u32::MAX, 1, 2], 1) && !of([u32::MAX, 2, 1], 1), "no product wraps around");
        assert_eq!(
            SpreadLaunch::of((AttendedKeys::All, 1), [14, 1, 1], 1, 13),
            None,
            "no memory for all"
        );
    }

    #[test]
    fn few_queries_of_many_keys_have_two_clusters() {
        use AttendedKeys::{All, List, Window};
        let of = |keys, clusters, rows| SpreadLaunch::of((keys, 2), clusters, rows, 14);
        let [one, two] = [1, 2].map(|halves| Some(SpreadLaunch { halves }));
        assert_eq!([of(List, [7, 1, 1], 384), of(List, [7, 1, 1], 385)], [one, two]);
        assert_eq!([of(List, [8, 1, 1], 512), of(List, [3, 1, 2], 2176)], [one, two]);
        assert_eq!([of(List, [1, 1, 1], 2177), of(List, [8, 1, 1], 1025)], [None; 2]);
        assert_eq!([of(All, [7, 1, 1], 640), of(All, [7, 1, 1], 641)], [one, two]);
        assert_eq!([of(All, [1, 4, 1], 8192), of(All, [2, 4, 1], 8192)], [two, None]);
        assert_eq!(of(Window, [1, 1, 1], 0), one);
        assert_eq!(SpreadLaunch::of((All, 1), [1, 1, 1], 960, 14), one, "one sum has one cluster");
        assert_eq!(of(All, [u32::MAX, 2, 1], 1), None, "no product wraps around");
    }

    #[test]
    fn few_keys_have_a_kernel_of_their_own() {
        use {
            AttendForm::{Spread, SpreadParts, Whole},
            AttendedKeys::*,
        };
        let [one, two] = [1, 2].map(|halves| Some(SpreadLaunch { halves }));
        let all = |parts, rows| form_of(All, one, parts, rows);
        assert_eq!([all(1, 0), all(1, 640)], [Spread(All); 2]);
        let many = [all(1, 641), all(1, 1024), all(2, 640), all(1, u32::MAX)];
        assert_eq!(many, [SpreadParts(ManyEntries::All); 4]);
        assert_eq!(form_of(All, two, 1, 640), SpreadParts(ManyEntries::All));
        let list = [form_of(List, one, 1, 640), form_of(List, one, 1, 641)];
        assert_eq!(list, [Spread(List), SpreadParts(ManyEntries::List)]);
        assert_eq!(form_of(List, two, 1, 512), SpreadParts(ManyEntries::List));
        assert_eq!(form_of(Window, one, 1, 0), Spread(Window));
        assert_eq!(form_of(List, None, 1, 1), Whole(List));
    }

    #[test]
    fn few_queries_have_halves_of_channels() {
        let of = |clusters| halves(clusters, MULTIPROCESSORS);
        assert_eq!([[1, 1, 1], [16, 1, 1], [8, 2, 1], [4, 2, 2]].map(of), [2; 4]);
        assert_eq!([[17, 1, 1], [9, 2, 1], [9, 1, 2], [2048, 1, 1]].map(of), [1; 4]);
        assert_eq!(of([u32::MAX, 4, 2]), 1, "no product wraps around");
        assert_eq!([0, u32::MAX].map(|multiprocessors| halves([1, 1, 1], multiprocessors)), [1, 2]);
    }
}
