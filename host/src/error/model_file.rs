//! Errors of a model's files as errors of the cache.

use dsv4_kv_model_files::ModelFileError;

use super::KvError;

impl From<ModelFileError> for KvError {
    fn from(error: ModelFileError) -> Self {
        Self::ModelFile(Box::new(error))
    }
}
