//! A transport over NIXL: reads memory of other processes and machines, on hosts and GPUs, by UCX or another of its
//! plugins. NIXL's C library is loaded when a transport is opened, so that a program with this feature also runs
//! without the library.
//!
//! NIXL may report success although the source has reused its memory before the read, and may write after a request was
//! dropped or memory was deregistered. So this module never releases a request before it is done, and
//! [`Transport::fence`] destroys the agent.

mod agent;
mod api;

use std::collections::HashMap;
use std::ffi::{CString, c_int};
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use agent::{Agent, Place};
use api::{Api, DRAM, Handle, IN_PROGRESS, VRAM};

use crate::mistake::{Mistake, made};

use super::{
    Descriptor, Held, InFlight, MemoryKind, NotPosted, Polled, Region, RegionMut, Registered,
    Transport, TransportError,
};

/// Options for opening NIXL.
#[derive(Clone, Debug)]
pub struct NixlOptions {
    /// The path of `libnixl_capi.so`. The default is the path in the environment variable `DSV4_NIXL`, or else the
    /// plain file name, which the system's loader looks up. Its code runs in this process: whoever names the file, or can
    /// write to it, is trusted.
    pub library: PathBuf,
    /// The name of the plugin that moves bytes. The default is `UCX`.
    pub plugin: String,
}

impl Default for NixlOptions {
    fn default() -> Self {
        let named = std::env::var_os("DSV4_NIXL").map(PathBuf::from);
        let library = named.unwrap_or_else(|| PathBuf::from("libnixl_capi.so"));
        Self { library, plugin: "UCX".to_owned() }
    }
}

/// A read that was posted.
struct Read {
    request: Handle,
    /// The status that `post_xfer_req` returned, if it was an error.
    failed: Option<c_int>,
}

// SAFETY: as of `Agent`, with which it is used.
unsafe impl Send for Read {}

/// A transport over NIXL.
pub struct Nixl {
    // Fields are dropped in this order. The agent is first, since it may write the regions.
    /// Or why a fence could not make another one.
    agent: Result<Agent, String>,
    reads: HashMap<u64, Read>,
    regions: HashMap<u64, Held>,
    api: Arc<Api>,
    plugin: CString,
}

/// Bytes at the start of a descriptor, before the agent's metadata: kind, address, length and number of the memory, u64
/// each.
const PLACE: usize = 32;

/// The place of memory that was registered with this id.
fn place(region: &Region, id: u64) -> Result<Place, TransportError> {
    let (address, len) = (region.address() as usize, region.len());
    let (kind, number) = match region.kind() {
        MemoryKind::Host => (DRAM, id),
        MemoryKind::Cuda { ordinal } => (VRAM, id << 32 | u64::from(ordinal)),
        kind => return Err(TransportError::Kind { transport: "NIXL", kind }),
    };
    Ok(Place { kind, address, len, number })
}

/// Refuses a range that is not in memory.
fn check_range(bytes: &Range<usize>, memory: Place) -> Result<(), TransportError> {
    let (is_its, len) = (bytes.start <= bytes.end && bytes.end <= memory.len, memory.len);
    if is_its { Ok(()) } else { Err(TransportError::Outside { bytes: bytes.clone(), len }) }
}

fn live(agent: &mut Result<Agent, String>) -> Result<&mut Agent, TransportError> {
    agent.as_mut().map_err(|why| TransportError::Failed {
        why: format!("the last fence could make no agent: {why}; fence the transport again"),
    })
}

impl Nixl {
    /// Destroys the agent, before the memory that it may write is freed. That unmaps device memory in the current context.
    fn destroy_agent(&mut self) {
        let agent = std::mem::replace(&mut self.agent, Err("it was destroyed".to_owned()));
        let mut regions = self.regions.values().map(Held::region);
        if let Some(region) = regions.find(|region| region.kind() != MemoryKind::Host) {
            // Where the context is lost, the agent is destroyed without it.
            let _ = region.within(|| drop(agent));
        }
    }

