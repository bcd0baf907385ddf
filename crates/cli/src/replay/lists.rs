//! Checks that the indexer's list for a query agrees with the reference's scores.
//!
//! The kernels sum a score in f32, the reference in f64. Only entries whose scores are nearer than this difference may
//! change places. The query is quantised to four or eight bits before. If a value is on the boundary between two codes,
//! both codes are right, and the score is known only within the bounds that follow from both.

use dsv4_kv_oracle::explain::roundings;
use dsv4_kv_oracle::hadamard::hadamard;
use dsv4_kv_oracle::index::{CHANNELS, KeyFormat};
use dsv4_kv_oracle::indexer::{score, weight_scale};
use dsv4_kv_oracle::number::bf16_nearest_f64;
use dsv4_kv_oracle::rope::Table;
use rayon::prelude::*;

/// Largest error of a score in f32, as a fraction of `sum |w q K|`.
const TOLERANCE: f64 = 1e-5;
/// Half the distance between 1 and the next f32.
const UNIT: f64 = 1.0 / (1 << 24) as f64;

/// A query as the indexer receives it.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// Its position.
    pub position: usize,
    /// `[heads, 128]`: the projected query.
    pub vectors: &'a [f32],
    /// `[heads]`: the projected weights.
    pub weights: &'a [f32],
}

/// In what way a list is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// The query sees no more entries than the list can name: the list names them all, oldest first.
    All,
    /// The entries of the largest scores, in their order.
    Exact,
    /// As `Self::Exact`, except for entries whose scores are too near to tell.
    Near,
}

/// The range of a score.
#[derive(Clone, Copy)]
struct Bounds {
    /// The reference's score.
    value: f64,
    least: f64,
    most: f64,
}

/// Judges the list of a query that sees `keys` (`[entries, 128]`). The error is a description.
pub fn judge(
    list: &[i32],
    query: Query<'_>,
    format: KeyFormat,
    keys: &[f32],
) -> Result<Right, String> {
    let visible = keys.len() / CHANNELS;
    if visible <= list.len() {
        let all = (0..visible as i32).chain(std::iter::repeat(-1));
        let right = list.iter().copied().eq(all.take(list.len()));
        return if right { Ok(Right::All) } else { Err(format!("not all of {visible} entries")) };
    }
    let mut listed = vec![false; visible];
    for &entry in list {
        match usize::try_from(entry).ok().and_then(|entry| listed.get_mut(entry)) {
            None => return Err(format!("entry {entry}, of {visible} that it sees")),
            Some(true) => return Err(format!("entry {entry} twice")),
            Some(once) => *once = true,
        }
    }
    judge_order(list, &listed, &scores(query, format, keys))
}

/// Judges a list of different entries by their scores, from its end: no entry may have a lower score than one that
/// comes later in the list or is left out.
fn judge_order(list: &[i32], listed: &[bool], scores: &[Bounds]) -> Result<Right, String> {
    let left_out = (0..scores.len()).filter(|&entry| !listed[entry]);
    let (mut highest, mut surest) = (None, None);
    let mut right = Right::Exact;
    let by_value = |a: usize, b: usize| scores[a].value.total_cmp(&scores[b].value).then(b.cmp(&a));
    let in_list = list.iter().rev().map(|&entry| entry as usize);
    for (entry, is_listed) in left_out.map(|entry| (entry, false)).chain(in_list.map(|e| (e, true)))
    {
        let higher = highest.filter(|&highest| by_value(highest, entry).is_gt());
        let surer = surest.filter(|&surest: &usize| scores[surest].least > scores[entry].most);
        match (is_listed, higher, surer) {
            (true, _, Some(other)) => {
                let (low, high) = (scores[entry].value, scores[other].value);
                return Err(format!("entry {entry} of score {low} before entry {other} of {high}"));
            }
            (true, Some(_), None) => right = Right::Near,
            _ => {}
        }
        highest = higher.or(Some(entry));
        surest =
            surest.filter(|&surest| scores[surest].least >= scores[entry].least).or(Some(entry));
    }
    Ok(right)
}

