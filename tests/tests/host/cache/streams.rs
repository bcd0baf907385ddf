//! Copies between steps that are queued in other streams than the steps, on a device that defers its work. They wait
//! for the last step of each layer group and for each other, and the next steps wait for them.

use std::ops::Range;

use dsv4_kv::device::{Device, EmuOptions, Emulator, Stream};
use dsv4_kv::schema::PoolUnit;
use dsv4_kv::{Accepted, CacheConfig, Launches, LayerGroup, RequestId};
use dsv4_kv_tests::fed::{Fed, Part};
use dsv4_kv_tests::lazy::Lazy;
use dsv4_kv_tests::stories::{Formats, Stored, Story, config, tiny};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

type Late = Lazy<Emulator>;

const FORMATS: Formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
/// Tokens of a request before it is copied, and after the next step.
const TOKENS: usize = 131;
const NEXT: usize = 136;

/// A cache of a model with a draft layer, and two streams for copies.
struct Cache {
    /// The cache. Steps of the trunk are queued in its stream.
    fed: Fed<Late>,
    /// The stream of the draft layer's steps.
    draft: Stream<Late>,
    copies: [Stream<Late>; 2],
    story: Story,
    stored: Vec<Stored>,
}

impl Cache {
    fn new() -> Self {
        let device: Device<Late> = Lazy::emulated(EmuOptions::default());
        let base = config(&tiny(), FORMATS, 3);
        assert_eq!(base.model.mtp_layers, 1, "it has a draft layer");
        let settings = CacheConfig { num_checkpoints: 1, max_suspended: 1, max_draft: 3, ..base };
        let fed = Fed::new(&device, settings);
        // The slots and blocks must be poisoned before another stream reads them.
        fed.stream.synchronize().unwrap();
        let [draft, first, second] = [(); 3].map(|()| device.stream().unwrap());
        let story = Story::random(&tiny(), NEXT, 71);
        let stored = story.stored(&device, FORMATS);
        Self { fed, draft, copies: [first, second], story, stored }
    }

    /// Runs a step of each group in the group's stream. It overwrites the tensors of the last step, which must have
    /// been read.
    fn step(&mut self, id: RequestId, tokens: Range<usize>) {
        self.draft.synchronize().unwrap();
        let part = Part::new(id, &self.story, tokens);
        let request = part.request();
        let Fed { manager, stream, inputs } = &mut self.fed;
        inputs.load(stream, &[part], request.tokens);
        for (group, stream) in LayerGroup::ALL.into_iter().zip([&*stream, &self.draft]) {
            let mut group = manager.group(group).unwrap();
            let mut step = group.begin_step(stream, Launches::Eager, &[request]).unwrap();
            inputs.run(&mut step, &mut |_, _| Ok(())).unwrap();
            step.commit(&[Accepted::count(id, request.tokens)]).unwrap();
        }
    }

    /// A request of `tokens` tokens, for whose steps the host has not waited.
    fn request(&mut self, tokens: usize) -> RequestId {
        let id = self.fed.manager.admit().unwrap();
        self.step(id, 0..tokens);
        id
    }

    /// Overwrites the slot of a request.
    fn damage(&self, id: RequestId) {
        let (manager, stream) = (&self.fed.manager, &self.fed.stream);
        for (layer, schema) in self.fed.layer_ids().zip(&manager.schema().layers) {
            for pool in schema.pools.iter().filter(|pool| pool.unit == PoolUnit::Slot) {
                let (all, bytes) = (manager.writable_pool(layer, pool.kind), pool.unit_bytes());
                let slot = all.unwrap().slice(u64::from(id.slot().0) * bytes, bytes).unwrap();
                stream.fill(&slot, 0xFF).unwrap();
            }
        }
        stream.synchronize().unwrap();
    }

    fn assert_holds(&self, id: RequestId, tokens: usize) {
        self.draft.synchronize().unwrap();
        self.fed.assert_holds(id, &self.story, &self.stored, tokens);
    }
}

/// Runs `copy` on a new cache, which copies requests in two streams, and continues the requests that it returns to
/// [`NEXT`] tokens. Runs it twice: once the host waits for the copies, which then run as early as possible; once it
/// does not, and they run late.
fn check(mut copy: impl FnMut(&mut Cache) -> Vec<RequestId>) {
    for early in [true, false] {
        let mut cache = Cache::new();
        let copied = copy(&mut cache);
        if early {
            cache.copies.iter().rev().for_each(|stream| stream.synchronize().unwrap());
        }
        for &id in &copied {
            let start = cache.fed.manager.ledger().committed(id).unwrap() as usize;
            cache.step(id, start..NEXT);
        }
        copied.iter().for_each(|&id| cache.assert_holds(id, NEXT));
        cache.fed.manager.check_faults(&cache.fed.stream).unwrap();
    }
}

/// A fork, and a fork of the fork in another stream.
#[test]
fn a_fork_follows_the_steps() {
    check(|cache| {
        let id = cache.request(TOKENS);
        let [first, second] = &cache.copies;
        let fork = cache.fed.manager.fork(first, id).unwrap();
        vec![cache.fed.manager.fork(second, fork).unwrap(), fork, id]
    });
}

/// A request that is suspended in one stream, and resumed in another, in another slot.
#[test]
fn a_suspension_follows_the_steps() {
    check(|cache| {
        let id = cache.request(TOKENS);
        let [first, second] = &cache.copies;
        let suspended = cache.fed.manager.suspend(first, id).unwrap();
        let taken = cache.fed.manager.admit().unwrap();
        assert_eq!(taken.slot(), id.slot(), "its bytes are not in the slot that it gets");
        vec![cache.fed.manager.resume(second, suspended).unwrap()]
    });
}

/// A request is saved in one stream. Another with the same tokens, whose slot was overwritten, is restored from it in
/// another stream.
#[test]
fn a_checkpoint_follows_the_steps() {
    check(|cache| {
        let damaged = cache.request(128);
        cache.draft.synchronize().unwrap();
        cache.damage(damaged);
        let id = cache.request(128);
        let [first, second] = &cache.copies;
        let saved = cache.fed.manager.save_checkpoints(first, &[(id, 128)]).unwrap().remove(0);
        assert!(saved.has_draft());
        cache.fed.manager.restore_from_other(second, damaged, &saved).unwrap();
        vec![damaged, id]
    });
}

/// A request leaves in one stream. It arrives in another, in the slot and the blocks of a request that has just ended.
#[test]
fn a_move_follows_the_steps() {
    check(|cache| {
        let id = cache.request(TOKENS);
        let mut staging = cache.fed.manager.new_transfer_staging().unwrap();
        let at = cache.fed.manager.positions(id).unwrap();
        let mut payload = vec![0; staging.layout().bytes(at) as usize];
        let export = cache.fed.manager.export(&cache.copies[0], &mut staging, id);
        export.unwrap().all(&mut payload).unwrap();
        let ended = cache.request(TOKENS - 1);
        cache.fed.manager.release(ended).unwrap();
        let came =
            cache.fed.manager.import(&cache.copies[1], &mut staging, (at, &payload)).unwrap();
        assert_eq!(came.slot(), ended.slot(), "the step of the one that ended writes it first");
        vec![came, id]
    });
}