    /// Loads the library and creates an agent.
    ///
    /// # Errors
    /// [`TransportError::NoLibrary`], [`TransportError::NoSymbol`]; [`TransportError::Status`] for a plugin that NIXL
    /// does not find; [`TransportError::Failed`] for a plugin name with a zero byte.
    pub fn open(options: &NixlOptions) -> Result<Self, TransportError> {
        let api = Arc::new(Api::load(&options.library)?);
        let plugin = CString::new(options.plugin.as_str());
        let plugin = plugin.map_err(|_| TransportError::Failed {
            why: format!("{:?} is not the name of a plugin", options.plugin),
        })?;
        let agent = Ok(Self::agent(&api, &plugin)?);
        Ok(Self { agent, reads: HashMap::new(), regions: HashMap::new(), api, plugin })
    }

    /// An agent with a unique name.
    fn agent(api: &Arc<Api>, plugin: &CString) -> Result<Agent, TransportError> {
        let (process, random) = (std::process::id(), RandomState::new().hash_one(0));
        let name = CString::new(format!("dsv4-kv-{process}-{random:x}")).expect("no zeros");
        Agent::new(api, &name, plugin)
    }

    /// Calls `work` with the agent and the place of memory that no read may write, in the context of its device.
    fn with_place<R>(
        &mut self,
        id: u64,
        work: impl FnOnce(&mut Agent, Place) -> Result<R, TransportError>,
    ) -> Result<R, TransportError> {
        self.check_no_read(id)?;
        let held = self.regions.get(&id).ok_or(TransportError::Unknown { id })?;
        let (region, agent) = (held.region(), live(&mut self.agent)?);
        let place = place(region, id)?;
        region.within(|| work(agent, place))?
    }

    /// Refuses memory that a read may write, even if the caller holds a token that says otherwise.
    fn check_no_read(&self, id: u64) -> Result<(), TransportError> {
        let is_read = self.reads.contains_key(&id) && !made(Mistake::NoQuarantine);
        if is_read { Err(TransportError::Read { id }) } else { Ok(()) }
    }

    fn begin(
        &mut self,
        id: u64,
        bytes: Range<usize>,
        from: &Descriptor,
    ) -> Result<Read, TransportError> {
        let needed = bytes.end;
        let parts = from.0.split_at_checked(PLACE);
        let wrong = |why: &str| TransportError::Descriptor { why: why.to_owned() };
        let short = || wrong("it is shorter than a kind, an address, a length and a number");
        let (place, metadata) = parts.ok_or_else(short)?;
        let [kind, address, found, number] = [0, 8, 16, 24].map(|at| {
            let mut number = [0; 8];
            number.copy_from_slice(&place[at..at + 8]);
            u64::from_le_bytes(number)
        });
        let kinds = [DRAM, VRAM];
        let kind = kinds.into_iter().find(|&known| known as u64 == kind);
        let kind = kind.ok_or_else(|| wrong("its memory is neither of a host nor of a GPU"))?;
        let (address, found) = (address as usize, found as usize);
        if found < needed {
            return Err(TransportError::TooShort { needed, found });
        }
        let (request, status) = self.with_place(id, |agent, to| {
            check_range(&bytes, to)?;
            let len = bytes.len();
            let to = Place { address: to.address + bytes.start, len, ..to };
            let from = Place { kind, address: address.wrapping_add(bytes.start), len, number };
            // SAFETY: the region is kept, and its token is an `InFlight`, until the read is done or the agent was
            // destroyed.
            unsafe { agent.read(to, (metadata, from)) }
        })?;
        Ok(Read { request, failed: (status < 0).then_some(status) })
    }
}

