//! A request that advances step by step, or starts again.

use dsv4_kv::RequestId;
use dsv4_kv::device::Backend;
use dsv4_kv_tests::fed::{Padding, Part};
use dsv4_kv_tests::stories::Story;

use super::world::Site;

/// A request that advances step by step.
#[derive(Default)]
pub struct Walk {
    pub id: Option<RequestId>,
    at: usize,
}

impl Walk {
    /// Computes the request up to `end` tokens; from the start if it is past that.
    pub fn to<B: Backend>(&mut self, site: &mut Site<B>, story: &Story, end: usize) -> RequestId {
        let manager = &mut site.fed.manager;
        if end < self.at {
            manager.release(self.id.take().unwrap()).unwrap();
        }
        let id = *self.id.get_or_insert_with(|| {
            self.at = 0;
            manager.admit().unwrap()
        });
        if end > self.at {
            site.fed.step(&[Part::new(id, story, self.at..end)], Padding::None);
        }
        self.at = end;
        id
    }
}
