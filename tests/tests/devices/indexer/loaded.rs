//! Weights of the indexer and of the compressors, loaded from a checkpoint: exact; those of the indexer padded with
//! zeros.

use dsv4_kv::device::{Backend, Device, Stream};
use dsv4_kv::ops::{self, IndexQueries, QueryProduct, StepQueries};
use dsv4_kv::rope::compress_frequencies;
use dsv4_kv::{CompressorWeights, CsaIndexer, KvError, QueryWeight};
use dsv4_kv_linear::ops::{Bf16Weight, multiply_bf16};
use dsv4_kv_linear::{Nvfp4Linear, Nvfp4Matrix};
use dsv4_kv_model_files::ModelFileError;
use dsv4_kv_tests::model_files::{Made, config, one_file, tensors};
use half::bf16;
use kv_layout::config::CompressRope;
use kv_layout::format::E4m3;
use kv_layout::geometry::CompressorKind;
use kv_layout::index_row::IndexFormat;
use safetensors::Dtype;

use crate::inputs::{download, upload, upload_bf16};

/// A CSA layer of the configuration. Layers 1 and 3 are CSA layers, layer 2 is an HCA layer.
const LAYER: u32 = 1;
const HEADS: usize = 64;
const LATENT: usize = 48;
const HIDDEN: usize = 96;
/// Padded columns: the next multiple of 32. A hidden size of 96 is one already.
const PADDED_LATENT: usize = 64;
const PADDED: usize = 96;

/// Codes of E4M3 values other than NaN, scales from 2^-7 to 2^8, one for 128 rows, and the values of both.
fn quantised() -> (Made, Made, Vec<f32>) {
    let codes: Vec<u8> = (0..HEADS * 128 * LATENT).map(|at| (at * 31 % 127) as u8).collect();
    let scales: Vec<u8> = (0..HEADS).map(|block| 120 + (block % 16) as u8).collect();
    let value = |(at, &code): (usize, &u8)| {
        let power = i32::from(scales[at / LATENT / 128]) - 127;
        E4m3(code).to_f32() * 2_f32.powi(power)
    };
    let values = codes.iter().enumerate().map(value).collect();
    let codes = Made::new(Dtype::F8_E4M3, &[HEADS * 128, LATENT], codes);
    (codes, Made::new(Dtype::F8_E8M0, &[HEADS, 1], scales), values)
}

/// Asserts that `found` has rows of `values`, and zeros after each row.
fn assert_padded(found: &[bf16], values: &[f32], [columns, padded]: [usize; 2]) {
    assert_eq!(found.len(), values.len() / columns * padded);
    for (found, values) in found.chunks(padded).zip(values.chunks(columns)) {
        assert!(found[..columns].iter().map(|value| value.to_f32()).eq(values.iter().copied()));
        assert!(found[columns..].iter().all(|value| value.to_bits() == 0));
    }
}

pub fn an_indexer_is_exact_and_padded<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let (codes, scales, query) = quantised();
    let head: Vec<f32> = (0..HEADS * HIDDEN).map(|at| (at % 251) as f32 - 125.0).collect();
    let prefix = "layers.1.attn.indexer";
    let written = tensors([
        (&format!("{prefix}.wq_b.weight"), codes),
        (&format!("{prefix}.wq_b.scale"), scales),
        (&format!("model.{prefix}.weights_proj.weight"), Made::bf16(&[HEADS, HIDDEN], &head)),
    ]);
    let mut wide = config();
    (wide["q_lora_rank"], wide["hidden_size"]) = (LATENT.into(), HIDDEN.into());
    let model_files = one_file(&wide, &written);
    let indexer = CsaIndexer::of_layer(&stream, &model_files, LAYER).unwrap();
    let columns = [indexer.latent_columns(), indexer.hidden_columns()];
    assert_eq!(columns, [PADDED_LATENT as u32, PADDED as u32]);
    let QueryWeight::Bf16(weight) = indexer.query_weight() else { panic!("no weight in BF16") };
    assert_padded(&download(&stream, weight), &query, [LATENT, PADDED_LATENT]);
    assert_padded(&download(&stream, indexer.head_weight()), &head, [HIDDEN, PADDED]);
    // Padding does not change a product: it equals that of the unpadded weight.
    let mut input = vec![bf16::ZERO; PADDED];
    (0..HIDDEN).for_each(|at| input[at] = bf16::from_f32((at % 7) as f32 - 3.0));
    let output = device.allocate("products", HEADS as u64).unwrap();
    let (values, inner) = (indexer.head_weight(), indexer.hidden_columns());
    let weight = Bf16Weight { values, columns: HEADS as u32, inner };
    multiply_bf16(&stream, weight, &upload(&stream, &input), 1, &output).unwrap();
    let product = |row: &[f32]| row.iter().zip(&input).map(|(w, x)| w * x.to_f32()).sum::<f32>();
    let products: Vec<f32> = head.chunks(HIDDEN).map(product).collect();
    assert_eq!(download(&stream, &output), products, "sums of integers are exact");
    let error = CsaIndexer::of_layer(&stream, &model_files, 2).err().expect("an HCA layer");
    let missing = matches!(&error, KvError::ModelFile(error)
        if matches!(&**error, ModelFileError::Missing { name } if name.starts_with("layers.2.")));
    assert!(missing, "{error}");
}

