//! Tensors that a model does not read: those that it does not need, and others, which are refused.

use dsv4_kv_model_files::{ModelFileError, ModelFiles};

/// What tools quantise besides weights: activations and cached keys. Of the last part of a tensor's name, this is what
/// comes before the first `_`; one of [`PARAMETERS`] follows.
const OF_ACTIVATIONS: [&str; 6] = ["input", "output", "q", "k", "v", "kv"];
const PARAMETERS: [&str; 3] = ["scale", "zero_point", "global_scale"];

/// What of a model's files is left over when the model is read.
pub(crate) struct LeftOver<'c> {
    pub model_files: &'c ModelFiles,
    /// Number of layers without MTP layers.
    pub trunk: usize,
}

impl LeftOver<'_> {
    /// Refuses a tensor that the index lists and no file has, unless it is needless. Any other tensor is one that the
    /// model reads, or one that [`Self::check`] would refuse if a file had it.
    pub fn check_listed(&self) -> Result<(), ModelFileError> {
        self.model_files.check_listed(|name| !self.is_needless(name))
    }

    /// Refuses a tensor that was not read yet and is not needless, if its layer `is_due` (`None`: it has no layer):
    /// without it the results would be those of another model.
    pub fn check(&self, is_due: impl Fn(Option<usize>) -> bool) -> Result<(), ModelFileError> {
        let mut unread = self.model_files.unread();
        unread.retain(|name| is_due(layer(name)) && !self.is_needless(name));
        match unread.first() {
            None => Ok(()),
            Some(&name) => Err(ModelFileError::Unused { name: name.into(), count: unread.len() }),
        }
    }

    fn is_needless(&self, name: &str) -> bool {
        let end = name.rsplit('.').next().unwrap_or(name);
        let is_of_activations = end.split_once('_').is_some_and(|(of, parameter)| {
            OF_ACTIVATIONS.contains(&of) && PARAMETERS.contains(&parameter)
        });
        is_of_activations || end.ends_with("inv_freq") || self.is_of_draft(name)
    }

    /// Whether this is a tensor of an MTP layer. Some tools number MTP layers behind the trunk. Such a layer has a norm
    /// of the next token's embedding, in a file, which layers of the trunk lack: a trunk that is longer than `config.json` says
    /// stays refused.
    fn is_of_draft(&self, name: &str) -> bool {
        let norms_embedding =
            |layer: usize| self.model_files.contains(&format!("layers.{layer}.enorm.weight"));
        name.starts_with("mtp.")
            || layer(name).is_some_and(|layer| layer >= self.trunk && norms_embedding(layer))
    }
}

/// The layer in a tensor's name, if it has the name `layers.N.`.
fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("layers.")?.split('.').next()?.parse().ok()
}
