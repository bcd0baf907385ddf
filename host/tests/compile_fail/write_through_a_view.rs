//! A view can only be read.

use dsv4_kv::device::{DeviceError, DevicePtrMut, Emulator, Stream, View};

fn write(stream: &Stream<Emulator>, view: &View<Emulator, u32>) -> Result<(), DeviceError> {
    stream.fill(view, 0)?; //~ E0308
    stream.upload(&[1], view, 0)?; //~ E0308
    let _: DevicePtrMut<u32> = view.ptr(); //~ E0308
    Ok(())
}

fn main() {}
