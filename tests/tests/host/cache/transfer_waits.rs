//! Requests and prefixes that are exported to device memory or imported, on a device that defers its work. An export or
//! import is done when the call returns; after an import that failed nothing is left running.

use dsv4_kv::device::{Buffer, Device, EmuOptions, Emulator, Stream};
use dsv4_kv::transfer::{MoveError, Parts, PartsMut, Positions, TransferStaging};
use dsv4_kv::{CacheConfig, KvError, RequestId};
use dsv4_kv_tests::failing::{Failing, Failure, each_call};
use dsv4_kv_tests::fed::{Fed, Padding, Part};
use dsv4_kv_tests::inputs::{CANARY, download, upload};
use dsv4_kv_tests::lazy::Lazy;
use dsv4_kv_tests::stories::Story;

use super::tier::{FORMATS, LAYERS, TOKENS, prompt, run, settings, tokens};

type Late = Failing<Lazy<Emulator>>;

const HOWS: [Failure; 2] = [Failure::Instead, Failure::After];
/// Tokens of a request that gets the slot and blocks of a failed import.
const OTHER: usize = 20;

/// A cache of two slots with one request, whose prompt is in the prefix tree.
struct Cache {
    fed: Fed<Late>,
    staging: TransferStaging<Late>,
    id: RequestId,
    /// A stream that waits for no other.
    aside: Stream<Late>,
}

impl Cache {
    fn new() -> Self {
        let device = Failing::late(EmuOptions::default());
        let mut fed = Fed::new(&device, CacheConfig { host_bytes: 0, poison: false, ..settings() });
        let (staging, aside) =
            (fed.manager.new_transfer_staging().unwrap(), device.stream().unwrap());
        let story = Story::random(&LAYERS, TOKENS, 81);
        let tokens = tokens();
        let id = fed.manager.admit_with(&fed.stream, &prompt(&tokens, b"")).unwrap().id;
        run(&mut fed, id, &story, 0);
        Self { fed, staging, id, aside }
    }

    fn device(&self) -> Device<Late> {
        self.fed.manager.device().clone()
    }

    /// Exports its request to host memory.
    fn request(&mut self) -> (Positions, Vec<u8>) {
        let Self { fed: Fed { manager, stream, .. }, staging, id, .. } = self;
        let at = manager.positions(*id).unwrap();
        let mut payload = vec![0; staging.layout().bytes(at) as usize];
        manager.export(stream, staging, *id).unwrap().all(&mut payload).unwrap();
        (at, payload)
    }

    /// Exports the prefix of its request to host memory.
    fn prefix(&mut self) -> (Positions, Vec<u8>) {
        let Self { fed: Fed { manager, stream, .. }, staging, .. } = self;
        let tokens = tokens();
        let export = manager.export_prefix(stream, staging, &prompt(&tokens, b"")).unwrap();
        let mut export = export.expect("the chunk has saved it");
        let mut payload = vec![0; export.layout().prefix_bytes(export.positions()) as usize];
        export.all(&mut payload).unwrap();
        (export.positions(), payload)
    }

    /// Device memory of this length.
    fn memory(&self, bytes: &[u8]) -> Buffer<Late, u8> {
        self.device().allocate("parts", bytes.len() as u64).unwrap()
    }

    /// Asserts that a stream that waits for no other reads these bytes from the memory now.
    fn assert_there(&self, memory: &Buffer<Late, u8>, bytes: &[u8], what: &str) {
        assert!(download(&self.aside, memory) == bytes, "{what} is not there yet");
    }
}

/// An export to device memory returns after the bytes have arrived.
#[test]
fn an_export_to_the_device_is_done() {
    let mut cache = Cache::new();
    let (at, payload) = cache.request();
    let blocks = cache.staging.layout().blocks(at.trunk);
    let of_blocks = u64::from(blocks) * cache.staging.layout().block_bytes();
    let (of_blocks, of_state) = payload.split_at(of_blocks as usize);
    let [to_blocks, to_state] = [of_blocks, of_state].map(|part| cache.memory(part));
    let Cache { fed: Fed { manager, stream, .. }, staging, id, .. } = &mut cache;
    let mut export = manager.export(stream, staging, *id).unwrap();
    export.blocks_to(0..blocks, PartsMut::Device(to_blocks.clone())).unwrap();
    cache.assert_there(&to_blocks, of_blocks, "blocks");
    let Cache { fed: Fed { manager, stream, .. }, staging, id, .. } = &mut cache;
    let mut export = manager.export(stream, staging, *id).unwrap();
    export.state_to(PartsMut::Device(to_state.clone())).unwrap();
    cache.assert_there(&to_state, of_state, "the state");
}

/// The same for a prefix.
#[test]
fn an_export_of_a_prefix_to_the_device_is_done() {
    let mut cache = Cache::new();
    // The staging memory has not been used before, so that bytes of the payload without a row are zero.
    let (_, payload) = cache.prefix();
    let to = cache.memory(&payload);
    let (Cache { fed: Fed { manager, stream, .. }, staging, .. }, tokens) = (&mut cache, tokens());
    let export = manager.export_prefix(stream, staging, &prompt(&tokens, b"")).unwrap();
    export.unwrap().all_to(PartsMut::Device(to.clone())).unwrap();
    cache.assert_there(&to, &payload, "the prefix");
}

