//! Which queries of a step gather compressed entries, and in which batches.

use std::ops::Range;

use dsv4_kv::StepRequest;
use dsv4_kv::kv_layout::geometry::HCA_RATIO;

/// Most queries in a batch.
pub const MAX_QUERIES: u32 = 256;

/// The queries of a step that gather entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queries {
    /// All of them, as in attention.
    All,
    /// The last queries of each request, at most this many.
    Last(u32),
}

impl Queries {
    /// The queries of a request whose tokens are the rows `rows` of the step.
    pub fn of(self, rows: Range<u32>) -> Range<u32> {
        match self {
            Self::All => rows,
            Self::Last(count) => rows.start.max(rows.end.saturating_sub(count))..rows.end,
        }
    }
}

/// Consecutive queries of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The queries, at most [`MAX_QUERIES`].
    pub queries: Range<u32>,
    /// Most entries that a query of the batch sees in an HCA layer; at least 1.
    pub hca_rows: u32,
}

impl Batch {
    /// Parts of the batch whose tiles of `rows` rows per query have at most `most` rows together.
    pub fn tiles(&self, rows: u32, most: u32) -> impl Iterator<Item = Range<u32>> {
        let (Range { start, end }, count) = (self.queries.clone(), most / rows);
        (start..end).step_by(count as usize).map(move |first| first..end.min(first + count))
    }
}

/// The batches of the queries that gather, in the order of the step.
pub fn batches(queries: Queries, step: &[StepRequest]) -> Vec<Batch> {
    let mut batches: Vec<Batch> = Vec::new();
    let mut first = 0;
    for part in step {
        let rows = first..first + part.tokens;
        for query in queries.of(rows.clone()) {
            let hca_rows = ((part.start + query - first + 1) / HCA_RATIO).max(1);
            match batches.last_mut() {
                Some(Batch { queries, hca_rows: most })
                    if queries.end == query && queries.len() < MAX_QUERIES as usize =>
                {
                    queries.end += 1;
                    *most = hca_rows.max(*most);
                }
                _ => batches.push(Batch { queries: query..query + 1, hca_rows }),
            }
        }
        first = rows.end;
    }
    batches
}

#[cfg(test)]
mod tests {
    use dsv4_kv::Ledger;
    use dsv4_kv::kv_layout::config::ModelConfig;

    use super::*;

    /// A step with a chunk of a long prompt, and a token at position 5.
    fn step() -> [StepRequest; 2] {
        let model = ModelConfig::preset("tiny").expect("a preset");
        let config = dsv4_kv::CacheConfig::new(model);
        let config = dsv4_kv::CacheConfig { max_requests: 2, ..config };
        let mut ledger = Ledger::new(&config).expect("a valid configuration");
        let mut request =
            |start, tokens| StepRequest { id: ledger.admit().expect("two slots"), start, tokens };
        [request(40_000, 700), request(5, 1)]
    }

    #[test]
    fn every_query_is_in_one_batch_and_in_one_tile_that_fits() {
        let batches = batches(Queries::All, &step());
        assert!(batches.iter().flat_map(|batch| batch.queries.clone()).eq(0..701));
        assert!(batches.iter().all(|batch| batch.queries.len() <= MAX_QUERIES as usize));
        assert_eq!(batches.iter().map(|batch| batch.hca_rows).max(), Some(40_700 / 128));
        for batch in batches {
            let tiles: Vec<_> = batch.tiles(512, 1 << 15).collect();
            assert!(tiles.iter().all(|tile| tile.len() <= 64), "{tiles:?}");
            assert!(tiles.into_iter().flatten().eq(batch.queries));
        }
    }

    #[test]
    fn the_last_queries_of_each_request_alone() {
        let queries = |last: u32| -> Vec<u32> {
            let batches = batches(Queries::Last(last), &step());
            batches.into_iter().flat_map(|batch| batch.queries).collect()
        };
        assert_eq!(queries(1), [699, 700]);
        assert_eq!(queries(3), [697, 698, 699, 700]);
    }
}
