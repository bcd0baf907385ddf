//! A step of five tokens in a model of two sliding-window layers, and a check of its results.

use anyhow::{Result, ensure};
use dsv4_kv::device::{Backend, Buffer, Device, Stream};
use dsv4_kv::kv_layout::{config::ModelConfig, geometry::LayerKind};
use dsv4_kv::{Accepted, CacheConfig, KvCacheManager, KvError, Launches, StepRequest, bf16};

/// Tokens of the prompt.
pub const TOKENS: usize = 5;
/// Rows of a query's window.
pub const WINDOW: usize = 128;
/// Values of a row.
pub const ROW: usize = 512;

/// The tensors of the embedder's model.
pub struct Tensors<B: Backend> {
    /// `[TOKENS, ROW]`: the output of its projections.
    pub rows: Buffer<B, bf16>,
    /// `[TOKENS, WINDOW, ROW]`: the input of its attention.
    pub window: Buffer<B, bf16>,
    /// `[TOKENS]`: number of rows of each window.
    pub lengths: Buffer<B, i32>,
}

/// Queues the step in `stream`, and waits for it.
pub fn run<B: Backend>(
    device: &Device<B>,
    stream: &Stream<B>,
    tensors: &Tensors<B>,
) -> Result<(), KvError> {
    let tiny = ModelConfig::preset("tiny").expect("a preset");
    let model = ModelConfig { layers: vec![LayerKind::Swa; 2], mtp_layers: 0, ..tiny };
    let config = CacheConfig { max_step_tokens: 64, ..CacheConfig::new(model) };
    let mut cache = KvCacheManager::new(device.clone(), config)?;
    let id = cache.admit()?;
    let tokens = TOKENS as u32;
    let requests = [StepRequest { id, start: 0, tokens }];
    let mut step = cache.begin_step(stream, Launches::Eager, &requests)?;
    for (layer, _) in step.layer_kinds() {
        let layer = step.swa(layer)?.update(&tensors.rows)?;
        layer.gather_window(0..tokens, &tensors.window, &tensors.lengths)?;
        layer.append()?;
    }
    step.commit(&[Accepted::count(id, tokens)])?;
    // Waits for the kernels, since the cache is dropped here.
    cache.check_faults(stream)
}

/// Checks that each token sees itself and all earlier tokens, whose values are all 1.
pub fn check(window: &[bf16], lengths: &[i32]) -> Result<()> {
    ensure!(lengths == [1, 2, 3, 4, 5], "windows of {lengths:?} rows");
    for (query, (rows, &length)) in window.chunks(WINDOW * ROW).zip(lengths).enumerate() {
        let rows = &rows[..length as usize * ROW];
        ensure!(rows.iter().all(|&value| value == bf16::ONE), "query {query} sees other rows");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use dsv4_kv::device::{EmuDevice, EmuOptions};

    use super::*;

    #[test]
    fn what_a_gpu_must_answer_the_emulator_answers() {
        let device = EmuDevice::new(EmuOptions::default());
        let stream = device.stream().unwrap();
        let tensors = Tensors {
            rows: device.allocate("rows", (TOKENS * ROW) as u64).unwrap(),
            window: device.allocate("window", (TOKENS * WINDOW * ROW) as u64).unwrap(),
            lengths: device.allocate("lengths", TOKENS as u64).unwrap(),
        };
        let read = || {
            let (mut window, mut lengths) = (vec![bf16::ZERO; TOKENS * WINDOW * ROW], [0; TOKENS]);
            stream.download(&tensors.window, 0, &mut window).unwrap();
            stream.download(&tensors.lengths, 0, &mut lengths).unwrap();
            (window, lengths)
        };
        let (window, lengths) = read();
        assert!(check(&window, &lengths).is_err(), "no step has run");
        stream.upload(&[bf16::ONE; TOKENS * ROW], &tensors.rows, 0).unwrap();
        run(&device, &stream, &tensors).unwrap();
        let (mut window, lengths) = read();
        check(&window, &lengths).unwrap();
        window[WINDOW * ROW] = bf16::ZERO;
        assert!(check(&window, &lengths).is_err(), "one value of the second query is another");
    }
}
