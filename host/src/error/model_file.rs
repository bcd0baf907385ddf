//! Errors of a model's files as errors of the cache.

use dsv4_kv_checkpoint::CheckpointError;

use super::KvError;

impl From<CheckpointError> for KvError {
    fn from(error: CheckpointError) -> Self {
        Self::ModelFile(Box::new(error))
    }
}
