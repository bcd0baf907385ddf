//! The list of measurements, made before the first one, so that a bar can show the time left.

use std::fmt::Debug;

use anyhow::Result;
use indicatif::ProgressBar;

use crate::progress;

/// The progress, the time left by the mean so far, and the name of the current measurement.
const BAR: &str = "{bar:30} {pos} of {len}, {left}  {wide_msg}";

/// The measurement of one or a few rows of a suite.
pub struct Work<'w, R> {
    name: String,
    measure: Box<dyn FnOnce() -> Result<Vec<R>> + 'w>,
}

impl<'w, R> Work<'w, R> {
    /// A measurement of one row.
    pub fn row(name: impl Into<String>, measure: impl FnOnce() -> Result<R> + 'w) -> Self {
        Self::rows(name, || measure().map(|row| vec![row]))
    }

    /// A measurement of several rows together.
    pub fn rows(name: impl Into<String>, measure: impl FnOnce() -> Result<Vec<R>> + 'w) -> Self {
        Self { name: name.into(), measure: Box::new(measure) }
    }

    /// One measurement per case, each of all rows of that case.
    pub fn each<C: Debug + 'w>(
        cases: impl IntoIterator<Item = C>,
        measure: impl Fn(&C) -> Result<Vec<R>> + Copy + 'w,
    ) -> Vec<Self> {
        let work = |case| Self::rows(format!("{case:?}"), move || measure(&case));
        cases.into_iter().map(work).collect()
    }
}

/// Runs all of `works`; `bar` advances by one after each.
pub fn run<R>(works: Vec<Work<'_, R>>, bar: &ProgressBar) -> Result<Vec<R>> {
    let mut rows = Vec::new();
    for Work { name, measure } in works {
        bar.set_message(name);
        rows.extend(measure()?);
        bar.inc(1);
    }
    Ok(rows)
}

/// A bar on standard error for `works` measurements; nothing if that is not a terminal.
pub fn bar(works: usize) -> ProgressBar {
    progress::bar(works as u64, BAR)
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_bar_moves_by_one_with_each_work_until_one_fails() {
        let works = Work::each([1, 2, 3], |&rows| match rows {
            3 => Err(anyhow!("the device failed")),
            _ => Ok(vec![rows; rows]),
        });
        let mut works = works.into_iter();
        let bar = ProgressBar::hidden();
        bar.set_length(3);
        assert_eq!(run(works.by_ref().take(2).collect(), &bar).unwrap(), [1, 2, 2]);
        assert_eq!((bar.position(), bar.message()), (2, "2".to_owned()));
        run(works.collect(), &bar).unwrap_err();
        assert_eq!((bar.position(), bar.message()), (2, "3".to_owned()));
        indicatif::ProgressStyle::with_template(BAR).unwrap();
    }
}
