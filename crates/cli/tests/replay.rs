//! The command `replay`: exit codes, messages, JSON and the report.

use std::io::Write;

use assert_cmd::Command;
use serde_json::Value;
use tempfile::NamedTempFile;

/// `dsv4-kv replay` with these options, separated by blanks.
fn replay(options: &str) -> Command {
    let mut command = Command::cargo_bin("dsv4-kv").expect("the program is built with its tests");
    command.arg("replay").args(options.split_whitespace());
    command
}

/// The JSON of a replay that must succeed.
fn json(command: &mut Command) -> Value {
    let output = command.arg("--json").assert().success().get_output().stdout.clone();
    serde_json::from_slice(&output).expect("standard output is one JSON value")
}

/// The message of a refused replay. It must end with exit code 2 and print no result.
fn refusal(command: &mut Command) -> String {
    let output = command.assert().code(2).get_output().clone();
    assert!(output.stdout.is_empty(), "a refused replay has no result");
    String::from_utf8(output.stderr).expect("messages are UTF-8")
}

fn trace(lines: &[&str]) -> NamedTempFile {
    let mut file = NamedTempFile::new().expect("a temporary file");
    file.write_all(lines.join("\n").as_bytes()).expect("room for a few lines");
    file
}

const LINE: &str =
    r#"{"timestamp": 0, "input_length": 600, "output_length": 40, "hash_ids": [1, 2]}"#;

/// The smallest replay with kernels that goes beyond one window and decodes.
const SMALL: &str = "--device cpu --gpu-mem 300MiB --max-requests 8";

#[test]
fn a_replay_on_the_cpu_matches_the_reference() {
    let lines = [
        r#"{"timestamp": 0, "input_length": 140, "output_length": 6}"#,
        r#"{"timestamp": 0, "input_length": 9, "output_length": 3}"#,
    ];
    let trace = trace(&lines);
    // The indexer processes chunks of 16 queries in parts of 3.
    let options = "--max-step-tokens 100 --verify 2 --indexer-memory 160KB";
    let mut command = replay(&format!("{SMALL} {options}"));
    let result = json(command.arg("--trace").arg(trace.path()));
    assert_eq!(
        (&result["mismatches"], &result["mismatch_examples"]),
        (&0.into(), &[0; 0][..].into())
    );
    assert_eq!(result["verified_requests"], 2);
    assert_eq!(result["tokens"], 140 + 5 + 9 + 2);
    assert_eq!(result["prefill_tokens"], 149);
    assert_eq!(result["steps"], 2 + 5);
    // Five layers. 128 rows of each window are compared, and the written rows of each ring: of request 0 after 100
    // tokens, then six times 128; of request 1 after 9, 10 and 11.
    let swa = 5 * (7 * 128 + 100 + 6 * 128 + 3 * 128 + 9 + 10 + 11);
    // Lists of 16 entries in two CSA layers: seven of request 0, which sees more entries, and three of request 1, which
    // sees fewer. In the HCA layer one entry, after step 0.
    let gathered = 2 * 16 * (7 + 3) + 6;
    assert_eq!((&result["verified_lists"], &result["scored_lists"]), (&(7 + 3).into(), &7.into()));
    assert_eq!(result["near_lists"], 0);
    // At the end every entry of two CSA layers, with its key, and of an HCA layer.
    let entries = 2 * 2 * (36 + 2) + 1;
    assert_eq!(result["verified_rows"], swa + gathered + entries);
    assert_eq!(result["verified_entries"], entries);
    assert_eq!(result["entries"], 2 * (36 + 2) + 1);
    assert!(result["kernel_ms"].as_f64().is_some_and(|ms| ms > 0.0));
    assert_eq!(result["model"], "tiny");
}