impl Transport for Nixl {
    fn register(&mut self, region: Region) -> Result<Registered, TransportError> {
        let (held, memory) = Held::new(region);
        let place = place(held.region(), memory.id())?;
        let agent = live(&mut self.agent)?;
        // SAFETY: the region is kept until it is deregistered, or the agent is dropped.
        held.region().within(|| unsafe { agent.register(place) })??;
        self.regions.insert(memory.id(), held);
        Ok(memory)
    }

    fn deregister(&mut self, memory: Registered) -> Result<Region, TransportError> {
        self.with_place(memory.id(), |agent, place| agent.deregister(place))?;
        let held = self.regions.remove(&memory.id());
        held.map(Held::into_region).ok_or(TransportError::Unknown { id: memory.id() })
    }

    fn with_region<R>(
        &mut self,
        memory: &mut Registered,
        work: impl FnOnce(RegionMut<'_>) -> R,
    ) -> Result<R, TransportError> {
        let id = memory.id();
        self.check_no_read(id)?;
        let held = self.regions.get_mut(&id).ok_or(TransportError::Unknown { id })?;
        Ok(work(held.region_mut()))
    }

    fn publish(&mut self, memory: &Registered) -> Result<Descriptor, TransportError> {
        self.with_place(memory.id(), |agent, Place { kind, address, len, number }| {
            let words = [kind as u64, address as u64, len as u64, number];
            let mut bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
            bytes.extend(agent.metadata()?);
            Ok(Descriptor(bytes))
        })
    }

    /// Only checks the range: peers always see the current bytes.
    fn flush(&mut self, memory: &Registered, bytes: Range<usize>) -> Result<(), TransportError> {
        self.with_place(memory.id(), |_, memory| check_range(&bytes, memory))
    }

    fn post(
        &mut self,
        into: Registered,
        bytes: Range<usize>,
        from: &Descriptor,
    ) -> Result<InFlight, NotPosted> {
        match self.begin(into.id(), bytes, from) {
            Ok(read) => {
                self.reads.insert(into.id(), read);
                Ok(into.in_flight())
            }
            Err(error) => Err(NotPosted(into, error)),
        }
    }

    fn poll(&mut self, read: InFlight) -> Polled {
        let id = read.id();
        let known = self.reads.get(&id).zip(self.regions.get(&id));
        let Some((&Read { request, failed }, held)) = known else {
            return Polled::Failed(read, TransportError::Unknown { id });
        };
        let agent = match live(&mut self.agent) {
            Ok(agent) => agent,
            Err(error) => return Polled::Failed(read, error),
        };
        let (call, status) = match failed {
            Some(status) => ("post_xfer_req", status),
            // A read to a device advances inside the status call, which needs the device's context.
            None => match held.region().within(|| agent.status(request)) {
                Ok(status) => ("get_xfer_status", status),
                Err(error) => return Polled::Failed(read, error),
            },
        };
        match status {
            IN_PROGRESS => Polled::Pending(read),
            0 => {
                agent.end(request);
                self.reads.remove(&id);
                self.regions[&id].done(read)
            }
            _ => Polled::Failed(read, TransportError::Status { call, status }),
        }
    }

    fn fence(&mut self) -> Result<(), TransportError> {
        self.destroy_agent();
        self.reads.clear();
        self.regions.clear();
        match Self::agent(&self.api, &self.plugin) {
            Ok(agent) => {
                self.agent = Ok(agent);
                Ok(())
            }
            Err(error) => {
                self.agent = Err(error.to_string());
                Err(error)
            }
        }
    }
}

impl Drop for Nixl {
    fn drop(&mut self) {
        self.destroy_agent();
    }
}

impl std::fmt::Debug for Nixl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nixl").field("plugin", &self.plugin).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After a fence that could make no agent, each call says why.
    #[test]
    fn the_error_of_a_fence_is_kept() {
        let mut agent = Err("create_backend failed".to_owned());
        let Err(error) = live(&mut agent) else { panic!("there is no agent") };
        assert!(error.to_string().contains("no agent: create_backend failed;"), "{error}");
    }
}
