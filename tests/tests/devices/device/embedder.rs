//! CUDA only: a serving binary's own context, stream and memory.

use cust::context::Context;
use cust::memory::{CopyDestination, DeviceBuffer};
use cust::stream::{Stream, StreamFlags};
use dsv4_kv::device::{CudaDevice, CudaOptions, DeviceError, kernels};
use kv_layout::main_row::MainFormat;

use crate::inputs::{assert_same, oracle, rows};
use crate::window::swa::Rings;

pub fn its_context_and_stream_are_used() {
    let context = Context::new(cust::device::Device::get_device(0).unwrap()).unwrap();
    let own = Stream::new(StreamFlags::DEFAULT, None).unwrap();
    // SAFETY: a live context of GPU 0 that outlives the device, which is dropped first.
    let device =
        unsafe { CudaDevice::from_context(context.as_raw(), CudaOptions::default(), &kernels()) };
    let device = device.unwrap();
    // SAFETY: a live stream of that context that outlives the handle, which is dropped first.
    let stream = unsafe { device.stream_from_raw(own.as_inner()) };
    let values = rows(8, 91);
    let rings = Rings::new(&device, MainFormat::Ue8m0, 1, 128);
    rings.append_rows(&stream, &values, &[0, 1, 2, 3, 4, 5, 6, 7]);
    own.synchronize().unwrap();
    for (got, value) in rings.contents(&stream).iter().zip(&values) {
        assert_same(&got.data, &oracle(MainFormat::Ue8m0).encode(value).data, "row");
    }
    stream.synchronize().unwrap();
}

pub fn its_memory_is_used_where_it_lies() {
    let context = Context::new(cust::device::Device::get_device(0).unwrap()).unwrap();
    let own = DeviceBuffer::from_slice(&[1_u32, 2, 3, 4]).unwrap();
    let address = own.as_device_ptr().as_raw();
    // SAFETY: a live context of GPU 0 that outlives the device, which is dropped first.
    let device =
        unsafe { CudaDevice::from_context(context.as_raw(), CudaOptions::default(), &kernels()) };
    let device = device.unwrap();
    let stream = device.stream().unwrap();
    // SAFETY: an address that is refused is not used.
    let refused = unsafe { device.buffer_from_raw::<u32>(address + 4, 1) };
    let expected = (address + 4, 1, 256);
    match refused.err() {
        Some(DeviceError::BorrowedMemory { address, len, align }) => {
            assert_eq!((address, len, align), expected);
        }
        other => panic!("{other:?}"),
    }
    // SAFETY: a live allocation of four elements that outlives the buffer.
    let buffer = unsafe { device.buffer_from_raw::<u32>(address, 4) }.unwrap();
    let mut read = [0; 4];
    stream.download(&buffer, 0, &mut read).unwrap();
    assert_eq!((read, buffer.ptr().address()), ([1, 2, 3, 4], address));
    stream.upload(&[9], &buffer.slice(2, 1).unwrap(), 0).unwrap();
    stream.synchronize().unwrap();
    drop(buffer);
    // It was not freed.
    own.copy_to(&mut read).unwrap();
    assert_eq!(read, [1, 2, 9, 4]);
}

/// The driver forbids frees, allocations and waits in all contexts of the process while one captures: here they are refused, or put
/// off, also for a device of another context.
pub fn a_capture_is_of_all_contexts() {
    let capturing = dsv4_kv::open_cuda(CudaOptions::default()).unwrap();
    let (mut context, gpu) = (std::ptr::null_mut(), 0);
    // SAFETY: the call writes the context, of GPU 0, which exists.
    let made = unsafe { cust::sys::cuCtxCreate_v2(&raw mut context, 0, gpu) };
    assert_eq!(made, cust::sys::CUresult::CUDA_SUCCESS);
    // SAFETY: a live context, which is never destroyed.
    let other =
        unsafe { CudaDevice::from_context(context, CudaOptions::default(), &kernels()) }.unwrap();
    let stream = capturing.stream().unwrap();
    let buffer = capturing.allocate::<u32>("captured", 4).unwrap();
    let dropped = other.allocate::<u8>("dropped in the capture", 64 << 20).unwrap();
    let free = other.free_memory().unwrap();
    let graph = stream.capture(vec![buffer.memory()], || {
        drop(dropped);
        stream.fill(&buffer, 1)
    });
    stream.replay(&graph.expect("nothing broke the capture")).unwrap();
    assert!(other.free_memory().unwrap() >= free + (64 << 20), "it was freed behind the capture");
    let broken = stream.capture(vec![buffer.memory()], || {
        let refused = other.allocate::<u8>("in the capture", 1).unwrap_err();
        assert!(matches!(refused, DeviceError::ForbiddenInCapture { .. }), "{refused}");
        // SAFETY: as above.
        let opened =
            unsafe { CudaDevice::from_context(context, CudaOptions::default(), &kernels()) };
        let refused = opened.map(drop).unwrap_err();
        assert!(matches!(refused, DeviceError::ForbiddenInCapture { .. }), "{refused}");
        stream.fill(&buffer, 1)
    });
    let broken = broken.map(drop).unwrap_err();
    assert!(matches!(broken, DeviceError::ForbiddenInCapture { .. }), "{broken}");
    other.allocate::<u8>("behind it", 1).map(drop).unwrap();
}
