//! Threads that share a device: calls that may run at the same time do so here, without kernels, so that
//! ThreadSanitizer and Miri can check them; neither supports the emulator's fibers.

use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::Duration;

use dsv4_kv::device::{CudaOptions, DeviceError, EmuDevice, EmuOptions, Graph, Null, NullDevice};
use dsv4_kv::events::EventSource;
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{Accepted, CacheConfig, KvCacheManager, Launches, Prompt, StepRequest};
use dsv4_kv_tests::failing::Failing;
use dsv4_kv_tests::inputs::download;

const THREADS: u64 = 4;
const ROUNDS: u64 = if cfg!(miri) { 3 } else { 200 };
const WORDS: usize = 64;
const MEMORY: u64 = 1 << 20;

/// The value, or `None` for an error that a thread may get while another captures or holds most of the memory.
fn allowed<T>(answer: Result<T, DeviceError>) -> Option<T> {
    match answer {
        Ok(value) => Some(value),
        Err(DeviceError::ForbiddenInCapture { .. } | DeviceError::NestedCapture) => None,
        Err(DeviceError::OutOfMemory { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

/// Each thread allocates, copies and captures, and all write to one buffer. A copy of that buffer holds the bytes of
/// one thread and no mixture, a thread's own memory holds its own bytes, and in the end all memory is free.
#[test]
fn threads_share_a_device() {
    let device = EmuDevice::new(EmuOptions { memory: MEMORY, seed: 1 });
    let shared = device.allocate::<u32>("shared", WORDS as u64).unwrap();
    let together = Barrier::new(THREADS as usize);
    let run = |thread: u64| {
        let stream = device.stream().unwrap();
        let own = device.allocate::<u32>("own", WORDS as u64).unwrap();
        let (mut captured, mut told) = (0, vec![0_u32; WORDS]);
        together.wait();
        for round in 0..ROUNDS {
            let byte = (thread * ROUNDS + round) as u8;
            stream.fill(&shared, byte).unwrap();
            stream.copy(&shared, &own).unwrap();
            if allowed(stream.download(&own, 0, &mut told)).is_some() {
                assert!(told.iter().all(|&word| word == told[0]), "a mixture: {told:08x?}");
            }
            // These allocations do not all fit at the same time.
            drop(allowed(device.allocate::<u8>("large", MEMORY / 3)));
            let record = || stream.fill(&own, byte);
            let graph: Option<Graph<_>> = allowed(stream.capture(vec![own.memory()], record));
            if let Some(graph) = graph {
                captured += 1;
                stream.replay(&graph).unwrap();
                if allowed(stream.download(&own, 0, &mut told)).is_some() {
                    assert_eq!(told, [u32::from_ne_bytes([byte; 4]); WORDS]);
                }
            }
        }
        captured
    };
    let captures: Vec<u64> = thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..THREADS).map(|at| scope.spawn(move || run(at))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(captures.iter().sum::<u64>() > 0, "nothing was captured");
    drop(shared);
    assert_eq!(device.free_memory().unwrap(), MEMORY, "memory was lost");
}

/// Threads that replay one graph take turns: a driver accepts one replay at a time, and so does this backend.
#[test]
fn threads_take_turns_with_a_graph() {
    let device = Failing::emulated(EmuOptions { memory: MEMORY, seed: 1 });
    let buffer = device.allocate::<u8>("filled", MEMORY / 2).unwrap();
    let stream = device.stream().unwrap();
    let record = || (0..8).try_for_each(|byte| stream.fill(&buffer, byte));
    let graph = stream.capture(vec![buffer.memory()], record).unwrap();
    let together = Barrier::new(THREADS as usize);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let stream = device.stream().unwrap();
                together.wait();
                (0..ROUNDS).for_each(|_| stream.replay(&graph).unwrap());
            });
        }
    });
    assert_eq!(download(&stream, &buffer.slice(0, 1).unwrap()), [7]);
}

