//! Maps the names in a file to released names. Only this module knows transformers' names.
//!
//! transformers writes released names with the prefix `model.` (except for the head), and changes some of them
//! ([`WHOLE`], [`ENDS`]). Names of transformers' modules ([`PARTS`]) are accepted too, since converters write those.

/// Whole names without `model.`, and their released names.
const WHOLE: [(&str, &str); 5] = [
    ("embed_tokens.weight", "embed.weight"),
    ("lm_head.weight", "head.weight"),
    ("hc_head.hc_fn", "hc_head_fn"),
    ("hc_head.hc_base", "hc_head_base"),
    ("hc_head.hc_scale", "hc_head_scale"),
];

/// Suffixes of names, and their released forms. The first that matches is replaced.
const ENDS: [(&str, &str); 3] = [
    (".attn.norm.weight", ".attn.kv_norm.weight"),
    (".compressor.kv_norm.weight", ".compressor.norm.weight"),
    // The name that compressed-tensors gives to codes, two per byte.
    (".weight_packed", ".weight"),
];

/// Parts of transformers' module names, between dots, and their replacements, applied in this order.
const PARTS: [(&str, &str); 27] = [
    ("self_attn", "attn"),
    ("mlp", "ffn"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("attn_hc.fn", "hc_attn_fn"),
    ("attn_hc.base", "hc_attn_base"),
    ("attn_hc.scale", "hc_attn_scale"),
    ("ffn_hc.fn", "hc_ffn_fn"),
    ("ffn_hc.base", "hc_ffn_base"),
    ("ffn_hc.scale", "hc_ffn_scale"),
    ("attn.sinks", "attn.attn_sink"),
    ("q_a_norm", "q_norm"),
    ("compressor.indexer.q_b_proj", "indexer.wq_b"),
    ("compressor.indexer.scorer.weights_proj", "indexer.weights_proj"),
    ("compressor.indexer.kv_norm", "indexer.compressor.norm"),
    ("compressor.indexer", "indexer.compressor"),
    ("shared_experts.gate_proj", "shared_experts.w1"),
    ("shared_experts.down_proj", "shared_experts.w2"),
    ("shared_experts.up_proj", "shared_experts.w3"),
    ("position_bias", "ape"),
    ("q_a_proj", "wq_a"),
    ("q_b_proj", "wq_b"),
    ("kv_proj", "wkv"),
    ("gate_proj", "wgate"),
    ("o_a_proj", "wo_a"),
    ("o_b_proj", "wo_b"),
    ("gate.e_score_correction_bias", "gate.bias"),
];

/// The released name of a file's tensor.
pub(crate) fn released(name: &str) -> String {
    let name = name.strip_prefix("model.").unwrap_or(name);
    if let Some((_, released)) = WHOLE.iter().find(|(whole, _)| *whole == name) {
        return (*released).to_owned();
    }
    // With dots at both ends every part lies between two dots.
    let mut dotted = format!(".{name}.");
    for (part, replacement) in PARTS {
        dotted = dotted.replace(&format!(".{part}."), &format!(".{replacement}."));
    }
    let name = &dotted[1..dotted.len() - 1];
    match ENDS.iter().find_map(|(end, released)| Some((name.strip_suffix(end)?, released))) {
        Some((start, released)) => format!("{start}{released}"),
        None => name.to_owned(),
    }
}

/// A tensor in which transformers merges one or two weights of all experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Merged {
    /// `[experts, 2 * intermediate, hidden]`: rows of `w1`, then of `w3`.
    GateUp,
    /// `[experts, hidden, intermediate]`: `w2`.
    Down,
}

/// If a released name is that of a merged tensor: the name up to and including `.experts.`, and which weights are
/// merged.
pub(crate) fn merged(released: &str) -> Option<(&str, Merged)> {
    let experts = |end, merged| Some((released.strip_suffix(end)?, merged));
    experts("gate_up_proj", Merged::GateUp)
        .or_else(|| experts("down_proj", Merged::Down))
        .filter(|(start, _)| start.ends_with(".ffn.experts."))
}
