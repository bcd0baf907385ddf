//! Units of pinned memory: stored bytes come back, whatever the order of the units.

use std::sync::Arc;

use dsv4_kv::device::{Backend, Device, DeviceError, HostCopies, HostPool};

use crate::inputs::{download, upload};

pub fn what_is_stored_comes_back<B: Backend>(device: &Device<B>) {
    let (stream, aside) = (device.stream().unwrap(), device.stream().unwrap());
    let pool = HostPool::new(device, 8, 4096).unwrap();
    // Units 1, 3, 4, 5 and 6 are free: one alone, and a run of four. The last one gets fewer bytes than it holds.
    let mut held = pool.take(7).unwrap();
    held.remove(1);
    held.truncate(2);
    let free = pool.free();
    assert_eq!((free, pool.units()), (6, 8));
    let values: Vec<u8> = (0..4 * 4096 + 100).map(|at| (at * 7 % 251) as u8).collect();
    let from = upload(&stream, &values);
    let mut copies = HostCopies::new(&aside).unwrap();
    copies.store(&from.view(), pool.take(5).unwrap()).unwrap();
    copies.end().unwrap();
    assert_eq!((copies.bytes(), pool.free()), (values.len() as u64, 1));
    let units = copies.settle().ok().expect("it is done");
    let stored: Vec<u8> = units.iter().flat_map(|unit| unit.bytes()).copied().collect();
    assert_eq!(stored[..values.len()], values);
    let units: Vec<_> = units.into_iter().map(Arc::new).collect();
    let to = device.allocate::<u8>("to", values.len() as u64).unwrap();
    let mut copies = HostCopies::new(&aside).unwrap();
    copies.load(units.iter().cloned(), &to).unwrap();
    copies.end().unwrap();
    while !copies.is_done().unwrap() {}
    assert!(copies.settle().is_ok());
    assert_eq!(download(&stream, &to), values);
    drop((units, held));
    assert_eq!(pool.free(), 8);
    assert!(pool.take(9).is_none() && pool.free() == 8);
}

pub fn wrong_sizes_of_units_are_refused<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let pool = HostPool::new(device, 4, 4096).unwrap();
    let mut copies = HostCopies::new(&stream).unwrap();
    for (bytes, units) in [(4096, 2), (4097, 1), (0, 1)] {
        let buffer = device.allocate::<u8>("buffer", bytes).unwrap();
        let taken = pool.take(units).unwrap();
        let error = copies.store(&buffer.view(), taken).unwrap_err();
        assert!(matches!(error, DeviceError::Length { .. }), "{error}");
        let taken = pool.take(units).unwrap().into_iter().map(Arc::new);
        let error = copies.load(taken, &buffer).unwrap_err();
        assert!(matches!(error, DeviceError::Length { .. }), "{error}");
    }
    assert_eq!((copies.bytes(), pool.free()), (0, 4));
}

/// Copies that are dropped during a capture do not end it. Their units are free again after it.
pub fn what_is_dropped_in_a_capture_comes_back<B: Backend>(device: &Device<B>) {
    let (stream, aside) = (device.stream().unwrap(), device.stream().unwrap());
    let pool = HostPool::new(device, 2, 4096).unwrap();
    let from = upload(&stream, &[7_u8; 8192]);
    let mut copies = HostCopies::new(&aside).unwrap();
    copies.store(&from.view(), pool.take(2).unwrap()).unwrap();
    let graph = stream.capture(vec![from.memory()], || {
        drop(copies);
        assert_eq!(pool.free(), 0, "the device may still write them");
        stream.fill(&from, 1)
    });
    graph.expect("nothing broke the capture");
    assert_eq!(pool.free(), 2);
}
