//! The program under hostile options, endless input, closed pipes, full disks and signals.

mod processes;
mod program;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::Duration;

use program::{end, kv, process, refusal, text};
use serde_json::Value;
use tempfile::NamedTempFile;

/// The smallest replay, without a device.
const SMALL: &str = "replay --execute bookkeeping --requests 4";

#[test]
fn numbers_out_of_range_are_refused_with_value_and_limit() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let report = folder.path().join("out.html");
    let limits = [
        ("--token-rate", "from 0.001 to 1000000000000"),
        ("--step-ms", "from 0.001 to 3600000"),
        ("--time-scale", "from 0.000001 to 1000000"),
        ("--shrink", "from 0.001 to 1000000"),
    ];
    for (option, limit) in limits {
        for value in ["1e308", "1e-308", "0", "-1", "-0.0", "NaN", "inf", "-inf", "1e999"] {
            let mut command = kv(&format!("{SMALL} {option}={value} --report"));
            let message = refusal(command.arg(&report));
            assert!(
                message.contains(&format!("'{value}'")) && message.contains(limit),
                "{message}"
            );
            assert!(message.contains(option), "{message}");
        }
    }
    assert!(!report.exists(), "nothing was begun");
    let integers = [
        (
            "--requests",
            "from 1 to 1000000",
            &["0", "1000001", "4294967295", "99999999999", "-1", "NaN"],
        ),
        (
            "--max-requests",
            "from 1 to 65535",
            &["0", "65536", "4294967295", "99999999999", "-1", "1e3"],
        ),
        (
            "--max-step-tokens",
            "from 1 to 1048576",
            &["0", "1048577", "4294967295", "99999999999", "-1", "x"],
        ),
        ("--verify", "from 0 to 64", &["65", "4294967295", "99999999999", "-1", "1.5", ""]),
    ];
    for (option, limit, values) in integers {
        for value in values {
            let message =
                refusal(&mut kv(&format!("replay --execute bookkeeping {option}={value}")));
            assert!(message.contains(option), "{message}");
            assert!(message.contains(limit), "{value}: {message}");
            let mut command = kv("replay --execute bookkeeping");
            let apart = refusal(command.args([option, value]));
            assert!(value.is_empty() || apart == message, "{apart}");
        }
    }
    for size in ["1.5PiB", "16EiB", "99999999999999999999999", "9007199254740993PiB"] {
        for command in [
            format!("{SMALL} --gpu-mem {size}"),
            format!("{SMALL} --indexer-memory {size}"),
            format!("plan --model tiny --gpu-mem {size}"),
        ] {
            let message = refusal(&mut kv(&command));
            assert!(message.contains(size) && message.contains("of at most 1.0 PiB"), "{message}");
        }
    }
}

#[test]
fn a_trace_that_is_no_file_is_refused_with_its_option() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().display();
    for command in ["replay --execute bookkeeping", "inspect", "reuse", "soak"] {
        let message = refusal(&mut kv(&format!("{command} --trace {path}")));
        assert!(message.contains(&format!("--trace {path}: Is a directory")), "{message}");
        let message = refusal(&mut kv(&format!("{command} --trace {path}/none")));
        assert!(message.contains(&format!("--trace {path}/none: No such file")), "{message}");
    }
}

#[test]
fn bookkeeping_refuses_what_needs_a_device() {
    for (option, reason) in [
        ("--attend", "--attend needs --execute full"),
        ("--verify 1", "--verify needs --execute full"),
        ("--host-cache 1GiB", "--host-cache needs --execute full"),
        ("--peers 2 --payloads device", "--payloads device needs --execute full"),
        ("--peers 2 --arrival-memory 4GiB", "--arrival-memory needs --execute full"),
        ("--device cuda", "--device cuda needs --execute full"),
        ("--indexer-memory 1GiB", "--indexer-memory needs --execute full"),
        ("--attention-cluster one-block", "--attention-cluster needs --attend"),
    ] {
        let message = refusal(&mut kv(&format!("{SMALL} {option}")));
        assert!(message.contains(reason), "{message}");
    }
    // What they have by default.
    for option in ["--attend=false", "--indexer-memory 16MiB", "--attention-cluster two-blocks"] {
        kv(&format!("{SMALL} {option}")).assert().success();
    }
}

