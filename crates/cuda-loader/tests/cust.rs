//! A program that uses `cust` links and starts without CUDA, and says clearly what is missing.
//!
//! Where a driver is installed the same tests state the opposite: the loader must find it.

use cuda_loader::DriverError;
use cust::error::CudaError;

fn mapped_files() -> String {
    std::fs::read_to_string("/proc/self/maps").unwrap()
}

#[test]
fn the_loader_and_cust_agree_on_whether_there_is_a_driver() {
    let initialised = cust::init(cust::CudaFlags::empty());
    match cuda_loader::driver() {
        Ok(driver) => {
            assert!(driver.path().is_absolute(), "{}", driver.path().display());
            // The path may be a link; the mapped file is what it leads to.
            let file = driver.path().canonicalize().unwrap();
            assert!(mapped_files().contains(file.to_str().unwrap()), "{}", file.display());
            // A driver without a GPU answers NoDevice; anything else is a fault of the loader.
            assert!(matches!(initialised, Ok(()) | Err(CudaError::NoDevice)), "{initialised:?}");
        }
        Err(error) => {
            assert_eq!(initialised, Err(CudaError::NoDevice));
            assert!(matches!(error, DriverError::NoDriver { .. }), "{error}");
            assert!(error.to_string().contains("libcuda.so.1"), "{error}");
            assert!(!mapped_files().contains("libcuda"));
        }
    }
}

#[test]
fn every_cust_error_can_be_displayed() {
    for error in [CudaError::NoDevice, CudaError::NotFound, CudaError::OutOfMemory] {
        let text = error.to_string();
        assert!(text.len() > 5, "{error:?}: {text}");
    }
    if cuda_loader::driver().is_err() {
        assert!(CudaError::NoDevice.to_string().contains("no CUDA driver is installed"));
    }
}