/// The score of every key, and the range in which the kernel's score may be.
fn scores(query: Query<'_>, format: KeyFormat, keys: &[f32]) -> Vec<Bounds> {
    let scale = weight_scale(query.weights.len());
    let weights: Vec<f64> = query.weights.iter().map(|&weight| f64::from(weight) * scale).collect();
    let heads = query.vectors.par_chunks_exact(CHANNELS);
    let heads: Vec<_> = heads.map(|head| candidates(format, head, query.position)).collect();
    let nearest: Vec<_> = heads.iter().map(|candidates| candidates[0].clone()).collect();
    let of_key = |key: &[f32]| {
        let key: Vec<f64> = key.iter().copied().map(f64::from).collect();
        let exact = score(&nearest, &weights, &key);
        let slack = TOLERANCE * exact.magnitude;
        let (mut least, mut most) = (exact.value - slack, exact.value + slack);
        let open = heads.iter().zip(&weights).filter(|(candidates, _)| candidates.len() > 1);
        for (candidates, &weight) in open {
            let of = |query| score(std::slice::from_ref(query), &[weight], &key).value;
            let nearest = of(&candidates[0]);
            let others = || candidates.iter().map(of);
            least += others().fold(nearest, f64::min) - nearest;
            most += others().fold(nearest, f64::max) - nearest;
        }
        Bounds { value: exact.value, least, most }
    };
    keys.par_chunks_exact(CHANNELS).map(of_key).collect()
}

