//! Stop texts, which end a completion. They need not begin or end with a token.

/// Finds the first stop text in a text that arrives in pieces, and passes the text before it on. Text at the end that
/// may be the beginning of a stop text is held back until that is decided.
#[derive(Clone, Debug, Default)]
pub struct StopFilter {
    stops: Vec<String>,
    held: String,
}

/// The text that a [`StopFilter`] passes on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// The text.
    pub text: String,
    /// Whether a stop text follows it.
    pub stopped: bool,
}

impl StopFilter {
    /// A filter for these stop texts. Empty texts, which would stop at once, are ignored.
    #[must_use]
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        Self { stops, held: String::new() }
    }

    /// Takes the next piece. If it completes several stop texts, the one that ends first counts, so that the result
    /// does not depend on how the text was cut; of those that end together, the longest.
    pub fn push(&mut self, piece: &str) -> Passed {
        self.held.push_str(piece);
        let found = self.stops.iter().filter_map(|stop| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start))
        });
        if let Some((_, start)) = found.min() {
            self.held.truncate(start);
            return Passed { text: std::mem::take(&mut self.held), stopped: true };
        }
        let held = self.held.split_off(self.undecided());
        Passed { text: std::mem::replace(&mut self.held, held), stopped: false }
    }

    /// Ends the text. Returns the text that was held back, which is not a stop text.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The start of the longest suffix of the held text that may become a stop text.
    fn undecided(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest);
        let may_stop = |&(at, _): &(usize, char)| {
            let end = &self.held[at..];
            self.stops.iter().any(|stop| stop.starts_with(end))
        };
        let mut places = self.held.char_indices().filter(|&(at, _)| at >= from);
        places.find(may_stop).map_or(self.held.len(), |(at, _)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::StopFilter;

    /// The text that is passed on of a text in these pieces, and whether a stop text ended it.
    fn passed<'p>(stops: &[&str], pieces: impl IntoIterator<Item = &'p str>) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(ToString::to_string).collect();
        let mut filter = StopFilter::new(&stops);
        let mut text = String::new();
        for piece in pieces {
            let passed = filter.push(piece);
            text += &passed.text;
            if passed.stopped {
                return (text, true);
            }
        }
        (text + &filter.finish(), false)
    }

    #[test]
    fn a_stop_is_found_however_the_text_is_cut() {
        let texts = [
            (vec!["abcd", "bc"], "xabcdx", "xa", true),
            (vec!["aab"], "aaab", "a", true),
            (vec!["\n\n"], "a\n\u{e9}\n\n", "a\n\u{e9}", true),
            (vec!["\u{1F600}b"], "\u{1F600}\u{1F600}b", "\u{1F600}", true),
            (vec!["end"], "the en", "the en", false),
            (vec!["bb", "abb"], "xabb", "x", true),
            (vec!["", "q"], "abc", "abc", false),
            (vec![], "abc", "abc", false),
        ];
        for (stops, text, expected, stopped) in texts {
            let places: Vec<usize> = text.char_indices().map(|(at, _)| at).skip(1).collect();
            // Every way to cut it.
            for cuts in 0u32..1 << places.len() {
                let chosen = places.iter().enumerate().filter(|(bit, _)| cuts >> bit & 1 == 1);
                let ends: Vec<usize> = chosen.map(|(_, &at)| at).chain([text.len()]).collect();
                let starts = [0].into_iter().chain(ends.iter().copied());
                let pieces = starts.zip(&ends).map(|(start, &end)| &text[start..end]);
                assert_eq!(passed(&stops, pieces), (expected.into(), stopped), "{text:?} {ends:?}");
            }
        }
    }

    #[test]
    fn only_what_may_become_a_stop_is_held_back() {
        let mut filter = StopFilter::new(&["###".into()]);
        assert_eq!(filter.push("a#").text, "a");
        assert_eq!(filter.push("b##").text, "#b");
        assert_eq!(filter.push("c").text, "##c");
        assert!(filter.push("###").stopped);
    }
}
