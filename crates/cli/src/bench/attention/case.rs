//! The measured cases: queries, their keys, and the graph of which they are a part.

use dsv4_kv::kv_layout::attention::{AttendedKeys, KeyCluster};
use dsv4_kv::kv_layout::geometry::{BLOCK_TOKENS, HEAD_DIM, LayerKind, WINDOW};
use dsv4_kv::kv_layout::main_row::MainFormat;
use dsv4_kv::ops::QueryForm;

/// Ratio of the entries that a query sees to the entries in its list.
const SEEN_PER_LISTED: u32 = 8;
/// Fewest tokens of a request before a chunk or a decode step, so that its windows are full.
const FULL_WINDOWS: u32 = 4 * WINDOW;

/// The queries of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queries {
    /// This many queries of a step whose rows are in the ring already: a token, and drafts.
    Decode(u32),
    /// This many queries of a chunk, whose own rows lie in the step's memory.
    Chunk(u32),
}

impl Queries {
    /// The number of queries.
    pub fn count(self) -> u32 {
        match self {
            Self::Decode(count) | Self::Chunk(count) => count,
        }
    }
}

/// One case.
#[derive(Clone, Debug)]
pub struct Case {
    /// Number of heads of a query.
    pub heads: u32,
    /// The kind of layer.
    pub kind: LayerKind,
    /// How the rows are stored.
    pub format: MainFormat,
    /// Number of entries that a query attends to.
    pub entries: u32,
    /// Number of requests.
    pub requests: u32,
    /// Queries of each request.
    pub queries: Queries,
    /// Whether the queries are normed and rotated already.
    pub form: QueryForm,
    /// Number of thread blocks that share a query's keys.
    pub cluster: KeyCluster,
    /// Requests that the graph is made for. If there are fewer, the rest is padding.
    pub most_requests: u32,
    /// Context that the graph is made for, in tokens, if longer than that of the requests.
    pub most_context: u32,
    /// Microseconds of the best peer: FlashMLA as vLLM 0.33 and SGLang ship it for sm_90, with its combine kernel, on
    /// an H200 on 2026-11-21. For a chunk, over rows that were converted to BF16 before.
    pub peer: Option<f64>,
}

/// Cases of 64 and 128 heads.
pub fn cases() -> Vec<Case> {
    let swa = |requests| Case::new(64, LayerKind::Swa, 0, requests);
    let csa = |requests| Case::new(64, LayerKind::Csa, 512, requests);
    let hca = |entries, requests| Case::new(64, LayerKind::Hca, entries, requests);
    let pro = |kind, entries, requests| Case::new(128, kind, entries, requests);
    let drafts = |case: Case| Case { queries: Queries::Decode(4), ..case };
    let chunk = |case: Case| Case { queries: Queries::Chunk(2048), ..case };
    vec![
        swa(1).peer(11.5),
        swa(32).peer(12.8),
        swa(256).peer(29.1),
        csa(1).peer(13.6),
        csa(32).peer(25.5),
        csa(256).peer(86.6),
        drafts(csa(32)).peer(41.8),
        hca(64, 32).peer(16.8),
        hca(1024, 1).peer(15.2),
        hca(1024, 32).peer(33.9),
        hca(8192, 1).peer(29.5),
        hca(8192, 32).peer(124.5),
        pro(LayerKind::Csa, 1024, 1).peer(14.9),
        pro(LayerKind::Csa, 1024, 32).peer(45.9),
        pro(LayerKind::Csa, 1024, 256).peer(207.0),
        pro(LayerKind::Hca, 8192, 1).peer(26.4),
        pro(LayerKind::Hca, 8192, 32).peer(179.0),
        chunk(swa(1)).peer(135.0),
        chunk(csa(1)).peer(356.0),
        chunk(pro(LayerKind::Csa, 1024, 1)).peer(1203.0),
        csa(7),
        csa(14),
        hca(64, 1),
        hca(512, 1),
        hca(900, 1),
        hca(2048, 1),
        pro(LayerKind::Csa, 1024, 3),
        pro(LayerKind::Hca, 8192, 8),
        swa(32).raw(),
        csa(1).raw(),
        csa(32).raw(),
        csa(256).raw(),
        chunk(csa(1)).raw(),
        swa(32).in_graph(256, 0),
        csa(32).in_graph(256, 0),
        hca(64, 32).in_graph(256, 0),
        hca(64, 256),
        hca(64, 256).in_graph(256, 1 << 20),
        csa(32).in_graph(32, 1 << 20),
        hca(64, 32).in_graph(32, 1 << 20),
        csa(1).in_one_block().peer(13.6),
        csa(32).in_one_block().peer(25.5),
        csa(256).in_one_block().peer(86.6),
        drafts(csa(32)).in_one_block().peer(41.8),
        hca(64, 32).in_one_block().peer(16.8),
        hca(64, 256).in_one_block(),
        hca(1024, 32).in_one_block().peer(33.9),
        hca(8192, 32).in_one_block().peer(124.5),
        pro(LayerKind::Csa, 1024, 256).in_one_block().peer(207.0),
        pro(LayerKind::Hca, 8192, 32).in_one_block().peer(179.0),
        chunk(csa(1)).in_one_block().peer(356.0),
        chunk(pro(LayerKind::Csa, 1024, 1)).in_one_block().peer(1203.0),
        csa(1).with_f32_scales(),
        csa(32).with_f32_scales(),
        csa(256).with_f32_scales(),
        hca(8192, 32).with_f32_scales(),
        chunk(csa(1)).with_f32_scales(),
    ]
}

