//! The result of `plan`: one value, printed as tables or as JSON.

use std::fmt;

use bytesize::ByteSize;
use comfy_table::{CellAlignment, Table, presets};
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::{CacheConfig, Capacity, KvError, WorkspaceSize, capacity};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::device;

/// Shortest request in the table of lengths, in tokens.
const SHORTEST: u32 = 1 << 10;

/// A planned cache.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// Bytes there are for it.
    memory: u64,
    /// Bytes set aside for the rounding up of allocations.
    rounding: u64,
    /// The workspace of the indexer; none if no layer has one.
    #[schemars(with = "Option<Map<String, Value>>")]
    indexer: Option<WorkspaceSize>,
    /// Bytes left when all that is allocated.
    left_over: u64,
    /// Requests of the longest context that would fit without checkpoints; none if not even one cache would.
    requests_without_checkpoints: Option<u32>,
    /// Tokens of the longest request that fits while no other is there.
    longest_request: u32,
    /// What it has room for: the fields of `dsv4_kv::Capacity`.
    #[schemars(with = "Map<String, Value>")]
    capacity: Capacity,
    /// Requests by length.
    lengths: Vec<Length>,
    /// Its configuration: the fields of `dsv4_kv::CacheConfig`.
    #[schemars(with = "Map<String, Value>")]
    config: CacheConfig,
}

/// Requests of one length.
#[derive(Debug, Serialize, JsonSchema)]
struct Length {
    /// Tokens of a request.
    tokens: u32,
    /// Blocks it needs.
    blocks: u32,
    /// Bytes of its slot and its blocks.
    bytes: u64,
    /// How many fit at once.
    requests: u32,
    /// How many would, were slots and blocks chosen for this length.
    requests_at_best: u32,
}

impl Report {
    /// The result for a cache of `config`. `memory` is the total in bytes, `left` is what the indexer and the rounding
    /// leave of it for the cache, and `without` is the number of requests of its context that would fit without
    /// checkpoints.
    pub fn new(
        config: CacheConfig,
        indexer: Option<WorkspaceSize>,
        without: Option<u32>,
        (memory, left): (u64, u64),
    ) -> Result<Self, KvError> {
        let capacity = Capacity::new(&config);
        let length = |tokens| {
            Ok(Length {
                tokens,
                blocks: capacity.blocks_of(tokens),
                bytes: capacity.request_bytes(tokens),
                requests: capacity.requests_of(tokens),
                requests_at_best: at_best(&config, left, tokens)?,
            })
        };
        let lengths = lengths(config.max_context).map(length).collect::<Result<_, KvError>>()?;
        Ok(Self {
            memory,
            rounding: device::rounding(&config, indexer.as_ref()),
            indexer,
            left_over: left - capacity.bytes(),
            requests_without_checkpoints: without,
            longest_request: capacity.longest_request(),
            capacity,
            lengths,
            config,
        })
    }

    fn layer_table(&self) -> Table {
        let Capacity { slot_bytes, block_bytes, bytes_per_token, layers, .. } = &self.capacity;
        let mut table =
            table(["layer kind", "layers", "bytes per slot", "bytes per block", "bytes per token"]);
        for kind in layers {
            table.add_row([
                name(kind.kind).to_string(),
                kind.layers.to_string(),
                kind.slot_bytes.to_string(),
                kind.block_bytes.to_string(),
                kind.bytes_per_token.to_string(),
            ]);
        }
        table.add_row([
            "all".to_string(),
            self.config.model.layers.len().to_string(),
            slot_bytes.to_string(),
            block_bytes.to_string(),
            bytes_per_token.to_string(),
        ]);
        table
    }

