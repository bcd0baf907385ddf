//! A histogram of times.

/// Number of bars of a histogram.
const BARS: usize = 40;
/// End of the last bar, as a multiple of the longest time, so that it stands apart from the frame.
const END: f64 = 1.05;

/// Times in bars of equal width, from 0. The longest thousandth is left out, since a few long times would put all
/// others into one bar.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    width: f64,
    counts: [u32; BARS],
}

impl Histogram {
    /// A histogram of sorted times.
    pub fn new(sorted: &[f32]) -> Self {
        let last = sorted.len().saturating_sub(1);
        let longest = sorted.get(last * 999 / 1000).map_or(0.0, |&time| f64::from(time));
        let end = if longest > 0.0 { END * longest } else { 1.0 };
        let width = end / BARS as f64;
        let mut counts = [0u32; BARS];
        for time in sorted.iter().map(|&time| f64::from(time)).take_while(|&time| time <= longest) {
            counts[((time / width) as usize).min(BARS - 1)] += 1;
        }
        Self { width, counts }
    }

    /// End of the last bar.
    pub fn end(&self) -> f64 {
        self.width * BARS as f64
    }

    /// Height of the tallest bar.
    pub fn top(&self) -> u32 {
        self.counts.into_iter().max().unwrap_or(0)
    }

    /// Each bar: its begin, its end, and the number of times in it.
    pub fn bars(&self) -> impl Iterator<Item = (f64, f64, u32)> {
        let width = self.width;
        (0u32..).zip(self.counts).map(move |(bar, count)| {
            let left = f64::from(bar) * width;
            (left, left + width, count)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_is_in_its_bar_but_the_longest_thousandth() {
        let times: Vec<f32> = (1..=2001u16).map(f32::from).collect();
        let histogram = Histogram::new(&times);
        assert!((histogram.end() - END * 1999.0).abs() < 1e-6);
        assert_eq!(histogram.bars().map(|(.., count)| count).sum::<u32>(), 1999);
        for (left, right, count) in histogram.bars() {
            let within =
                times[..1999].iter().filter(|&&time| (left..right).contains(&f64::from(time)));
            assert_eq!(within.count(), count as usize, "{left} to {right}");
        }
    }

    #[test]
    fn equal_times_are_one_bar() {
        for time in [0.0, 7.5] {
            let histogram = Histogram::new(&[time; 12]);
            let full: Vec<_> = histogram.bars().filter(|(.., count)| *count > 0).collect();
            let [(left, right, 12)] = full[..] else { panic!("{full:?}") };
            assert!(left <= f64::from(time) && f64::from(time) <= right + 1e-9, "{full:?}");
        }
    }

    #[test]
    fn no_times_are_no_bars() {
        let histogram = Histogram::new(&[]);
        assert_eq!((histogram.end(), histogram.top()), (1.0, 0));
    }
}
