//! Loads a model from its files.

use dsv4_kv::{IndexerWeights, rope};
use dsv4_kv_model_files::{Config, ModelFileError, ModelFiles};
use dsv4_kv_router::{RouterConfig, RouterWeights};
use kv_layout::geometry::{CSA_RATIO, HCA_RATIO, HEAD_DIM, INDEX_DIM, LayerKind};
use ndarray::{Array1, Array2};

use crate::attention::Attention;
use crate::error::ModelError;
use crate::experts::{Expert, Experts};
use crate::hyper::{HyperConnection, HyperConstants, HyperHead};
use crate::layer::{Compressed, Compressor, Csa, Layer};
use crate::left_over::LeftOver;
use crate::linear::Linear;
use crate::model::Model;
use crate::norm::RmsNorm;
use crate::rotary::Rotary;

impl Model {
    /// Reads all weights of a model, layer by layer. Calls `progress` after each layer with the number of layers
    /// read.
    ///
    /// Some tensors may be left over: those of MTP layers, also where these are numbered behind the other layers;
    /// scales of activations and of cached keys, which are not quantised as the files would have it; and
    /// frequencies of the rotary embedding, which follow from the configuration. Any other is refused as soon as its
    /// layer was read, or before all if `config.json` has no such layer.
    ///
    /// # Errors
    /// [`ModelError::ModelFile`], [`ModelError::Cache`] or [`ModelError::Router`] names the tensor;
    /// [`ModelFileError::Unused`] one that is left over; [`ModelFileError::NotInShard`], before anything is read, one
    /// that the index lists and no file has.
    pub fn load(
        model_files: &ModelFiles,
        mut progress: impl FnMut(usize),
    ) -> Result<Self, ModelError> {
        let config = model_files.config();
        let root = Tensors { model_files, config, prefix: String::new() };
        let hidden = config.hidden_size;
        let trunk = config.cache.layers.len() - config.cache.mtp_layers as usize;
        let left_over = LeftOver { model_files, trunk };
        left_over.check_listed()?;
        left_over.check(|layer| layer.is_some_and(|layer| layer >= trunk))?;
        let layers = (0..trunk).map(|index| {
            let layer = root.at(&format!("layers.{index}.")).layer(index as u32)?;
            left_over.check(|layer| layer == Some(index))?;
            progress(index + 1);
            Ok::<_, ModelError>(layer)
        });
        let layers = layers.collect::<Result<_, _>>()?;
        let model = Self {
            embedding: root.matrix("embed.weight", config.vocab_size, hidden)?,
            layers,
            head_streams: root.hyper_head()?,
            norm: root.norm("norm.weight", hidden)?,
            head: root.linear("head.weight", config.vocab_size, hidden)?,
            router: RouterConfig::from(config),
            config: config.clone(),
        };
        left_over.check(|_| true)?;
        Ok(model)
    }
}

/// The tensors of a model whose names begin with `prefix`.
struct Tensors<'c> {
    model_files: &'c ModelFiles,
    config: &'c Config,
    prefix: String,
}

impl<'c> Tensors<'c> {
    fn at(&self, prefix: &str) -> Self {
        Self { prefix: format!("{}{prefix}", self.prefix), ..*self }
    }

    fn f32(&self, name: &str, shape: &[u64]) -> Result<Vec<f32>, ModelFileError> {
        self.model_files.finite_f32(&format!("{}{name}", self.prefix), shape)
    }

    fn vector(&self, name: &str, length: u32) -> Result<Array1<f32>, ModelFileError> {
        Ok(Array1::from_vec(self.f32(name, &[length.into()])?))
    }

    fn matrix(&self, name: &str, rows: u32, columns: u32) -> Result<Array2<f32>, ModelFileError> {
        let values = self.f32(name, &[rows.into(), columns.into()])?;
        let shape = (rows as usize, columns as usize);
        Ok(Array2::from_shape_vec(shape, values).expect("the shape was checked"))
    }

    fn linear(&self, name: &str, outputs: u32, inputs: u32) -> Result<Linear, ModelFileError> {
        Ok(Linear::new(self.matrix(name, outputs, inputs)?))
    }

    fn norm(&self, name: &str, channels: u32) -> Result<RmsNorm, ModelFileError> {
        Ok(RmsNorm::new(self.vector(name, channels)?, self.config.norm_eps))
    }

    /// Reads layer `index`; `prefix` must be that of the layer.
    fn layer(&self, index: u32) -> Result<Layer, ModelError> {
        let hidden = self.config.hidden_size;
        let kind = self.config.cache.layers[index as usize];
        Ok(Layer {
            attention_streams: self.hyper_connection("hc_attn_")?,
            attention_norm: self.norm("attn_norm.weight", hidden)?,
            attention: self.at("attn.").attention(kind)?,
            compressed: self.at("attn.").compressed(kind, index)?,
            experts_streams: self.hyper_connection("hc_ffn_")?,
            experts_norm: self.norm("ffn_norm.weight", hidden)?,
            router: RouterWeights::of_layer(self.model_files, index)?,
            experts: self.at("ffn.").experts()?,
        })
    }

