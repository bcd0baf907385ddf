//! A program that uses `cust` does not load the CUDA driver to start: only the first call does.
//!
//! One test, alone in its program: another one running beside it might make that first call.

fn driver_is_mapped() -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap().contains("libcuda.so")
}

#[test]
fn the_driver_is_opened_by_the_first_call() {
    assert!(!driver_is_mapped());
    let initialised = cust::init(cust::CudaFlags::empty());
    assert_eq!(driver_is_mapped(), cuda_loader::driver().is_ok(), "{initialised:?}");
}