impl Case {
    /// Requests that decode a token each, in a graph of exactly that size. No peer was measured.
    pub fn new(heads: u32, kind: LayerKind, entries: u32, requests: u32) -> Self {
        let (queries, form, peer) = (Queries::Decode(1), QueryForm::Rotated, None);
        let (most_requests, most_context, cluster) = (requests, 0, KeyCluster::TwoBlocks);
        Self {
            heads,
            kind,
            format: MainFormat::Ue8m0,
            entries,
            requests,
            queries,
            form,
            cluster,
            most_requests,
            most_context,
            peer,
        }
    }

    /// The same case with the time of the best peer.
    pub fn peer(self, microseconds: f64) -> Self {
        Self { peer: Some(microseconds), ..self }
    }

    /// The same case with one block of the kernel for each query.
    pub fn in_one_block(self) -> Self {
        Self { cluster: KeyCluster::OneBlock, ..self }
    }

    /// The same case over rows with F32 scales.
    pub fn with_f32_scales(self) -> Self {
        Self { format: MainFormat::F32, ..self }
    }

    /// The same case with queries that are not normed and rotated yet.
    pub fn raw(self) -> Self {
        Self { form: QueryForm::Raw, ..self }
    }

    /// The same case in a graph for more requests, or for longer ones.
    pub fn in_graph(self, most_requests: u32, most_context: u32) -> Self {
        Self { most_requests, most_context, ..self }
    }

    /// A description of the case.
    pub fn name(&self) -> String {
        let Self { heads, entries, requests, kind, .. } = self;
        let queries = match self.queries {
            Queries::Decode(1) => String::new(),
            Queries::Decode(count) => format!(" x {count} tokens"),
            Queries::Chunk(count) => format!(" x a chunk of {count} tokens"),
        };
        let (most, context) = (self.most_requests, self.most_context);
        let graph = match (most > *requests, context > self.context()) {
            (true, _) => format!(", in a graph for {most}"),
            (_, true) => format!(", in a graph for {context} tokens"),
            _ => String::new(),
        };
        let cluster = if self.cluster == KeyCluster::OneBlock { ", one block" } else { "" };
        let scales = if self.format == MainFormat::F32 { ", F32 scales" } else { "" };
        let form = if self.form == QueryForm::Raw { ", raw queries" } else { "" };
        let kind = format!("{kind:?}").to_uppercase();
        format!(
            "{kind}, {heads} heads, {WINDOW} + {entries} keys, {requests} requests{queries}{form}{graph}{cluster}{scales}"
        )
    }

    /// Number of queries that are not padding.
    pub fn live(&self) -> u32 {
        self.requests * self.queries.count()
    }

    /// Number of queries that the launch covers, padding included.
    pub fn tokens(&self) -> u32 {
        self.most_requests * self.queries.count()
    }

    /// Bytes that a launch must move: each key of a request once, queries and results once.
    pub fn bytes(&self) -> u64 {
        let window = u64::from(WINDOW + self.queries.count() - 1);
        let keys = window + (u64::from(self.entries) * self.lists()).min(self.seen().into());
        let vectors = 2 * u64::from(self.live() * self.heads) * 2 * u64::from(HEAD_DIM);
        u64::from(self.requests) * keys * self.format.row_bytes() + vectors
    }

