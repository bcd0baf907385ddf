//! Drafts by prompt lookup: the tokens that followed an earlier occurrence of the last tokens.

/// Length of the longest match that is tried; shorter ones follow.
const LONGEST: usize = 3;

/// Up to `count` drafts of the tokens that follow `tokens`: those that followed the latest earlier occurrence of the
/// last three tokens, else of the last two, else of the last one. Empty if the last token did not occur before.
#[must_use]
pub fn drafts(tokens: &[u32], count: usize) -> &[u32] {
    for length in (1..=LONGEST.min(tokens.len())).rev() {
        let (earlier, last) = (&tokens[..tokens.len() - 1], &tokens[tokens.len() - length..]);
        if let Some(at) = earlier.windows(length).rposition(|window| window == last) {
            let following = &tokens[at + length..];
            return &following[..count.min(following.len())];
        }
    }
    &[]
}

#[cfg(test)]
mod tests {
    use super::drafts;

    #[test]
    fn the_latest_occurrence_of_the_longest_match_counts() {
        assert_eq!(drafts(&[1, 2, 3, 9, 2, 3, 7, 1, 2, 3], 2), [9, 2]);
        assert_eq!(drafts(&[2, 3, 7, 2, 3, 8, 5, 2, 3], 1), [8]);
        assert_eq!(drafts(&[4, 4], 3), [4]);
        assert!(drafts(&[1, 2], 3).is_empty());
        assert!(drafts(&[], 3).is_empty());
        assert!(drafts(&[1, 1], 0).is_empty());
    }
}