#[test]
fn the_same_seed_gives_the_same_replay_and_another_another() {
    let steps = |seed| {
        let options = format!("--execute bookkeeping --requests 50 --seed {seed}");
        let result = json(&mut replay(&options));
        (result["tokens"].clone(), result["virtual_s"].clone())
    };
    assert_eq!(steps(1), steps(1));
    assert_ne!(steps(1), steps(2));
}

/// The same prompt of 600 tokens 20 times, three at once: the first three are computed, the others reuse four blocks.
#[test]
fn bookkeeping_follows_a_trace_and_reuses_its_prefixes() {
    let trace = trace(&[LINE; 20]);
    let replayed = |more: &str| {
        let options = format!("--execute bookkeeping --max-requests 3 --gpu-mem 2GiB {more}");
        let result = json(replay(&options).arg("--trace").arg(trace.path()));
        assert_eq!(result["finished"], 20);
        assert_eq!(result["waited_admissions"], 17);
        assert_eq!(result["rejected"], 0);
        assert_eq!(result["peak_slots"], 3);
        assert_eq!(result["peak_blocks"], 15, "639 tokens hold 5 blocks");
        assert_eq!(result["kernel_ms"], Value::Null);
        result
    };
    for without in ["--no-reuse", "--checkpoints 0"] {
        let result = replayed(without);
        assert_eq!((&result["tokens"], &result["reused_tokens"]), (&(20 * 639).into(), &0.into()));
        assert_eq!(result["reuse"], Value::Null);
    }
    let result = replayed("");
    assert_eq!(result["reused_tokens"], 17 * 512);
    assert_eq!(result["tokens"], 20 * 639 - 17 * 512);
    assert_eq!(result["prefill_tokens"], 20 * 600 - 17 * 512);
    let reuse = &result["reuse"];
    assert_eq!(reuse["hit_ratio"], f64::from(17 * 512) / f64::from(20 * 600));
    assert_eq!((&reuse["hits"], &reuse["hits_at_prompt"]), (&17.into(), &17.into()));
    // The last 88 tokens of each prompt, and the first three prompts.
    assert_eq!((&reuse["tail"], &reuse["never_seen"]), (&(20 * 88).into(), &(3 * 512).into()));
    assert_eq!(reuse["too_long"], 0);
}

/// Five requests share a prefix, and five others need more than half of all blocks, so that they share nothing: their
/// prompts count all the same, in a group of their own.
#[test]
fn prompts_that_are_too_long_to_share_count_as_not_reused() {
    let line = |at: u32, tokens: u32| {
        let ids: Vec<_> = (0..tokens.div_ceil(512)).collect();
        format!(
            r#"{{"timestamp": {at}, "input_length": {tokens}, "output_length": 1, "hash_ids": {ids:?}}}"#
        )
    };
    let lines: Vec<_> = (0..10).map(|at| line(at, if at < 5 { 2049 } else { 102_400 })).collect();
    let trace = trace(&lines.iter().map(String::as_str).collect::<Vec<_>>());
    let options = "--execute bookkeeping --model flash --gpu-mem 600MiB --max-requests 1";
    let result = json(replay(options).arg("--trace").arg(trace.path()));
    assert_eq!((&result["finished"], &result["preempted"]), (&10.into(), &0.into()));
    let reuse = &result["reuse"];
    assert_eq!((&reuse["prompts"], &reuse["hits"]), (&10.into(), &4.into()));
    assert_eq!(reuse["prompt_tokens"], 522_245);
    assert_eq!(reuse["hit_ratio"], 8192.0 / 522_245.0);
    let groups =
        ["no_checkpoint", "missed_by_eviction", "other_root", "tail", "never_seen", "too_long"];
    let groups = groups.map(|group| reuse[group].as_u64().expect("a count"));
    assert_eq!((groups[5], groups.iter().sum()), (512_000, 522_245_u64 - 8192));
}

