//! Objects of a backend, which are released only while no capture is active.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::capture::Captures;

/// An object of a backend. It is released when this is dropped, or after the capture that is active then: a driver may
/// neither free nor wait during a capture.
pub(crate) struct Owned<T: Send + 'static> {
    raw: ManuallyDrop<T>,
    captures: Arc<Captures>,
}

impl<T: Send + 'static> Owned<T> {
    pub fn new(raw: T, captures: &Arc<Captures>) -> Self {
        Self { raw: ManuallyDrop::new(raw), captures: Arc::clone(captures) }
    }
}

impl<T: Send + 'static> Deref for Owned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.raw
    }
}

impl<T: Send + 'static> DerefMut for Owned<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.raw
    }
}

impl<T: Send + 'static> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: taken here and nowhere else; `self` is not used afterwards.
        let raw = unsafe { ManuallyDrop::take(&mut self.raw) };
        self.captures.free(raw);
    }
}
