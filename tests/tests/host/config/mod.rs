//! Configurations of models, as checkpoints have them.

mod model;
mod router;
