//! Uses the cache together with `cudarc`: both share one context and one stream, and each uses the other's memory
//! without copies.
//!
//! On a machine with a GPU, `cargo run -p embed-cudarc` prints what it has checked, and exits with status 1 if a check
//! fails. It also compiles without a GPU, and its tests run the same step on the emulator.

mod step;

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, DevicePtrMut, sys};
use dsv4_kv::bf16;
use dsv4_kv::device::{Cuda, CudaDevice, CudaOptions, Stream, kernels};

use step::{ROW, TOKENS, Tensors, WINDOW};

fn main() -> Result<()> {
    // SAFETY: the call looks for CUDA's driver and runs nothing of another library.
    if !unsafe { sys::is_culib_present() } {
        bail!("no CUDA driver on this machine: `libcuda.so` was not found");
    }
    let context = CudaContext::new(0).context("opening GPU 0 with cudarc")?;
    let stream = context.new_stream()?;
    // SAFETY: cudarc's context is live, of GPU 0, and outlives the device, which is dropped before it.
    let device = unsafe {
        CudaDevice::from_context(context.cu_ctx().cast(), CudaOptions::default(), &kernels())
    }?;
    // SAFETY: cudarc's stream is live, of that context, and outlives the handle, which is dropped before it.
    let cache_stream = unsafe { device.stream_from_raw(stream.cu_stream().cast()) };

    check_context(&device, &context)?;
    println!("context: what the cache allocates is in cudarc's context, and no other is current");
    run_step(&device, &cache_stream, &stream)?;
    println!("stream and memory: a step read and wrote tensors of cudarc in its stream, uncopied");
    share_back(&device, &cache_stream, &stream)?;
    println!("memory of the cache: cudarc read it where it lies");
    Ok(())
}

/// Checks that memory of the cache is in cudarc's context, and that this context is current.
fn check_context(device: &CudaDevice, context: &Arc<CudaContext>) -> Result<()> {
    let buffer = device.allocate::<u32>("a buffer", 64)?;
    let mut found: sys::CUcontext = std::ptr::null_mut();
    let which = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT;
    let address = buffer.ptr().address();
    // SAFETY: the call writes one context to `found`, which has room for it.
    unsafe { sys::cuPointerGetAttribute((&raw mut found).cast(), which, address) }.result()?;
    let expected = context.cu_ctx();
    ensure!(
        found == expected,
        "the cache allocates in {found:?}, cudarc's context is {expected:?}"
    );
    let current = cudarc::driver::result::ctx::get_current()?;
    ensure!(current == Some(expected), "{current:?} is current, cudarc's context is {expected:?}");
    Ok(())
}

// ANCHOR: step
/// Runs a step over tensors that cudarc allocates, fills and reads.
fn run_step(
    device: &CudaDevice,
    cache_stream: &Stream<Cuda>,
    stream: &Arc<CudaStream>,
) -> Result<()> {
    let rows = stream.clone_htod(&vec![bf16::ONE; TOKENS * ROW])?;
    let mut window = stream.alloc_zeros::<bf16>(TOKENS * WINDOW * ROW)?;
    let mut lengths = stream.alloc_zeros::<i32>(TOKENS)?;
    {
        // cudarc records the use of its memory when these guards are dropped, which is after the step was queued.
        let (rows_at, _rows) = rows.device_ptr(stream);
        let (window_at, _window) = window.device_ptr_mut(stream);
        let (lengths_at, _lengths) = lengths.device_ptr_mut(stream);
        // SAFETY: three live allocations with these numbers of elements, which outlive the buffers; all work that
        // touches them is in one stream.
        let tensors = unsafe {
            Tensors {
                rows: device.buffer_from_raw(rows_at, (TOKENS * ROW) as u64)?,
                window: device.buffer_from_raw(window_at, (TOKENS * WINDOW * ROW) as u64)?,
                lengths: device.buffer_from_raw(lengths_at, TOKENS as u64)?,
            }
        };
        ensure!(tensors.rows.ptr().address() == rows_at, "the rows have moved");
        step::run(device, cache_stream, &tensors)?;
    }
    step::check(&stream.clone_dtoh(&window)?, &stream.clone_dtoh(&lengths)?)
}
// ANCHOR_END: step

/// Reads memory that the cache's device allocated, as a slice of cudarc.
fn share_back(
    device: &CudaDevice,
    cache_stream: &Stream<Cuda>,
    stream: &Arc<CudaStream>,
) -> Result<()> {
    let values = [3, 1, 4, 1];
    let buffer = device.allocate::<i32>("a buffer of the cache", 4)?;
    cache_stream.upload(&values, &buffer, 0)?;
    // SAFETY: a live allocation of four values, whatever they are; `leak` keeps cudarc from freeing it.
    let slice = unsafe { stream.upgrade_device_ptr::<i32>(buffer.ptr().address(), values.len()) };
    let read = stream.clone_dtoh(&slice);
    slice.leak();
    let read = read?;
    ensure!(read == values, "cudarc read {read:?}, the cache wrote {values:?}");
    Ok(())
}