/// The possible values of a head's query when it is scored, the reference's own value first: rotated, transformed, and
/// quantised to the format of the keys, with the errors of f32.
fn candidates(format: KeyFormat, head: &[f32], position: usize) -> Vec<Vec<f64>> {
    let head: Vec<f64> = head.iter().copied().map(f64::from).collect();
    let rotated = Table::Compress.rotate(&head, position);
    let largest = rotated.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let mut found: Vec<Vec<f64>> = Vec::new();
    // Each channel is the sum of two products, each with two roundings. Cosine and sine may be off by one unit.
    for rounded in roundings(&rotated, 8.0 * UNIT * largest) {
        let transformed = hadamard(&rounded);
        // Seven additions and one product, each at most the sum of all magnitudes.
        let sum: f64 = rounded.iter().map(|x| x.abs()).sum();
        let slack = 8.0 * UNIT * sum / (CHANNELS as f64).sqrt();
        for key in roundings(&transformed, slack) {
            let bits: Vec<u16> = key.into_iter().map(bf16_nearest_f64).collect();
            let query = format.decode(&format.encode(&bits)).into_iter().map(f64::from).collect();
            if !found.contains(&query) {
                found.push(query);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    const HEADS: usize = 8;
    const ENTRIES: usize = 60;
    const FORMATS: [KeyFormat; 3] = KeyFormat::ALL;

    /// Projections of a query, and the keys that it sees.
    struct Case {
        vectors: Vec<f32>,
        weights: Vec<f32>,
        /// `[entries, 128]`
        keys: Vec<f32>,
        format: KeyFormat,
    }

    impl Case {
        fn random(format: KeyFormat, seed: u64) -> Self {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let mut values = |count: usize| -> Vec<f32> {
                (0..count).map(|_| rng.random_range(-2.0..2.0)).collect()
            };
            let (vectors, weights) = (values(HEADS * CHANNELS), values(HEADS));
            Self { vectors, weights, keys: values(ENTRIES * CHANNELS), format }
        }

        fn query(&self) -> Query<'_> {
            Query { position: 243, vectors: &self.vectors, weights: &self.weights }
        }

        /// All entries, sorted by falling score.
        fn ranking(&self) -> Vec<i32> {
            let scores = scores(self.query(), self.format, &self.keys);
            let mut order: Vec<i32> = (0..ENTRIES as i32).collect();
            let value = |entry: i32| scores[entry as usize].value;
            order.sort_by(|&a, &b| value(b).total_cmp(&value(a)));
            order
        }

        fn judge(&self, list: &[i32]) -> Result<Right, String> {
            judge(list, self.query(), self.format, &self.keys)
        }

        /// The judgement of the best 16 entries, changed by `spoil`, which also gets the remaining entries.
        fn spoiled(&self, spoil: impl FnOnce(&mut [i32], &[i32])) -> Result<Right, String> {
            let mut list = self.ranking();
            let rest = list.split_off(16);
            spoil(&mut list, &rest);
            self.judge(&list)
        }
    }

    #[test]
    fn the_entries_of_the_largest_scores_in_their_order_are_right() {
        for format in FORMATS {
            for seed in 0..20 {
                assert_eq!(Case::random(format, seed).spoiled(|_, _| {}), Ok(Right::Exact));
            }
        }
    }

    #[test]
    fn another_order_and_other_entries_are_wrong() {
        for format in FORMATS {
            let case = Case::random(format, 1);
            let wrong = |spoil: fn(&mut [i32], &[i32]), expected: &str| {
                let text = case.spoiled(spoil).expect_err(expected);
                assert!(text.contains(expected), "{format:?}: {text}");
            };
            wrong(|list, _| list.swap(3, 4), "before entry");
            wrong(|list, _| list[2..9].rotate_left(1), "before entry");
            wrong(|list, rest| list[15] = rest[0], "before entry");
            wrong(|list, rest| list[0] = rest[43], "before entry");
            wrong(|list, _| list[15] = list[2], "twice");
            wrong(|list, _| list[7] = ENTRIES as i32, "entry 60, of 60 that it sees");
            wrong(|list, _| list[15] = -1, "entry -1");
        }
    }

    #[test]
    fn the_list_of_another_query_is_wrong() {
        for format in FORMATS {
            let mut case = Case::random(format, 2);
            let mut list = case.ranking();
            list.truncate(16);
            case.judge(&list).expect("it is its own");
            let query = Query { position: 244, ..case.query() };
            judge(&list, query, format, &case.keys).expect_err("one position on");
            let query = Query { weights: &[1.0; HEADS], ..case.query() };
            judge(&list, query, format, &case.keys).expect_err("without its weights");
            case.vectors.rotate_left(CHANNELS);
            case.judge(&list).expect_err("with its heads rotated");
        }
    }

    #[test]
    fn few_entries_are_named_oldest_first() {
        let case = Case::random(KeyFormat::Mxfp4, 3);
        let judge = |list: &[i32], seen: usize| {
            judge(list, case.query(), case.format, &case.keys[..seen * CHANNELS])
        };
        assert_eq!(judge(&[0, 1, 2, -1], 3), Ok(Right::All));
        assert_eq!(judge(&[0, 1, 2], 3), Ok(Right::All));
        assert_eq!(judge(&[-1, -1], 0), Ok(Right::All));
        for wrong in [[0, 2, 1, -1], [0, 1, 2, 3], [0, 1, -1, -1]] {
            judge(&wrong, 3).expect_err("not these");
        }
    }

    /// A key that differs from the best key in one channel: by less than f32 sums resolve, and by more.
    #[test]
    fn scores_too_near_to_tell_may_change_places_and_others_not() {
        for (format, right) in
            FORMATS.into_iter().flat_map(|format| [(format, true), (format, false)])
        {
            let mut case = Case::random(format, 4);
            let best = case.ranking()[0] as usize;
            let other = (best + 1) % ENTRIES;
            let mut key = case.keys[best * CHANNELS..][..CHANNELS].to_vec();
            key[9] += if right { 1e-4 } else { 0.5 };
            case.keys[other * CHANNELS..][..CHANNELS].copy_from_slice(&key);
            let found = case.spoiled(|list, _| list.swap(0, 1));
            assert_eq!(found.ok(), right.then_some(Right::Near), "{format:?}");
        }
    }

    /// If both roundings of a value of the query are right, both resulting queries are candidates.
    #[test]
    fn a_channel_in_the_middle_may_round_either_way() {
        for format in FORMATS {
            let mut head = vec![0.5; CHANNELS];
            // The largest value: it determines the scale, and BF16 values near it are 0.5 apart.
            head[3] = 64.25;
            assert_eq!(candidates(KeyFormat::Fp8, &head, 0).len(), 2, "{format:?}");
            head[3] = 64.3;
            assert_eq!(candidates(format, &head, 0).len(), 1, "{format:?}");
        }
    }
}
