//! Making a pointer from an address, and launching a kernel, need `unsafe`: the caller answers for them.

use dsv4_kv::device::{DeviceError, DevicePtr, EmuDevice, Emulator, Operation, Stream};

fn address(device: &EmuDevice) -> DevicePtr<u32> {
    DevicePtr::from_raw_parts(device, 0x1000, 4) //~ E0133
}

fn launch<O: Operation>(
    stream: &Stream<Emulator>,
    variant: O::Variant,
    operation: &O,
) -> Result<(), DeviceError> {
    stream.launch(variant, operation) //~ E0133
}

fn main() {}
