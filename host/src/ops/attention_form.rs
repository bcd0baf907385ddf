//! The form of the kernel for a launch of attention, and the number of blocks per work item: docs/architecture.md, D33.

use kernels_gpu::attention::HEADS;
use kernels_gpu::params::AttendParams;
use kv_layout::attention::{
    AttendForm, AttendedKeys, MAX_CONSECUTIVE, ManyEntries, SHORT_SPREAD_TILES, SPREAD_BLOCKS,
    SPREAD_TILES, TILE_KEYS,
};
use kv_layout::geometry::WINDOW;

/// `[queries, splits of a query's keys, groups of 64 heads]` of a launch; the product is its number of work items.
pub const fn work_items(params: &AttendParams) -> [u32; 3] {
    [params.tokens, params.num_splits, params.heads.div_ceil(HEADS)]
}

/// Tiles of a window and `rows` entries.
fn tiles_of(rows: u32) -> u64 {
    (u64::from(WINDOW) + u64::from(rows)).div_ceil(TILE_KEYS.into())
}

/// How a launch spreads its queries over clusters of eight blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpreadLaunch {
    /// Clusters of each work item, 1 or 2. Each of two clusters has half of the keys.
    pub halves: u32,
}

impl SpreadLaunch {
    /// The spread of the work items `[queries, splits, groups of 64 heads]`. The keys of a query are a window and
    /// `rows` entries, and a split has `blocks` blocks where it is not spread. `None` if this takes more than `limit`
    /// clusters, or if a cluster would have too many keys.
    pub fn of(
        (keys, blocks): (AttendedKeys, u32),
        [queries, splits, groups]: [u32; 3],
        rows: u32,
        limit: u64,
    ) -> Option<Self> {
        let clusters = queries.saturating_mul(splits).saturating_mul(groups);
        // No query of the launch has longer splits: a query with fewer tiles has only as many splits as it needs.
        let can_have = |halves: u32| {
            tiles_of(rows) <= u64::from(SPREAD_TILES) * u64::from(splits) * u64::from(halves)
                && u64::from(clusters) * u64::from(halves) <= limit
        };
        // With more tiles per cluster than this, two clusters are faster, although their sums must be combined
        // (docs/experiments-attention.md).
        let few = match keys {
            AttendedKeys::List => SPREAD_BLOCKS,
            AttendedKeys::Window | AttendedKeys::All => SHORT_SPREAD_TILES,
        };
        if blocks > 1 && tiles_of(rows) > few.into() && can_have(2) {
            return Some(Self { halves: 2 });
        }
        can_have(1).then_some(Self { halves: 1 })
    }
}

/// The form of the kernel for queries of up to `splits` splits and `rows` entries.
pub fn form_of(
    keys: AttendedKeys,
    spread: Option<SpreadLaunch>,
    splits: u32,
    rows: u32,
) -> AttendForm {
    let Some(SpreadLaunch { halves }) = spread else { return AttendForm::Whole(keys) };
    let is_short = splits == 1 && halves == 1 && tiles_of(rows) <= SHORT_SPREAD_TILES.into();
    match keys {
        AttendedKeys::List if !is_short => AttendForm::SpreadSplits(ManyEntries::List),
        AttendedKeys::All if !is_short => AttendForm::SpreadSplits(ManyEntries::All),
        _ => AttendForm::Spread(keys),
    }
}

/// Queries that a block of the consecutive form takes one after another, 2 to [`MAX_CONSECUTIVE`]; `None` if a block a
/// query and group of heads fits in one wave, or there are no multiprocessors. `groups` is not 0.
pub fn consecutive_queries([queries, groups]: [u32; 2], multiprocessors: u32) -> Option<u32> {
    let blocks = (multiprocessors / groups).max(1);
    let of_block = queries.div_ceil(blocks).min(MAX_CONSECUTIVE);
    (multiprocessors > 0 && of_block > 1).then_some(of_block)
}

/// Clusters (blocks, where a work item has one) among which the channels of the values of a work item are divided.
/// `blocks_per_split` blocks share its keys. 2 if the launch then has at most half as many blocks as there are
/// `multiprocessors`, else 1.
pub const fn halves_of_channels(
    [queries, splits, groups]: [u32; 3],
    blocks_per_split: u32,
    multiprocessors: u32,
) -> u32 {
    // Half of the multiprocessors stay free for the next kernel, whose blocks start before these end. With more blocks, a
    // decode step takes longer, although attention takes less time (docs/experiments-attention.md).
    let items = queries.saturating_mul(splits).saturating_mul(groups);
    let blocks = items.saturating_mul(2 * blocks_per_split);
    if blocks <= multiprocessors / 2 { 2 } else { 1 }
}

#[cfg(test)]
mod tests {
    use kernels_gpu::table::MULTIPROCESSORS;

    use super::*;

