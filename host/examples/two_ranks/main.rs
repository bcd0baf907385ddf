//! Two GPUs of one machine, a cache on each.
//!
//! ```text
//! cargo run --release -p dsv4-kv --example two_ranks            two devices that the CPU emulates
//! cargo run --release -p dsv4-kv --example two_ranks -- cuda    GPUs 0 and 1
//! ```
//!
//! | | a rank has | communication between ranks |
//! |---|---|---|
//! | data-parallel attention | requests of its own | none |
//! | tensor-parallel attention | all requests, whose rows are the same for all heads, and half of the heads | none: after the same calls, ranks without host memory have the same bookkeeping |
//!
//! What ranks with host memory (`CacheConfig::host_bytes`) need besides is in `docs/scale-out.md`.
//!
//! Each rank runs in a thread of its own. The bytes of its requests and the bits of its attention are compared with
//! those of one device that does all the work: all must be equal.

mod rank;

use std::thread;

use anyhow::{Context, Result, bail, ensure};
use dsv4_kv::device::{Backend, CudaOptions, Device, EmuDevice, EmuOptions};
use dsv4_kv::open_cuda;

use rank::{HEADS, Outcome, Work, run};

/// The requests, as numbers from which their tensors are generated.
const REQUESTS: [u64; 3] = [11, 22, 33];

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        None | Some("cpu") => check(&emulated()),
        Some("cuda") => {
            let open = |ordinal| {
                let device = open_cuda(CudaOptions { ordinal, ..CudaOptions::default() });
                device.with_context(|| format!("GPU {ordinal}; two are needed"))
            };
            check(&[open(0)?, open(1)?])
        }
        Some(other) => bail!("{other:?} is neither `cpu` nor `cuda`"),
    }
}

fn emulated() -> [EmuDevice; 2] {
    [0, 1].map(|seed| EmuDevice::new(EmuOptions { seed, ..EmuOptions::default() }))
}

/// Runs all requests on one device, then divides them between two in both ways, and compares the results.
fn check<B: Backend>(devices: &[Device<B>; 2]) -> Result<()> {
    for (rank, device) in devices.iter().enumerate() {
        println!("rank {rank}: {}", device.info().name);
    }
    let whole = run(&devices[0], &Work { requests: &REQUESTS, heads: 0..HEADS })?;
    let mut others = whole.states.clone();
    others.rotate_left(1);
    ensure!(others != whole.states, "all requests have the same bytes: nothing is compared");

    let own = REQUESTS.split_at(1);
    let ranks = both(devices, [own.0, own.1].map(|requests| Work { requests, heads: 0..HEADS }))?;
    data_parallel(&whole, &ranks)?;
    println!("data-parallel: {}", said(&whole));

    let half = HEADS / 2;
    let mut ranks =
        both(devices, [0..half, half..HEADS].map(|heads| Work { requests: &REQUESTS, heads }))?;
    tensor_parallel(&whole, &ranks)?;
    let tables = whole.tables.len();
    println!("tensor-parallel: {}, block tables of {tables} steps", said(&whole));

    // The comparison is tested too: swapped ranks must not be accepted.
    ranks.swap(0, 1);
    ensure!(tensor_parallel(&whole, &ranks).is_err(), "heads that are exchanged are not found");
    ensure!(data_parallel(&whole, &ranks).is_err(), "requests that are there twice are not found");
    Ok(())
}

/// Compares ranks that have requests of their own.
fn data_parallel(whole: &Outcome, ranks: &[Outcome; 2]) -> Result<()> {
    let states = [&ranks[0].states[..], &ranks[1].states].concat();
    ensure!(states == whole.states, "data-parallel: a request has other bytes than alone");
    let mut attended = ranks[0].attended.clone();
    attended.extend(ranks[1].attended.clone());
    ensure!(attended == whole.attended, "data-parallel: attention gave other bits");
    Ok(())
}

/// Compares ranks that have all requests, and half of the heads each.
fn tensor_parallel(whole: &Outcome, ranks: &[Outcome; 2]) -> Result<()> {
    for (rank, outcome) in ranks.iter().enumerate() {
        ensure!(outcome.tables == whole.tables, "tensor-parallel: rank {rank} has other blocks");
        ensure!(outcome.states == whole.states, "tensor-parallel: rank {rank} has other bytes");
    }
    for (query, all) in &whole.attended {
        let parts = ranks.iter().map(|rank| rank.attended.get(query).map_or(&[][..], |part| part));
        let joined = parts.collect::<Vec<_>>().concat();
        ensure!(&joined == all, "tensor-parallel: the heads of {query:?} have other bits");
    }
    Ok(())
}

/// Runs both ranks at the same time.
fn both<B: Backend>(devices: &[Device<B>; 2], work: [Work<'_>; 2]) -> Result<[Outcome; 2]> {
    let [first, second] = thread::scope(|scope| {
        let rank = |rank: usize| {
            let (device, work) = (&devices[rank], &work[rank]);
            scope.spawn(move || run(device, work))
        };
        [rank(0), rank(1)].map(|thread| thread.join())
    });
    let ended = |outcome: thread::Result<Result<Outcome>>| match outcome {
        Ok(outcome) => outcome,
        Err(_) => bail!("a rank has panicked"),
    };
    Ok([ended(first)?, ended(second)?])
}

/// A summary of what was compared.
fn said(whole: &Outcome) -> String {
    let bytes: usize = whole.states.iter().map(Vec::len).sum();
    let rows = whole.attended.len() * HEADS as usize;
    format!(
        "{} requests with {bytes} bytes, {rows} rows of attention, all equal",
        whole.states.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_emulated_ranks_agree() {
        check(&emulated()).unwrap();
    }
}