#[test]
fn the_ends_of_every_range_are_answered() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let report = folder.path().join("out.html");
    let ends = [
        "--token-rate 0.001",
        "--token-rate 1e12",
        "--step-ms 0.001",
        "--step-ms 3.6e6",
        "--time-scale 1e6",
        "--shrink 1e6",
        "--max-requests 65535 --gpu-mem 1PiB",
        "--max-step-tokens 1 --shrink 64",
        "--max-step-tokens 1048576",
        "--seed 18446744073709551615",
    ];
    for options in ends {
        kv(&format!("{SMALL} {options} --report")).arg(&report).assert().success();
        let page = fs::read_to_string(&report).expect("the report was written");
        assert!(page.ends_with("</html>"), "{options}: an older page stuck out");
        assert!(page.len() < 2_000_000, "{options}: {} bytes", page.len());
    }
    // Lengths by which no request fits: nothing runs, which is told beside the result.
    let options = "--time-scale 1e-6 --shrink 0.001 --model tiny --max-step-tokens 1048576";
    let mut command = kv(&format!("{SMALL} {options} --report"));
    let output = command.arg(&report).assert().code(1).get_output().clone();
    assert!(text(&output.stderr).contains("no request ran, and 4 were rejected"));
    assert!(text(&output.stdout).contains("4 (0 finished)"));
    assert!(fs::read_to_string(&report).expect("the report was written").ends_with("</html>"));
}

#[test]
fn the_memory_of_the_indexer_may_be_all_that_is_accepted() {
    let options = "--requests 1 --gpu-mem 300MiB --max-requests 2 --verify 0";
    kv(&format!("replay --device cpu {options} --indexer-memory 1PiB")).assert().success();
}

