//! Loads the model, and runs the engine on a device.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, CudaOptions, Device, EmuDevice, EmuOptions};
use dsv4_kv::kv_layout::attention::KeyCluster;
use dsv4_kv_model_files::ModelFiles;
use dsv4_kv_model::{Engine, EngineLimits, Model};

use crate::args::Options;
use crate::batch::{Batch, Ready};
use crate::request::Job;

/// Memory of the emulated device.
const EMULATED: u64 = 16 << 30;
/// Most blocks that may enter or leave the prefix tree between two steps.
const EVENTS: u32 = 4096;

/// Runs the engine until all senders of jobs are dropped. Sends one message: the engine's data, or why it could not be
/// started.
pub fn run(options: &Options, jobs: &Receiver<Job>, ready: &Sender<Result<Ready>>) {
    let run = || {
        let model = load(options)?;
        if options.gpu {
            let device = dsv4_kv::open_cuda(CudaOptions::default())?;
            return on_device(&device, model, options, (jobs, ready));
        }
        let device = EmuDevice::new(EmuOptions { memory: EMULATED, seed: 0 });
        on_device(&device, model, options, (jobs, ready))
    };
    if let Err(error) = run() {
        // Sending fails if the start was given up.
        let _ = ready.send(Err(error));
    }
}

fn load(options: &Options) -> Result<Arc<Model>> {
    let of = || options.model.display().to_string();
    let model_files = ModelFiles::open(&options.model).with_context(of)?;
    Ok(Arc::new(Model::load(&model_files, |_| {}).with_context(of)?))
}

fn on_device<B: Backend>(
    device: &Device<B>,
    model: Arc<Model>,
    options: &Options,
    (jobs, ready): (&Receiver<Job>, &Sender<Result<Ready>>),
) -> Result<()> {
    let Options { max_requests, context, chunk, checkpoints, .. } = *options;
    let limits = EngineLimits {
        requests: max_requests,
        context,
        // All requests fit at once, so that none is ever preempted. If prefixes are reused, each may also hold blocks
        // of the prefix tree that another request has computed at the same time.
        max_total_tokens: max_requests
            .saturating_mul(context.next_multiple_of(128))
            .saturating_mul(if checkpoints > 0 { 2 } else { 1 }),
        max_step_tokens: chunk.saturating_add(max_requests),
        max_draft: 0,
        checkpoints,
        host_bytes: 0,
        event_capacity: if checkpoints > 0 { EVENTS } else { 0 },
        attention_cluster: KeyCluster::TwoBlocks,
    };
    let mut batch = Batch::new(Engine::new(device, model, limits)?, options)?;
    let _ = ready.send(Ok(batch.ready()));
    batch.run(jobs);
    Ok(())
}
