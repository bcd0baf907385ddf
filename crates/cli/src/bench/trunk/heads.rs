//! The heads of a step's queries. All layers use the same tensors, one after the other, as in a model.

use dsv4_kv::KvError;
use dsv4_kv::device::{Backend, Buffer, Memory, Stream, bf16};
use dsv4_kv::kv_layout::geometry::HEAD_DIM;
use dsv4_kv::step::{AttentionTensors, QueryForm};

use super::super::projections::random_bf16;
use anyhow::Result;

/// The tensors that attention in place reads and writes.
pub struct Heads<B: Backend> {
    heads: u32,
    query: Buffer<B, bf16>,
    sinks: Buffer<B, f32>,
    out: Buffer<B, bf16>,
}

impl<B: Backend> Heads<B> {
    /// Random queries with `heads` heads.
    pub fn new(stream: &Stream<B>, tokens: u32, heads: u32) -> Result<Self> {
        let elements = u64::from(tokens) * u64::from(heads) * u64::from(HEAD_DIM);
        let device = stream.device();
        Ok(Self {
            heads,
            query: random_bf16(stream, "attention queries", elements)?,
            sinks: device.allocate("sinks", heads.into())?,
            out: device.allocate("attention results", elements)?,
        })
    }

    /// Passes them to `attend`, in the form that the cache takes.
    pub fn with(
        &self,
        attend: impl FnOnce(&AttentionTensors<'_, B>) -> Result<(), KvError>,
    ) -> Result<()> {
        let Self { heads, query, sinks, out } = self;
        let form = QueryForm::Rotated;
        Ok(attend(&AttentionTensors { heads: *heads, query, form, sinks, out, lse: None })?)
    }

    /// All memory of the heads, for a graph to retain.
    pub fn memory(&self) -> [Memory<B>; 3] {
        [self.query.memory(), self.sinks.memory(), self.out.memory()]
    }
}
