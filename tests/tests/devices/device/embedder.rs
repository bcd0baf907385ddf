//! CUDA only: the context, the stream and the memory of a serving program.

use cust::context::Context;
use cust::memory::{CopyDestination, DeviceBuffer};
use cust::stream::{Stream, StreamFlags};
use dsv4_kv::device::{
    CudaDevice, CudaOptions, DeviceError, HostCopies, HostPool, Kernels, kernels,
};
use dsv4_kv::ops::{self, BlockTable, TableUpdate};
use kv_layout::main_row::MainFormat;

use crate::inputs::{assert_same, download, oracle, rows};
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
    // The memory of the embedder was not freed.
    own.copy_to(&mut read).unwrap();
    assert_eq!(read, [1, 2, 9, 4]);
}

/// While a context captures, threads may use other contexts of the process: they allocate, wait, free and open devices.
/// The capturing thread may not: the driver would refuse that, and end the capture.
pub fn a_capture_binds_its_thread_in_other_contexts() {
    let capturing = dsv4_kv::open_cuda(CudaOptions::default()).unwrap();
    let (mut context, gpu) = (std::ptr::null_mut(), 0);
    // SAFETY: the call writes the context, of GPU 0, which exists.
    let made = unsafe { cust::sys::cuCtxCreate_v2(&raw mut context, 0, gpu) };
    assert_eq!(made, cust::sys::CUresult::CUDA_SUCCESS);
    let context = Shared(context);
    // SAFETY: a live context, which is never destroyed.
    let open =
        || unsafe { CudaDevice::from_context(context.raw(), CudaOptions::default(), &kernels()) };
    let other = open().unwrap();
    let (stream, others) = (capturing.stream().unwrap(), other.stream().unwrap());
    let buffer = capturing.allocate::<u32>("captured", 4).unwrap();
    let [here, there] = ["here", "there"].map(|name| other.allocate::<u8>(name, 4 << 30).unwrap());
    let free = other.free_memory().unwrap();
    let graph = stream.capture(vec![buffer.memory()], || {
        stream.fill(&buffer, 1)?;
        drop(here);
        std::thread::scope(|scope| {
            let meanwhile = scope.spawn(|| {
                drop(there);
                let more = other.allocate::<u8>("meanwhile", 4).unwrap();
                others.fill(&more, 7).unwrap();
                assert_eq!(download(&others, &more), [7; 4]);
                let event = other.event().unwrap();
                others.record(&event).unwrap();
                event.wait().unwrap();
                others.synchronize().unwrap();
                drop(open().unwrap());
            });
            meanwhile.join().unwrap();
        });
        stream.fill(&buffer, 2)
    });
    stream.replay(&graph.expect("nothing broke the capture")).unwrap();
    assert_eq!(download(&stream, &buffer), [0x0202_0202; 4]);
    // Other tests that run meanwhile take up to a gigabyte for their contexts.
    assert!(other.free_memory().unwrap() >= free + (6 << 30), "both are freed");
    for opens in [false, true] {
        let broken = stream.capture(vec![buffer.memory()], || {
            let refused = match opens {
                true => open().map(drop).unwrap_err(),
                false => other.allocate::<u8>("in the capture", 1).map(drop).unwrap_err(),
            };
            assert!(matches!(refused, DeviceError::ForbiddenInCapture { .. }), "{refused}");
            stream.fill(&buffer, 1)
        });
        let broken = broken.map(drop).unwrap_err();
        assert!(matches!(broken, DeviceError::ForbiddenInCapture { .. }), "{broken}");
    }
    other.allocate::<u8>("behind it", 1).map(drop).unwrap();
}

/// A context that any thread may use.
struct Shared(cust::sys::CUcontext);