    /// Floating-point operations of its products: queries by keys, and weights by keys.
    pub fn operations(&self) -> f64 {
        let keys = f64::from(WINDOW + self.entries);
        4.0 * f64::from(self.live() * self.heads) * keys * f64::from(HEAD_DIM)
    }

    /// Number of clusters that write partial results to memory; 0 if no keys are in several splits.
    pub fn clusters(&self) -> u32 {
        if self.entries == 0 || self.is_listed() {
            return 0;
        }
        let keys = WINDOW + self.entry_rows();
        let splits = AttendedKeys::All.num_splits(keys, self.cluster, self.heads);
        if splits > 1 { self.tokens() * splits * self.heads.div_ceil(64) } else { 0 }
    }

    /// Number of lists per request, each with its own entries.
    fn lists(&self) -> u64 {
        if self.is_listed() { self.queries.count().into() } else { 1 }
    }

    /// Whether a query attends to the entries of a list.
    pub fn is_listed(&self) -> bool {
        self.kind == LayerKind::Csa
    }

    /// Entries that the last query of a request sees.
    pub fn seen(&self) -> u32 {
        if self.is_listed() { self.entries * SEEN_PER_LISTED } else { self.entries }
    }

    /// Number of entries that every query of a request sees.
    pub fn seen_by_all(&self) -> u32 {
        self.seen() - self.queries.count().div_ceil(self.kind.ratio().unwrap_or(1))
    }

    /// Tokens of a request, including those of the step.
    pub fn context(&self) -> u32 {
        let of_entries = self.seen() * self.kind.ratio().unwrap_or(0);
        of_entries.max(self.queries.count() + FULL_WINDOWS).next_multiple_of(BLOCK_TOKENS)
    }

    /// Blocks of a request.
    pub fn blocks(&self) -> u32 {
        self.context() / BLOCK_TOKENS
    }

    /// Blocks in a row of the block table: those of the longest request that the graph is made for.
    pub fn max_blocks(&self) -> u32 {
        self.blocks().max(self.most_context / BLOCK_TOKENS)
    }

    /// Most entries of a query that the graph is made for.
    pub fn entry_rows(&self) -> u32 {
        let longest = self.most_context / self.kind.ratio().unwrap_or(1);
        if self.is_listed() { self.entries } else { self.entries.max(longest) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floors_are_those_of_the_products() {
        // 2,048 queries of 64 heads by 640 keys, two products: 172 GFLOP, 217 us at 790 TFLOP/s.
        let cases = cases();
        let of = |name: &str| cases.iter().find(|case| case.name() == name).unwrap();
        let flash = of("CSA, 64 heads, 128 + 512 keys, 1 requests x a chunk of 2048 tokens");
        assert_eq!((flash.operations() / 790e12 * 1e6).round(), 217.0);
        // The lists of its queries overlap: each of the 4,096 entries is read.
        assert_eq!(flash.bytes(), (2175 + 4096) * 584 + 2 * 2048 * 64 * 1024);
        // The first query of the chunk sees 512 entries fewer than the last.
        assert_eq!((flash.seen(), flash.seen_by_all(), flash.context()), (4096, 3584, 16_384));
        let f32 =
            of("CSA, 64 heads, 128 + 512 keys, 1 requests x a chunk of 2048 tokens, F32 scales");
        assert_eq!(flash.bytes() - f32.bytes(), (2175 + 4096) * 4);
        let window = of("SWA, 64 heads, 128 + 0 keys, 1 requests x a chunk of 2048 tokens");
        assert_eq!((window.operations() / 790e12 * 1e6).round(), 43.0);
    }

    #[test]
    fn a_graph_is_for_more_than_there_is() {
        let wide = Case::new(64, LayerKind::Csa, 512, 32).in_graph(256, 0);
        assert_eq!((wide.live(), wide.tokens(), wide.peer), (32, 256, None));
        assert!(wide.name().ends_with("32 requests, in a graph for 256"), "{}", wide.name());
        let long = Case::new(64, LayerKind::Hca, 64, 32).in_graph(32, 1 << 20);
        assert_eq!((long.blocks(), long.max_blocks(), long.entry_rows()), (64, 8192, 8192));
        assert_eq!(long.bytes(), Case::new(64, LayerKind::Hca, 64, 32).bytes());
    }
}
