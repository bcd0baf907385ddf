//! Which queries of a step gather compressed entries, and which entries: a list for each query, as an
//! indexer would pick them.

use std::ops::Range;

use dsv4_kv::StepRequest;
use dsv4_kv::kv_layout::geometry::{CSA_RATIO, HCA_RATIO};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Rows of the buffer that gathers write to.
pub const TILE_ROWS: u32 = 1 << 15;
/// Most queries of one launch.
pub const TILE_QUERIES: u32 = 256;

/// The queries of a step that gather entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queries {
    /// All of them, as in attention.
    All,
    /// The last one of each request.
    Last,
}

/// Queries of one launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The queries.
    pub queries: Range<u32>,
    /// Rows of a query's tile in a CSA layer: as many as its list has.
    pub csa_rows: u32,
    /// Rows of a query's tile in an HCA layer: the most that one of them sees, at least 1.
    pub hca_rows: u32,
    /// Where its lists begin.
    pub first: usize,
}

/// What a step gathers.
#[derive(Debug, Default)]
pub struct Selection {
    /// In the order of the step.
    pub batches: Vec<Batch>,
    /// For each batch `[queries, csa_rows]`: entries, -1 = none.
    pub lists: Vec<i32>,
    /// Position of each query of each batch.
    positions: Vec<u32>,
}

impl Selection {
    /// Picks for a step, at random but the same for the same `seed`. A query picks `topk` entries, or
    /// as many as it sees; one may be picked twice.
    pub fn fill(&mut self, queries: Queries, step: &[StepRequest], topk: u32, seed: u64) {
        self.batches.clear();
        self.lists.clear();
        self.positions.clear();
        let mut first = 0;
        for part in step {
            let end = first + part.tokens;
            let begin = if queries == Queries::All { first } else { end - 1 };
            (begin..end).for_each(|query| self.push(query, part.start + query - first, topk));
            first = end;
        }
        self.pick(&mut ChaCha8Rng::seed_from_u64(seed));
    }

    /// The list of a query of `batch`.
    pub fn list(&self, batch: &Batch, query: u32) -> &[i32] {
        let rows = batch.csa_rows as usize;
        &self.lists[batch.first + (query - batch.queries.start) as usize * rows..][..rows]
    }

    /// Adds a query to the last batch, or to a new one where it does not follow or fit.
    fn push(&mut self, query: u32, position: u32, topk: u32) {
        self.positions.push(position);
        let csa = ((position + 1) / CSA_RATIO).clamp(1, topk);
        let hca = ((position + 1) / HCA_RATIO).max(1);
        if let Some(last) = self.batches.last_mut().filter(|last| last.queries.end == query) {
            let (csa_rows, hca_rows) = (last.csa_rows.max(csa), last.hca_rows.max(hca));
            let count = query + 1 - last.queries.start;
            if count <= TILE_QUERIES && count * csa_rows.max(hca_rows) <= TILE_ROWS {
                let queries = last.queries.start..query + 1;
                *last = Batch { queries, csa_rows, hca_rows, first: 0 };
                return;
            }
        }
        let queries = query..query + 1;
        self.batches.push(Batch { queries, csa_rows: csa, hca_rows: hca, first: 0 });
    }

    fn pick(&mut self, rng: &mut ChaCha8Rng) {
        let mut positions = self.positions.iter();
        for batch in &mut self.batches {
            batch.first = self.lists.len();
            for position in positions.by_ref().take(batch.queries.len()) {
                let visible = (position + 1) / CSA_RATIO;
                self.lists.extend((0..batch.csa_rows).map(|row| {
                    if row < visible { rng.random_range(0..visible) as i32 } else { -1 }
                }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use dsv4_kv::Ledger;
    use dsv4_kv::kv_layout::config::ModelConfig;

    use super::*;

    /// A step of a long prompt's chunk, and of a token at position 5.
    fn step() -> [StepRequest; 2] {
        let model = ModelConfig::preset("tiny").expect("a preset");
        let config = dsv4_kv::CacheConfig::smallest(model);
        let config = dsv4_kv::CacheConfig { max_requests: 2, ..config };
        let mut ledger = Ledger::new(&config).expect("a valid configuration");
        let mut request =
            |start, tokens| StepRequest { id: ledger.admit().expect("two slots"), start, tokens };
        [request(40_000, 700), request(5, 1)]
    }

    #[test]
    fn every_query_is_in_one_batch_that_fits_and_its_list_is_visible() {
        let mut selection = Selection::default();
        selection.fill(Queries::All, &step(), 512, 1);
        let queries = selection.batches.iter().flat_map(|batch| batch.queries.clone());
        assert!(queries.eq(0..701));
        assert!(selection.batches.len() > 2);
        for batch in &selection.batches {
            let count = batch.queries.len() as u32;
            assert!(count <= TILE_QUERIES && count * batch.csa_rows <= TILE_ROWS);
            assert!(count * batch.hca_rows <= TILE_ROWS);
            for query in batch.queries.clone() {
                let position = if query < 700 { 40_000 + query } else { 5 };
                let visible = (position + 1) / 4;
                let list = selection.list(batch, query);
                let picked = list.iter().filter(|&&entry| entry >= 0);
                assert_eq!(picked.count() as u32, visible.min(512));
                assert!(list.iter().all(|&entry| entry < visible as i32));
                assert!(batch.hca_rows >= position.div_ceil(128) - 1);
            }
        }
    }

    #[test]
    fn the_last_query_of_each_request_alone() {
        let mut selection = Selection::default();
        selection.fill(Queries::Last, &step(), 512, 1);
        let queries: Vec<u32> = selection.batches.iter().flat_map(|b| b.queries.clone()).collect();
        assert_eq!(queries, [699, 700]);
    }
}
