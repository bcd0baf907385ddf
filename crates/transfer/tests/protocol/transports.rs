//! Transports without faults: reads return the published bytes, and reads of memory that is gone are refused.

use std::fs::Permissions;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use dsv4_kv_transfer::transport::{
    Descriptor, Fabric, Files, Loopback, NotPosted, Polled, Region, Registered,
};
use dsv4_kv_transfer::{Transport, TransportError};

fn region(bytes: &[u8]) -> Region {
    let mut region = Region::new(bytes.len()).unwrap();
    region.bytes_mut().copy_from_slice(bytes);
    region
}

fn read<T: Transport>(target: &mut T, len: usize, from: &Descriptor) -> Result<Vec<u8>, NotPosted> {
    let memory = target.register(Region::new(len).unwrap()).unwrap();
    let posted = target.post(memory, 0..len, from)?;
    let Polled::Done(memory) = target.poll(posted) else { panic!("it is done when it is posted") };
    Ok(target.deregister(memory).unwrap().bytes().to_vec())
}

/// Memory of another transport is unknown to this one in every call, and stays with its owner.
fn is_its_own<T: Transport>(stranger: &mut T, memory: &mut Registered) {
    let unknown = |error: TransportError| {
        assert!(matches!(error, TransportError::Unknown { .. }), "{error}");
    };
    unknown(stranger.with_bytes(memory, |bytes| bytes.fill(1)).unwrap_err());
    unknown(stranger.publish(memory).unwrap_err());
    unknown(stranger.flush(memory, 0..1).unwrap_err());
}

