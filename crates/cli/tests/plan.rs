//! The command `plan`: numbers, exit codes and messages.

use std::io::Write;

use assert_cmd::Command;
use dsv4_kv::device::{EmuDevice, EmuOptions};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{IndexerWorkspace, WorkspaceLimits};
use serde_json::Value;

/// `dsv4-kv plan` with these options, separated by blanks.
fn plan(options: &str) -> Command {
    let mut command = Command::cargo_bin("dsv4-kv").expect("the program is built with its tests");
    command.arg("plan").args(options.split_whitespace());
    command
}

/// The output of a plan that must succeed.
fn output(options: &str) -> String {
    let output = plan(options).assert().success().get_output().stdout.clone();
    String::from_utf8(output).expect("the result is UTF-8")
}

fn json(options: &str) -> Value {
    serde_json::from_str(&output(&format!("{options} --json"))).expect("one JSON value")
}

/// The message of a refused plan. It must end with exit code 2 and print no result.
fn refusal(options: &str) -> String {
    let output = plan(options).assert().code(2).get_output().clone();
    assert!(output.stdout.is_empty(), "{options}: a refused plan has no result");
    String::from_utf8(output.stderr).expect("messages are UTF-8")
}

const PRO: &str = "--model pro --gpu-mem 180GiB --context 131072";

#[test]
fn the_most_requests_of_the_context_fit() {
    let plan = json(&format!("{PRO} --max-draft 4 --checkpoints 0"));
    let number = |pointer: &str| {
        let value = plan.pointer(pointer).and_then(Value::as_u64);
        value.unwrap_or_else(|| panic!("no number at {pointer}"))
    };
    // Rows of 584 bytes and keys of 68; a ring of 128 + 4 rows in each of the 62 layers; 30 CSA
    // layers with rings of 4 + 4 own and 8 + 4 previous halves, 2 * (512 + 128) floats each; 31 HCA
    // layers with 4 + 2 rows of 3 * 512.
    let slot = 62 * 132 * 584 + 30 * (8 + 12) * 2 * 640 * 4 + 31 * 6 * 1536 * 4;
    assert_eq!(slot, 8_994_240);
    let block = 30 * 32 * (584 + 68) + 31 * 584;
    // One allocation for all pools, fourteen more buffers, three for splits of attention, and six of the indexer.
    let buffers = 1 + 14 + 3 + 6;
    assert_eq!(number("/rounding"), buffers << 21);
    // 64 queries of 64 heads of 128 channels, in f32 and in BF16; two f32 weights per head; one score for each of
    // 32,768 entries, and the largest of each 8.
    let indexer = 64 * (64 * (128 * 6 + 8) + (32_768 + 4096) * 4);
    assert_eq!((number("/indexer/bytes"), number("/indexer/queries")), (indexer, 64));
    let memory = (180 << 30) - (buffers << 21) - indexer - number("/capacity/working_bytes");
    let requests = memory / (slot + 1024 * block);
    assert_eq!(number("/capacity/slot_bytes"), slot);
    assert_eq!(number("/capacity/block_bytes"), block);
    assert_eq!(number("/capacity/slots"), requests);
    assert_eq!(number("/capacity/blocks"), (memory - requests * slot) / block);
    let pools = requests * slot + number("/capacity/blocks") * block;
    assert_eq!(number("/left_over"), memory - pools);
    assert_eq!(plan["capacity"]["bytes_per_token"], 5031.4375);
    let lengths = plan["lengths"].as_array().expect("a list");
    let tokens: Vec<_> = lengths.iter().filter_map(|length| length["tokens"].as_u64()).collect();
    assert_eq!(tokens, [1, 2, 4, 8, 16, 32, 64, 128].map(|ki| ki << 10));
    for length in lengths {
        assert_eq!(length["requests"], requests, "as many slots as the longest can use");
    }
    // With more requests, the block table is longer.
    let short = lengths[0]["requests_at_best"].as_u64().expect("a count");
    assert!((memory / (slot + 8 * block)).abs_diff(short) < 20, "{short}");
    assert_eq!(lengths[7]["requests_at_best"], requests);
}

#[test]
fn given_slots_are_kept_and_blocks_fill_the_rest() {
    let options = "--context 300000 --max-requests 3 --indexer-queries 2 --checkpoints 0";
    let plan = json(&format!("--model tiny --gpu-mem 128MiB {options}"));
    let slots = 3 * (5 * 128 * 584 + 2 * (4 + 8) * 2 * 640 * 4 + 2 * 1536 * 4);
    let working = plan["capacity"]["working_bytes"].as_u64().expect("bytes");
    // Three more buffers for splits of attention, since contexts are longer than 122,880 tokens.
    let rounding = (1 + 14 + 3 + 6) << 21;
    let indexer = plan["indexer"]["bytes"].as_u64().expect("bytes");
    let blocks = ((128 << 20) - rounding - indexer - working - slots) / (2 * 32 * 652 + 584);
    assert_eq!(plan["capacity"]["slots"], 3);
    assert_eq!(plan["capacity"]["blocks"], blocks);
    assert_eq!(plan["longest_request"], 128 * blocks + 3);
    let lengths = plan["lengths"].as_array().expect("a list");
    let (short, long) = (&lengths[0], lengths.last().expect("the context is one"));
    assert_eq!((&short["tokens"], &short["requests"]), (&1024.into(), &3.into()));
    assert_eq!((&long["tokens"], &long["requests"]), (&300_000.into(), &0.into()));
    assert_eq!(long["requests_at_best"], 0);
}

