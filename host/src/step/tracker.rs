//! Tracks which launches of a layer were queued in a step.

use crate::error::KvError;
use crate::ids::LayerId;
use crate::layer_progress::LayerProgress;

/// Whether a launch was queued, or may have been.
pub(super) fn may_have_run(launch: &Result<(), KvError>) -> bool {
    match launch {
        Ok(()) => true,
        Err(KvError::Device(error)) => error.may_have_queued(),
        Err(_) => false,
    }
}

/// Records which launches of a layer were queued, in the progress of the layer and in the step.
pub(crate) struct Tracker<'s> {
    pub layer: LayerId,
    pub progress: &'s mut LayerProgress,
    /// Address of the window rows that the layer was updated with; `None` before that.
    pub rows: &'s mut Option<u64>,
    pub touched: &'s mut bool,
}

impl Tracker<'_> {
    /// Refuses a layer that was updated already.
    pub fn check_not_started(&self) -> Result<(), KvError> {
        let (layer, progress) = (self.layer, *self.progress);
        match progress {
            LayerProgress::NotStarted => Ok(()),
            _ => Err(KvError::LayerRepeated { layer, progress }),
        }
    }

    /// Records a launch that writes rows of the cache. The layer counts as failed until [`Self::reached`], since a
    /// failure of this launch or of a later one of the update leaves it half updated.
    pub fn queued(&mut self, launch: Result<(), impl Into<KvError>>) -> Result<(), KvError> {
        let launch = launch.map_err(Into::into);
        if may_have_run(&launch) {
            *self.touched = true;
            *self.progress = LayerProgress::Failed;
        }
        launch
    }

    /// Records an append, which can be repeated if it fails.
    pub fn appended(&mut self, launch: Result<(), KvError>) -> Result<(), KvError> {
        *self.touched |= may_have_run(&launch);
        launch
    }

    /// Sets the progress of the layer, after all launches up to it were queued.
    pub fn reached(&mut self, progress: LayerProgress) {
        *self.progress = progress;
    }
}
