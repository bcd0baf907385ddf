//! The core of a cache, which the steps of both layer groups share: configuration, device memory, ledger.

use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use kernels_gpu::table::KERNELS;

use crate::config::CacheConfig;
use crate::device::{Backend, Device, DeviceError, Stream};
use crate::error::{KvError, Refusal};
use crate::ids::{CacheId, LayerGroup};
use crate::ledger::Ledger;
use crate::memory::cache_memory::CacheMemory;
use crate::poison;
use crate::schema::Schema;

/// Why [`Core`] has a ledger.
const THERE: &str = "the ledger is only taken inside `unlock`";

/// The state that the steps of both layer groups share.
pub(crate) struct Core<B: Backend> {
    pub device: Device<B>,
    pub config: CacheConfig,
    pub schema: Schema,
    pub memory: CacheMemory<B>,
    /// The cache's id, which is its ledger's.
    pub id: CacheId,
    /// `None` only inside [`Self::unlock`].
    ledger: Option<RwLock<Ledger>>,
    /// The fault words of each layer group as the last check found them. Its lock also lets one thread at a time read poison.
    reported: Mutex<[[u32; KERNELS.len()]; 2]>,
}

impl<B: Backend> Core<B> {
    /// Allocates the device memory that all steps share.
    pub fn new(device: Device<B>, config: CacheConfig) -> Result<Self, KvError> {
        let ledger = Ledger::new(&config)?;
        let schema = Schema::new(&config);
        let memory = CacheMemory::new(&device, &schema, &config)?;
        let (id, ledger) = (ledger.id(), Some(RwLock::new(ledger)));
        let reported = Mutex::new([[0; KERNELS.len()]; 2]);
        Ok(Self { device, config, schema, memory, id, ledger, reported })
    }

    /// Locks the ledger for writing: for a layer group, which is borrowed mutably. It may wait while another thread begins
    /// a step of the other group, or reads poison.
    pub fn lock_ledger(&self) -> RwLockWriteGuard<'_, Ledger> {
        // Ignores lock poisoning: no change of the ledger can panic halfway.
        self.lock().write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the ledger for reading. Read locks may be held several times: writers hold the cache, or a layer group,
    /// mutably, so they cannot run at the same time.
    pub fn read_ledger(&self) -> RwLockReadGuard<'_, Ledger> {
        self.lock().read().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> &RwLock<Ledger> {
        self.ledger.as_ref().expect(THERE)
    }

    /// The ledger, for the cache itself. It takes no lock: nobody else uses a core that is borrowed mutably, and a guard
    /// that was leaked (`std::mem::forget`) holds up nothing.
    pub fn ledger_mut(&mut self) -> &mut Ledger {
        let lock = self.ledger.as_mut().expect(THERE);
        lock.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Unlocks a ledger whose guard was leaked, before layer groups share the core: they would wait for it for ever.
    pub fn unlock(&mut self) {
        let leaked =
            self.ledger.take_if(|lock| matches!(lock.try_write(), Err(TryLockError::WouldBlock)));
        if let Some(lock) = leaked {
            let ledger = lock.into_inner().unwrap_or_else(PoisonError::into_inner);
            self.ledger = Some(RwLock::new(ledger));
        }
    }

    /// See [`KvCacheManager::check_faults`]; of the steps of these groups.
    ///
    /// The counts on the device only grow: setting them to 0 would lose what kernels in other streams count meanwhile.
    pub fn check_faults(&self, stream: &Stream<B>, groups: &[LayerGroup]) -> Result<(), KvError> {
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = *reported;
        for group in groups.iter().map(|group| group.index()) {
            stream.download(&self.memory.faults[group].all.view(), 0, &mut found[group])?;
        }
        let new = |kernel: usize| {
            let of_group = |group: usize| {
                u64::from(found[group][kernel].wrapping_sub(reported[group][kernel]))
            };
            u32::try_from(of_group(0) + of_group(1)).unwrap_or(u32::MAX)
        };
        let all = (0..KERNELS.len()).map(|kernel| (kernel, new(kernel)));
        let refused = all.filter(|&(_, count)| count > 0);
        let refusals: Vec<_> = refused.map(|(kernel, count)| Refusal::new(kernel, count)).collect();
        *reported = found;
        if refusals.is_empty() { Ok(()) } else { Err(KvError::KernelRefused { refusals }) }
    }

    /// See [`KvCacheManager::check_poison`]; of the steps of these groups.
    pub fn check_poison(&self, stream: &Stream<B>, groups: &[LayerGroup]) -> Result<(), KvError> {
        let Some(found) = &self.memory.poison else { return Ok(()) };
        // One thread at a time, so that no row is reported twice.
        let _reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        let found = groups.iter().map(|group| &found[group.index()]);
        // All are read before any is marked as reported: an error loses no row.
        let read = found.clone().map(|found| poison::read(stream, found));
        let read: Vec<_> = read.collect::<Result<_, _>>()?;
        let (mut count, mut rows) = (0_u32, Vec::new());
        for (found, words) in found.zip(&read) {
            let new = poison::report(stream, found, words, &self.read_ledger(), &mut rows);
            count = count.saturating_add(new);
        }
        rows.sort_unstable();
        if count == 0 { Ok(()) } else { Err(KvError::PoisonRead { count, rows }) }
    }

    /// Refuses a stream of another device.
    pub fn check_stream(&self, stream: &Stream<B>) -> Result<(), KvError> {
        let (found, used) = (stream.device().id(), self.device.id());
        if found != used {
            return Err(DeviceError::ForeignDevice { what: "stream", found, used }.into());
        }
        Ok(())
    }
}
