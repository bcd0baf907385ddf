//! Opens the driver's library, once per process.

use std::error::Error;
use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cust_raw::CUresult;
use libloading::Library;

/// Places of the driver, in the order tried. The second is that of WSL.
const CANDIDATES: &[&str] = &["libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"];

/// Why there is no CUDA driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// None of the libraries could be opened: usually no NVIDIA driver is installed.
    #[error("no CUDA driver: {}", tried.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NoDriver {
        /// The libraries that were tried, in order.
        tried: Vec<Tried>,
    },
    /// A library of that name was opened, but it has no `cuInit`.
    #[error("{} is not a CUDA driver: it has no cuInit", path.display())]
    NotADriver {
        /// The file that was opened.
        path: PathBuf,
    },
}

/// A library that could not be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}: {reason}")]
pub struct Tried {
    /// Its name.
    pub name: String,
    /// The system's error message, without the name.
    pub reason: String,
}

impl Tried {
    /// Messages of the dynamic linker mostly begin with the name of the library; it is removed.
    fn new(name: &str, said: &str) -> Self {
        let reason = said.strip_prefix(name).and_then(|rest| rest.strip_prefix(": "));
        Self { name: name.to_owned(), reason: reason.unwrap_or(said).to_owned() }
    }
}

/// The driver's library. It stays open for the rest of the process.
#[derive(Debug)]
pub struct Driver {
    library: Library,
    path: PathBuf,
}

impl Driver {
    /// The file the driver was loaded from, as the dynamic linker names it; it may be a link.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the first of `candidates` that the dynamic linker finds.
    fn open(candidates: &[&str]) -> Result<Self, DriverError> {
        let mut tried = Vec::new();
        for &name in candidates {
            // SAFETY: the candidates are system libraries, whose initialisers are safe to run on
            // any thread; nothing else is loaded in their place.
            match unsafe { Library::new(name) } {
                Ok(library) => {
                    // SAFETY: the address is only looked up here, not called.
                    let init = unsafe { library.get::<*const c_void>(c"cuInit") };
                    let Ok(init) = init.map(|symbol| *symbol) else {
                        return Err(DriverError::NotADriver { path: PathBuf::from(name) });
                    };
                    return Ok(Self {
                        path: file_of(init).unwrap_or_else(|| name.into()),
                        library,
                    });
                }
                Err(error) => {
                    let said =
                        error.source().map_or_else(|| error.to_string(), ToString::to_string);
                    tried.push(Tried::new(name, &said));
                }
            }
        }
        Err(DriverError::NoDriver { tried })
    }

    /// The driver's function `name`; `None` if this driver does not have it.
    ///
    /// # Safety
    /// `F` is a function pointer type of the function's own signature, and is not called once this
    /// driver is dropped.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> Option<F> {
        // SAFETY: the caller promises that `F` is the type of the symbol, and not to call the copied
        // pointer once the library is closed.
        unsafe { self.library.get::<F>(name) }.ok().map(|symbol| *symbol)
    }
}

/// The file that the code at `address` was loaded from.
fn file_of(address: *const c_void) -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr accepts any address and fills `info` if it returns non-zero; an all-zero
    // Dl_info is valid, so `assume_init` holds either way.
    let (found, info) = unsafe { (libc::dladdr(address, info.as_mut_ptr()), info.assume_init()) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr succeeded, so `dli_fname` is a NUL-terminated string owned by the linker,
    // alive while the library is open; it is copied at once.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(name.to_string_lossy().into_owned()))
}

fn opened() -> &'static Result<Driver, DriverError> {
    static DRIVER: OnceLock<Result<Driver, DriverError>> = OnceLock::new();
    DRIVER.get_or_init(|| Driver::open(CANDIDATES))
}

/// The CUDA driver of this machine, opened on the first call. This says nothing about devices: a driver may be
/// installed on a machine without a GPU.
///
/// # Errors
/// [`DriverError`] if there is none; the result does not change while the process runs.
pub fn driver() -> Result<&'static Driver, DriverError> {
    opened().as_ref().map_err(Clone::clone)
}

/// The function `name` of this machine's driver, or the status to return in its place.
///
/// # Safety
/// `F` is a function pointer type of the function's own signature.
pub(crate) unsafe fn resolve<F: Copy>(name: &CStr) -> Result<F, CUresult> {
    let driver = opened().as_ref().map_err(|_| CUresult::CUDA_ERROR_NO_DEVICE)?;
    // SAFETY: the caller answers for `F`; this driver is never dropped.
    unsafe { driver.function(name) }.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_the_reason() {
        let error = Driver::open(&["libnosuch-a.so", "libnosuch-b.so"]).unwrap_err();
        let DriverError::NoDriver { tried } = &error else { panic!("{error:?}") };
        let names: Vec<_> = tried.iter().map(|tried| tried.name.as_str()).collect();
        assert_eq!(names, ["libnosuch-a.so", "libnosuch-b.so"]);
        assert!(tried.iter().all(|tried| !tried.reason.is_empty()), "{tried:?}");
        let message = error.to_string();
        assert!(message.starts_with("no CUDA driver: libnosuch-a.so: "), "{message}");
        for name in names {
            assert_eq!(message.matches(name).count(), 1, "{message}");
        }
    }

    #[test]
    fn what_the_system_says_keeps_its_name_only_once() {
        let reason = |said| Tried::new("liba.so", said).reason;
        assert_eq!(
            reason("liba.so: cannot open shared object file"),
            "cannot open shared object file"
        );
        assert_eq!(reason("out of memory"), "out of memory");
        assert_eq!(reason("liba.so.1: is another"), "liba.so.1: is another");
    }

    #[test]
    fn a_library_without_cu_init_is_refused() {
        let error = Driver::open(&["libnosuch.so", "libc.so.6"]).unwrap_err();
        assert_eq!(error, DriverError::NotADriver { path: "libc.so.6".into() });
    }

    #[test]
    fn functions_are_found_by_name_and_missing_ones_are_not() {
        // SAFETY: libc is loaded in every process already.
        let library = unsafe { Library::new("libc.so.6") }.unwrap();
        let libc = Driver { library, path: PathBuf::new() };
        type GetPid = unsafe extern "C" fn() -> libc::pid_t;
        // SAFETY: the signature of getpid(2).
        let getpid = unsafe { libc.function::<GetPid>(c"getpid") }.unwrap();
        // SAFETY: getpid has no precondition.
        assert_eq!(u32::try_from(unsafe { getpid() }), Ok(std::process::id()));
        // SAFETY: the function does not exist, so nothing of that type can be called.
        assert!(unsafe { libc.function::<GetPid>(c"cuInit") }.is_none());
    }

    #[test]
    fn the_file_of_an_address_is_found() {
        let file = file_of(libc::getpid as *const c_void).unwrap();
        assert!(file.to_string_lossy().contains("libc"), "{}", file.display());
        assert_eq!(file_of(std::ptr::null()), None);
    }
}
