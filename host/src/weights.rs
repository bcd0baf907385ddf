//! A compressor's weights on a device.

use dsv4_kv_model_files::ModelFiles;
use kv_layout::geometry::CompressorKind;

use crate::device::{Backend, Buffer, Memory, Stream};
use crate::error::KvError;
use crate::step::CompressorInputs;

/// The weights of a layer's compressor that the cache applies: position bias and RMS norm. The projections of
/// keys and gates belong to the embedder. `ratio`, `columns` and `channels` are those of the [`CompressorKind`].
pub struct CompressorWeights<B: Backend> {
    /// `[ratio, columns]` f32.
    pub ape: Buffer<B, f32>,
    /// `[channels]` f32.
    pub norm: Buffer<B, f32>,
}

impl<B: Backend> CompressorWeights<B> {
    /// The weights of the compressor of this kind in layer `layer` of a model.
    ///
    /// # Errors
    /// [`KvError::ModelFile`] for a tensor that is missing or has another shape or type, for instance if
    /// the layer has no such compressor; [`KvError::Device`].
    pub fn of_layer(
        stream: &Stream<B>,
        model_files: &ModelFiles,
        layer: u32,
        kind: CompressorKind,
    ) -> Result<Self, KvError> {
        let layer = model_files.layer_prefix(layer);
        let prefix = match kind {
            CompressorKind::CsaMain | CompressorKind::Hca => format!("{layer}.attn.compressor"),
            CompressorKind::CsaIndex => format!("{layer}.attn.indexer.compressor"),
        };
        let [ratio, columns, channels] =
            [kind.ratio(), kind.columns(), kind.channels()].map(u64::from);
        let ape = model_files.f32(&format!("{prefix}.ape"), &[ratio, columns])?;
        let norm = model_files.f32(&format!("{prefix}.norm.weight"), &[channels])?;
        Self::from_host(stream, &ape, &norm)
    }

    /// Uploads weights from host memory: `[ratio, columns]` and `[channels]`. A layer's update refuses weights that are
    /// too short for it.
    ///
    /// # Errors
    /// [`KvError::Device`] if there is no memory.
    pub fn from_host(stream: &Stream<B>, ape: &[f32], norm: &[f32]) -> Result<Self, KvError> {
        Ok(Self {
            ape: stream.upload_new("position bias", ape)?,
            norm: stream.upload_new("norm weights", norm)?,
        })
    }

    /// The inputs of a layer's update: these weights and the projections of the step's tokens, both
    /// `[tokens, columns]` f32, the gates without the position bias.
    #[must_use]
    pub fn inputs<'i>(
        &'i self,
        kv: &'i Buffer<B, f32>,
        gate: &'i Buffer<B, f32>,
    ) -> CompressorInputs<'i, B> {
        CompressorInputs { kv, gate, ape: &self.ape, norm: &self.norm }
    }

    /// Its weights, for a graph to retain.
    #[must_use]
    pub fn memory(&self) -> Vec<Memory<B>> {
        vec![self.ape.memory(), self.norm.memory()]
    }
}