#[test]
fn the_times_of_a_trace_may_be_as_far_as_they_can() {
    let mut trace = NamedTempFile::new().expect("a temporary file");
    for at in [0, 1, u64::MAX] {
        let line = format!(r#"{{"timestamp": {at}, "input_length": 9, "output_length": 2}}"#);
        writeln!(trace, "{line}").expect("room for a line");
    }
    let options = "replay --execute bookkeeping --time-scale 1e-6 --report /dev/null --trace";
    kv(options).arg(trace.path()).assert().success();
}

#[test]
fn a_request_that_shrinking_makes_too_long_is_named() {
    let mut trace = NamedTempFile::new().expect("a temporary file");
    for input in [5, 4_000_000_000_u32] {
        let line = format!(r#"{{"timestamp": 0, "input_length": {input}, "output_length": 9}}"#);
        writeln!(trace, "{line}").expect("room for a line");
    }
    let mut command = kv("replay --execute bookkeeping --shrink 0.5 --trace");
    let message = refusal(command.arg(trace.path()));
    let expected = "--shrink: request 2 of the load: input_length 4000000000 and output_length 9, \
        divided by 0.5, pass 4294967295";
    assert!(message.contains(expected), "{message}");
    // Without `--shrink` the request is only too long for the model, and is rejected.
    let mut command = kv("replay --execute bookkeeping --json --trace");
    let output = command.arg(trace.path()).assert().success().get_output().stdout.clone();
    let result: Value = serde_json::from_slice(&output).expect("one JSON value");
    assert_eq!((&result["finished"], &result["rejected"]), (&1.into(), &1.into()));
}

#[test]
fn a_choice_of_cases_is_refused_where_there_is_nothing_to_choose() {
    for suite in ["swa", "all", "bookkeeping", "step"] {
        let message = refusal(&mut kv(&format!("bench {suite} --only CSA")));
        assert!(message.contains("--only is of `bench attention`"), "{message}");
    }
    // Before a GPU is looked for.
    for only in ["zzz", "Chunk"] {
        let message = refusal(&mut kv(&format!("bench attention --only {only}")));
        assert!(message.contains(&format!("--only {only}: no case contains it")), "{message}");
        assert!(message.contains("`SWA, 64 heads,"), "{message}");
    }
}

/// A host tier keeps prefixes up to checkpoints. Where there are none, the option that is missing is named.
#[test]
fn a_host_cache_without_checkpoints_is_refused_by_the_name_of_the_option() {
    let mut trace = NamedTempFile::new().expect("a temporary file");
    trace
        .write_all(br#"{"timestamp": 0, "input_length": 140, "output_length": 2}"#)
        .expect("room for a line");
    let replay = "replay --device cpu --gpu-mem 300MiB --host-cache 64MiB";
    let of_trace = refusal(kv(&format!("{replay} --trace")).arg(trace.path()));
    let expected =
        "--host-cache 64.0 MiB needs prompts that share prefixes, but no line of --trace";
    assert!(of_trace.contains(expected) && !of_trace.contains("num_checkpoints"), "{of_trace}");
    for command in [
        format!("{replay} --checkpoints 0"),
        "plan --model tiny --gpu-mem 8GiB --checkpoints 0 --host-cache 64MiB".to_owned(),
    ] {
        let message = refusal(&mut kv(&command));
        let expected = "--host-cache 64.0 MiB needs --checkpoints of at least 1";
        assert!(message.contains(expected), "{command}: {message}");
    }
}

/// An option that a suite would ignore is refused with the suites that read it, before a GPU is looked for.
#[test]
fn options_of_other_suites_are_refused() {
    for (options, reason) in [
        ("swa --batch 4", "--batch is of `bench step`: `bench swa` would ignore it"),
        (
            "attention --model pro",
            "--model is of `bench step`, `bench prefill`, `bench checkpoints`",
        ),
        ("prefill --context 65536", "--context is of `bench step`"),
        ("bookkeeping --model pro", "`bench bookkeeping` would ignore it"),
        ("checkpoints --index-weight nvfp4", "--index-weight is of `bench step`, `bench prefill`"),
        ("tier --chunk 2048", "--chunk is of `bench prefill`, `bench checkpoints`"),
        ("--attention", "--attention is of `bench step`: `bench all` would ignore it"),
    ] {
        let message = refusal(&mut kv(&format!("bench {options}")));
        assert!(message.contains(reason), "{options}: {message}");
    }
}

#[test]
fn endless_input_is_refused() {
    let mut yes = std::process::Command::new("yes");
    let mut blank = yes.arg("").stdout(Stdio::piped()).spawn().expect("it starts");
    let lines = blank.stdout.take().expect("a pipe");
    let mut replay = process("replay --execute bookkeeping --trace /dev/stdin");
    let output = replay.stdin(lines).output().expect("it starts");
    // It has the other end of the pipe.
    drop(replay);
    blank.wait().expect("it ends with its reader");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("1048576 bytes of blank lines"));
    let message = refusal(&mut kv("replay --execute bookkeeping --trace /dev/zero"));
    assert!(message.contains("/dev/zero:1: the line is longer than 1048576 bytes"), "{message}");
    let message = refusal(&mut kv("plan --gpu-mem 1GiB --model /dev/zero"));
    assert!(message.contains("unknown model `/dev/zero`"), "{message}");
    let mut config = tempfile::Builder::new().suffix(".json").tempfile().expect("a temporary file");
    config.write_all(&[b' '; (1 << 20) + 1]).expect("room for a mebibyte");
    let message = refusal(kv("plan --gpu-mem 1GiB --model").arg(config.path()));
    assert!(message.contains("more than 1048576 bytes"), "{message}");
}

#[test]
fn a_trace_of_too_many_requests_is_refused_and_its_first_can_be_replayed() {
    let mut trace = NamedTempFile::new().expect("a temporary file");
    let line = "{\"timestamp\":0,\"input_length\":1,\"output_length\":1}\n";
    trace.write_all(line.repeat(1_000_001).as_bytes()).expect("room for 50 MB");
    let path = trace.path();
    let message = refusal(kv("replay --execute bookkeeping --trace").arg(path));
    assert!(message.contains(":1000001: the trace has more than 1000000 requests"), "{message}");
    assert!(message.contains("--requests"), "{message}");
    kv("replay --execute bookkeeping --requests 5 --trace").arg(path).assert().success();
}

#[test]
fn a_reader_that_leaves_early_ends_nothing_with_an_error() {
    let commands = [
        SMALL.to_owned(),
        format!("{SMALL} --json"),
        "plan --model pro --gpu-mem 180GiB".to_owned(),
        "plan --model pro --gpu-mem 180GiB --json".to_owned(),
        "replay --help".to_owned(),
    ];
    for options in commands {
        let mut command = process(&options);
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        // The reader is gone before anything was written.
        drop(child.stdout.take());
        let output = end(child);
        assert_eq!(output.status.code(), Some(0), "{options}");
        assert_eq!(text(&output.stderr), "", "{options}");
    }
}

#[test]
fn a_full_disk_is_an_error_that_is_told() {
    let full = || File::options().write(true).open("/dev/full").expect("Linux has it");
    for options in [
        SMALL,
        "replay --execute bookkeeping --json",
        "plan --model pro --gpu-mem 180GiB",
        "--help",
    ] {
        let output = process(options).stdout(full()).output().expect("it starts");
        assert_eq!(output.status.code(), Some(1), "{options}");
        let message = text(&output.stderr);
        assert_eq!(message, "error: standard output: No space left on device (os error 28)\n");
    }
    // If not even the message can be written, only the exit code is left.
    let mut command = process(SMALL);
    let output = command.stdout(full()).stderr(full()).output().expect("it starts");
    assert_eq!(output.status.code(), Some(1));
    let refused = process("replay --shrink 0").stderr(full()).output().expect("it starts");
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn a_report_that_cannot_be_written_does_not_cost_the_result() {
    let output =
        process(&format!("{SMALL} --json --report /dev/full")).output().expect("it starts");
    assert_eq!(output.status.code(), Some(1));
    let message = text(&output.stderr);
    assert_eq!(message, "error: /dev/full: No space left on device (os error 28)\n");
    let result: Value = serde_json::from_slice(&output.stdout).expect("the result was printed");
    assert_eq!(result["finished"], 4);
    // And the reverse.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let report = folder.path().join("out.html");
    let full = File::options().write(true).open("/dev/full").expect("Linux has it");
    let mut command = process(&format!("{SMALL} --report"));
    let output = command.arg(&report).stdout(full).output().expect("it starts");
    assert_eq!(output.status.code(), Some(1));
    assert!(fs::read_to_string(&report).expect("it was written").contains("Occupancy"));
}

#[test]
fn a_report_is_opened_before_any_work_and_left_alone_if_there_is_none() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let replay = |more: &str, report: &Path| {
        let mut command = kv(&format!("{SMALL} {more} --report"));
        refusal(command.arg(report))
    };
    // The trace, which does not exist either, is not opened.
    let message = replay("--trace no/such/trace", &folder.path().join("no/such/folder/out.html"));
    assert!(message.contains("no/such/folder/out.html: No such file"), "{message}");
    let message = replay("--trace no/such/trace", folder.path());
    assert!(message.contains("Is a directory"), "{message}");
    let (new, old) = (folder.path().join("new.html"), folder.path().join("old.html"));
    fs::write(&old, "an older report").expect("room for it");
    for report in [&new, &old] {
        let message = replay("--trace no/such/trace", report);
        assert!(message.contains("no/such/trace"), "{message}");
    }
    assert!(!new.exists(), "a refused replay leaves no empty report");
    assert_eq!(fs::read_to_string(&old).expect("it is there"), "an older report");
}

/// A report would replace the trace, the model or the measurement that it is made from, also by another name.
#[test]
fn a_report_does_not_replace_what_the_command_reads() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, link) = (folder.path().join("input"), folder.path().join("link"));
    std::os::unix::fs::symlink(&input, &link).expect("a link");
    let line = r#"{"timestamp": 0, "input_length": 140, "output_length": 2}"#;
    let bench = r#"{"device": "a", "date": "b"}"#;
    for (command, option, content) in [
        ("replay --execute bookkeeping", "--trace", line),
        ("replay --execute bookkeeping", "--model", "{}"),
        ("bench", "--from", bench),
    ] {
        fs::write(&input, content).expect("room for a line");
        for (read, written) in [(&input, &input), (&link, &input), (&input, &link)] {
            let mut command = kv(command);
            let message = refusal(command.arg(option).arg(read).arg("--report").arg(written));
            assert!(message.contains(&format!("this is the file of {option}")), "{message}");
            assert_eq!(fs::read_to_string(&input).expect("it is there"), content);
        }
    }
    // Nothing of a device is replaced.
    let options = format!("{SMALL} --model tiny --trace /dev/null --report /dev/null");
    assert!(refusal(&mut kv(&options)).contains("the trace has no requests"));
}

