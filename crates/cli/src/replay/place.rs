//! The device of a replay, and the defaults that depend on it.

use anyhow::Result;
use dsv4_kv::device::{CudaDevice, CudaSurvey};

use super::args::{Execution, ReplayArgs};
use super::select::Queries;
use crate::error::InputError;

/// The device of a replay.
pub enum Place {
    /// No device: bookkeeping alone.
    Ledger,
    /// On the emulated device.
    Cpu,
    /// On a GPU.
    Cuda(CudaDevice),
}

/// Values of options that are not given.
#[derive(Clone, Copy, Debug)]
pub struct Defaults {
    /// Name of the model.
    pub model: &'static str,
    /// Bytes of memory.
    pub memory: u64,
    /// Maximum number of tokens of a step.
    pub max_step_tokens: u32,
    /// Requests of the synthetic load.
    pub requests: u32,
    /// Divisor of the synthetic load.
    pub shrink: f64,
    /// Number of requests to verify.
    pub verify: u32,
    /// Queries that gather entries.
    pub queries: Queries,
}

/// Number of GPUs over which the processes of a replay are spread; 1 if there is none.
fn gpus() -> u32 {
    CudaSurvey::of_machine().map_or(1, |survey| survey.gpus.len().max(1) as u32)
}

/// The driver's ordinal of the GPU of this process.
pub fn ordinal(args: &ReplayArgs) -> u32 {
    args.peer.map_or(0, |process| gpu_of(process, gpus()))
}

/// The GPU of a process, given the number of GPUs. Process 0 computes the prompts.
fn gpu_of(process: u32, gpus: u32) -> u32 {
    process % gpus
}

/// Most processes that share a GPU.
fn most_on_one(processes: u32, gpus: u32) -> u32 {
    processes.div_ceil(gpus)
}

impl Place {
    /// Number of processes of a replay among which the memory of a device is divided. All processes have caches of the
    /// same size, so that a request that fits in one fits in all.
    pub fn shares(&self, processes: u32) -> u32 {
        match self {
            Self::Cuda(_) => most_on_one(processes, gpus()),
            Self::Ledger | Self::Cpu => 1,
        }
    }

    /// The device for these options.
    pub fn choose(args: &ReplayArgs) -> Result<Self, InputError> {
        if args.execute == Execution::Bookkeeping {
            return Ok(Self::Ledger);
        }
        Ok(args.device.gpu(ordinal(args))?.map_or(Self::Cpu, Self::Cuda))
    }

    /// Its name in the result.
    pub fn name(&self) -> String {
        match self {
            Self::Ledger => "none (bookkeeping)".into(),
            Self::Cpu => "emulated (CPU)".into(),
            Self::Cuda(device) => device.info().name.clone(),
        }
    }

    /// Its defaults. With kernels, a load that takes seconds: on the CPU that of a small model, on a GPU one in which
    /// the verification takes most of the time.
    pub fn defaults(&self) -> Result<Defaults> {
        let gpu = Defaults {
            model: "flash",
            memory: 64 << 30,
            max_step_tokens: 8192,
            requests: 32,
            shrink: 4.0,
            verify: 2,
            queries: Queries::All,
        };
        Ok(match self {
            Self::Cuda(device) => Defaults { memory: device.free_memory()? / 10 * 9, ..gpu },
            Self::Ledger => Defaults { requests: 1024, shrink: 1.0, verify: 0, ..gpu },
            Self::Cpu => Defaults {
                model: "tiny",
                memory: 8 << 30,
                max_step_tokens: 256,
                requests: 12,
                shrink: 128.0,
                verify: 4,
                queries: Queries::Last(16),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_spread_over_gpus() {
        let on = |processes, gpus| {
            let mut on = vec![0; gpus as usize];
            (0..processes).for_each(|process| on[gpu_of(process, gpus) as usize] += 1);
            on
        };
        assert_eq!(on(3, 2), [2, 1]);
        for (processes, gpus) in [(2, 1), (2, 2), (3, 2), (2, 8), (16, 3)] {
            let on = on(processes, gpus);
            assert_eq!(on.iter().max(), Some(&most_on_one(processes, gpus)), "{on:?}");
        }
    }
}
