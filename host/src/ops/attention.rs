//! Attention in place: over the stored rows of the cache, without a gather.

use std::ops::Range;

use kernels_gpu::attention::HEADS;
use kernels_gpu::launch::Attend;
use kernels_gpu::params::AttendParams;
pub use kernels_gpu::table::MULTIPROCESSORS;
use kv_layout::attention::{AttendForm, AttendKernel, AttendedKeys, KeyCluster, MAX_HEADS};
use kv_layout::geometry::WINDOW;

use super::attention_exchange::spread_clusters;
use super::attention_form::{
    SpreadLaunch, consecutive_queries, form_of, halves_of_channels, work_items,
};
use super::{
    AttentionExchange, BlockTable, Entries, SplitWorkspace, StepQueries, SwaRing, check_argument,
    check_equal, check_length,
};
use crate::device::{Backend, Buffer, DeviceError, Stream, View, bf16};

/// The entries that queries attend to.
pub enum Attended<'a, B: Backend> {
    /// Those in a list, `[queries, rows]` i32 entry indices, -1 = none. The entries come first, as in lists of
    /// [`super::index_topk`]. Elements past the first `min(rows, entries that the query sees)` of a list are not read.
    List(&'a View<B, i32>),
    /// All that a query sees.
    All,
}

impl<B: Backend> Attended<'_, B> {
    pub(crate) fn keys(&self) -> AttendedKeys {
        match self {
            Self::List(_) => AttendedKeys::List,
            Self::All => AttendedKeys::All,
        }
    }
}

/// Compressed entries and which of them queries attend to.
pub struct AttendedEntries<'a, B: Backend> {
    /// The layer's entries.
    pub entries: &'a Entries<'a, B>,
    /// The blocks of the queries' requests.
    pub table: &'a BlockTable<'a, B>,
    /// Whether queries attend to a list of them, or to all that they see.
    pub which: Attended<'a, B>,
    /// Workspace for the partial outputs of keys in several splits (split-KV); needed whenever a query can have several
    /// splits. If one query needs more clusters than the workspace has, the call is refused; if only all queries
    /// together need more, the call becomes several launches. Spread launches keep their partial outputs in `exchange`,
    /// but are checked in the same way, so that whether a query is refused does not depend on its batch.
    pub splits: Option<&'a SplitWorkspace<B>>,
    /// Most entries of a query, 1 to `i32::MAX`: the length of its list, or the most that it may see. Elements of -1
    /// among the first `min(rows, entries that the query sees)` of a list are keys without weight, which count when
    /// blocks share the keys: so a query's bits depend on `rows` where its list is shorter.
    pub rows: u32,
}

/// The step's own window rows, in the format of the ring, which does not hold them yet.
pub struct OwnRows<'a, B: Backend> {
    /// `[step, 576]` u8.
    pub data: &'a View<B, u8>,
    /// `[step, 8]` UE8M0 or `[step]` f32, as bytes.
    pub scale: &'a View<B, u8>,
    /// Rows of the planes; at least `queries.first + queries.count`.
    pub rows: u32,
}

/// How queries were processed before attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum QueryForm {
    /// RMS norm of each head and RoPE.
    #[default]
    Rotated,
    /// Not at all: they are the output of the query projection. The kernel norms each head (no weight, `rms_norm_eps`
    /// 1e-6), rotates its last 64 channels by the query's position, both in f32, and rounds to BF16 once.
    Raw,
}

/// Attention of queries, and where its results go.
pub struct Attention<'a, B: Backend> {
    /// Which tokens of the step are the queries.
    pub queries: &'a StepQueries<'a, B>,
    /// `[queries, heads, 512]` BF16.
    pub query: &'a View<B, bf16>,
    /// How `query` was processed.
    pub form: QueryForm,
    /// Heads, 1 to 128.
    pub heads: u32,
    /// Number of thread blocks that share a query's keys, in layers with entries. It must be the same in all launches
    /// of a cache; otherwise a query's bits depend on the launch.
    pub cluster: KeyCluster,
    /// Multiprocessors that the launch is sized for ([`MULTIPROCESSORS`]). Their number selects the form of the kernel
    /// (docs/architecture.md, D33), and changes no bit.
    pub multiprocessors: u32,
    /// Workspace of work items that are spread over eight blocks. Without it, or where it has fewer clusters than the
    /// launch has work items, none is spread.
    pub exchange: Option<&'a AttentionExchange<B>>,
    /// `[heads]` f32: each head's sink.
    pub sinks: &'a View<B, f32>,
    /// `[32]` f32: the layer's rotary frequencies, radians per token.
    pub frequencies: &'a View<B, f32>,
    /// The layer's sliding-window ring.
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

