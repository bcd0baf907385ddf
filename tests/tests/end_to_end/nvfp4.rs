//! A model whose indexers have their query projections in NVFP4, compared with the same model with the decoded values
//! in BF16.

use std::sync::Arc;

use anyhow::{Result, ensure};
use dsv4_kv::device::{Backend, Device};
use dsv4_kv::{IndexerWeights, QueryValues};
use dsv4_kv_linear::Nvfp4Matrix;
use dsv4_kv_model::Model;
use dsv4_kv_model::layer::Compressed;
use dsv4_kv_model::sample::GREEDY;
use dsv4_kv_model::sequence::Continuation;
use half::bf16;
use libtest_mimic::Failed;

use crate::reference::Reference;
use crate::run::{Cut, Recorder, Run, Silent};

/// The part of the lists that may differ: the two products add in different orders.
const OTHER_LISTS: f64 = 0.02;

/// Both models generate the same tokens, and the same lists except for near ties.
pub fn decodes_as_its_values_in_bf16<B: Backend>(
    device: &Device<B>,
    reference: &Reference,
) -> Result<(), Failed> {
    let (four_bits, decoded) = models(&reference.model)?;
    let [found, expected] = [four_bits, decoded].map(|model| outcome(device, reference, model));
    let ((tokens, lists), (same_tokens, same_lists)) = (found?, expected?);
    let other = lists.iter().zip(&same_lists).filter(|(found, expected)| found != expected).count();
    println!("{}: {other} of {} lists differ", reference.name, lists.len());
    if tokens != same_tokens || other as f64 > lists.len() as f64 * OTHER_LISTS {
        return Err(
            format!("{tokens:?} and {same_tokens:?}; {other} of {} lists", lists.len()).into()
        );
    }
    Ok(())
}

/// The model with query projections in NVFP4, and the model with their decoded values, which are exact in BF16.
fn models(model: &Model) -> Result<(Model, Model)> {
    let (mut four_bits, mut decoded) = (model.clone(), model.clone());
    let inner = model.config.cache.q_lora_rank;
    let columns = model.config.cache.index_heads * 128;
    for (layer, other) in four_bits.layers.iter_mut().zip(&mut decoded.layers) {
        let (Compressed::Csa(csa), Compressed::Csa(other)) =
            (&mut layer.compressed, &mut other.compressed)
        else {
            continue;
        };
        let QueryValues::Bf16(values) = &csa.indexer.query else { continue };
        let matrix = Nvfp4Matrix::quantise(values, columns, inner)?;
        // With a power of two as the scale of the whole matrix every decoded value is exact in BF16.
        let (codes, scales) = (matrix.codes().to_vec(), matrix.scales().to_vec());
        let scale = f32::from_bits(matrix.scale().to_bits() & 0x7F80_0000);
        let matrix = Nvfp4Matrix::from_parts(columns, inner, codes, scales, scale)?;
        let values: Vec<bf16> = matrix.decode().into_iter().map(bf16::from_f32).collect();
        let is_exact =
            values.iter().zip(matrix.decode()).all(|(bf16, value)| bf16.to_f32() == value);
        ensure!(is_exact, "a product that BF16 does not hold");
        other.indexer.query = QueryValues::Bf16(values);
        let IndexerWeights { query, .. } = &mut csa.indexer;
        *query = QueryValues::Nvfp4(matrix);
    }
    Ok((four_bits, decoded))
}

/// The tokens that a model generates for the first prompt, and the sorted lists of all tokens of its request.
fn outcome<B: Backend>(
    device: &Device<B>,
    reference: &Reference,
    model: Model,
) -> Result<(Vec<u32>, Vec<Vec<i32>>)> {
    let reference = reference.mutated(Arc::new(model));
    let request = reference.request(0);
    let mut run = Run::new(device, &reference, 1, request.len())?;
    let mut seen = Recorder::new(None);
    run.feed(std::slice::from_ref(&request), Cut::Whole, &mut seen)?;
    let mut lists: Vec<_> = seen.seen.into_iter().collect();
    lists.sort_by_key(|(place, _)| *place);
    let lists = lists.into_iter().map(|(_, seen)| seen.selected).filter(|list| !list.is_empty());
    let sorted = |mut list: Vec<i32>| {
        list.sort_unstable();
        list
    };
    let lists = lists.map(sorted).collect();
    run.engine.release(run.ids[0])?;
    let prompt = &request[..reference.prompt];
    let continuation = Continuation {
        sampling: GREEDY,
        max_tokens: request.len() - prompt.len(),
        end: Vec::new(),
        drafts: 0,
        top_logprobs: 0,
        prompt_logits: false,
    };
    Ok((run.engine.generate(prompt, continuation, 64, &mut Silent)?.tokens, lists))
}