    fn constants(&self) -> HyperConstants {
        let hyper = &self.config.hyper;
        HyperConstants {
            streams: hyper.streams as usize,
            iterations: hyper.sinkhorn_iterations as usize,
            epsilon: hyper.eps,
            norm_epsilon: self.config.norm_eps,
        }
    }

    fn hyper_connection(&self, prefix: &str) -> Result<HyperConnection, ModelFileError> {
        let (streams, tensors) = (self.config.hyper.streams, self.at(prefix));
        let weights = 2 * streams + streams * streams;
        let scale = tensors.f32("scale", &[3])?;
        Ok(HyperConnection {
            projection: tensors.linear("fn", weights, streams * self.config.hidden_size)?,
            base: tensors.vector("base", weights)?,
            scale: [scale[0], scale[1], scale[2]],
            constants: self.constants(),
        })
    }

    fn hyper_head(&self) -> Result<HyperHead, ModelFileError> {
        let streams = self.config.hyper.streams;
        Ok(HyperHead {
            projection: self.linear("hc_head_fn", streams, streams * self.config.hidden_size)?,
            base: self.vector("hc_head_base", streams)?,
            scale: self.f32("hc_head_scale", &[1])?[0],
            constants: self.constants(),
        })
    }

    fn attention(&self, kind: LayerKind) -> Result<Attention, ModelFileError> {
        let Config { hidden_size, heads, q_lora_rank, o_groups, o_lora_rank, .. } = *self.config;
        let width = heads * HEAD_DIM;
        let groups = self.matrix("wo_a.weight", o_groups * o_lora_rank, width / o_groups)?;
        let groups = groups.exact_chunks((o_lora_rank as usize, groups.ncols()));
        let groups = groups.into_iter().map(|group| Linear::new(group.to_owned()));
        let rotary = match kind {
            LayerKind::Swa => Rotary::new(rope::plain_frequencies(self.config.rope_theta)),
            LayerKind::Csa | LayerKind::Hca => {
                Rotary::new(rope::compress_frequencies(&self.config.compress_rope))
            }
        };
        Ok(Attention {
            latent: self.linear("wq_a.weight", q_lora_rank, hidden_size)?,
            latent_norm: self.norm("q_norm.weight", q_lora_rank)?,
            query: self.linear("wq_b.weight", width, q_lora_rank)?,
            kv: self.linear("wkv.weight", HEAD_DIM, hidden_size)?,
            kv_norm: self.norm("kv_norm.weight", HEAD_DIM)?,
            sinks: self.vector("attn_sink", heads)?,
            output_groups: groups.collect(),
            output: self.linear("wo_b.weight", hidden_size, o_groups * o_lora_rank)?,
            rotary,
            output_rotary: rotary,
            norm_epsilon: self.config.norm_eps,
        })
    }

    fn compressed(&self, kind: LayerKind, index: u32) -> Result<Compressed, ModelError> {
        let main = |ratio, columns| self.at("compressor.").compressor(ratio, columns, HEAD_DIM);
        Ok(match kind {
            LayerKind::Swa => Compressed::Swa,
            // A CSA window overlaps the one before it: each token has keys and gates for both.
            LayerKind::Csa => {
                let keys = self.at("indexer.compressor.");
                Compressed::Csa(Box::new(Csa {
                    main: main(CSA_RATIO, 2 * HEAD_DIM)?,
                    index: keys.compressor(CSA_RATIO, 2 * INDEX_DIM, INDEX_DIM)?,
                    indexer: IndexerWeights::of_layer(self.model_files, index)?,
                }))
            }
            LayerKind::Hca => Compressed::Hca(main(HCA_RATIO, HEAD_DIM)?),
        })
    }

    fn compressor(
        &self,
        ratio: u32,
        columns: u32,
        channels: u32,
    ) -> Result<Compressor, ModelFileError> {
        let hidden = self.config.hidden_size;
        Ok(Compressor {
            kv: self.linear("wkv.weight", columns, hidden)?,
            gate: self.linear("wgate.weight", columns, hidden)?,
            position_bias: self.f32("ape", &[ratio.into(), columns.into()])?,
            norm: self.f32("norm.weight", &[channels.into()])?,
        })
    }

    fn experts(&self) -> Result<Experts, ModelFileError> {
        let experts = &self.config.experts;
        let expert = |prefix: &str, intermediate: u32| {
            let (tensors, hidden) = (self.at(prefix), self.config.hidden_size);
            Ok::<_, ModelFileError>(Expert {
                gate: tensors.linear("w1.weight", intermediate, hidden)?,
                up: tensors.linear("w3.weight", intermediate, hidden)?,
                down: tensors.linear("w2.weight", hidden, intermediate)?,
                limit: experts.swiglu_limit,
            })
        };
        let intermediate = experts.intermediate_size;
        let routed = (0..experts.routed)
            .map(|index| expert(&format!("experts.{index}."), intermediate))
            .collect::<Result<_, _>>()?;
        // The shared experts are stored as one expert, whose intermediate size is the sum of theirs.
        let shared = expert("shared_experts.", experts.shared * intermediate)?;
        Ok(Experts { routed, shared })
    }
}
