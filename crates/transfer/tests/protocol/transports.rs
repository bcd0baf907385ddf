//! Transports that do not fail: what is read is what was published, and what is gone is refused.

use dsv4_kv_transfer::transport::{Descriptor, Fabric, Files, Loopback, NotPosted, Polled, Region};
use dsv4_kv_transfer::{Transport, TransportError};

fn region(bytes: &[u8]) -> Region {
    let mut region = Region::new(bytes.len()).unwrap();
    region.bytes_mut().copy_from_slice(bytes);
    region
}

fn read<T: Transport>(target: &mut T, len: usize, from: &Descriptor) -> Result<Vec<u8>, NotPosted> {
    let memory = target.register(Region::new(len).unwrap()).unwrap();
    let posted = target.post(memory, from)?;
    let Polled::Done(memory) = target.poll(posted) else { panic!("it is done when it is posted") };
    Ok(target.deregister(memory).unwrap().bytes().to_vec())
}

fn moves_bytes<T: Transport>(mut source: T, mut target: T) {
    let bytes: Vec<u8> = (0..10_000u32).map(|at| (at * 7) as u8).collect();
    let mut memory = source.register(region(&bytes)).unwrap();
    source.with_bytes(&mut memory, |bytes| bytes[0] = 99).unwrap();
    let from = source.publish(&memory).unwrap();
    let got = read(&mut target, 10_000, &from).unwrap();
    assert!(got[0] == 99 && got[1..] == bytes[1..]);
    assert_eq!(read(&mut target, 100, &from).unwrap(), got[..100]);
    let NotPosted(memory_of_target, error) = read(&mut target, 10_001, &from).unwrap_err();
    assert!(matches!(error, TransportError::TooShort { needed: 10_001, .. }), "{error}");
    target.deregister(memory_of_target).unwrap();
    // Taken back: it cannot be read any more.
    source.deregister(memory).unwrap();
    assert!(read(&mut target, 100, &from).is_err());
    for wrong in [&b"../secret.payload"[..], b"", b"x"] {
        let NotPosted(_, error) = read(&mut target, 1, &Descriptor(wrong.to_vec())).unwrap_err();
        assert!(matches!(error, TransportError::Descriptor { .. }), "{error}");
    }
    // After a fence tokens are void.
    let mut memory = source.register(region(&[1])).unwrap();
    source.fence().unwrap();
    let refused = source.with_bytes(&mut memory, |_| ()).unwrap_err();
    assert!(matches!(refused, TransportError::Unknown { .. }), "{refused}");
}

pub fn within_a_process() {
    let fabric = Fabric::default();
    moves_bytes(Loopback::new(&fabric), Loopback::new(&fabric));
}

pub fn through_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let files = || Files::new(directory.path()).unwrap();
    moves_bytes(files(), files());
    assert_eq!(directory.path().read_dir().unwrap().count(), 0, "no file is left");
}