    #[test]
    fn few_queries_of_few_keys_are_spread() {
        let of =
            |clusters, rows| SpreadLaunch::of((AttendedKeys::All, 1), clusters, rows, 14).is_some();
        assert!(of([14, 1, 1], 1408) && of([7, 1, 2], 0) && of([1, 1, 1], 1));
        assert!(!of([15, 1, 1], 1408) && !of([8, 1, 2], 0) && !of([1, 1, 1], 1409));
        assert!(of([7, 2, 1], 2944) && !of([8, 2, 1], 2944) && !of([1, 2, 1], 2945));
        assert!(of([1, 4, 2], 6016) && !of([1, 4, 1], 6017) && !of([1, 1, 1], u32::MAX));
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
        assert_eq!([of(List, [8, 1, 1], 512), of(List, [3, 1, 2], 2944)], [one, two]);
        assert_eq!([of(List, [1, 1, 1], 2945), of(List, [8, 1, 1], 1409)], [None; 2]);
        assert_eq!([of(All, [7, 1, 1], 640), of(All, [7, 1, 1], 641)], [one, two]);
        assert_eq!([of(All, [1, 4, 1], 8192), of(All, [2, 4, 1], 8192)], [two, None]);
        assert_eq!([of(All, [1, 3, 2], 8192), of(All, [1, 4, 2], 8192)], [two, None]);
        assert_eq!(of(Window, [1, 1, 1], 0), one);
        assert_eq!(SpreadLaunch::of((All, 1), [1, 1, 1], 960, 14), one, "one sum has one cluster");
        assert_eq!(of(All, [u32::MAX, 2, 1], 1), None, "no product wraps around");
    }

    #[test]
    fn few_keys_have_a_kernel_of_their_own() {
        use {
            AttendForm::{Spread, SpreadSplits, Whole},
            AttendedKeys::*,
        };
        let [one, two] = [1, 2].map(|halves| Some(SpreadLaunch { halves }));
        let all = |splits, rows| form_of(All, one, splits, rows);
        assert_eq!([all(1, 0), all(1, 640)], [Spread(All); 2]);
        let many = [all(1, 641), all(1, 1024), all(2, 640), all(1, u32::MAX)];
        assert_eq!(many, [SpreadSplits(ManyEntries::All); 4]);
        assert_eq!(form_of(All, two, 1, 640), SpreadSplits(ManyEntries::All));
        let list = [form_of(List, one, 1, 640), form_of(List, one, 1, 641)];
        assert_eq!(list, [Spread(List), SpreadSplits(ManyEntries::List)]);
        assert_eq!(form_of(List, two, 1, 512), SpreadSplits(ManyEntries::List));
        assert_eq!(form_of(Window, one, 1, 0), Spread(Window));
        assert_eq!(form_of(List, None, 1, 1), Whole(List));
    }

    #[test]
    fn many_windows_are_consecutive() {
        let of = |queries, groups| consecutive_queries([queries, groups], MULTIPROCESSORS);
        assert_eq!([of(1, 1), of(132, 1), of(66, 2)], [None; 3]);
        assert_eq!([of(133, 1), of(67, 2), of(264, 1)], [Some(2); 3]);
        assert_eq!([of(265, 1), of(2048, 1), of(2048, 2)], [Some(3), Some(16), Some(32)]);
        assert_eq!([of(u32::MAX, 1), of(u32::MAX, 2)], [Some(MAX_CONSECUTIVE); 2]);
        let few = |multiprocessors| consecutive_queries([3, 2], multiprocessors);
        assert_eq!([few(0), few(1), few(u32::MAX)], [None, Some(3), None]);
    }

    #[test]
    fn few_queries_have_halves_of_channels() {
        let of = |items, blocks| halves_of_channels(items, blocks, MULTIPROCESSORS);
        assert_eq!([[1, 1, 1], [16, 1, 1], [8, 2, 1], [4, 2, 2]].map(|items| of(items, 2)), [2; 4]);
        assert_eq!(
            [[17, 1, 1], [9, 2, 1], [9, 1, 2], [2048, 1, 1]].map(|items| of(items, 2)),
            [1; 4]
        );
        assert_eq!(
            [[1, 1, 1], [33, 1, 1], [8, 4, 1], [16, 1, 2]].map(|items| of(items, 1)),
            [2; 4]
        );
        assert_eq!(
            [[34, 1, 1], [9, 4, 1], [17, 1, 2], [2048, 1, 1]].map(|items| of(items, 1)),
            [1; 4]
        );
        assert_eq!(of([u32::MAX, 4, 2], 1), 1, "no product wraps around");
        let of_one = |multiprocessors| halves_of_channels([1, 1, 1], 1, multiprocessors);
        assert_eq!([0, 3, 4, u32::MAX].map(of_one), [1, 1, 2, 2]);
    }
}
