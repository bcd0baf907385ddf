//! A weight in NVFP4 on a device.

use dsv4_kv_device::{Backend, Buffer, Memory, Stream, View, bf16};
use kernels_gpu::launch::Nvfp4Linear as Operation;
use kernels_gpu::params::Nvfp4LinearParams;
use kv_layout::linear::{LinearOutput, LinearTile};

use crate::error::LinearError;
use crate::matrix::Nvfp4Matrix;
use crate::tiles::tiles;

/// A weight in NVFP4 on a device. Its upload is complete when [`Self::new`] returns, and no launch writes it
/// afterwards. So any number of streams may use it, and kernels may load it while the previous launch still runs.
#[derive(Clone)]
pub struct Nvfp4Linear<B: Backend> {
    columns: u32,
    inner: u32,
    codes: View<B, u8>,
    scales: View<B, u8>,
    scale: f32,
}

impl<B: Backend> Nvfp4Linear<B> {
    /// Copies a weight to the stream's device.
    ///
    /// # Errors
    /// [`LinearError::Device`].
    pub fn new(stream: &Stream<B>, weight: &Nvfp4Matrix) -> Result<Self, LinearError> {
        let (codes, scales) = tiles(weight);
        Ok(Self {
            columns: weight.columns(),
            inner: weight.inner(),
            codes: stream.upload_new("NVFP4 codes", &codes)?.into(),
            scales: stream.upload_new("NVFP4 scales", &scales)?.into(),
            scale: weight.scale(),
        })
    }

    /// Columns of the product: rows of the weight.
    #[must_use]
    pub fn columns(&self) -> u32 {
        self.columns
    }

    /// Values of a row.
    #[must_use]
    pub fn inner(&self) -> u32 {
        self.inner
    }

    /// `[columns / 64, inner / 128, 4096]` u8, quotients rounded up: codes in the tiles of [`kv_layout::linear`].
    #[must_use]
    pub fn codes(&self) -> &View<B, u8> {
        &self.codes
    }

    /// `[columns / 64, inner / 128, 512]` u8, quotients rounded up: E4M3 scales in tiles.
    #[must_use]
    pub fn scales(&self) -> &View<B, u8> {
        &self.scales
    }

    /// The scale of the whole weight, by which every value is multiplied.
    #[must_use]
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Its memory, for a graph to retain.
    #[must_use]
    pub fn memory(&self) -> [Memory<B>; 2] {
        [self.codes.memory(), self.scales.memory()]
    }

    /// Queues the product of `tokens` rows of `x` (`[tokens, inner]` BF16) with the weight, into `y` (`[tokens,
    /// columns]` f32). For decode batches: every 32 rows read the whole weight.
    ///
    /// # Errors
    /// [`LinearError::Device`] if a tensor is too short, or the launch failed.
    pub fn multiply(
        &self,
        stream: &Stream<B>,
        x: &View<B, bf16>,
        tokens: u32,
        y: &Buffer<B, f32>,
    ) -> Result<(), LinearError> {
        self.queue(stream, x, tokens, LinearOutput::F32, &y.cast()?)
    }

    /// As [`Self::multiply`], with `y` in BF16: the sums are rounded.
    ///
    /// # Errors
    /// As [`Self::multiply`].
    pub fn multiply_to_bf16(
        &self,
        stream: &Stream<B>,
        x: &View<B, bf16>,
        tokens: u32,
        y: &Buffer<B, bf16>,
    ) -> Result<(), LinearError> {
        self.queue(stream, x, tokens, LinearOutput::Bf16, &y.cast()?)
    }

    /// Queues `nvfp4_linear_*`.
    fn queue(
        &self,
        stream: &Stream<B>,
        x: &View<B, bf16>,
        tokens: u32,
        form: LinearOutput,
        y: &Buffer<B, u8>,
    ) -> Result<(), LinearError> {
        if tokens == 0 {
            return Ok(());
        }
        let (columns, inner, scale_bits) = (self.columns, self.inner, self.scale.to_bits());
        let operation = Operation {
            input: x.ptr(),
            codes: self.codes.ptr(),
            scales: self.scales.ptr(),
            output: y.ptr_mut(),
            params: Nvfp4LinearParams { tokens, columns, inner, scale_bits },
        };
        // SAFETY: the launch checks every buffer; `Nvfp4Matrix` has checked the shape; no launch writes the weight.
        Ok(unsafe { stream.launch((LinearTile::of(tokens), form), &operation) }?)
    }
}
