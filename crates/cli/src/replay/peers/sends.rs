//! Sends requests with their bytes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Device};
use dsv4_kv::transfer::{Positions, TransferStaging};
use dsv4_kv::{CacheConfig, RequestId};
use dsv4_kv_transfer::transport::Storage;
use dsv4_kv_transfer::{Fingerprint, OpenTransfer, Sender, Source, Transport};

use super::super::full::Full;
use super::super::setup::Setup;
use super::leave::{Mover, Prompted};
use super::link::Link;
use super::message::{ToDecode, now_ms};

/// Most requests that wait to be read. They hold memory, which has no other limit here.
const WAITING: usize = 64;

/// The sender. Other threads answer claims through it.
pub type Shared<T> = Arc<Mutex<Sender<T>>>;

/// Locks the sender, also after a panic of another thread.
pub fn lock<T: Transport>(sender: &Shared<T>) -> MutexGuard<'_, Sender<T>> {
    sender.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The settings that all processes of a replay must have in common.
pub fn fingerprint(config: &CacheConfig, seed: u64) -> Fingerprint {
    Fingerprint::new(config, &seed.to_le_bytes(), b"", b"").expect("a seed is not empty")
}

/// The memory for payloads from or to a cache on `device`. If the device has no room, host memory is used.
pub fn storage<B: Backend>(device: &Device<B>, setup: &Setup) -> Result<Storage> {
    let on_device = setup.payloads.map(|ordinal| Storage::device(device, ordinal));
    Ok(on_device.transpose()?.unwrap_or_default().or_host())
}

/// A request that leaves while its prompt is computed.
struct Leaving {
    index: usize,
    transfer: OpenTransfer,
    /// Number of bytes that the other process was told of.
    told: u64,
}

/// The source of requests with their bytes.
pub struct BytesOut<B: Backend, T: Transport> {
    staging: TransferStaging<B>,
    sender: Shared<T>,
    fingerprint: Fingerprint,
    leaving: HashMap<RequestId, Leaving>,
}

impl<B: Backend, T: Transport> BytesOut<B, T> {
    /// Requests leave `cache` over `transport`.
    pub fn new(cache: &Full<B>, transport: T, setup: &Setup) -> Result<Self> {
        let storage = storage(cache.cache().device(), setup)?;
        Ok(Self {
            staging: cache.cache().new_transfer_staging()?,
            sender: Arc::new(Mutex::new(Sender::with_storage(transport, (storage, u64::MAX)))),
            fingerprint: fingerprint(cache.cache().config(), setup.seed),
            leaving: HashMap::new(),
        })
    }

    /// The sender, which answers claims.
    pub fn sender(&self) -> Shared<T> {
        Arc::clone(&self.sender)
    }
}

impl<B: Backend, T: Transport> Mover<Full<B>> for BytesOut<B, T> {
    fn is_full(&self) -> bool {
        lock(&self.sender).offers() >= WAITING
    }

    fn admitted(&mut self, cache: &mut Full<B>, to: &Link, prompted: &Prompted<'_>) -> Result<()> {
        let &Prompted { index, id, tokens, reused } = prompted;
        let (cache, stream) = cache.parts();
        let export = cache.export(stream, &mut self.staging, id)?;
        let trunk = tokens.len() as u32;
        let draft = if export.layout().has_draft_layers() { trunk } else { 0 };
        let at = Positions { trunk, draft };
        let transfer = lock(&self.sender).open(&export, self.fingerprint, (at, tokens))?;
        let opening = transfer.opening();
        let (manifest, payload) = (opening.manifest, opening.payload.0);
        to.send(&ToDecode::Open { index, reused, manifest, payload })?;
        self.leaving.insert(id, Leaving { index, transfer, told: 0 });
        Ok(())
    }

    fn stepped(&mut self, cache: &mut Full<B>, to: &Link, id: RequestId) -> Result<()> {
        let Some(leaving) = self.leaving.get_mut(&id) else { return Ok(()) };
        let (cache, stream) = cache.parts();
        let mut export = cache.export(stream, &mut self.staging, id)?;
        let ready = lock(&self.sender).take(&mut leaving.transfer, &mut export)?;
        // The last part is announced by the offer.
        if ready.bytes > leaving.told && !leaving.transfer.is_whole() {
            leaving.told = ready.bytes;
            let Source { epoch, lease } = ready.source;
            to.send(&ToDecode::Ready { index: leaving.index, epoch, lease, bytes: ready.bytes })?;
        }
        Ok(())
    }

    fn ended(&mut self, _cache: &mut Full<B>, to: &Link, id: RequestId) -> Result<bool> {
        let Leaving { index, transfer, .. } =
            self.leaving.remove(&id).context("a prompt that leaves was admitted")?;
        let mut sender = lock(&self.sender);
        let is_whole = transfer.is_whole();
        if is_whole {
            let offer = sender.offer(transfer, Duration::MAX)?;
            let (manifest, payload, at_ms) = (offer.manifest, offer.payload.0, now_ms());
            to.send(&ToDecode::Offer { index, manifest, payload, at_ms })?;
        } else {
            sender.abandon(transfer)?;
            to.send(&ToDecode::Forget { index })?;
        }
        Ok(is_whole)
    }
}
