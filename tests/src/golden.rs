//! The golden vectors: `.npy` files made by other software, see `golden/README.md`.

use std::env;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use npyz::{Deserialize, NpyFile, Order};

/// An array in C order.
#[derive(Clone, Debug, PartialEq)]
pub struct Array<T> {
    /// Extent of each dimension, slowest first.
    pub shape: Vec<usize>,
    /// The elements, the last dimension contiguous.
    pub data: Vec<T>,
}

impl<T> Array<T> {
    /// The slices along the last dimension, in order: `[.., n]` gives slices of `n` elements.
    ///
    /// # Panics
    /// If the array has no dimension or the last one is empty.
    pub fn rows(&self) -> std::slice::ChunksExact<'_, T> {
        self.data.chunks_exact(self.shape[self.shape.len() - 1])
    }
}

/// The folder of the vectors: `DSV4_GOLDEN_DIR` if set, else `golden` beside this package's source.
#[must_use]
pub fn folder() -> PathBuf {
    match env::var_os("DSV4_GOLDEN_DIR") {
        Some(folder) => folder.into(),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden"),
    }
}

/// Reads `name.npy`, in C order whatever the file's order is. BF16 is stored as `u16`, FP8, FP4 and UE8M0 as `u8`.
///
/// # Errors
/// Names the file, and says whether it is absent, not `.npy`, of another element type, cut short,
/// or in Fortran order with more than two dimensions.
pub fn load<T: Deserialize + Copy>(name: &str) -> Result<Array<T>> {
    let path = folder().join(format!("{name}.npy"));
    let context = || format!("golden vector {}", path.display());
    let file = File::open(&path).with_context(context)?;
    let npy = NpyFile::new(BufReader::new(file)).with_context(context)?;
    let order = npy.order();
    let shape: Vec<usize> = npy.shape().iter().map(|&extent| extent as usize).collect();
    let data = npy.into_vec().with_context(context)?;
    let data = match (order, &shape[..]) {
        (Order::C, _) | (Order::Fortran, [_]) => data,
        (Order::Fortran, &[rows, columns]) => transpose(&data, rows, columns),
        _ => bail!("{} is in Fortran order with {} dimensions", context(), shape.len()),
    };
    Ok(Array { shape, data })
}

/// `[rows, columns]` in C order from the same in Fortran order.
fn transpose<T: Copy>(data: &[T], rows: usize, columns: usize) -> Vec<T> {
    (0..rows * columns).map(|at| data[at % columns * rows + at / columns]).collect()
}

/// Reads a text file of the folder, such as `index_semantics.json`.
///
/// # Errors
/// Names the file if it cannot be read.
pub fn text(file: &str) -> Result<String> {
    let path = folder().join(file);
    fs::read_to_string(&path).with_context(|| format!("golden file {}", path.display()))
}
