//! CUDA only: a serving binary's own context and stream.

use cust::context::Context;
use cust::stream::{Stream, StreamFlags};
use dsv4_kv::device::{CudaDevice, CudaOptions, kernels};
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
