//! The kind of every layer: released files list compression ratios; transformers lists names of layer types.

use alloc::string::String;
use alloc::vec::Vec;

use super::{ConfigError, Fields};
use crate::geometry::{CSA_RATIO, HCA_RATIO, LayerKind};

/// Names of layer types in files that transformers wrote.
const NAMES: [(&str, LayerKind); 3] = [
    ("sliding_attention", LayerKind::Swa),
    ("compressed_sparse_attention", LayerKind::Csa),
    ("heavily_compressed_attention", LayerKind::Hca),
];

/// Most layers, draft layers not counted.
const MAX_TRUNK_LAYERS: u32 = 1024;
/// Most draft layers.
const MAX_DRAFT_LAYERS: u32 = 64;

/// Every layer, the multi-token-prediction (MTP) layers last.
pub(super) struct Schedule {
    pub(super) layers: Vec<LayerKind>,
    pub(super) mtp_layers: u32,
}

impl Schedule {
    /// Reads `compress_ratios` or `layer_types`; with both, they must agree.
    pub(super) fn read(fields: &Fields) -> Result<Self, ConfigError> {
        let trunk = fields.count("num_hidden_layers", 1, MAX_TRUNK_LAYERS)?;
        check_ratios(fields)?;
        let named = names(fields, trunk)?;
        let Some(ratios) = fields.find::<Vec<i64>>("compress_ratios")? else {
            // transformers drops the MTP layers of a model when it loads it, and so writes none.
            let layers = named.ok_or(ConfigError::NoSchedule)?;
            return Ok(Self { layers, mtp_layers: 0 });
        };
        let mtp_layers = mtp_layers(fields, trunk, ratios.len())?;
        let layers = ratios
            .iter()
            .enumerate()
            .map(|(layer, &value)| kind_of_ratio(layer, value))
            .collect::<Result<Vec<_>, _>>()?;
        if named.is_some_and(|named| named != layers[..trunk as usize]) {
            let [first, second] = ["layer_types", "compress_ratios"].map(String::from);
            return Err(ConfigError::Disagree { first, second });
        }
        Ok(Self { layers, mtp_layers })
    }
}

/// The number of MTP layers among `found` ratios.
///
/// The number is `num_nextn_predict_layers`, except in models with a DSpark block drafter (Flash of 2026-07-31):
/// there the field is still 1, and the list has a ratio for each of the drafter's stages.
fn mtp_layers(fields: &Fields, trunk: u32, found: usize) -> Result<u32, ConfigError> {
    let name = "num_nextn_predict_layers";
    let said: u32 = fields.find(name)?.unwrap_or(0);
    if said > MAX_DRAFT_LAYERS {
        let [value, least, most] = [said, 0, MAX_DRAFT_LAYERS].map(f64::from);
        return Err(ConfigError::OutOfRange { field: String::from(name), value, least, most });
    }
    let listed = u32::try_from(found).unwrap_or(u32::MAX).saturating_sub(trunk);
    let drafter = fields.find::<u32>("dspark_block_size")?.is_some();
    let stages = drafter && said == 1 && (1..=MAX_DRAFT_LAYERS).contains(&listed);
    if found == (trunk as usize).saturating_add(said as usize) || stages {
        return Ok(listed);
    }
    let field = "compress_ratios";
    Err(ConfigError::BadLength { field, found, layers: trunk, mtp_layers: said })
}

/// `layer_types`, one for each layer of the trunk.
fn names(fields: &Fields, trunk: u32) -> Result<Option<Vec<LayerKind>>, ConfigError> {
    let field = "layer_types";
    let Some(types) = fields.find::<Vec<String>>(field)? else { return Ok(None) };
    if types.len() != trunk as usize {
        let (found, layers) = (types.len(), trunk);
        return Err(ConfigError::BadLength { field, found, layers, mtp_layers: 0 });
    }
    let kinds = types.into_iter().enumerate().map(|(layer, found)| {
        let known = NAMES.into_iter().find(|(name, _)| *name == found);
        let expected =
            "sliding_attention, compressed_sparse_attention, heavily_compressed_attention";
        match known {
            Some((_, kind)) => Ok(kind),
            None => Err(ConfigError::BadLayerType { field, layer, found, expected }),
        }
    });
    kinds.collect::<Result<Vec<_>, _>>().map(Some)
}

/// The ratios of the two layer types with compressed entries, as transformers writes them.
fn check_ratios(fields: &Fields) -> Result<(), ConfigError> {
    let ratios = [(NAMES[1].0, CSA_RATIO), (NAMES[2].0, HCA_RATIO)];
    if let Some(rates) = fields.section("compress_rates")? {
        rates.only(&ratios.map(|(name, _)| name))?;
        ratios.iter().try_for_each(|&(name, ratio)| rates.dimension(name, ratio))?;
    }
    fields.constant("compress_rate_csa", CSA_RATIO.into())?;
    fields.constant("compress_rate_hca", HCA_RATIO.into())
}

fn kind_of_ratio(layer: usize, value: i64) -> Result<LayerKind, ConfigError> {
    match value {
        0 => Ok(LayerKind::Swa),
        v if v == i64::from(CSA_RATIO) => Ok(LayerKind::Csa),
        v if v == i64::from(HCA_RATIO) => Ok(LayerKind::Hca),
        _ => Err(ConfigError::BadRatio { layer, value }),
    }
}