    fn total_table(&self) -> Table {
        let Capacity { slots, blocks, slot_bytes, block_bytes, working_bytes, .. } = self.capacity;
        let Capacity { checkpoints, checkpoint_bytes, suspended, .. } = self.capacity;
        let share =
            |units: u32, bytes: u64| format!("{units} ({})", ByteSize(u64::from(units) * bytes));
        let indexer = |WorkspaceSize { queries, bytes, .. }| {
            format!("{queries} queries at once ({})", ByteSize(bytes))
        };
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        table.add_row(["memory", &ByteSize(self.memory).to_string()]);
        table.add_row(["slots", &share(slots, slot_bytes)]);
        table.add_row(["blocks", &share(blocks, block_bytes)]);
        for (what, units, bytes) in [
            ("checkpoints", checkpoints, checkpoint_bytes),
            ("suspended requests", suspended, slot_bytes),
        ] {
            if units > 0 {
                table.add_row([what, &format!("{}, {bytes} bytes each", share(units, bytes))]);
            }
        }
        if let Some(without) = self.requests_without_checkpoints.filter(|_| checkpoints > 0) {
            let context = self.capacity.max_context;
            let with = self.capacity.requests_of(context);
            let cost = format!("{with} requests of {context} tokens, not {without}");
            table.add_row(["with checkpoints fit", &cost]);
        }
        let Capacity { host_bytes, staging_bytes, .. } = self.capacity;
        table.add_row(["step buffers", &ByteSize(working_bytes - staging_bytes).to_string()]);
        if host_bytes > 0 {
            let pinned = format!("{} pinned", ByteSize(host_bytes));
            table.add_row(["host cache", &pinned]);
            table.add_row(["on the way to it and back", &ByteSize(staging_bytes).to_string()]);
        }
        table.add_row(["indexer workspace", &self.indexer.map_or("none".into(), indexer)]);
        table.add_row(["allocation rounding", &ByteSize(self.rounding).to_string()]);
        table.add_row(["unused", &ByteSize(self.left_over).to_string()]);
        table.add_row(["longest request", &format!("{} tokens", self.longest_request)]);
        table
    }

    fn length_table(&self) -> Table {
        let mut table =
            table(["tokens", "blocks", "bytes", "requests", "requests if planned for it"]);
        for length in &self.lengths {
            let Length { tokens, blocks, bytes, requests, requests_at_best } = *length;
            let row =
                [tokens.into(), blocks.into(), bytes, requests.into(), requests_at_best.into()];
            table.add_row(row.map(|number: u64| number.to_string()));
        }
        table
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CacheConfig { model, main_format, index_format, max_draft, .. } = &self.config;
        let (main, index) = (main_format.name(), index_format.name());
        writeln!(
            f,
            "{}: {main} rows, {index} indexer keys, {max_draft} draft tokens\n",
            model.name
        )?;
        writeln!(f, "{}\n\n{}\n", self.layer_table(), self.total_table().trim_fmt())?;
        writeln!(
            f,
            "Requests of each length that fit at once, in this cache and in one planned for that length:\n"
        )?;
        write!(f, "{}", self.length_table())
    }
}

/// Powers of two below the context, and the context.
fn lengths(context: u32) -> impl Iterator<Item = u32> {
    let doubled = std::iter::successors(Some(SHORTEST), |tokens| tokens.checked_mul(2));
    doubled.take_while(move |&tokens| tokens < context).chain([context])
}

/// Requests of `tokens` tokens that fit at once in the best cache for them; 0 if not even one fits.
fn at_best(config: &CacheConfig, memory: u64, tokens: u32) -> Result<u32, KvError> {
    match capacity::most_requests(config.clone(), memory, tokens) {
        Ok(best) => Ok(best.max_requests),
        Err(KvError::MemoryTooSmall { .. }) => Ok(0),
        Err(error) => Err(error),
    }
}

/// A table of numbers, aligned to the right.
fn table(header: [&str; 5]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header(header);
    table.column_iter_mut().for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

fn name(kind: LayerKind) -> &'static str {
    match kind {
        LayerKind::Swa => "sliding window",
        LayerKind::Csa => "CSA",
        LayerKind::Hca => "HCA",
    }
}