/// Starts a replay, and waits until it has run some of its steps.
fn begun(options: &str) -> Child {
    let mut command = process(options);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    processes::wait_for_handler(child.id());
    processes::wait_for_work(child.id());
    child
}

/// A replay that takes minutes, in steps of one token.
const LONG: &str = "replay --execute bookkeeping --requests 100000 --max-step-tokens 1";

fn interrupt(child: &Child) {
    let mut kill = std::process::Command::new("kill");
    assert!(kill.args(["-INT", &child.id().to_string()]).status().expect("it starts").success());
}

#[test]
fn an_interrupted_replay_says_what_was_done() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let report = folder.path().join("out.html");
    let child = begun(&format!("{LONG} --json --report {}", report.display()));
    interrupt(&child);
    let output = end(child);
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).expect("the result so far");
    assert_eq!((&result["interrupted"], &result["requests"]), (&true.into(), &100_000.into()));
    let number = |name: &str| result[name].as_u64().expect("a count");
    assert!(number("steps") > 0 && number("finished") < 100_000, "{result}");
    assert_eq!(number("tokens"), number("steps"));
    assert!(fs::read_to_string(&report).expect("it was written").contains("interrupted"));
    let child = begun(LONG);
    interrupt(&child);
    let output = end(child);
    assert_eq!(output.status.code(), Some(130));
    let table = text(&output.stdout);
    assert!(table.contains("interrupted") && table.contains("100000 ("), "{table}");
}