/// An imported request is complete when the call returns: readers need not wait, and the owner of the source memory may
/// overwrite it.
#[test]
fn an_import_is_done() {
    for on_device in [false, true] {
        let mut cache = Cache::new();
        let (at, payload) = cache.request();
        let from = upload(&cache.aside, &payload);
        let Cache { fed, staging, aside, .. } = &mut cache;
        let reserved = fed.manager.reserve(at).unwrap();
        let parts = if on_device { Parts::Device(from.clone()) } else { Parts::Host(&payload) };
        let loaded = fed.manager.load_from(&fed.stream, staging, reserved, parts).unwrap();
        aside.fill(&from, CANARY).unwrap();
        aside.synchronize().unwrap();
        let came = fed.manager.enter(loaded).unwrap();
        // Reads by a stream that waits for no other.
        let stream = std::mem::replace(&mut fed.stream, aside.clone());
        let found = fed.pool_bytes();
        stream.synchronize().unwrap();
        assert!(fed.pool_bytes() == found, "it was there when the call returned");
        cache.id = came;
        assert!(cache.request().1 == payload, "what came is what was sent");
    }
}

/// The same for a prefix.
#[test]
fn an_import_of_a_prefix_is_done() {
    let mut source = Cache::new();
    let (at, payload) = source.prefix();
    let mut cache = Cache::new();
    let from = upload(&cache.aside, &payload);
    let tokens = tokens();
    let ask = prompt(&tokens[..at.trunk as usize], b"comes");
    let Cache { fed, staging, id, aside, .. } = &mut cache;
    // This frees the only checkpoint.
    fed.manager.release(*id).unwrap();
    let parts = (at, Parts::Device(from.clone()));
    let came = fed.manager.import_prefix_from(&fed.stream, staging, &ask, parts).unwrap();
    assert!(came.is_some_and(|came| came.checkpoint && came.blocks == 2));
    aside.fill(&from, CANARY).unwrap();
    aside.synchronize().unwrap();
    let export = fed.manager.export_prefix(&fed.stream, staging, &ask).unwrap();
    let mut export = export.expect("it came");
    assert_eq!(export.positions(), at);
    let mut found = vec![0; payload.len()];
    export.all(&mut found).unwrap();
    assert!(found == payload, "what came is what was sent");
}

/// Runs `import` in a stream of its own with each of its device calls failing in turn, until none is left. After each
/// failure nothing is left running, and a request that gets the room of the import has its own bytes.
fn fail_each(
    cache: &mut Cache,
    how: Failure,
    import: impl Fn(&mut Fed<Late>, &Stream<Late>, &mut TransferStaging<Late>) -> Result<(), MoveError>,
) {
    let (device, other) = (cache.device(), Story::random(&LAYERS, OTHER, 82));
    let (stream, end, stored) =
        (device.stream().unwrap(), device.event().unwrap(), other.stored(&device, FORMATS));
    let Cache { fed, staging, .. } = cache;
    let mut failures = Vec::new();
    for call in each_call() {
        device.backend().fail(call, how);
        let result = import(fed, &stream, staging);
        let failed = device.backend().failed();
        device.backend().fail_nothing();
        let Some(failed) = failed else {
            result.unwrap();
            break;
        };
        assert!(
            matches!(result, Err(MoveError::Cache(KvError::Device(_)))),
            "{failed}, {result:?}"
        );
        failures.push(failed);
        stream.record(&end).unwrap();
        assert!(end.has_passed().unwrap(), "something is on its way after {failures:?}, {how:?}");
        let next = fed.manager.admit().unwrap();
        fed.step(&[Part::new(next, &other, 0..OTHER)], Padding::None);
        stream.synchronize().unwrap();
        fed.assert_holds(next, &other, &stored, OTHER);
        fed.manager.release(next).unwrap();
    }
    assert!(failures.contains(&"launch") && failures.contains(&"synchronize"), "{failures:?}");
}

/// Work of an import that was queued before the device failed does not write to the slot and the blocks that others
/// get.
#[test]
fn an_import_that_fails_is_over() {
    for (how, on_device) in HOWS.into_iter().flat_map(|how| [(how, false), (how, true)]) {
        let mut cache = Cache::new();
        let (at, payload) = cache.request();
        let from = upload(&cache.aside, &payload);
        fail_each(&mut cache, how, |fed, stream, staging| {
            let reserved = fed.manager.reserve(at)?;
            let parts = if on_device { Parts::Device(from.clone()) } else { Parts::Host(&payload) };
            let loaded = fed.manager.load_from(stream, staging, reserved, parts)?;
            fed.manager
                .enter(loaded)
                .map(drop)
                .map_err(|loaded| MoveError::ForeignReservation(loaded.into()))
        });
    }
}

/// The same for a prefix.
#[test]
fn an_import_of_a_prefix_that_fails_is_over() {
    for (how, on_device) in HOWS.into_iter().flat_map(|how| [(how, false), (how, true)]) {
        let mut cache = Cache::new();
        let (at, payload) = cache.prefix();
        let (from, tokens) = (upload(&cache.aside, &payload), tokens());
        // This frees the only checkpoint.
        cache.fed.manager.release(cache.id).unwrap();
        fail_each(&mut cache, how, |fed, stream, staging| {
            let ask = prompt(&tokens[..at.trunk as usize], b"comes");
            let parts = if on_device { Parts::Device(from.clone()) } else { Parts::Host(&payload) };
            fed.manager.import_prefix_from(stream, staging, &ask, (at, parts)).map(drop)
        });
    }
}
