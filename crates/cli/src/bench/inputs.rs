//! Inputs of the measured kernels: buffers in which each node of a graph has its own part.

use anyhow::{Result, ensure};
use bytemuck::Pod;
use dsv4_kv::device::{Backend, Buffer, DeviceError, Stream};
use dsv4_kv_linear::Nvfp4Matrix;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// A new buffer of `len` elements, filled with repetitions of `pattern` or with its beginning.
pub fn repeated<B: Backend, T: Pod>(
    stream: &Stream<B>,
    label: &'static str,
    len: u64,
    pattern: &[T],
) -> Result<Buffer<B, T>, DeviceError> {
    let buffer = stream.device().allocate(label, len)?;
    let mut done = len.min(pattern.len() as u64);
    stream.upload(&pattern[..done as usize], &buffer, 0)?;
    while done < len {
        let more = done.min(len - done);
        let part = |start| buffer.slice(start, more).expect("a part of the buffer");
        stream.copy(&part(0), &part(done))?;
        done += more;
    }
    Ok(buffer)
}

/// The part of `buffer` that belongs to node `node` of `nodes`.
pub fn part<B: Backend, T: Pod>(buffer: &Buffer<B, T>, node: u64, nodes: u64) -> Buffer<B, T> {
    let len = buffer.len() / nodes;
    buffer.slice(node * len, len).expect("a part for every node")
}

/// A random weight in NVFP4.
pub fn random_nvfp4(columns: u32, inner: u32) -> Result<Nvfp4Matrix> {
    let mut random = SmallRng::seed_from_u64(4);
    let values = (columns * inner) as usize;
    let codes = (0..values / 2).map(|_| random.random()).collect();
    let scales = (0..values / 16).map(|_| random.random_range(0x20..0x60)).collect();
    Ok(Nvfp4Matrix::from_parts(columns, inner, codes, scales, 1e-3)?)
}

/// Checks that no launch counted a refused input in `faults` (one element).
///
/// # Errors
/// If a launch refused an input. Then the measured time is not that of the kernel's full work.
pub fn ensure_none_refused<B: Backend>(stream: &Stream<B>, faults: &Buffer<B, u32>) -> Result<()> {
    let mut refused = [0];
    stream.download(faults, 0, &mut refused)?;
    ensure!(refused == [0], "the kernel refused {} of its inputs", refused[0]);
    Ok(())
}
