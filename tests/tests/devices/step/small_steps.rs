//! Long requests in a cache for small steps. Copies between steps use the memory of its StepMeta, which has no room for
//! all blocks of such a request at once.

use std::ops::Range;

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::{CacheConfig, LayerGroup, Prompt, RequestId};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

use super::told::{self, Cut, Told, admit, assert_table, same, settings};
use crate::fed::Fed;
use crate::stories::{STEP_TOKENS, Story, tiny};

const FORMATS: (MainFormat, IndexFormat) = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
/// Tokens of a request when it arrives, is forked, or is resumed: 22 blocks.
const PROMPT: usize = 2700;
/// Tokens of the request in the end.
const TOKENS: usize = 2720;

fn cache<B: Backend>(device: &Device<B>, max_step_tokens: u32, num_blocks: u32) -> Fed<B> {
    let base = settings(0, 2, 0);
    let (max_context, max_requests, max_suspended) = (22 * 128, 2, 1);
    let sizes = CacheConfig { max_step_tokens, max_context, num_blocks, ..base };
    told::fed(device, CacheConfig { max_requests, max_suspended, ..sizes })
}

/// All blocks are entered into the device's table for a request that arrived, a fork, a resumed request, and one that
/// continues from a prefix. Each continues with the bytes of the oracle.
pub fn long_tables_are_entered<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), TOKENS, 441);
    let (stored, told) = (story.stored(device, FORMATS), Told::of(&[(0, &story, TOKENS)]));
    let ids = told.ids();
    let prompt = Prompt { tokens: &ids[..PROMPT], salt: b"", adapter: b"" };
    let mut source = cache(device, STEP_TOKENS, 22);
    let mut staging = source.manager.new_transfer_staging().unwrap();
    let stream = source.stream.clone();
    let id = source.manager.admit_with(&stream, &prompt).unwrap().id;
    told::compute_to(&mut source, id, &told, 0..PROMPT, Cut::Chunks(STEP_TOKENS as usize));
    let mut export = source.manager.export(&stream, &mut staging, id).unwrap();
    let at = export.positions();
    let mut request = vec![0; export.layout().bytes(at) as usize];
    export.all(&mut request).unwrap();
    let mut export = source.manager.export_prefix(&stream, &mut staging, &prompt).unwrap().unwrap();
    let (prefix_at, tokens) = (export.positions(), export.prompt().tokens.to_vec());
    let mut prefix = vec![0; export.layout().prefix_bytes(prefix_at) as usize];
    export.all(&mut prefix).unwrap();

    let mut fed = cache(device, 2, 70);
    let stream = fed.stream.clone();
    // Each block takes two words, besides those of the copies.
    let room = fed.manager.writable_step_meta(LayerGroup::Trunk).unwrap().len();
    assert!(room < 2 * 21, "{room} words have no room for 21 blocks");
    let goes_on = |fed: &mut Fed<B>, id: RequestId, tokens: Range<usize>| {
        assert_table(fed, id);
        told::compute_to(fed, id, &told, tokens, Cut::Chunks(2));
        assert_table(fed, id);
        told::bytes(fed, id, TOKENS)
    };
    let mut staging = fed.manager.new_transfer_staging().unwrap();
    let came = fed.manager.import(&stream, &mut staging, (at, &request)).unwrap();
    let fork = fed.manager.fork(&stream, came).unwrap();
    assert_table(&fed, fork);
    let alone = goes_on(&mut fed, came, PROMPT..TOKENS);
    fed.assert_holds(came, &story, &stored, TOKENS);
    let suspended = fed.manager.suspend(&stream, fork).unwrap();
    fed.manager.release(came).unwrap();
    // Changes the rows of both slots, so that they name other blocks.
    let mut occupy = |fed: &mut Fed<B>| {
        let mut import = || fed.manager.import(&stream, &mut staging, (at, &request)).unwrap();
        [import(), import()].into_iter().for_each(|id| fed.manager.release(id).unwrap());
    };
    occupy(&mut fed);
    let resumed = fed.manager.resume(&stream, suspended).unwrap();
    let fork = fed.manager.fork(&stream, resumed).unwrap();
    same(&goes_on(&mut fed, resumed, PROMPT..TOKENS), &alone, "resumed");
    same(&goes_on(&mut fed, fork, PROMPT..TOKENS), &alone, "a fork");
    for id in [resumed, fork] {
        fed.manager.release(id).unwrap();
    }
    let entered = Prompt { tokens: &tokens, ..prompt };
    let mut second = fed.manager.new_transfer_staging().unwrap();
    let entered = fed.manager.import_prefix(&stream, &mut second, &entered, (prefix_at, &prefix));
    assert_eq!(entered.unwrap().map(|entered| entered.blocks), Some(21));
    occupy(&mut fed);
    let admission = admit(&mut fed, &told, b"");
    assert_eq!(admission.reused, 21 * 128);
    same(&goes_on(&mut fed, admission.id, 21 * 128..TOKENS), &alone, "behind a prefix");
}