/// A query weight in NVFP4 keeps its bytes from the checkpoint to the device, in the spelling of either tool.
pub fn an_indexer_in_nvfp4_stays_so<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let codes: Vec<u8> = (0..HEADS * 128 * LATENT / 2).map(|at| (at * 41 % 256) as u8).collect();
    let scales: Vec<u8> = (0..HEADS * 128 * LATENT / 16).map(|at| (at * 7 % 127) as u8).collect();
    let pad = |bytes: &[u8], of: usize| -> Vec<u8> {
        let rows = bytes.chunks_exact(LATENT / of);
        rows.flat_map(|row| [row, &vec![0; (PADDED_LATENT - LATENT) / of]].concat()).collect()
    };
    let [columns, inner] = [HEADS * 128, PADDED_LATENT].map(|extent| extent as u32);
    let (padded, groups) = (pad(&codes, 2), pad(&scales, 16));
    let matrix = Nvfp4Matrix::from_parts(columns, inner, padded, groups, 0.125).unwrap();
    let expected = Nvfp4Linear::new(&stream, &matrix).unwrap();
    let prefix = "layers.1.attn.indexer";
    let head = Made::bf16(&[HEADS, HIDDEN], &vec![1.0; HEADS * HIDDEN]);
    let mut wide = config();
    (wide["q_lora_rank"], wide["hidden_size"]) = (LATENT.into(), HIDDEN.into());
    // ModelOpt multiplies by the global scale, compressed-tensors divides by it.
    for (weight, last, value) in
        [("weight", "weight_scale_2", 0.125), ("weight_packed", "weight_global_scale", 8.0)]
    {
        let written = tensors([
            (
                &format!("{prefix}.wq_b.{weight}"),
                Made::new(Dtype::U8, &[HEADS * 128, LATENT / 2], codes.clone()),
            ),
            (
                &format!("{prefix}.wq_b.weight_scale"),
                Made::new(Dtype::F8_E4M3, &[HEADS * 128, LATENT / 16], scales.clone()),
            ),
            (&format!("{prefix}.wq_b.{last}"), Made::f32(&[1], &[value])),
            (&format!("{prefix}.weights_proj.weight"), head.clone()),
        ]);
        let indexer = CsaIndexer::of_layer(&stream, &one_file(&wide, &written), LAYER).unwrap();
        let QueryWeight::Nvfp4(found) = indexer.query_weight() else { panic!("no NVFP4: {last}") };
        assert_eq!(found.scale().to_bits(), expected.scale().to_bits(), "{last}");
        for (found, expected) in
            [(found.codes(), expected.codes()), (found.scales(), expected.scales())]
        {
            assert!(download(&stream, found) == download(&stream, expected), "{last}");
        }
        assert_eq!(queries(&stream, found), queries(&stream, &expected), "{last}");
    }
}

/// The bytes of the quantised queries of three tokens, computed with a weight.
fn queries<B: Backend>(stream: &Stream<B>, weight: &Nvfp4Linear<B>) -> Vec<u8> {
    let latent: Vec<u16> = (0..3 * PADDED_LATENT)
        .map(|at| {
            bf16::from_f32(if at % PADDED_LATENT < LATENT { (at % 23) as f32 - 9.0 } else { 0.0 })
                .to_bits()
        })
        .collect();
    let (slot, position) = (upload(stream, &[0, 1, 2]), upload(stream, &[5, 700, 81]));
    let query = upload(stream, &vec![0_u8; 3 * IndexFormat::MAX_QUERY_BYTES as usize]);
    let product = QueryProduct {
        queries: &StepQueries {
            position: &position,
            slot: &slot,
            index: &slot,
            first: 0,
            count: 3,
        },
        latent: &upload_bf16(stream, &latent),
        weight,
        projected_weight: &upload(stream, &vec![1.0_f32; 3 * HEADS]),
        frequencies: &upload(stream, &compress_frequencies(&CompressRope::RELEASED)),
        format: IndexFormat::Mxfp4,
        to: &IndexQueries {
            query: &query,
            weight: &upload(stream, &vec![0.0_f32; 3 * HEADS]),
            heads: HEADS as u32,
        },
    };
    ops::nvfp4_index_query(stream, &product).unwrap();
    let found = download(stream, &query);
    assert!(found.iter().any(|&byte| byte != 0));
    found
}

pub fn compressors_are_loaded<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let of = |count: usize, first: usize| -> Vec<f32> {
        (0..count).map(|at| ((at + first) % 100) as f32 / 4.0).collect()
    };
    let kinds = [
        (CompressorKind::CsaMain, 1, "layers.1.attn.compressor", [4, 1024, 512]),
        (CompressorKind::CsaIndex, 1, "layers.1.attn.indexer.compressor", [4, 256, 128]),
        (CompressorKind::Hca, 2, "layers.2.attn.compressor", [128, 512, 512]),
    ];
    let mut written = tensors([]);
    for (_, layer, prefix, [ratio, columns, channels]) in kinds {
        let ape = Made::f32(&[ratio, columns], &of(ratio * columns, layer));
        let norm = Made::bf16(&[channels], &of(channels, layer + 7));
        written.extend([(format!("{prefix}.ape"), ape), (format!("{prefix}.norm.weight"), norm)]);
    }
    let model_files = one_file(&config(), &written);
    for (kind, layer, _, [ratio, columns, channels]) in kinds {
        let loaded =
            CompressorWeights::of_layer(&stream, &model_files, layer as u32, kind).unwrap();
        assert_eq!(download(&stream, &loaded.ape), of(ratio * columns, layer));
        assert_eq!(download(&stream, &loaded.norm), of(channels, layer + 7));
        assert_eq!(loaded.memory().len(), 2);
    }
    let wrong = CompressorWeights::of_layer(&stream, &model_files, 2, CompressorKind::CsaMain);
    let error = wrong.err().expect("an HCA layer");
    let shape = matches!(&error, KvError::ModelFile(error)
        if matches!(&**error, ModelFileError::Shape { expected, .. } if expected == &[4, 1024]));
    assert!(shape, "{error}");
}