/// Waves of three requests, of 40 steps each. The wave of a request determines its waiting time.
#[test]
fn waits_are_told_in_steps_with_what_limits_them() {
    let trace = trace(&[LINE; 20]);
    let options = "--execute bookkeeping --max-requests 3 --gpu-mem 2GiB --no-reuse";
    let result = json(replay(options).arg("--trace").arg(trace.path()));
    let service = &result["service"];
    assert_eq!((&service["unit"], &service["elapsed"]), (&"steps".into(), &280.0.into()));
    assert_eq!(service["tokens_per_unit"], 20.0 * 639.0 / 280.0);
    // Of 40 tokens of an answer the first is given by the prompt's step, and the last is not computed.
    assert_eq!(service["generated_per_unit"], 20.0 * 40.0 / 280.0);
    // Waiting times of 0, 40 .. 240 steps: the tenth and the twentieth of twenty.
    for (wait, p50, p99) in [
        ("queueing", 120.0, 240.0),
        ("time_to_first_token", 121.0, 241.0),
        ("time_per_token", 1.0, 1.0),
    ] {
        assert_eq!(
            (&service[wait]["p50"], &service[wait]["p99"]),
            (&p50.into(), &p99.into()),
            "{wait}"
        );
    }
    let limit = &service["limit"];
    assert_eq!(limit["waiting_for_slots"], 240.0 / 280.0);
    assert_eq!(limit["waiting_for_blocks"], 0.0);
    let advice = limit["advice"][0].as_str().expect("words");
    assert!(
        advice.starts_with("slots: in 86 % of the steps requests waited for one of 3"),
        "{advice}"
    );
    assert!(advice.contains("set --max-requests 20"), "{advice}");
    // By default the cache has a slot for each of them, and no request waits.
    let options = "--execute bookkeeping --gpu-mem 2GiB --no-reuse --max-step-tokens 20000";
    let result = json(replay(options).arg("--trace").arg(trace.path()));
    assert_eq!((&result["slots"], &result["waited_admissions"]), (&20.into(), &0.into()));
    assert_eq!(result["service"]["queueing"]["p99"], 0.0);
}

