//! Damaged and malformed files are refused with a reason, and never cause a panic.

use std::fs;

use dsv4_kv_model_files::{ModelFileError, ModelFiles};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;

use dsv4_kv_tests::model_files::{
    Made, Tensors, config, directory, refusal, serialized, sharded, tensors,
};

/// A file with a tensor of each type and with merged experts.
fn small() -> Tensors {
    tensors([
        ("model.embed_tokens.weight", Made::bf16(&[2, 2], &[1.0, 2.0, 3.0, 4.0])),
        ("layers.0.ffn.experts.gate_up_proj", Made::bf16(&[2, 2, 1], &[1.0, 2.0, 3.0, 4.0])),
        ("layers.0.ffn.gate.tid2eid", Made::i64(&[2], &[1, 2])),
        ("w.weight", Made::new(Dtype::F8_E4M3, &[1, 2], vec![0x11, 0x22])),
        ("w.scale", Made::new(Dtype::F8_E8M0, &[1, 1], vec![0x7F])),
        ("x.weight", Made::new(Dtype::I8, &[1, 2], vec![0x11, 0x22])),
        ("x.scale", Made::new(Dtype::F8_E8M0, &[1, 1], vec![0x7F])),
    ])
}

/// Opens a checkpoint, and reads each tensor in every way that exists.
fn read_all(directory: &TempDir) -> Result<(), ModelFileError> {
    let model_files = ModelFiles::open(directory.path())?;
    for name in model_files.names() {
        let shape = model_files.shape(name).expect("it is there");
        let doubled: Vec<u64> = match shape[..] {
            [rows, columns] => vec![rows, columns.wrapping_mul(2)],
            _ => shape.clone(),
        };
        for shape in [&shape, &doubled] {
            let results = [
                model_files.f32(name, shape).err(),
                model_files.bf16(name, shape).err(),
                model_files.i64(name, shape).err(),
            ];
            assert!(results.into_iter().flatten().all(|error| !error.to_string().is_empty()));
        }
    }
    Ok(())
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = serialized(&small());
    read_all(&directory(&config(), &[("model.safetensors", &whole)])).expect("the whole file");
    for length in 0..whole.len() {
        let error =
            refusal(directory(&config(), &[("model.safetensors", &whole[..length])]).path());
        let right = matches!(error, ModelFileError::Corrupt { .. } | ModelFileError::Length { .. });
        assert!(right, "{length} bytes: {error}");
    }
    let mut longer = whole.clone();
    longer.push(0);
    let error = refusal(directory(&config(), &[("model.safetensors", &longer)]).path());
    assert!(matches!(error, ModelFileError::Length { .. }), "{error}");
}

/// 2,000 files with changed bytes in the header, and with numbers in it replaced by extreme ones: each is opened and
/// read, or refused.
#[test]
fn damaged_headers_never_panic() {
    let whole = serialized(&small());
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut random = StdRng::seed_from_u64(11);
    let directory = directory(&config(), &[]);
    let path = directory.path().join("model.safetensors");
    let mut opened = 0;
    for _ in 0..2000 {
        let mut bytes = whole.clone();
        for _ in 0..random.random_range(1..4) {
            let at = random.random_range(0..header);
            bytes[at] = match random.random_range(0..3) {
                0 => random.random(),
                1 => b"0123456789[],:\"{}"[random.random_range(0..17)],
                _ => whole[random.random_range(0..header)],
            };
        }
        fs::write(&path, &bytes).unwrap();
        opened += u32::from(read_all(&directory).is_ok());
    }
    // Changed names and metadata leave a readable file.
    assert!((20..1980).contains(&opened), "{opened}");
}

#[test]
fn extreme_numbers_in_headers() {
    let file = |tensors: Value| {
        let header = tensors.to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend([0; 16]);
        read_all(&directory(&config(), &[("model.safetensors", &bytes)]))
    };
    let tensor = |dtype: &str, shape: Value, offsets: Value| json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets });
    let large = 1_u64 << 61;
    let mut chain = serde_json::Map::new();
    for at in 0..7 {
        chain.insert(
            format!("t{at}"),
            tensor("U8", json!([large - 1]), json!([at * (large - 1), (at + 1) * (large - 1)])),
        );
    }
    for (name, tensors) in [
        ("a chain to 2^64", Value::Object(chain)),
        ("huge", json!({ "a": tensor("U8", json!([u64::MAX]), json!([0, u64::MAX])) })),
        ("product overflows", json!({ "a": tensor("F32", json!([large, large]), json!([0, 16])) })),
        ("backwards", json!({ "a": tensor("U8", json!([16]), json!([16, 0])) })),
        ("a gap", json!({ "a": tensor("U8", json!([8]), json!([8, 16])) })),
        ("type", json!({ "a": tensor("F77", json!([16]), json!([0, 16])) })),
    ] {
        let error = file(tensors).expect_err(name);
        let right = matches!(error, ModelFileError::Corrupt { .. } | ModelFileError::Length { .. });
        assert!(right, "{name}: {error}");
    }
    // A huge number of empty experts: they are not split.
    let name = "layers.0.ffn.experts.down_proj";
    file(json!({
        name: tensor("BF16", json!([1_u64 << 40, 0, 0]), json!([0, 0])),
        "a": tensor("U8", json!([16]), json!([0, 16])),
    }))
    .expect("a file");
}

