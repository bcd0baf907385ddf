//! A NIXL agent with one backend, and its lists of memory.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::null_mut;
use std::sync::Arc;

use super::api::{AgentConfig, Api, Handle, READ, VRAM, check};
use crate::transport::TransportError;

/// A setting for UCX: it connects asynchronously. By default it connects inside the call that begins the first read
/// from a source, and an address that does not answer blocks that call until the system's own timeout. The environment
/// variable `UCX_TCP_CONN_NB` overrides this setting.
const UCX: &CStr = c"UCX";
const UCX_SETTINGS: (&CStr, &CStr) = (c"engine_config", c"TCP_CONN_NB=y");

/// Most microseconds that an agent's progress thread sleeps; it wakes when something arrives. With NIXL's default, 0,
/// the thread keeps a core busy as long as the agent lives.
const THREAD_SLEEP: u64 = 1000;

/// An agent.
pub(super) struct Agent {
    api: Arc<Api>,
    handle: Handle,
    /// The optional arguments of calls, which name the backend.
    options: Handle,
    /// The metadata that was loaded last, and the name of its peer: the pieces of a payload share them.
    loaded: Option<(Vec<u8>, CString)>,
}

// SAFETY: objects of the library belong to no thread; it may be used by one thread at a time, as `&mut` says.
unsafe impl Send for Agent {}

/// Memory as NIXL knows it. `number` takes the place of NIXL's device id. It is unique for each registration: a peer
/// keeps the descriptions of memory that is gone, and would take new memory at the same address for the old one. For
/// host memory the number has no other meaning. For GPU memory its low half is the ordinal of the GPU, since plugins
/// may read it as an `int`.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// [`DRAM`](super::api::DRAM) or [`VRAM`](super::api::VRAM).
    pub kind: c_int,
    pub address: usize,
    pub len: usize,
    pub number: u64,
}

/// A list with one piece of memory, which is freed when this is dropped.
struct Memory<'a> {
    handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> c_int,
    _api: &'a Api,
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        // SAFETY: the list is this one's alone.
        unsafe { (self.destroy)(self.handle) };
    }
}

impl Agent {
    /// An agent with this name, and a backend of the plugin.
    pub fn new(api: &Arc<Api>, name: &CStr, plugin: &CStr) -> Result<Self, TransportError> {
        let config = AgentConfig::with_thread(THREAD_SLEEP);
        let mut handle = null_mut();
        // SAFETY: the name ends with a zero, the configuration is read, and the handle is written if the call succeeds.
        check("create_configured_agent", unsafe {
            (api.create_configured_agent)(name.as_ptr(), &config, &mut handle)
        })?;
        let mut agent = Self { api: Arc::clone(api), handle, options: null_mut(), loaded: None };
        let (mut kinds, mut parameters, mut backend) = (null_mut(), null_mut(), null_mut());
        // SAFETY: as above, of an agent that lives; what is made is freed once, below.
        unsafe {
            let status =
                (api.get_plugin_params)(handle, plugin.as_ptr(), &mut kinds, &mut parameters);
            check("get_plugin_params", status)?;
            let (name, value) = UCX_SETTINGS;
            let set = match plugin == UCX {
                true => (api.params_add)(parameters, name.as_ptr(), value.as_ptr()),
                false => 0,
            };
            let made = (api.create_backend)(handle, plugin.as_ptr(), parameters, &mut backend);
            (api.destroy_mem_list)(kinds);
            (api.destroy_params)(parameters);
            check("params_add", set)?;
            check("create_backend", made)?;
            check("create_opt_args", (api.create_opt_args)(&mut agent.options))?;
        }
        // SAFETY: both live.
        check("opt_args_add_backend", unsafe {
            (api.opt_args_add_backend)(agent.options, backend)
        })?;
        Ok(agent)
    }