#[test]
fn an_interrupted_soak_says_so_in_its_last_round_too() {
    let load = "--requests 20000 --rounds 1 --fill 100";
    let child = begun(&format!("soak {load} --json"));
    interrupt(&child);
    let output = end(child);
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).expect("the result so far");
    let run = &result["runs"][0];
    assert_eq!((&run["interrupted"], &run["rounds"]), (&true.into(), &0.into()), "{run}");
    assert!(run["finished"].as_u64() < Some(20_000), "{run}");
}

#[test]
fn a_second_interrupt_ends_at_once() {
    // A step takes seconds, so both signals arrive in the same one.
    let options = "--shrink 1 --model tiny --requests 2 --max-step-tokens 65536";
    let mut child = begun(&format!("replay --device cpu {options}"));
    // Two signals that arrive before the process is scheduled count as one.
    let ended = loop {
        interrupt(&child);
        sleep(Duration::from_millis(5));
        if let Some(status) = child.try_wait().expect("it was started") {
            break status;
        }
    };
    assert_eq!(ended.code(), Some(130));
    let mut printed = String::new();
    let stdout = child.stdout.take().expect("a pipe");
    BufReader::new(stdout).read_to_string(&mut printed).expect("UTF-8");
    assert_eq!(printed, "", "there was no time for a table");
}

/// The codes of a command, and no others: a plan is not interrupted, and only a server handles SIGTERM.
#[test]
fn help_lists_the_exit_codes_of_its_command() {
    for (options, codes) in [
        ("--help", &["0", "1", "2", "130"][..]),
        ("replay --help", &["0", "1", "2", "130"]),
        ("soak --help", &["0", "1", "2", "130"]),
        ("plan --help", &["0", "1", "2"]),
        ("bench --help", &["0", "1", "2"]),
        ("doctor --help", &["0", "1", "2"]),
    ] {
        let output = kv(options).assert().success().get_output().stdout.clone();
        let lines = output.lines().map_while(Result::ok);
        let listed = lines.skip_while(|line| line != "Exit codes:").skip(1);
        let listed: Vec<_> =
            listed.filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect();
        assert_eq!(listed, codes, "{options}");
    }
}