#[test]
fn an_index_names_files_beside_it() {
    let first = tensors([("a", Made::f32(&[1], &[1.0]))]);
    let open = |map: Value| refusal(sharded(&[("one.safetensors", &first)], &map).path());
    for shard in [
        "../one.safetensors",
        "/etc/passwd",
        "x/one.safetensors",
        "..",
        ".",
        "",
        "one.safetensors/",
    ] {
        let error = open(json!({ "a": shard }));
        assert!(
            matches!(&error, ModelFileError::OutsideDirectory { shard: found, .. } if found == shard),
            "{shard}: {error}"
        );
    }
    let error = open(json!({ "a": "one.safetensors", "b": "two.safetensors" }));
    assert!(
        matches!(&error, ModelFileError::NoShard { shard, .. } if shard == "two.safetensors"),
        "{error}"
    );
    for map in [json!({ "a": 7 }), json!([]), json!({}), Value::Null] {
        let error = open(map);
        assert!(matches!(error, ModelFileError::Index { .. }), "{error}");
    }
    let directory = directory(&config(), &[("model.safetensors.index.json", b"{")]);
    assert!(matches!(refusal(directory.path()), ModelFileError::Index { .. }));
}

/// transformers reads the single file, vLLM the files of the index: the two have to be of one checkpoint.
#[test]
fn a_single_file_beside_an_index_is_one_of_its_files() {
    let [of_index, single] = ["a", "b"].map(|name| tensors([(name, Made::f32(&[1], &[1.0]))]));
    let shards = [("one.safetensors", &of_index), ("model.safetensors", &single)];
    let error = refusal(sharded(&shards, &json!({ "a": "one.safetensors" })).path());
    assert!(
        matches!(&error, ModelFileError::Index { reason, .. } if reason.contains("model.safetensors is beside")),
        "{error}"
    );
    let both = sharded(&shards, &json!({ "a": "one.safetensors", "b": "model.safetensors" }));
    let model_files = ModelFiles::open(both.path()).expect("a checkpoint of two shards");
    assert!(["a", "b"].iter().all(|name| model_files.contains(name)));
    let files = ModelFiles::files(both.path()).expect("its files");
    assert_eq!(files.len(), 4, "config.json, the index and two shards: {files:?}");
}

/// A link that leads nowhere stands for a file that the checkpoint had: without it, it would be read as another one.
#[cfg(unix)]
#[test]
fn a_link_to_nothing_is_refused_by_name() {
    let weights = serialized(&small());
    let single = ("model.safetensors", &weights[..]);
    for (name, files) in [
        ("generation_config.json", &[single][..]),
        ("model.safetensors.index.json", &[single]),
        ("model.safetensors", &[]),
    ] {
        let directory = directory(&config(), files);
        std::os::unix::fs::symlink("nowhere", directory.path().join(name)).unwrap();
        let error = refusal(directory.path());
        assert!(
            matches!(&error, ModelFileError::File { path, .. } if path.ends_with(name)),
            "{name}: {error}"
        );
    }
}

#[test]
fn a_directory_without_what_it_needs() {
    let empty = tempfile::tempdir().unwrap();
    let error = refusal(empty.path());
    assert!(
        matches!(&error, ModelFileError::File { path, .. } if path.ends_with("config.json")),
        "{error}"
    );
    assert!(matches!(refusal(directory(&config(), &[]).path()), ModelFileError::NoWeights { .. }));
    assert!(matches!(refusal(&empty.path().join("nowhere")), ModelFileError::File { .. }));
    let wrong = directory(&config(), &[("config.json", b"{\"hidden_size\": 7}")]);
    let error = refusal(wrong.path());
    assert!(matches!(&error, ModelFileError::Config { .. }), "{error}");
    let long = directory(&config(), &[("config.json", &vec![b' '; (1 << 20) + 1])]);
    assert!(matches!(refusal(long.path()), ModelFileError::TooLarge { .. }));
    let not_text = directory(&config(), &[("config.json", &[0xFF, 0xFE])]);
    assert!(matches!(refusal(not_text.path()), ModelFileError::File { .. }));
}
