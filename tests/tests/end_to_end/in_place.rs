//! `whole_model` and `same_bits` with attention on the device, directly over the stored rows.

use dsv4_kv::device::{Backend, Device};
use libtest_mimic::Failed;

use crate::reference::Reference;
use crate::{same_bits, whole_model};

/// Greedy decoding gives the reference's tokens.
pub fn decodes_the_same_tokens<B: Backend>(
    device: &Device<B>,
    reference: &Reference,
) -> Result<(), Failed> {
    whole_model::decodes_the_same_tokens(device, &reference.in_place())
}

/// Logits are within the bounds of BF16.
pub fn logits<B: Backend>(device: &Device<B>, reference: &Reference) -> Result<(), Failed> {
    whole_model::logits(device, &reference.in_place())
}

/// For the reference's tokens, logits are within the bounds of BF16.
pub fn reference_tokens<B: Backend>(
    device: &Device<B>,
    reference: &Reference,
) -> Result<(), Failed> {
    same_bits::reference_tokens(device, &reference.in_place())
}

/// In batches and chunks a request has the bits that it has alone.
pub fn batches<B: Backend>(device: &Device<B>, reference: &Reference) -> Result<(), Failed> {
    same_bits::batches(device, &reference.in_place())
}

/// Drafts that are rejected leave no trace.
pub fn drafts<B: Backend>(device: &Device<B>, reference: &Reference) -> Result<(), Failed> {
    same_bits::drafts(device, &reference.in_place())
}

/// Drafts by prompt lookup change no token.
pub fn prompt_lookup<B: Backend>(device: &Device<B>, reference: &Reference) -> Result<(), Failed> {
    same_bits::prompt_lookup(device, &reference.in_place())
}

/// Graphs give the bits of single launches.
pub fn graphs<B: Backend>(device: &Device<B>, reference: &Reference) -> Result<(), Failed> {
    same_bits::graphs(device, &reference.in_place())
}
