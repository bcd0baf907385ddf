//! A graph of recorded reads borrows its step: meanwhile the step is neither updated nor committed.

use dsv4_kv::device::{Backend, Buffer, bf16};
use dsv4_kv::{Accepted, KvError, LayerId, Step};

fn update<B: Backend>(step: &mut Step<'_, B>, kv: &Buffer<B, bf16>) -> Result<(), KvError> {
    let graph = step.record_reads(Vec::new(), |_| Ok::<_, KvError>(()))?;
    step.swa(LayerId(0))?.update(kv)?; //~ E0499
    graph.replay()
}

fn commit<B: Backend>(mut step: Step<'_, B>, accepted: &[Accepted<'_>]) {
    let graph = step.record_reads(Vec::new(), |_| Ok::<_, KvError>(())).unwrap();
    step.commit(accepted).unwrap(); //~ E0505
    graph.replay().unwrap();
}

fn main() {}