/// With kernels, times are in milliseconds.
#[test]
fn waits_on_a_device_are_times() {
    let trace = trace(&[r#"{"timestamp": 0, "input_length": 9, "output_length": 3}"#]);
    let result =
        json(replay("--device cpu --gpu-mem 300MiB --verify 0").arg("--trace").arg(trace.path()));
    let service = &result["service"];
    assert_eq!(service["unit"], "ms");
    let number = |of: &Value| of.as_f64().expect("a number");
    let (all, first) =
        (number(&service["elapsed"]), number(&service["time_to_first_token"]["p50"]));
    let per_token = number(&service["time_per_token"]["p50"]);
    assert!(first > 0.0 && per_token > 0.0);
    assert!((first + 2.0 * per_token - all).abs() < 1e-3 * all, "{service}");
    assert!(number(&result["kernel_ms"]) <= all, "{result}");
}

/// Prompts that differ after an id: the second one computes what follows the last checkpoint, the third one continues
/// from the point where they differ.
#[test]
fn a_branch_point_is_reused_by_the_third_prompt() {
    let line = |at: u32, last: u32| {
        format!(
            r#"{{"timestamp": {at}, "input_length": 1500, "output_length": 1, "hash_ids": [1, 2, {last}]}}"#
        )
    };
    let lines = [line(0, 3), line(1000, 4), line(2000, 5)];
    let trace = trace(&lines.each_ref().map(String::as_str));
    let result =
        json(replay("--execute bookkeeping --gpu-mem 4GiB").arg("--trace").arg(trace.path()));
    assert_eq!(result["reused_tokens"], 1024);
    let reuse = &result["reuse"];
    assert_eq!((&reuse["no_checkpoint"], &reuse["hits_at_branch"]), (&1024.into(), &1.into()));
}

/// Each of three prompts in turn needs two checkpoints: with six they stay, with two they are evicted.
#[test]
fn what_finds_no_room_is_evicted() {
    let line = |at: u32| {
        let first = 20 * (at % 3);
        let ids: Vec<_> = (first..first + 8).collect();
        format!(
            r#"{{"timestamp": {}, "input_length": 4000, "output_length": 1, "hash_ids": {ids:?}}}"#,
            1000 * at
        )
    };
    let lines: Vec<_> = (0..9).map(line).collect();
    let trace = trace(&lines.iter().map(String::as_str).collect::<Vec<_>>());
    let result = |checkpoints: u32| {
        let options = "--execute bookkeeping --max-requests 1 --gpu-mem 1GiB --checkpoints";
        let mut command = replay(&format!("{options} {checkpoints}"));
        json(command.arg("--trace").arg(trace.path()))["reuse"].clone()
    };
    let (small, large) = (result(2), result(6));
    assert_eq!((&small["hits"], &large["hits"]), (&0.into(), &6.into()));
    // Each prompt evicts the two checkpoints of the previous one, and the blocks with them.
    assert_eq!(small["evicted_checkpoints"], 2 * 8);
    assert_eq!(small["evicted_blocks"], 8 * 31);
    // Evicted blocks are remembered in places that others may overwrite, by hashes that differ from run to run.
    // Forgotten ones count as new.
    let number = |name: &str| small[name].as_u64().expect("a count");
    assert!((1..=6 * 31 * 128).contains(&number("missed_by_eviction")), "{small}");
    assert_eq!(number("missed_by_eviction") + number("never_seen"), 9 * 31 * 128);
    assert_eq!(large["evicted_blocks"], 0);
}

#[test]
fn what_is_reused_is_verified_with_kernels() {
    let lines = [
        r#"{"timestamp": 0, "input_length": 140, "output_length": 2, "hash_ids": [1]}"#,
        r#"{"timestamp": 5000, "input_length": 150, "output_length": 2, "hash_ids": [1]}"#,
    ];
    let trace = trace(&lines);
    let mut command = replay(&format!("{SMALL} --max-step-tokens 100 --verify 2 --checkpoints 4"));
    let result = json(command.arg("--trace").arg(trace.path()));
    assert_eq!(
        (&result["mismatches"], &result["mismatch_examples"]),
        (&0.into(), &[0; 0][..].into())
    );
    assert_eq!((&result["reused_tokens"], &result["verified_reused"]), (&128.into(), &128.into()));
    assert_eq!(result["tokens"], 141 + 151 - 128);
    assert_eq!(result["verified_requests"], 2);
}

/// With room for two checkpoints, the third prompt evicts the first one, which then comes back from host memory.
#[test]
fn what_was_evicted_comes_back_from_host_memory() {
    let line = |(at, id): (u32, u32)| {
        format!(
            r#"{{"timestamp": {}, "input_length": 140, "output_length": 1, "hash_ids": [{id}]}}"#,
            1000 * at
        )
    };
    let lines: Vec<_> = (0..).zip([1, 2, 3, 1]).map(line).collect();
    let trace = trace(&lines.iter().map(String::as_str).collect::<Vec<_>>());
    let result = |more: &str| {
        let options =
            "--device cpu --gpu-mem 300MiB --max-requests 1 --max-step-tokens 140 --verify 4";
        let mut command = replay(&format!("{options} --checkpoints 2 {more}"));
        let result = json(command.arg("--trace").arg(trace.path()));
        assert_eq!(result["mismatches"], 0, "{result}");
        result
    };
    let (without, with) = (result(""), result("--host-cache 64MiB"));
    assert_eq!((&without["reused_tokens"], &without["reuse"]["tier"]), (&0.into(), &Value::Null));
    assert_eq!((&with["reused_tokens"], &with["verified_reused"]), (&128.into(), &128.into()));
    let tier = &with["reuse"]["tier"];
    assert_eq!((&tier["restored_checkpoints"], &tier["restored_blocks"]), (&1.into(), &1.into()));
    assert!(tier["stored_checkpoints"].as_u64() >= Some(3), "{tier}");
}

#[test]
fn only_the_first_requests_are_replayed_and_what_can_never_fit_is_told() {
    let long = r#"{"timestamp": 0, "input_length": 2000000, "output_length": 1}"#;
    let trace = trace(&[LINE, long, LINE, "not read"]);
    let mut command = replay("--execute bookkeeping --requests 3 --gpu-mem 8GiB");
    let result = json(command.arg("--trace").arg(trace.path()));
    assert_eq!((&result["finished"], &result["rejected"]), (&2.into(), &1.into()));
}

/// A request that never fits is not drawn for the verification, whose result would say nothing.
#[test]
fn requests_to_verify_are_drawn_from_those_that_fit() {
    let long = r#"{"timestamp": 0, "input_length": 1500000, "output_length": 9}"#;
    let short = r#"{"timestamp": 0, "input_length": 140, "output_length": 2}"#;
    let trace = trace(&[long, long, short, long]);
    for seed in 0..4 {
        let options =
            format!("--device cpu --gpu-mem 2GiB --max-requests 2 --verify 1 --seed {seed}");
        let result = json(replay(&options).arg("--trace").arg(trace.path()));
        assert_eq!((&result["finished"], &result["rejected"]), (&1.into(), &3.into()));
        assert_eq!((&result["verified_requests"], &result["mismatches"]), (&1.into(), &0.into()));
        let advice = result["service"]["limit"]["advice"].as_array().expect("a list");
        let last = advice.last().and_then(Value::as_str).expect("words");
        assert!(last.starts_with("length: 3 requests need more") && last.contains("--shrink"));
    }
}

/// A replay in which nothing ran does not pass.
#[test]
fn a_load_of_which_nothing_fits_is_an_error() {
    let long = r#"{"timestamp": 0, "input_length": 1500000, "output_length": 9}"#;
    let trace = trace(&[long]);
    for device in ["--execute bookkeeping", "--device cpu"] {
        let mut command = replay(&format!("{device} --json --trace"));
        let output = command.arg(trace.path()).assert().code(1).get_output().clone();
        let said = String::from_utf8(output.stderr).expect("messages are UTF-8");
        assert!(said.contains("no request ran, and 1 were rejected"), "{said}");
        let result: Value = serde_json::from_slice(&output.stdout).expect("one JSON value");
        assert_eq!((&result["finished"], &result["rejected"]), (&0.into(), &1.into()));
        let advice = result["service"]["limit"]["advice"].to_string();
        assert!(advice.contains("--shrink") && !advice.contains("nothing"), "{advice}");
    }
}

/// A trace that says nothing of its prompts, or misspells it, shares no prefixes, which is told.
#[test]
fn requests_without_hash_ids_are_told() {
    let misspelt = LINE.replace("hash_ids", "hash_id");
    let trace = trace(&[LINE, &misspelt, &misspelt]);
    let said = |options: &str| {
        let mut command = replay(&format!("--execute bookkeeping {options} --trace"));
        let output = command.arg(trace.path()).assert().success().get_output().clone();
        String::from_utf8(output.stderr).expect("messages are UTF-8")
    };
    for options in ["", "--json"] {
        let said = said(options);
        assert!(said.contains("2 of 3 requests have no hash_ids"), "{options}: {said}");
    }
    for options in ["--no-reuse", "--checkpoints 0", "--requests 1"] {
        assert_eq!(said(options), "", "{options}");
    }
}

#[test]
fn a_bad_line_is_named() {
    let trace = trace(&[LINE, LINE, r#"{"timestamp": 0, "input_length": 600}"#]);
    let message = refusal(replay("--execute bookkeeping").arg("--trace").arg(trace.path()));
    let at = format!("{}:3: ", trace.path().display());
    assert!(
        message.contains(&at) && message.contains("missing field `output_length`"),
        "{message}"
    );
}

#[test]
fn an_unknown_model_is_told_with_the_known_ones() {
    let message = refusal(&mut replay("--execute bookkeeping --model huge"));
    assert!(message.contains("unknown model `huge`"), "{message}");
    assert!(message.contains("flash, pro, tiny"), "{message}");
    let message = refusal(&mut replay("--execute bookkeeping --model no/such/config.json"));
    assert!(message.contains("no/such/config.json: No such file"), "{message}");
}

#[test]
fn a_model_file_is_checked() {
    let mut file = tempfile::Builder::new().suffix(".json").tempfile().expect("a temporary file");
    file.write_all(b"{\"model_type\": \"deepseek_v4\"}").expect("room for a line");
    let mut command = replay("--execute bookkeeping");
    let message = refusal(command.arg("--model").arg(file.path()));
    assert!(message.contains("config.json has no `head_dim`"), "{message}");
}

#[test]
fn a_model_that_does_not_fit_is_told_with_the_sizes() {
    let message =
        refusal(&mut replay("--device cpu --model pro --gpu-mem 1GiB --max-requests 256"));
    assert!(message.contains("model pro with"), "{message}");
    assert!(message.contains("256 slots of") && message.contains("1 blocks of"), "{message}");
    assert_eq!(message.matches("256 slots of").count(), 1, "{message}");
    let message = refusal(&mut replay("--device cpu --gpu-mem 1MiB"));
    assert!(message.contains("1.0 MiB of memory do not hold"), "{message}");
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let cases = [
        ("--time-scale 0", "a number from 0.000001 to 1000000"),
        ("--gpu-mem lots", "--gpu-mem"),
        ("--execute bookkeeping --verify 1", "--verify needs --execute full"),
        ("--execute bookkeeping --max-step-tokens 0", "--max-step-tokens"),
        ("--execute bookkeeping --host-cache 1GiB", "--host-cache needs --execute full"),
        ("--no-reuse --checkpoints 3", "cannot be used with"),
        ("--device quantum", "quantum"),
        ("--device cpu --indexer-memory 9KB", "has 9000 bytes; one query needs"),
    ];
    for (options, expected) in cases {
        let message = refusal(&mut replay(options));
        assert!(message.contains(expected), "{options}: {message}");
    }
}

#[test]
fn the_report_has_its_plots_inside_and_loads_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("out.html");
    let page = |options: &str| {
        let mut command =
            replay(&format!("--execute bookkeeping --requests 40 {options} --report"));
        let output = command.arg(&path).assert().success().get_output().stdout.clone();
        assert!(String::from_utf8_lossy(&output).contains("peak blocks"));
        std::fs::read_to_string(&path).expect("the report was written")
    };
    assert_eq!(page("--no-reuse").matches("<svg").count(), 6);
    let page = page("");
    assert_eq!(page.matches("<svg").count(), 9);
    let reuse = ["Hit ratio", "Prompt tokens saved", "Evictions"];
    for title in ["Occupancy (%)", "Batch (tokens per step)", "begin_step"].iter().chain(&reuse) {
        assert!(page.contains(title), "{title}");
    }
    let waits = ["Queueing", "Time to first token", "Time per token"];
    for title in waits {
        assert!(page.contains(&format!("{title} (requests)")), "{title}");
    }
    // A mark of each in every histogram, including that of the host's time.
    for mark in ["p50 ", "p99 "] {
        let marks = page.lines().filter(|line| line.trim_start().starts_with(mark)).count();
        assert_eq!(marks, waits.len() + 1, "{mark}");
    }
    let without_namespace = page.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
    for loads in ["http:", "https:", "src=", "href=", "url(", "@import", "<script", "<link"] {
        assert!(!without_namespace.contains(loads), "{loads}");
    }
    let missing = folder.path().join("no/such/folder/out.html");
    let mut command = replay("--execute bookkeeping --requests 1 --json --report");
    let message = refusal(command.arg(&missing));
    assert!(message.contains("no/such/folder"), "{message}");
}