/// Queues `attend`: for each query and head, the sum of its keys (which are also the values), weighted by the softmax
/// of their scores. The rotary channels of the result are rotated back by the query's position. The outputs of padding,
/// whose slot is negative, stay untouched. Without queries the call does nothing, whatever the other arguments are.
///
/// Each of these adds 1 to `faults`:
/// - a listed entry, not -1, that the query does not see, or an entry whose block is missing; it is left out of the softmax;
/// - without a list, a query that sees more entries than `rows`; it attends to the oldest `rows`;
/// - a query whose slot is past the last, whose position is negative, or whose row or index does not fit the own rows; its outputs stay
///   untouched.
///
/// # Errors
/// - [`DeviceError::Argument`]: a number of heads, `rows` or `max_blocks` out of range, entries scaled otherwise than the ring, a ring of more
///   than `i32::MAX` rows, queries past `u32::MAX`.
/// - [`DeviceError::NotADivisor`]: `entries_per_block` does not divide 128.
/// - [`DeviceError::Length`]: a ring shorter than a window, fewer own rows than the queries end at, a table of fewer slots than the
///   ring, no room for the splits of one query.
/// - [`DeviceError::TooShort`]: a buffer shorter than its shape. [`DeviceError::BadGrid`]: more queries than a launch has room for. As
///   [`Stream::launch`].
///
/// # Safety
/// Until the launch is done nothing writes the slots, positions and indices of the step (`queries`): each thread of a block reads them
/// for itself, and which barriers it waits at, and which rows others have found, follows from them.
pub unsafe fn attend<B: Backend>(
    stream: &Stream<B>,
    attention: &Attention<'_, B>,
) -> Result<(), DeviceError> {
    if attention.queries.count == 0 {
        return Ok(());
    }
    let plan = attention.plan()?;
    let mut launches = plan.launches();
    if launches.len() > 1 {
        attention.check(stream, &plan)?;
    }
    launches.try_for_each(|queries| {
        let operation = attention.operation(&plan, queries)?;
        // SAFETY: the launch checks every buffer; the kernel refuses slots outside the ring and the table, entries that
        // a query does not see, and blocks outside the planes. `SpreadLaunch::of` has no more tiles for a cluster than
        // the kernel takes, `form_of` no more than the short one does, and halves of splits only where these have two
        // sums. Work of one stream runs in order, so that splits of one launch are combined before the next leaves its
        // own, and their counters are 0 then; both workspaces are used by one stream at a time, as their types say. All
        // threads read the same of the step, by this function's own contract.
        let launched = unsafe { stream.launch(plan.kernel, &operation) };
        launched.inspect_err(|error| attention.clean(stream, error))
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
    attention.check(stream, &attention.plan()?)
}

/// Resets the arrival counters of attention after the error of a launch or a replay. A kernel that the emulator has
/// stopped may leave counters that are not 0, and the next launch would compute wrong results.
pub(crate) fn reset_arrivals<'a, B: Backend>(
    stream: &Stream<B>,
    error: &DeviceError,
    counters: impl IntoIterator<Item = &'a Buffer<B, u32>>,
) {
    if !matches!(error, DeviceError::Fault(_)) {
        return;
    }
    for arrivals in counters {
        // The caller gets the first error instead.
        let _ = stream.fill(arrivals, 0);
    }
}

/// An empty part of `view`.
fn empty<B: Backend, T: bytemuck::Pod>(view: &View<B, T>) -> View<B, T> {
    view.slice(0, 0).expect("every buffer has an empty part")
}

/// How a call is launched. Decided once, for all its queries.
struct Plan {
    /// Parameters of one launch of all queries; each launch has its own halves.
    params: AttendParams,
    spread: Option<SpreadLaunch>,
    kernel: AttendKernel,
    /// Most queries of a launch: as many as the workspace for splits has room for.
    at_once: u32,
}

impl Plan {
    /// The queries of each launch.
    fn launches(&self) -> impl ExactSizeIterator<Item = Range<u32>> + use<> {
        let (count, at_once) = (self.params.tokens, self.at_once);
        let launch = move |at: u32| at * at_once..(at * at_once).saturating_add(at_once).min(count);
        (0..count.div_ceil(at_once)).map(launch)
    }
}

impl<B: Backend> Attention<'_, B> {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let mut params = self.params()?;
        let spread = self.spread(&params);
        let form = match self.consecutive(&params) {
            Some(queries) => {
                params.queries_per_block = queries;
                AttendForm::Consecutive
            }
            None => form_of(self.keys(), spread, params.num_splits, params.entry_rows),
        };
        let kernel = AttendKernel { format: self.ring.format, form };
        Ok(Plan { params, spread, kernel, at_once: self.at_once(&params, spread)? })
    }

    /// Checks all launches before any of them is queued.
    fn check(&self, stream: &Stream<B>, plan: &Plan) -> Result<(), DeviceError> {
        plan.launches()
            .try_for_each(|queries| stream.check(plan.kernel, &self.operation(plan, queries)?))
    }

    /// Most queries of a launch.
    fn at_once(
        &self,
        params: &AttendParams,
        spread: Option<SpreadLaunch>,
    ) -> Result<u32, DeviceError> {
        if params.num_splits == 1 {
            return Ok(params.tokens);
        }
        // Spread queries keep their splits in the exchange, but are checked in the same way, so that whether a query is
        // refused does not depend on its batch.
        let of_query = u64::from(params.num_splits) * u64::from(params.heads.div_ceil(HEADS));
        let there = self.splits().map_or(0, SplitWorkspace::clusters);
        check_length("clusters that have memory for splits of a query", there, of_query)?;
        let enough = (there / of_query).min(params.tokens.into()) as u32;
        Ok(if spread.is_some() { params.tokens } else { enough })
    }

    fn splits(&self) -> Option<&SplitWorkspace<B>> {
        self.entries.as_ref().and_then(|entries| entries.splits)
    }

    /// The launch of some queries.
    fn operation(&self, plan: &Plan, range: Range<u32>) -> Result<Attend, DeviceError> {
        let Self { query, sinks, frequencies, ring, out, faults, queries, .. } = *self;
        let params = AttendParams {
            first: queries.first + range.start,
            tokens: range.end - range.start,
            skipped: range.start,
            ..plan.params
        };
        let (channel_halves, key_halves) = match plan.spread {
            Some(SpreadLaunch { halves }) => (1, halves),
            None => {
                // Windows as if they had two blocks: in a graph for 32 requests they would take 0.9 us less, and so 1.4 us less
                // than in a graph for 256 requests (docs/experiments-attention.md).
                let blocks = if self.entries.is_some() { params.blocks_per_split } else { 2 };
                (halves_of_channels(work_items(&params), blocks, self.multiprocessors), 1)
            }
        };
        let params = AttendParams { channel_halves, key_halves, ..params };
        let (no_bytes, no_words) = (empty(ring.data), empty(&faults.view().cast::<i32>()?));
        let own = self.own.as_ref().map_or([&no_bytes; 2], |own| [own.data, own.scale]);
        let entries = self.entries.as_ref();
        let planes = entries.map_or([&no_bytes; 2], |of| [of.entries.data, of.entries.scale]);
        let selected = match entries.map(|of| &of.which) {
            Some(Attended::List(selected)) => selected,
            _ => &no_words,
        };
        let no_counts = faults.slice(0, 0).expect("every buffer has an empty part");
        // Aligned as the kernel requires, unless `out` itself is misaligned: then the launch names `out` in its error.
        let no_results = out.slice(0, 0).expect("every buffer has an empty part");
        let no_floats = no_results.cast::<f32>().or_else(|_| no_counts.cast())?;
        let no_exchange = no_floats.cast::<u32>()?;
        let workspace = if plan.spread.is_some() {
            self.exchange.map(|of| (&of.sums, &of.denominators, &of.arrivals))
        } else {
            let splits = self.splits().filter(|_| params.num_splits > 1);
            splits.map(|of| (&of.sums, &of.lse, &of.arrivals))
        };
        let (split_out, split_softmax, arrivals) =
            workspace.unwrap_or((&no_floats, &no_floats, &no_counts));
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
            split_out: split_out.ptr_mut(),
            split_softmax: split_softmax.ptr_mut(),
            arrivals: arrivals.ptr_mut(),
            exchange: self.exchange.map_or(&no_exchange, |of| &of.weights).ptr_mut(),
            faults: faults.ptr_mut(),
            params,
        })
    }

    /// Resets the arrival counters after `error`.
    fn clean(&self, stream: &Stream<B>, error: &DeviceError) {
        let splits = self.splits().map(|of| &of.arrivals);
        reset_arrivals(
            stream,
            error,
            splits.into_iter().chain(self.exchange.map(|of| &of.arrivals)),
        );
    }

    fn keys(&self) -> AttendedKeys {
        self.entries.as_ref().map_or(AttendedKeys::Window, |of| of.which.keys())
    }

    /// How the queries are spread over clusters of eight blocks; `None` if they are not.
    fn spread(&self, params: &AttendParams) -> Option<SpreadLaunch> {
        let exchange = self.exchange.filter(|_| self.form == QueryForm::Rotated)?;
        let limit = exchange.clusters().min(spread_clusters(self.multiprocessors).into());
        let keys = (self.keys(), params.blocks_per_split);
        SpreadLaunch::of(keys, work_items(params), params.entry_rows, limit)
    }

    /// Number of queries that a block takes one after another in the consecutive form; `None` for the other forms. That
    /// form is for windows alone, of a step whose own rows are not in the ring: then most queries are consecutive
    /// tokens of a chunk.
    fn consecutive(&self, params: &AttendParams) -> Option<u32> {
        let is_chunk = self.entries.is_none() && params.own_rows > 0;
        let [queries, _, groups] = work_items(params);
        let is_possible = is_chunk && self.form == QueryForm::Rotated;
        is_possible.then(|| consecutive_queries([queries, groups], self.multiprocessors)).flatten()
    }

    /// Parameters of one launch of all queries.
    fn params(&self) -> Result<AttendParams, DeviceError> {
        let Self { queries, ring, heads, .. } = *self;
        check_argument("heads", heads, 1, MAX_HEADS)?;
        ring.rows()?;
        queries.check()?;
        check_length("rows of the ring", ring.ring.into(), WINDOW.into())?;
        let own_rows = self.own.as_ref().map_or(0, |own| own.rows);
        if self.own.is_some() {
            let end = queries.first + queries.count;
            check_length("rows of the step", own_rows.into(), end.into())?;
        }
        let params = AttendParams {
            first: queries.first,
            tokens: queries.count,
            skipped: 0,
            heads,
            lse_heads: if self.lse.is_some() { heads } else { 0 },
            raw_queries: u32::from(self.form == QueryForm::Raw),
            num_splits: 1,
            ring: ring.ring,
            slots: ring.slots,
            own_rows,
            entry_rows: 0,
            ratio_log2: 0,
            entries_log2: 0,
            max_blocks: 0,
            num_blocks: 0,
            blocks_per_split: self.cluster.blocks(self.keys()),
            channel_halves: 1,
            key_halves: 1,
            queries_per_block: 1,
        };
        self.entries
            .as_ref()
            .map_or(Ok(params), |entries| entries.add_to(params, self.cluster, ring))
    }
}