fn moves_bytes<T: Transport>(mut source: T, mut target: T) {
    let bytes: Vec<u8> = (0..10_000u32).map(|at| (at * 7) as u8).collect();
    let mut memory = source.register(region(&bytes)).unwrap();
    source.with_bytes(&mut memory, |bytes| bytes[0] = 99).unwrap();
    let from = source.publish(&memory).unwrap();
    source.flush(&memory, 0..10_000).unwrap();
    let got = read(&mut target, 10_000, &from).unwrap();
    assert!(got[0] == 99 && got[1..] == bytes[1..]);
    assert_eq!(read(&mut target, 100, &from).unwrap(), got[..100]);
    let NotPosted(memory_of_target, error) = read(&mut target, 10_001, &from).unwrap_err();
    assert!(matches!(error, TransportError::TooShort { needed: 10_001, .. }), "{error}");
    target.deregister(memory_of_target).unwrap();
    // Reads a part that was changed and flushed, without its surroundings.
    source.with_bytes(&mut memory, |bytes| bytes[5_000..5_003].fill(200)).unwrap();
    source.flush(&memory, 5_000..5_002).unwrap();
    let part = target.register(Region::new(10_000).unwrap()).unwrap();
    let posted = target.post(part, 4_999..5_002, &from).unwrap();
    let Polled::Done(part) = target.poll(posted) else { panic!("it is done when it is posted") };
    let part = target.deregister(part).unwrap();
    assert_eq!(part.bytes()[4_998..5_003], [0, got[4_999], 200, 200, 0]);
    // Ranges outside of the memory, on either side.
    let outside = source.flush(&memory, 9_000..10_001).unwrap_err();
    assert!(matches!(outside, TransportError::Outside { len: 10_000, .. }), "{outside}");
    // A range so long that no buffer for it can be allocated.
    let outside = source.flush(&memory, 0..usize::MAX).unwrap_err();
    assert!(matches!(outside, TransportError::Outside { len: 10_000, .. }), "{outside}");
    let backwards = Range { start: 5, end: 2 };
    let outside = source.flush(&memory, backwards.clone()).unwrap_err();
    assert!(matches!(outside, TransportError::Outside { .. }), "{outside}");
    let into = target.register(Region::new(10).unwrap()).unwrap();
    let NotPosted(into, error) = target.post(into, backwards, &from).unwrap_err();
    assert!(matches!(error, TransportError::Outside { .. }), "{error}");
    target.deregister(into).unwrap();
    is_its_own(&mut target, &mut memory);
    let short = target.register(Region::new(10).unwrap()).unwrap();
    let NotPosted(short, error) = target.post(short, 5..11, &from).unwrap_err();
    assert!(matches!(error, TransportError::Outside { len: 10, .. }), "{error}");
    target.deregister(short).unwrap();
    // Memory of another peer can be neither accessed, nor published, nor read into.
    let refused = target.with_bytes(&mut memory, |_| ()).unwrap_err();
    assert!(matches!(refused, TransportError::Unknown { .. }), "{refused}");
    let refused = target.publish(&memory).unwrap_err();
    assert!(matches!(refused, TransportError::Unknown { .. }), "{refused}");
    let other = source.register(region(&[1])).unwrap();
    let NotPosted(other, refused) = target.post(other, 0..1, &from).unwrap_err();
    assert!(matches!(refused, TransportError::Unknown { .. }), "{refused}");
    let refused = target.deregister(other).unwrap_err();
    assert!(matches!(refused, TransportError::Unknown { .. }), "{refused}");
    assert_eq!(read(&mut target, 100, &from).unwrap(), got[..100], "it is as it was");
    // After it was deregistered, it cannot be read.
    source.deregister(memory).unwrap();
    let NotPosted(_, refused) = read(&mut target, 100, &from).unwrap_err();
    assert!(
        matches!(
            refused,
            // In this process the memory is gone, and in a directory the file; NIXL's reads fail.
            TransportError::Descriptor { .. }
                | TransportError::File { .. }
                | TransportError::Failed { .. }
        ),
        "{refused}"
    );
    for wrong in [&b"../secret.payload"[..], b"", b"x"] {
        let NotPosted(_, error) = read(&mut target, 1, &Descriptor(wrong.to_vec())).unwrap_err();
        assert!(matches!(error, TransportError::Descriptor { .. }), "{error}");
    }
    // Nor can this transport deregister another's memory, or read into it.
    let [foreign, read_into] = [1, 2].map(|byte| source.register(region(&[byte])).unwrap());
    let (id, from) = (read_into.id(), source.publish(&foreign).unwrap());
    let error = target.deregister(foreign).unwrap_err();
    assert!(matches!(error, TransportError::Unknown { .. }), "{error}");
    let NotPosted(read_into, error) = target.post(read_into, 0..1, &from).unwrap_err();
    assert!(matches!(error, TransportError::Unknown { id: of } if of == id), "{error}");
    assert_eq!(source.deregister(read_into).unwrap().bytes(), [2]);
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

/// A directory of this user alone, whatever the umask is.
pub fn private_directory() -> tempfile::TempDir {
    let own = Permissions::from_mode(0o700);
    tempfile::Builder::new().permissions(own).tempdir().unwrap()
}

pub fn through_a_directory() {
    let directory = private_directory();
    let files = || Files::new(directory.path()).unwrap();
    moves_bytes(files(), files());
    // Memory that was never published has no file to remove, even if another transport's file has a similar name.
    let (mut own, mut other) = (files(), files());
    let [mut name, mut rest] = [Vec::new(), Vec::new()];
    let mut memory = Vec::new();
    for transport in [&mut own, &mut other] {
        let registered = transport.register(region(&[1])).unwrap();
        let from = transport.publish(&registered).unwrap();
        let (start, end) = from.0.split_at(from.0.iter().position(|&byte| byte == b'-').unwrap());
        name.push(start.to_vec());
        rest.push(end.to_vec());
        memory.push(registered);
    }
    assert_ne!(name[0], name[1], "of one process, and yet each its own");
    assert_ne!(rest[0], rest[1]);
    // A directory with the name of the file: publishing fails, and the memory can still be deregistered.
    let unpublished = own.register(region(&[2])).unwrap();
    let mine = String::from_utf8(name[0].clone()).unwrap();
    let taken = directory.path().join(format!("{mine}-{}.payload", unpublished.id()));
    std::fs::create_dir_all(taken.join("full")).unwrap();
    let error = own.publish(&unpublished).unwrap_err();
    assert!(matches!(error, TransportError::File { .. }), "{error}");
    own.deregister(unpublished).unwrap();
    std::fs::remove_dir_all(taken).unwrap();
    // A fence that fails can be called again.
    let published = own.register(region(&[3])).unwrap();
    own.publish(&published).unwrap();
    let file = directory.path().join(format!("{mine}-{}.payload", published.id()));
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    let error = own.fence().unwrap_err();
    assert!(matches!(error, TransportError::File { .. }), "{error}");
    std::fs::remove_dir(&file).unwrap();
    std::fs::write(&file, [3]).unwrap();
    own.fence().unwrap();
    assert!(!file.exists(), "what it had left");
    drop((own, other));
    assert_eq!(directory.path().read_dir().unwrap().count(), 0, "no file is left");
    // Payloads, and a directory that is created, are of one user.
    let made = directory.path().join("made");
    let mut own = Files::new(&made).unwrap();
    let memory = own.register(region(&[1])).unwrap();
    let name = String::from_utf8(own.publish(&memory).unwrap().0).unwrap();
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!([mode(&made), mode(&made.join(name))], [0o700, 0o600]);
}