    fn registered(&self, place: Place) -> Result<Memory<'_>, TransportError> {
        let (api, mut handle) = (&*self.api, null_mut());
        let Place { kind, address, len, number } = place;
        // SAFETY: the handle is written if the call succeeds.
        check("create_reg_dlist", unsafe { (api.create_reg_dlist)(kind, &mut handle, false) })?;
        let list = Memory { handle, destroy: api.destroy_reg_dlist, _api: api };
        // SAFETY: the list lives; an address and a length are numbers to it.
        let added =
            unsafe { (api.reg_dlist_add_desc)(handle, address, len, number, std::ptr::null(), 0) };
        check("reg_dlist_add_desc", added)?;
        Ok(list)
    }

    fn moved(&self, place: Place) -> Result<Memory<'_>, TransportError> {
        let (api, mut handle) = (&*self.api, null_mut());
        let Place { kind, address, len, number } = place;
        // SAFETY: as of `registered`.
        check("create_xfer_dlist", unsafe { (api.create_xfer_dlist)(kind, &mut handle, false) })?;
        let list = Memory { handle, destroy: api.destroy_xfer_dlist, _api: api };
        // SAFETY: as of `registered`.
        let added = unsafe { (api.xfer_dlist_add_desc)(handle, address, len, number) };
        check("xfer_dlist_add_desc", added)?;
        Ok(list)
    }

    /// Registers memory.
    ///
    /// # Safety
    /// The memory lives until it is deregistered, or the agent is dropped.
    pub unsafe fn register(&mut self, place: Place) -> Result<(), TransportError> {
        let list = self.registered(place)?;
        // SAFETY: by this function's own contract.
        let status = unsafe { (self.api.register_mem)(self.handle, list.handle, self.options) };
        match check("register_mem", status) {
            Err(TransportError::Status { status, .. }) if place.kind == VRAM => {
                Err(TransportError::GpuMemory { status })
            }
            checked => checked,
        }
    }

    /// Takes the registration back.
    pub fn deregister(&mut self, place: Place) -> Result<(), TransportError> {
        let list = self.registered(place)?;
        // SAFETY: agent and list live.
        check("deregister_mem", unsafe {
            (self.api.deregister_mem)(self.handle, list.handle, self.options)
        })
    }

    /// The metadata that peers load to reach all memory that is registered now.
    pub fn metadata(&mut self) -> Result<Vec<u8>, TransportError> {
        let (mut data, mut len) = (null_mut(), 0);
        // SAFETY: the agent lives; bytes and length are written if the call succeeds, and freed once.
        unsafe {
            let status = (self.api.get_local_md)(self.handle, &mut data, &mut len);
            check("get_local_md", status)?;
            let bytes = std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec();
            libc::free(data);
            Ok(bytes)
        }
    }

    /// Begins to read the place of a peer's memory into `to`. Returns the request and the status of `post_xfer_req`.
    ///
    /// # Safety
    /// `to` is registered memory that stays alive, and that nothing else accesses, until the request has ended or the
    /// agent is dropped.
    pub unsafe fn read(
        &mut self,
        to: Place,
        (metadata, from): (&[u8], Place),
    ) -> Result<(Handle, c_int), TransportError> {
        let peer = self.load(metadata)?;
        let (local, remote) = (self.moved(to)?, self.moved(from)?);
        let (api, options, mut request) = (&*self.api, self.options, null_mut());
        // SAFETY: all objects live, and the name ends with a zero.
        let made = unsafe {
            let (name, lists) = (peer.as_ptr(), (local.handle, remote.handle));
            (api.create_xfer_req)(self.handle, READ, lists.0, lists.1, name, &mut request, options)
        };
        check("create_xfer_req", made)?;
        // SAFETY: by this function's own contract.
        let posted = unsafe { (api.post_xfer_req)(self.handle, request, options) };
        Ok((request, posted))
    }

    /// Loads the metadata of a peer, and returns the peer's name.
    fn load(&mut self, metadata: &[u8]) -> Result<CString, TransportError> {
        if let Some((_, name)) = self.loaded.as_ref().filter(|(bytes, _)| bytes == metadata) {
            return Ok(name.clone());
        }
        self.loaded = None;
        let mut name: *mut c_char = null_mut();
        // SAFETY: the bytes live; the name is written if the call succeeds, and freed once.
        let owned = unsafe {
            let bytes = metadata.as_ptr().cast();
            let status = (self.api.load_remote_md)(self.handle, bytes, metadata.len(), &mut name);
            check("load_remote_md", status)?;
            let owned = CStr::from_ptr(name).to_owned();
            libc::free(name.cast());
            owned
        };
        self.loaded = Some((metadata.to_vec(), owned.clone()));
        Ok(owned)
    }

    /// The status of a request that was not released.
    pub fn status(&mut self, request: Handle) -> c_int {
        // SAFETY: agent and request live.
        unsafe { (self.api.get_xfer_status)(self.handle, request) }
    }

    /// Releases a request that is done.
    pub fn end(&mut self, request: Handle) {
        // SAFETY: as of `status`; nobody uses it any more. A request that is done has nothing to cancel.
        unsafe {
            (self.api.release_xfer_req)(self.handle, request);
            (self.api.destroy_xfer_req)(request);
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // SAFETY: nobody uses agent or options any more. Requests that are under way end with the agent; their handles
        // are never freed, since that would cancel them first.
        unsafe {
            (self.api.destroy_agent)(self.handle);
            if !self.options.is_null() {
                (self.api.destroy_opt_args)(self.options);
            }
        }
    }
}
