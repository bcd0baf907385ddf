//! The constants of the rotary embedding, in the spelling of released files and of transformers.

use alloc::format;
use alloc::string::{String, ToString};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{ConfigError, Fields};
use crate::geometry::{HEAD_DIM, ROPE_DIM};

/// The rotary embedding of layers with compressed entries: YaRN (docs/specification.md, section 4).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CompressRope {
    /// Base of the frequencies (`compress_rope_theta`).
    pub theta: f64,
    /// Ratio of the context to the context trained on.
    pub factor: f64,
    /// Pairs with more turns than this over the context trained on keep their frequency.
    pub beta_fast: f64,
    /// Pairs with fewer turns than this have their frequency divided by the whole factor.
    pub beta_slow: f64,
    /// The context trained on, in tokens (`original_max_position_embeddings`).
    pub trained_context: f64,
}

impl CompressRope {
    /// The constants of every released model.
    pub const RELEASED: Self = Self {
        theta: 160_000.0,
        factor: 16.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        trained_context: 65_536.0,
    };
}

/// Both rotary embeddings of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeConstants {
    /// Base of the frequencies of sliding-window layers (`rope_theta`), which have no YaRN.
    pub theta: f64,
    /// The rotary embedding of layers with compressed entries.
    pub compress: CompressRope,
}

/// Range of bases that are accepted. Above 1, a pair's frequency is at most one radian a token, and angles stay in the
/// range where cosine and sine are exact to the last place.
const THETAS: (f64, f64) = (2.0, 1e12);
/// Ranges of the other constants.
const FACTORS: (f64, f64) = (1.0, 1e6);
const BETAS: (f64, f64) = (1e-3, 1e6);
const TRAINED_CONTEXTS: (f64, f64) = (1.0, 1e9);

impl RopeConstants {
    /// Refuses constants outside the ranges that [`Self::read`] accepts; a configuration from elsewhere may have such
    /// constants.
    ///
    /// # Errors
    /// [`ConfigError::OutOfRange`] names the first.
    pub fn check(&self) -> Result<(), ConfigError> {
        let Self { theta, compress } = *self;
        let CompressRope { theta: compress_theta, factor, beta_fast, beta_slow, trained_context } =
            compress;
        let constants = [
            ("rope_theta", theta, THETAS),
            ("compress_rope.theta", compress_theta, THETAS),
            ("compress_rope.factor", factor, FACTORS),
            ("compress_rope.beta_fast", beta_fast, BETAS),
            ("compress_rope.beta_slow", beta_slow, BETAS),
            ("compress_rope.trained_context", trained_context, TRAINED_CONTEXTS),
        ];
        // NaN is in no range.
        match constants
            .into_iter()
            .find(|(_, value, (least, most))| !(least..=most).contains(&value))
        {
            None => Ok(()),
            Some((field, value, (least, most))) => {
                Err(ConfigError::OutOfRange { field: String::from(field), value, least, most })
            }
        }
    }

    /// Reads the constants from `rope_theta`, `compress_rope_theta` and `rope_scaling` (released files; a
    /// `rope_parameters` without sections is the same as `rope_scaling`), or from `rope_parameters` with its sections
    /// `main` and `compress` (transformers).
    ///
    /// # Errors
    /// [`ConfigError`] names the field; a constant that is in a file twice must be the same.
    pub fn read(fields: &Fields) -> Result<Self, ConfigError> {
        check_rotated(fields)?;
        let section = fields.section("rope_parameters")?;
        let sections = match &section {
            Some(section) => (section.section("main")?, section.section("compress")?),
            None => (None, None),
        };
        let (main, scaling) = match (section, sections) {
            (Some(section), (Some(main), Some(compress))) => {
                section.only(&["main", "compress"])?;
                main.only(&["rope_type", "type", "rope_theta", "partial_rotary_factor"])?;
                main.one_of("rope_type", &[json!("default")])?;
                main.one_of("type", &[json!("default")])?;
                check_factor(&main)?;
                // Without it, transformers scales cosine and sine of such a file by 0.1 ln(factor) + 1, and vLLM does not.
                compress.need::<f64>("attention_factor")?;
                (Some(main), Some(compress))
            }
            // Not nested: the same as `rope_scaling`.
            (section, _) => (None, section),
        };
        let released = fields.section("rope_scaling")?;
        let yarn = match (&released, &scaling) {
            (None, None) => return Err(fields.missing("rope_scaling")),
            (Some(one), None) | (None, Some(one)) => Yarn::read(one)?,
            (Some(one), Some(other)) if Yarn::read(one)? == Yarn::read(other)? => Yarn::read(one)?,
            (Some(_), Some(_)) => return Err(disagree("rope_parameters", "rope_scaling")),
        };
        let (nested, flat) = match main {
            Some(_) => (scaling.as_ref(), None),
            None => (None, scaling.as_ref()),
        };
        let main_theta = theta(fields, "rope_theta", main.as_ref())?;
        let compress_theta = theta(fields, "compress_rope_theta", nested)?;
        for section in [released.as_ref(), flat].into_iter().flatten() {
            check_scaled_theta(section, [main_theta, compress_theta])?;
        }
        let Yarn { factor, beta_fast, beta_slow, trained_context } = yarn;
        let compress =
            CompressRope { theta: compress_theta, factor, beta_fast, beta_slow, trained_context };
        Ok(Self { theta: main_theta, compress })
    }
}