/// A device with exactly the planned bytes holds the workspace. With one byte less, one query less fits.
#[test]
fn the_indexer_takes_the_planned_bytes() {
    let model = ModelConfig::preset("flash").expect("a preset");
    for (context, queries) in [(300_000, 1), (131_072, 32), (5, 500), (1 << 20, 7)] {
        let options = format!("--context {context} --indexer-queries {queries}");
        let plan = json(&format!("--model flash --gpu-mem 40GiB {options}"));
        let bytes = plan["indexer"]["bytes"].as_u64().expect("bytes");
        let device = EmuDevice::new(EmuOptions { memory: bytes, ..EmuOptions::default() });
        let workspace = |most, bytes| {
            IndexerWorkspace::new(
                &device,
                &model,
                WorkspaceLimits { context, queries: most, bytes },
            )
            .map(|workspace| workspace.size())
        };
        let size = workspace(queries, bytes).expect("the planned bytes hold it");
        assert_eq!(serde_json::to_value(size).expect("it is plain"), plan["indexer"]);
        match workspace(queries, bytes - 1) {
            Ok(size) => assert_eq!(size.queries, queries - 1),
            Err(error) => assert!(queries == 1, "{error}"),
        }
        let _held =
            IndexerWorkspace::new(&device, &model, WorkspaceLimits { context, queries, bytes });
        assert_eq!(device.free_memory().expect("an emulated device"), 0);
    }
    let swa = r#"{"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [0, 128],
        "hidden_size": 256,
        "head_dim": 512, "qk_rope_head_dim": 64, "sliding_window": 128, "q_lora_rank": 128,
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
        "max_position_embeddings": 4096, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "compress_rope_theta": 160000, "rope_scaling": {"type": "yarn",
        "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}}"#;
    let mut file = tempfile::Builder::new().suffix(".json").tempfile().expect("a temporary file");
    file.write_all(swa.as_bytes()).expect("room for a few lines");
    let plan = json(&format!("--model {} --gpu-mem 1GiB", file.path().display()));
    assert_eq!(plan["indexer"], Value::Null, "a model without CSA layers has no indexer");
}

#[test]
fn formats_change_the_bytes() {
    let per_token = |formats: &str| {
        let plan = json(&format!("--model flash --gpu-mem 64GiB {formats}"));
        plan["capacity"]["bytes_per_token"].clone()
    };
    assert_eq!(per_token(""), 3514.25);
    assert_eq!(per_token("--index-format fp8"), 3850.25);
    assert_eq!(per_token("--main-format f32 --index-format nvfp4"), 3513.625);
}

#[test]
fn the_tables_name_every_kind_and_every_length() {
    let table = output(PRO);
    let row = |label: &str| {
        let rows: Vec<_> = table.lines().filter(|line| line.contains(label)).collect();
        assert_eq!(rows.len(), 1, "{label}:\n{table}");
        rows[0].to_string()
    };
    for (label, value) in [
        ("| sliding window ", "| 1 "),
        (" CSA ", " 4890 "),
        (" HCA ", " 141.4375 "),
        (" all ", " 5031.4375 "),
        ("memory", "180.0 GiB"),
        ("indexer workspace", "64 queries at once (12.0 MiB)"),
        ("| 131072 ", "| 1024 "),
    ] {
        let row = row(label).split_whitespace().collect::<Vec<_>>().join(" ") + " ";
        assert!(row.contains(value), "{row}");
    }
}

#[test]
fn what_does_not_fit_is_told_with_the_sizes() {
    let message = refusal("--model pro --gpu-mem 1GiB --context 1048576");
    assert!(message.contains("model pro with 1.0 GiB of memory"), "{message}");
    assert!(message.contains("1 slots of"), "{message}");
    assert!(message.contains("8192 blocks of 644024"), "{message}");
    let needed = message.split_once("the cache needs ").expect("what would be enough").1;
    let needed: u64 = needed.split_once(',').expect("a number").0.parse().expect("bytes");
    assert!((8192 * 644_024..8193 * 644_024 + (1 << 30)).contains(&needed), "{message}");
    let message = refusal("--model pro --gpu-mem 1GiB --context 1024 --max-requests 500");
    assert!(message.contains("500 slots of") && message.contains("1 blocks of"), "{message}");
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let cases = [
        ("--model pro", "--gpu-mem"),
        ("--gpu-mem 1GiB", "--model"),
        ("--model huge --gpu-mem 1GiB", "unknown model `huge`"),
        ("--model tiny --gpu-mem lots", "--gpu-mem"),
        ("--model tiny --gpu-mem 1GiB --context 0", "from 1 to 1048576"),
        ("--model tiny --gpu-mem 1GiB --context 1048577", "from 1 to 1048576"),
        ("--model tiny --gpu-mem 1GiB --max-draft 128", "from 0 to 127"),
        ("--model tiny --gpu-mem 1GiB --max-requests 0", "--max-requests"),
        ("--model tiny --gpu-mem 1GiB --indexer-queries 65536", "--indexer-queries"),
        ("--model tiny --gpu-mem 1GiB --main-format fp4", "[possible values: ue8m0, f32]"),
        ("--model tiny --gpu-mem 1GiB --index-format f32", "nvfp4, mxfp4, fp8"),
    ];
    for (options, expected) in cases {
        let message = refusal(options);
        assert!(message.contains(expected), "{options}: {message}");
    }
}

/// By default checkpoints have a third of the memory that the slots leave, and the plan shows how many requests that
/// costs. If the longest request needs all blocks, there are none.
#[test]
fn checkpoints_have_their_share() {
    let (with, without) = (json(PRO), json(&format!("{PRO} --checkpoints 0")));
    let number = |plan: &Value, name: &str| plan.pointer(name).and_then(Value::as_u64).unwrap();
    let slots = number(&without, "/capacity/slots");
    let blocks = number(&without, "/capacity/blocks");
    let block = number(&without, "/capacity/block_bytes");
    let share = blocks / 3 * block / number(&with, "/capacity/checkpoint_bytes");
    assert_eq!(number(&with, "/capacity/checkpoints"), share);
    assert_eq!(number(&with, "/requests_without_checkpoints"), slots);
    let fit = number(&with, "/capacity/slots");
    assert!((slots * 64 / 100..slots * 69 / 100).contains(&fit), "{fit} of {slots}");
    let table = output(PRO);
    let cost = format!("{fit} requests of 131072 tokens, not {slots}");
    assert!(table.contains(&cost), "{table}");
    // With 1 GiB there are checkpoints, and still the 1,024 blocks of the longest request. With 500 MiB that request
    // leaves no room for checkpoints.
    let one = json("--model flash --gpu-mem 1GiB --context 131072 --max-requests 1");
    let blocks = number(&one, "/capacity/blocks");
    assert!(number(&one, "/capacity/checkpoints") > 0 && blocks >= 1024, "{one}");
    let tight = |checkpoints: &str| {
        let options = "--model flash --gpu-mem 500MiB --context 131072 --max-requests 1";
        json(&format!("{options} {checkpoints}"))
    };
    assert_eq!(number(&tight(""), "/capacity/checkpoints"), 0);
    assert_eq!(tight("")["capacity"], tight("--checkpoints 0")["capacity"]);
}

/// A host cache takes the given pinned memory, and device memory for its staging buffers. Without checkpoints, or if it
/// is smaller than a block and a checkpoint, it is refused.
#[test]
fn a_host_cache_is_planned() {
    let options = "--model flash --gpu-mem 64GiB --context 8192 --max-requests 8 --checkpoints 64";
    let (without, with) = (json(options), json(&format!("{options} --host-cache 16GiB")));
    let number =
        |plan: &Value, pointer: &str| plan.pointer(pointer).and_then(Value::as_u64).unwrap();
    // The rows of a block in all pools, each a multiple of 16 bytes, and all together a multiple of 256.
    let unit = (number(&with, "/capacity/block_bytes") + 20 * 8).next_multiple_of(256);
    assert_eq!(number(&with, "/capacity/host_bytes"), (16 << 30) / unit * unit);
    // Two buffers of up to 16 MiB in each direction, and a job of 16 bytes for each block of a request.
    let staging = 4 * ((16 << 20) / unit).min(16) * unit + 2 * 64 * 16;
    assert_eq!(number(&with, "/capacity/staging_bytes"), staging);
    let more =
        number(&with, "/capacity/working_bytes") - number(&without, "/capacity/working_bytes");
    assert_eq!((more, number(&without, "/capacity/host_bytes")), (staging, 0));
    assert_eq!(number(&with, "/rounding") - number(&without, "/rounding"), 6 << 21);
    assert!(output(&format!("{options} --host-cache 16GiB")).contains("pinned"));
    let refused = refusal("--model flash --gpu-mem 64GiB --checkpoints 0 --host-cache 16GiB");
    assert!(refused.contains("--host-cache 16.0 GiB needs --checkpoints"), "{refused}");
    let refused = refusal(&format!("{options} --host-cache 1MiB"));
    assert!(refused.contains("host_bytes is 1048576"), "{refused}");
}