/// Threads that look for a GPU at the same time get the same answer.
#[test]
#[cfg_attr(miri, ignore = "Miri opens no library")]
fn threads_look_for_a_gpu_at_once() {
    let together = Barrier::new(THREADS as usize);
    let look = || {
        together.wait();
        dsv4_kv::open_cuda(CudaOptions::default()).map(|_| ()).map_err(|error| error.to_string())
    };
    let answers: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(look)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(answers.windows(2).all(|pair| pair[0] == pair[1]), "{answers:?}");
}

/// A held read lock of the ledger does not block other readers, nor the same thread, in any function that takes
/// `&self`.
#[test]
fn who_looks_at_the_ledger_stops_nobody_from_looking() {
    let model = ModelConfig::preset("tiny").unwrap();
    let config = CacheConfig { num_checkpoints: 2, host_bytes: 1 << 20, ..CacheConfig::new(model) };
    let device = EmuDevice::new(EmuOptions { memory: 1 << 28, seed: 1 });
    let mut cache = KvCacheManager::new(device, config).unwrap();
    let stream = cache.device().stream().unwrap();
    let id = cache.admit().unwrap();
    let (done, waits) = mpsc::channel();
    let look = thread::spawn(move || {
        let ledger = cache.ledger();
        let again = cache.ledger();
        assert_eq!((ledger.live_requests(), again.live_requests()), (1, 1));
        assert_eq!(cache.block_table(id).unwrap(), []);
        assert_eq!(cache.reuse_stats().hits, 0);
        assert_eq!(cache.event_capacity(), 0);
        assert!(cache.new_transfer_staging().is_ok());
        let prompt = Prompt { tokens: &[1; 200], salt: b"", adapter: b"" };
        assert_eq!(cache.host_prompt(&prompt).unwrap().in_host, 0);
        cache.check_poison(&stream).unwrap();
        cache.check_faults(&stream).unwrap();
        cache.audit_tier().unwrap();
        done.send(()).unwrap();
    });
    let waited = waits.recv_timeout(Duration::from_secs(60));
    assert!(waited.is_ok(), "something waits for a ledger that is only looked at, or has failed");
    look.join().unwrap();
}

/// A guard of the ledger that was leaked, as a leaked step, holds up nobody who changes the ledger.
#[test]
fn a_leaked_guard_of_the_ledger_holds_up_nobody() {
    let model = ModelConfig::preset("tiny").unwrap();
    let smallest = CacheConfig::new(model);
    let config =
        CacheConfig { max_requests: 2, num_checkpoints: 2, host_bytes: 1 << 20, ..smallest };
    let mut cache = KvCacheManager::new(NullDevice::null(1 << 34), config).unwrap();
    let stream = cache.device().stream().unwrap();
    let leak = |cache: &KvCacheManager<Null>| std::mem::forget(cache.ledger());
    let (done, waits) = mpsc::channel();
    let go_on = thread::spawn(move || {
        leak(&cache);
        let id = cache.admit().unwrap();
        let requests = [StepRequest { id, start: 0, tokens: 1 }];
        leak(&cache);
        drop(cache.begin_step(&stream, Launches::Eager, &requests).unwrap());
        leak(&cache);
        let mut step = cache.begin_step(&stream, Launches::Eager, &requests).unwrap();
        step.skip_kernels();
        step.commit(&[Accepted::count(id, 1)]).unwrap();
        leak(&cache);
        let fork = cache.fork(&stream, id).unwrap();
        leak(&cache);
        cache.advance_tier(&stream).unwrap();
        for id in [id, fork] {
            leak(&cache);
            cache.release(id).unwrap();
        }
        assert_eq!(cache.ledger().live_requests(), 0);
        done.send(()).unwrap();
    });
    let waited = waits.recv_timeout(Duration::from_secs(60));
    assert!(waited.is_ok(), "something waits for a guard that nobody holds, or has failed");
    go_on.join().unwrap();
}