impl<B: Backend> AttendedEntries<'_, B> {
    fn add_to(
        &self,
        params: AttendParams,
        cluster: KeyCluster,
        ring: &SwaRing<'_, B>,
    ) -> Result<AttendParams, DeviceError> {
        let Self { entries, table, rows, .. } = *self;
        let ratio_log2 = entries.ratio()?.ilog2();
        let (entry, window) = (entries.format.scale_bytes(), ring.format.scale_bytes());
        check_equal("bytes of an entry's scales", entry, window)?;
        check_length("slots of the block table", table.slots.into(), ring.slots.into())?;
        check_argument("blocks of a request", table.max_blocks, 1, i32::MAX as u32)?;
        check_argument("entries of a query", rows, 1, i32::MAX as u32)?;
        Ok(AttendParams {
            num_splits: self.which.keys().num_splits(WINDOW + rows, cluster, params.heads),
            entry_rows: rows,
            ratio_log2,
            entries_log2: entries.entries_per_block.ilog2(),
            max_blocks: table.max_blocks,
            num_blocks: entries.num_blocks,
            ..params
        })
    }
}

#[cfg(test)]
mod tests {
    use simt::emu::{Fault, FaultKind};

    use super::*;
    use crate::device::{EmuDevice, EmuOptions};

    #[test]
    fn a_fault_leaves_counters_at_zero() {
        let device = EmuDevice::new(EmuOptions::default());
        let stream = device.stream().unwrap();
        let splits = SplitWorkspace::new(&device, 1).unwrap();
        let exchange = AttentionExchange::new(&device, 1).unwrap();
        let counters = [&splits.arrivals, &exchange.arrivals];
        let kind = Box::new(FaultKind::InvalidLaunch { grid: (1, 1), block: 0 });
        let fault = DeviceError::Fault(Fault { kernel: None, block: None, kind });
        for (error, left) in [(DeviceError::NestedCapture, 1), (fault, 0)] {
            for counters in counters {
                stream.upload(&[1], counters, 0).unwrap();
            }
            reset_arrivals(&stream, &error, counters);
            for counters in counters {
                let mut first = [7];
                stream.download(counters, 0, &mut first).unwrap();
                assert_eq!(first, [left], "{error}");
            }
        }
    }
}
