//! The command `soak`.

use assert_cmd::Command;
use serde_json::Value;

fn soak(options: &str) -> Command {
    let mut command = Command::cargo_bin("dsv4-kv").expect("the program is built with its tests");
    command.arg("soak").args(options.split_whitespace());
    command
}

/// The runs of a soak that ends with this exit code.
fn runs(options: &str, code: i32) -> Vec<Value> {
    let output = soak(options).arg("--json").assert().code(code).get_output().stdout.clone();
    let mut result: Value = serde_json::from_slice(&output).expect("one JSON value");
    result["runs"].as_array_mut().map(std::mem::take).expect("a run for each fill")
}

fn count(run: &Value, what: &str) -> u64 {
    run[what].as_u64().unwrap_or_else(|| panic!("{what}: {run}"))
}

/// Few requests with many events each, in a pool that is little larger than the longest request: nothing is lost, and
/// the cache does as the model. The long run is started by hand.
#[test]
fn nothing_is_lost_and_the_model_agrees() {
    let events = "--aborts 10 --forks 10 --preemptions 10";
    for (seed, fill) in (0..9).zip([80, 95, 100].into_iter().cycle()) {
        let load = format!("--requests 120 --rounds 2 --gpu-mem 3GiB {events} --fill {fill}");
        let [run] = &runs(&format!("{load} --seed {seed}"), 0)[..] else {
            panic!("one run for one fill")
        };
        assert_eq!(run["faults"], Value::Array(Vec::new()), "{run}");
        for what in ["aborted", "forked", "suspended", "preempted", "reused", "evicted_blocks"] {
            assert!(count(run, what) > 0, "{what}: {run}");
        }
        let ended = ["finished", "aborted", "rejected"].map(|what| count(run, what));
        assert_eq!(ended.iter().sum::<u64>(), 2 * 120 + count(run, "forked"), "{run}");
        assert_eq!(count(run, "differing"), 0, "{run}");
    }
}

#[test]
fn the_model_agrees_about_an_undisturbed_load() {
    let events = "--aborts 0 --forks 0 --preemptions 0";
    let load = format!("--requests 200 --rounds 2 --gpu-mem 3GiB {events} --seed 2");
    let runs = runs(&format!("{load} --fill 80,95"), 0);
    assert_eq!(runs.len(), 2);
    for run in runs {
        assert_eq!((count(&run, "finished"), count(&run, "rejected")), (400, 0), "{run}");
    }
}

#[test]
fn a_soak_of_nothing_fails() {
    let options = "--requests 20 --rounds 2 --fill 1 --gpu-mem 200MiB --max-requests 4";
    let [run] = &runs(options, 1)[..] else { panic!("one run for one fill") };
    assert_eq!((count(run, "finished"), count(run, "rejected")), (0, 40), "{run}");
    assert_eq!(run["faults"], serde_json::json!(["no request ran, and 40 were rejected"]), "{run}");
}

/// Prompts of which nothing is known share no prefix: a soak of them would test none, and pass.
#[test]
fn a_trace_without_hash_ids_is_refused() {
    let trace = tempfile::NamedTempFile::new().expect("a temporary file");
    let line = |name: &str| {
        format!(r#"{{"timestamp": 0, "input_length": 600, "output_length": 4, "{name}": [1, 2]}}"#)
    };
    std::fs::write(trace.path(), [line("hash_ids"), line("hash_id")].join("\n")).expect("room");
    let of_trace = |options: &str| {
        let mut command = soak(options);
        command.arg("--trace").arg(trace.path());
        command
    };
    let output = of_trace("--rounds 1").assert().code(2).get_output().clone();
    let message = String::from_utf8(output.stderr).expect("messages are UTF-8");
    assert!(message.contains("request 2 has no hash_ids"), "{message}");
    of_trace("--rounds 1 --requests 1").assert().success();
}

#[test]
fn a_cache_that_is_too_small_is_refused() {
    let output = soak("--gpu-mem 1GiB").assert().code(2).get_output().clone();
    let message = String::from_utf8(output.stderr).expect("messages are UTF-8");
    assert!(message.contains("model flash with 1.0 GiB of memory"), "{message}");
}