/// YaRN's own constants.
#[derive(PartialEq)]
struct Yarn {
    factor: f64,
    beta_fast: f64,
    beta_slow: f64,
    trained_context: f64,
}

impl Yarn {
    fn read(section: &Fields) -> Result<Self, ConfigError> {
        section.only(&[
            "rope_type",
            "type",
            "rope_theta",
            "partial_rotary_factor",
            "factor",
            "beta_fast",
            "beta_slow",
            "original_max_position_embeddings",
            "attention_factor",
        ])?;
        let kind = |name| section.find::<Value>(name);
        if kind("rope_type")?.is_none() && kind("type")?.is_none() {
            return Err(section.missing("rope_type"));
        }
        section.one_of("rope_type", &[json!("yarn")])?;
        section.one_of("type", &[json!("yarn")])?;
        // The released models do not scale cosine and sine.
        section.constant("attention_factor", 1.0)?;
        check_factor(section)?;
        Ok(Self {
            factor: section.number("factor", FACTORS.0, FACTORS.1)?,
            beta_fast: section.number("beta_fast", BETAS.0, BETAS.1)?,
            beta_slow: section.number("beta_slow", BETAS.0, BETAS.1)?,
            trained_context: section.number(
                "original_max_position_embeddings",
                TRAINED_CONTEXTS.0,
                TRAINED_CONTEXTS.1,
            )?,
        })
    }
}

/// The base in field `name`; it must agree with a section's `rope_theta`, if there is one.
fn theta(fields: &Fields, name: &str, section: Option<&Fields>) -> Result<f64, ConfigError> {
    let (least, most) = THETAS;
    let inner = match section {
        Some(section) if section.find::<f64>("rope_theta")?.is_some() => {
            Some((section.path_of("rope_theta"), section.number("rope_theta", least, most)?))
        }
        _ => None,
    };
    match (fields.find::<f64>(name)?, inner) {
        (Some(outer), Some((path, inner))) if outer != inner => Err(disagree(&path, name)),
        (None, Some((_, inner))) => Ok(inner),
        _ => fields.number(name, least, most),
    }
}

/// Checks the base in `rope_scaling`, or in `rope_parameters` without `main` and `compress`. Released files have none
/// there; transformers does not use it. It has to be one of `thetas`: `rope_theta` and `compress_rope_theta`.
fn check_scaled_theta(section: &Fields, thetas: [f64; 2]) -> Result<(), ConfigError> {
    match section.find::<f64>("rope_theta")? {
        Some(theta) if !thetas.contains(&theta) => {
            let [main, compress] = thetas;
            Err(ConfigError::Unsupported {
                field: section.path_of("rope_theta"),
                found: theta.to_string(),
                expected: format!(
                    "{main} (`rope_theta`), {compress} (`compress_rope_theta`) or no such field"
                ),
            })
        }
        _ => Ok(()),
    }
}

/// Checks that 64 channels are rotated: given as a number, or as a part of the head's channels.
fn check_rotated(fields: &Fields) -> Result<(), ConfigError> {
    match fields.find::<f64>("partial_rotary_factor")? {
        None => fields.dimension("qk_rope_head_dim", ROPE_DIM),
        Some(_) => {
            fields.constant("qk_rope_head_dim", ROPE_DIM.into())?;
            check_factor(fields)
        }
    }
}

fn check_factor(fields: &Fields) -> Result<(), ConfigError> {
    fields.constant("partial_rotary_factor", f64::from(ROPE_DIM) / f64::from(HEAD_DIM))
}

fn disagree(first: &str, second: &str) -> ConfigError {
    ConfigError::Disagree { first: String::from(first), second: String::from(second) }
}
