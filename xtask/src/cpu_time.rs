//! CPU time of this process and of its child processes that have ended.

use std::fs;
use std::time::Duration;

/// Linux counts the times in `/proc/self/stat` in hundredths of a second.
const TICK: Duration = Duration::from_millis(10);

/// CPU time so far, user and system; zero if `/proc` does not tell.
pub fn so_far() -> Duration {
    fs::read_to_string("/proc/self/stat").ok().and_then(|text| parse(&text)).unwrap_or_default()
}

/// Reads proc_pid_stat(5): fields 14 to 17 are utime, stime, cutime and cstime. Field 2 is the program's name in
/// parentheses, and may contain any character.
fn parse(text: &str) -> Option<Duration> {
    let (_, after_name) = text.rsplit_once(')')?;
    let times = after_name.split_whitespace().skip(11).take(4);
    let ticks: Option<Vec<u32>> = times.map(|time| time.parse().ok()).collect();
    ticks.filter(|ticks| ticks.len() == 4).map(|ticks| TICK * ticks.into_iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_four_times_are_summed() {
        let text = "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 100 20 3000 400 20 0 1 0";
        assert_eq!(parse(text), Some(Duration::from_millis(35_200)));
        assert_eq!(parse("7 (a) S 1"), None);
        assert!(parse(&fs::read_to_string("/proc/self/stat").expect("Linux")).is_some());
    }
}