impl Shared {
    fn raw(&self) -> cust::sys::CUcontext {
        self.0
    }
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Sync for Shared {}

/// The context that is current on this thread.
fn current() -> cust::sys::CUcontext {
    let mut current = std::ptr::null_mut();
    // SAFETY: the call writes the context.
    let status = unsafe { cust::sys::cuCtxGetCurrent(&raw mut current) };
    assert_eq!(status, cust::sys::CUresult::CUDA_SUCCESS);
    current
}

/// After each call the context is current again that the calling program had made current before it.
pub fn the_context_of_the_caller_stays_current() {
    let mut own = std::ptr::null_mut();
    // SAFETY: the call writes the context, of GPU 0, which exists, and makes it current.
    let made = unsafe { cust::sys::cuCtxCreate_v2(&raw mut own, 0, 0) };
    assert_eq!((made, current()), (cust::sys::CUresult::CUDA_SUCCESS, own));
    let device = dsv4_kv::open_cuda(CudaOptions::default()).unwrap();
    assert_eq!(current(), own, "opened");
    let stream = device.stream().unwrap();
    let buffer = device.allocate::<u8>("bytes", 4).unwrap();
    // Memory of another context is not waited for when it is freed.
    assert_ne!(context_of(buffer.ptr().address()), own, "memory of the caller's context");
    stream.fill(&buffer, 7).unwrap();
    assert_eq!((download(&stream, &buffer), current()), (vec![7; 4], own), "used");
    drop((buffer, stream, device));
    assert_eq!(current(), own, "dropped");
    // SAFETY: nothing uses it any more.
    unsafe { cust::sys::cuCtxDestroy_v2(own) };
}

/// The primary context that the embedder has retained too stays current when the last device of it is dropped. A context
/// that its owner has destroyed, and that an earlier call left current on a thread, does not become current again.
pub fn only_contexts_that_live_stay_current() {
    use cust::sys::{self, CUresult};
    let mut primary = std::ptr::null_mut();
    // SAFETY: the calls retain the primary context of GPU 0, which exists, and make it current.
    let retained = unsafe {
        (sys::cuDevicePrimaryCtxRetain(&raw mut primary, 0), sys::cuCtxSetCurrent(primary))
    };
    assert_eq!(retained, (CUresult::CUDA_SUCCESS, CUresult::CUDA_SUCCESS));
    drop(dsv4_kv::open_cuda(CudaOptions::default()).unwrap());
    assert_eq!(current(), primary, "it is the embedder's too");

    let mut own = std::ptr::null_mut();
    // SAFETY: the call writes the context, and makes it current.
    let made = unsafe { sys::cuCtxCreate_v2(&raw mut own, 0, 0) };
    assert_eq!(made, CUresult::CUDA_SUCCESS);
    // SAFETY: a live context of GPU 0, which is destroyed behind the device.
    let opened = unsafe { CudaDevice::from_context(own, CudaOptions::default(), &kernels()) };
    let (device, own) = (opened.unwrap(), Shared(own));
    let other = dsv4_kv::open_cuda(CudaOptions::default()).unwrap();
    // A channel ends with the thread of its sender, also by a panic.
    let (used, when_used) = std::sync::mpsc::channel();
    let (destroyed, when_destroyed) = std::sync::mpsc::channel();
    let (own, other) = (&own, &other);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            device.free_memory().unwrap();
            assert_eq!(current(), own.raw(), "the thread had none");
            drop(device);
            used.send(()).unwrap();
            when_destroyed.recv().unwrap();
            other.free_memory().unwrap();
            assert_ne!(current(), own.raw(), "it is destroyed");
        });
        when_used.recv().unwrap();
        // SAFETY: nothing uses it any more.
        unsafe { sys::cuCtxDestroy_v2(own.raw()) };
        destroyed.send(()).unwrap();
    });
    // SAFETY: retained above, once.
    unsafe { sys::cuDevicePrimaryCtxRelease_v2(0) };
}

/// The context to which the memory at `address` belongs.
fn context_of(address: u64) -> cust::sys::CUcontext {
    let attribute = cust::sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT;
    let mut context: cust::sys::CUcontext = std::ptr::null_mut();
    // SAFETY: the call writes the context, which is a pointer.
    let status =
        unsafe { cust::sys::cuPointerGetAttribute((&raw mut context).cast(), attribute, address) };
    assert_eq!(status, cust::sys::CUresult::CUDA_SUCCESS);
    context
}

