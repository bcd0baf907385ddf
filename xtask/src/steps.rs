//! The steps of a long task, each with its name and its duration. On a terminal each step also shows the time that is
//! left, estimated from the durations of the last complete run.

use std::fs;
use std::io::{IsTerminal, stdout};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use comfy_table::Table;
use comfy_table::presets::ASCII_MARKDOWN;
use indicatif::HumanDuration;

use crate::{cpu_time, workspace};

/// The steps that have run, with wall time and CPU time of each.
pub struct Steps {
    took: Vec<(String, Duration, Duration)>,
    /// Names and seconds of the steps of the last complete run; empty if there was none.
    last: Vec<(String, f64)>,
    record: PathBuf,
}

impl Steps {
    /// The steps of `task`, whose name is also that of the file with the last durations.
    pub fn new(task: &str) -> Self {
        let record = workspace::target_dir().join("xtask-times").join(format!("{task}.json"));
        let last = fs::read(&record).ok().and_then(|json| serde_json::from_slice(&json).ok());
        Self { took: Vec::new(), last: last.unwrap_or_default(), record }
    }

    /// Runs a step under its name.
    ///
    /// # Errors
    /// The step failed; the error names it.
    pub fn run<T>(&mut self, name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        match self.left().filter(|_| stdout().is_terminal()) {
            Some(left) => println!("== {name}; {:#} left by the last run", HumanDuration(left)),
            None => println!("== {name}"),
        }
        let (start, cpu) = (Instant::now(), cpu_time::so_far());
        let done = work().with_context(|| format!("step `{name}` failed"));
        let took = (start.elapsed(), cpu_time::so_far().saturating_sub(cpu));
        self.took.push((name.to_owned(), took.0, took.1));
        let result = if done.is_ok() { "ok" } else { "failed" };
        println!("== {name}: {result}, {:.1} s\n", took.0.as_secs_f64());
        done
    }

    /// Runs a step in its own thread beside `others`, and waits for both. The row of the step is the time that it took
    /// longer than `others`, so that rows add up. The CPU time that it used meanwhile is counted in the rows of
    /// `others`.
    ///
    /// # Errors
    /// The error of `others`, or that of the step. If both failed, the error of the step is printed.
    pub fn beside<T: Send>(
        &mut self,
        name: &str,
        work: impl FnOnce() -> Result<T> + Send,
        others: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<T> {
        thread::scope(|scope| {
            println!("== {name}: runs beside the next steps");
            let step = scope.spawn(work);
            let others = others(self);
            let done = self.run(&format!("the rest of: {name}"), || {
                step.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            if let (Err(_), Err(also)) = (&others, &done) {
                println!("{also:#}");
            }
            others.and(done)
        })
    }

    /// Time that the remaining steps took in the last run; `None` without a last run.
    fn left(&self) -> Option<Duration> {
        let is_done = |name: &str| self.took.iter().any(|(done, ..)| done == name);
        let rest = self.last.iter().filter(|(name, _)| !is_done(name)).map(|(_, seconds)| seconds);
        let left = Duration::try_from_secs_f64(rest.sum()).ok();
        left.filter(|_| !self.last.is_empty())
    }

    /// One row per step, and their sum.
    pub fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(ASCII_MARKDOWN).set_header(["step", "s", "CPU s"]);
        let sum =
            |of: fn(&(String, Duration, Duration)) -> Duration| self.took.iter().map(of).sum();
        let total = ("all".to_owned(), sum(|step| step.1), sum(|step| step.2));
        for (name, wall, cpu) in self.took.iter().chain([&total]) {
            let seconds = |time: &Duration| format!("{:.1}", time.as_secs_f64());
            table.add_row([name.clone(), seconds(wall), seconds(cpu)]);
        }
        table
    }

    /// Stores the durations of all steps for the next run. If they cannot be written, the next run shows no estimate.
    pub fn keep(&self) {
        let took: Vec<_> =
            self.took.iter().map(|(name, wall, _)| (name, wall.as_secs_f64())).collect();
        if let (Some(folder), Ok(json)) = (self.record.parent(), serde_json::to_vec(&took)) {
            let _ = fs::create_dir_all(folder).and_then(|()| fs::write(&self.record, json));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_what_the_other_steps_took_last() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let record = folder.path().join("times/test.json");
        let last = vec![("build".to_owned(), 100.0), ("test".to_owned(), 20.0)];
        let mut steps = Steps { took: vec![], last, record: record.clone() };
        assert_eq!(steps.left(), Some(Duration::from_secs(120)));
        steps.run("build", || Ok(())).expect("it does nothing");
        assert_eq!(steps.left(), Some(Duration::from_secs(20)));
        steps.run("test", || Ok(())).expect("it does nothing");
        assert_eq!(steps.left(), Some(Duration::ZERO));
        steps.keep();
        let kept: Vec<(String, f64)> =
            serde_json::from_slice(&fs::read(record).expect("it was written")).expect("JSON");
        let names: Vec<_> = kept.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["build", "test"]);
        assert!(kept.iter().all(|(_, seconds)| *seconds < 10.0), "{kept:?}");
    }

    #[test]
    fn without_an_earlier_run_nobody_knows_what_is_left() {
        let steps = Steps { took: vec![], last: vec![], record: PathBuf::new() };
        assert_eq!(steps.left(), None);
    }

    #[test]
    fn a_step_beside_others_counts_what_it_takes_longer() {
        let mut steps = Steps { took: vec![], last: vec![], record: PathBuf::new() };
        let (sender, receiver) = std::sync::mpsc::channel();
        let both = steps.beside(
            "build",
            move || Ok(receiver.recv()?),
            |steps| steps.run("lint", || Ok(sender.send(7)?)),
        );
        assert_eq!(both.expect("neither fails"), 7);
        let names: Vec<_> = steps.took.iter().map(|(name, ..)| name.as_str()).collect();
        assert_eq!(names, ["lint", "the rest of: build"]);
    }

    #[test]
    fn of_steps_beside_each_other_either_may_fail() {
        let fails = || -> Result<()> { anyhow::bail!("a fault") };
        let mut steps = Steps { took: vec![], last: vec![], record: PathBuf::new() };
        let first = steps.beside("build", fails, |steps| steps.run("lint", || Ok(())));
        let second = steps.beside("build", || Ok(()), |steps| steps.run("lint", fails));
        let both = steps.beside("build", fails, |steps| steps.run("lint", fails));
        let named = [first, second, both].map(|done| done.expect_err("one failed").to_string());
        let lint = "step `lint` failed";
        assert_eq!(named, ["step `the rest of: build` failed", lint, lint]);
    }

    #[test]
    fn a_step_that_fails_is_named() {
        let mut steps = Steps { took: vec![], last: vec![], record: PathBuf::new() };
        let failed = steps.run("clippy", || -> Result<()> { anyhow::bail!("a lint") });
        assert_eq!(failed.expect_err("it failed").to_string(), "step `clippy` failed");
        assert_eq!(steps.table().row_iter().count(), 2);
    }
}
