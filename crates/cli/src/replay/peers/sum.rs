//! Sums up the work of all processes of a replay.

use super::super::execute::KernelWork;
use super::super::latency::Moment;
use super::super::moves::{Decoded, Moved};
use super::super::quantiles::Quantiles;

/// Adds the work of the decode processes to that of this process, from which `sent` requests left.
pub fn add(work: &mut KernelWork, sent: u64, all: Vec<Decoded>) {
    let mut moved = Moved { sent, ..Moved::default() };
    let (mut move_ms, mut next_token_ms) = (Vec::new(), Vec::new());
    moved.moves.decode_processes = all.len() as u32;
    for decoded in all {
        let Decoded { time: Moment { steps, ms }, tokens, .. } = decoded;
        moved.finished += decoded.finished;
        moved.moves.requests += decoded.arrived;
        moved.moves.bytes += decoded.bytes;
        moved.moves.early_bytes += decoded.early_bytes;
        moved.moves.device_bytes += decoded.device_bytes;
        moved.moves.tokens += tokens;
        moved.moves.steps += steps;
        for (rate, elapsed) in moved.rate.iter_mut().zip([steps as f64, ms]) {
            *rate += if elapsed > 0.0 { tokens as f64 / elapsed } else { 0.0 };
        }
        moved.per_token.extend(decoded.per_token);
        move_ms.extend(decoded.move_ms);
        next_token_ms.extend(decoded.next_token_ms);
        work.entries += decoded.entries;
        work.kernel_ms = work.kernel_ms.zip(decoded.kernel_ms).map(|(own, other)| own + other);
        work.verification.add(decoded.verification);
    }
    moved.moves.move_ms = Quantiles::of_unsorted(move_ms);
    moved.moves.next_token_ms = Quantiles::of_unsorted(next_token_ms);
    work.moved = Some(moved);
}