/// While the program that owns a stream captures it, nothing would run: work that has to run is refused.
pub fn a_capture_of_the_stream_by_its_owner_refuses_steps() {
    use cust::sys::{self, CUresult, CUstreamCaptureMode};
    let context = Context::new(cust::device::Device::get_device(0).unwrap()).unwrap();
    let own = Stream::new(StreamFlags::NON_BLOCKING, None).unwrap();
    // SAFETY: a live context of GPU 0 that outlives the device, which is dropped first.
    let device = unsafe {
        let options = CudaOptions { check_every_launch: true, ..CudaOptions::default() };
        CudaDevice::from_context(context.as_raw(), options, &kernels())
    };
    let device = device.unwrap();
    // SAFETY: a live stream of that context that outlives the handle, which is dropped first.
    let stream = unsafe { device.stream_from_raw(own.as_inner()) };
    let buffer = device.allocate::<u8>("bytes", 4).unwrap();
    let graph = stream.capture(vec![buffer.memory()], || stream.fill(&buffer, 7)).unwrap();
    // What a capture forbids also fails a capture of a stream that others own.
    let broken = stream.capture(vec![buffer.memory()], || {
        let _ = stream.upload(&[1], &buffer, 0);
        stream.fill(&buffer, 7)
    });
    let broken = broken.map(drop).unwrap_err();
    assert!(matches!(broken, DeviceError::ForbiddenInCapture { .. }), "{broken}");
    let pool = HostPool::new(&device, 2, 4).unwrap();
    let mut copies = [0, 1].map(|_| HostCopies::new(&stream).unwrap());
    let unit = std::sync::Arc::new(pool.take(1).unwrap().remove(0));
    let words = ["index", "block", "table"].map(|label| device.allocate::<i32>(label, 1).unwrap());
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: a live stream, which nothing captures.
    let begun = unsafe { sys::cuStreamBeginCapture_v2(own.as_inner(), mode) };
    assert_eq!(begun, CUresult::CUDA_SUCCESS);
    let refused = stream.running("a step").map(drop).unwrap_err();
    assert!(
        matches!(refused, DeviceError::ForbiddenInCapture { operation: "a step" }),
        "{refused}"
    );
    let refused = stream.replay(&graph).unwrap_err();
    assert!(matches!(refused, DeviceError::NestedCapture), "{refused}");
    // Otherwise a stream that waits for the event would join the capture.
    let (event, mut read) = (device.event().unwrap(), [0]);
    let refused = [
        stream.record(&event),
        stream.wait_for(&event),
        stream.synchronize(),
        stream.download(&buffer, 0, &mut read),
        stream.upload_new("new", &[1_u8]).map(drop),
        copies[0].store(&buffer.view(), pool.take(1).unwrap()),
        copies[1].load([unit], &buffer),
    ];
    for refused in refused {
        let refused = refused.unwrap_err();
        assert!(matches!(refused, DeviceError::ForbiddenInCapture { .. }), "{refused}");
    }
    drop(copies);
    assert_eq!(pool.free(), 2, "no copy was queued");
    // A launch is recorded, and not waited for.
    let [index, block, table] = &words;
    let table = BlockTable { table, slots: 1, max_blocks: 1 };
    let update =
        TableUpdate { index: &index.view(), block: &block.view(), table: &table, count: 1 };
    ops::update_table(&stream, &update).unwrap();
    let mut recorded = std::ptr::null_mut();
    // SAFETY: the stream is captured; the call writes the graph, which nothing else destroys.
    let ended = unsafe {
        let ended = sys::cuStreamEndCapture(own.as_inner(), &raw mut recorded);
        sys::cuGraphDestroy(recorded);
        ended
    };
    assert_eq!(ended, CUresult::CUDA_SUCCESS, "a refusal does not end the capture");
    drop(stream.running("a step").unwrap());
    stream.replay(&graph).unwrap();
    assert_eq!(download(&stream, &buffer), [7; 4]);
}

/// A GPU that is refused when it is opened gives its context back, and the context is no longer current. Otherwise code
/// that asks for the context of the thread would use it.
pub fn a_refused_gpu_leaves_no_context() {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let refuse: dsv4_kv::device::PtxOf =
                |_, _| Err(DeviceError::NoDevice { ordinal: 7, count: 7 });
            // SAFETY: no kernel of the list is ever loaded.
            let none = unsafe { Kernels::new(&[], refuse) };
            let refused = dsv4_kv::device::Cuda::open(CudaOptions::default(), &none).map(drop);
            let refused = refused.expect_err("there is no PTX");
            assert!(matches!(refused, DeviceError::NoDevice { ordinal: 7, .. }), "{refused}");
            assert!(current().is_null(), "a context that was given back");
        });
    });
}
