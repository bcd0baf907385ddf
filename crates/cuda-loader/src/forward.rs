//! The driver's functions: each forwards to the function of the same name in `libcuda.so.1`.
//!
//! The table has the functions that `cust` calls, and those that this project calls through `cust::sys`. A function
//! that is missing here is an undefined symbol when a program that calls it is linked: add its line.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};
use std::sync::OnceLock;

use cust_raw::{
    CUDA_ARRAY3D_DESCRIPTOR, CUDA_EXTERNAL_MEMORY_BUFFER_DESC, CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
    CUDA_KERNEL_NODE_PARAMS, CUDA_MEMCPY2D, CUDA_RESOURCE_DESC, CUDA_RESOURCE_VIEW_DESC,
    CUDA_TEXTURE_DESC, CUarray, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent,
    CUexternalMemory, CUfunc_cache, CUfunction, CUfunction_attribute, CUgraph, CUgraphExec,
    CUgraphNode, CUgraphNodeType, CUhostFn, CUjit_option, CUjitInputType, CUlimit, CUlinkState,
    CUmem_advise, CUmodule, CUoccupancyB2DSize, CUpointer_attribute, CUresult, CUsharedconfig,
    CUstream, CUstreamCaptureMode, CUstreamCaptureStatus, CUsurfObject, CUtexObject,
};

use crate::driver::resolve;
use crate::status;

/// Defines each function; the compiler checks its signature against `cust_raw`'s declaration.
macro_rules! forward {
    ($( fn $name:ident($( $argument:ident: $kind:ty ),* $(,)?); )*) => { $(
        const _: unsafe extern "C" fn($($kind),*) -> CUresult = cust_raw::$name;

        /// # Safety
        /// That of the driver's function of this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $kind),*) -> CUresult {
            // The status is read as a number: the driver may be newer than `CUresult`.
            type Function = unsafe extern "C" fn($($kind),*) -> c_int;
            static FUNCTION: OnceLock<Result<Function, CUresult>> = OnceLock::new();
            const NAME: &std::ffi::CStr = status::c_str(concat!(stringify!($name), "\0"));
            // SAFETY: `Function` is the signature of this function, checked above against
            // `cust_raw`, with the status as the integer that it is in C.
            match FUNCTION.get_or_init(|| unsafe { resolve(NAME) }) {
                // SAFETY: the caller answers for the arguments.
                Ok(function) => status::from_code(unsafe { function($($argument),*) }),
                Err(status) => *status,
            }
        }
    )* };
}

forward! {
    // Driver and devices.
    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    fn cuDeviceGetAttribute(value: *mut c_int, attrib: CUdevice_attribute, device: CUdevice);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    fn cuDevicePrimaryCtxGetState(device: CUdevice, flags: *mut c_uint, active: *mut c_int);
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    fn cuDevicePrimaryCtxReset_v2(device: CUdevice);
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    fn cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, flags: c_uint);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    fn cuDriverGetVersion(driver_version: *mut c_int);
    fn cuInit(flags: c_uint);

    // Contexts.
    fn cuCtxCreate_v2(context: *mut CUcontext, flags: c_uint, device: CUdevice);
    fn cuCtxDestroy_v2(context: CUcontext);
    fn cuCtxGetApiVersion(context: CUcontext, version: *mut c_uint);
    fn cuCtxGetCacheConfig(pconfig: *mut CUfunc_cache);
    fn cuCtxGetCurrent(context: *mut CUcontext);
    fn cuCtxGetDevice(device: *mut CUdevice);
    fn cuCtxGetFlags(flags: *mut c_uint);
    fn cuCtxGetLimit(value: *mut usize, limit: CUlimit);
    fn cuCtxGetSharedMemConfig(config: *mut CUsharedconfig);
    fn cuCtxGetStreamPriorityRange(least_priority: *mut c_int, greatest_priority: *mut c_int);
    fn cuCtxPopCurrent_v2(context: *mut CUcontext);
    fn cuCtxPushCurrent_v2(context: CUcontext);
    fn cuCtxSetCacheConfig(config: CUfunc_cache);
    fn cuCtxSetCurrent(context: CUcontext);
    fn cuCtxSetLimit(limit: CUlimit, value: usize);
    fn cuCtxSetSharedMemConfig(config: CUsharedconfig);
    fn cuCtxSynchronize();

    // Modules, functions and linking.
    fn cuFuncGetAttribute(value: *mut c_int, attrib: CUfunction_attribute, function: CUfunction);
    fn cuFuncSetAttribute(function: CUfunction, attrib: CUfunction_attribute, value: c_int);
    fn cuFuncSetCacheConfig(function: CUfunction, config: CUfunc_cache);
    fn cuFuncSetSharedMemConfig(function: CUfunction, config: CUsharedconfig);
    fn cuLinkAddData_v2(
        state: CUlinkState, kind: CUjitInputType, data: *mut c_void, size: usize,
        name: *const c_char, num_options: c_uint, options: *mut CUjit_option,
        option_values: *mut *mut c_void,
    );
    fn cuLinkComplete(state: CUlinkState, cubin_out: *mut *mut c_void, size_out: *mut usize);
    fn cuLinkCreate_v2(
        num_options: c_uint, options: *mut CUjit_option, option_values: *mut *mut c_void,
        state_out: *mut CUlinkState,
    );
    fn cuLinkDestroy(state: CUlinkState);
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    fn cuModuleGetGlobal_v2(
        device_pointer: *mut CUdeviceptr, bytes: *mut usize, module: CUmodule, name: *const c_char,
    );
    fn cuModuleLoad(module: *mut CUmodule, fname: *const c_char);
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    fn cuModuleLoadDataEx(
        module: *mut CUmodule, image: *const c_void, num_options: c_uint,
        options: *mut CUjit_option, option_values: *mut *mut c_void,
    );
    fn cuModuleUnload(module: CUmodule);
    fn cuOccupancyAvailableDynamicSMemPerBlock(
        dynamic_smem_size: *mut usize, function: CUfunction, num_blocks: c_int, block_size: c_int,
    );
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        num_blocks: *mut c_int, function: CUfunction, block_size: c_int,
        dynamic_shared_size: usize,
    );
    fn cuOccupancyMaxPotentialBlockSize(
        min_grid_size: *mut c_int, block_size: *mut c_int, function: CUfunction,
        block_size_to_dynamic_shared_size: CUoccupancyB2DSize, dynamic_shared_size: usize,
        block_size_limit: c_int,
    );

    // Memory.
    fn cuArray3DCreate_v2(handle: *mut CUarray, allocate_array: *const CUDA_ARRAY3D_DESCRIPTOR);
    fn cuArray3DGetDescriptor_v2(array_descriptor: *mut CUDA_ARRAY3D_DESCRIPTOR, array: CUarray);
    fn cuArrayDestroy(array: CUarray);
    fn cuDestroyExternalMemory(ext_memory: CUexternalMemory);
    fn cuExternalMemoryGetMappedBuffer(
        dev_ptr: *mut CUdeviceptr, ext_memory: CUexternalMemory,
        buffer_desc: *const CUDA_EXTERNAL_MEMORY_BUFFER_DESC,
    );
    fn cuImportExternalMemory(
        ext_memory_out: *mut CUexternalMemory,
        mem_handle_desc: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
    );
    fn cuMemAdvise(dev_ptr: CUdeviceptr, count: usize, advice: CUmem_advise, device: CUdevice);
    fn cuMemAllocAsync(device_pointer: *mut CUdeviceptr, bytes: usize, stream: CUstream);
    fn cuMemAllocHost_v2(pointer: *mut *mut c_void, bytes: usize);
    fn cuMemAllocManaged(device_pointer: *mut CUdeviceptr, bytes: usize, flags: c_uint);
    fn cuMemAlloc_v2(device_pointer: *mut CUdeviceptr, bytes: usize);
    fn cuMemFreeAsync(device_pointer: CUdeviceptr, stream: CUstream);
    fn cuMemFreeHost(pointer: *mut c_void);
    fn cuMemFree_v2(device_pointer: CUdeviceptr);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemHostGetDevicePointer_v2(
        device_pointer: *mut CUdeviceptr, pointer: *mut c_void, flags: c_uint,
    );
    fn cuMemHostRegister_v2(pointer: *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemHostUnregister(pointer: *mut c_void);
    fn cuMemPrefetchAsync(
        dev_ptr: CUdeviceptr, count: usize, dst_device: CUdevice, stream: CUstream,
    );
    fn cuMemcpy2D_v2(copy: *const CUDA_MEMCPY2D);
    fn cuMemcpyAsync(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream);
    fn cuMemcpyAtoH_v2(dst_host: *mut c_void, src_array: CUarray, src_offset: usize, bytes: usize);
    fn cuMemcpyDtoDAsync_v2(
        dst_device: CUdeviceptr, src_device: CUdeviceptr, bytes: usize, stream: CUstream,
    );
    fn cuMemcpyDtoD_v2(dst_device: CUdeviceptr, src_device: CUdeviceptr, bytes: usize);
    fn cuMemcpyDtoHAsync_v2(
        dst_host: *mut c_void, src_device: CUdeviceptr, bytes: usize, stream: CUstream,
    );
    fn cuMemcpyDtoH_v2(dst_host: *mut c_void, src_device: CUdeviceptr, bytes: usize);
    fn cuMemcpyHtoA_v2(
        dst_array: CUarray, dst_offset: usize, src_host: *const c_void, bytes: usize,
    );
    fn cuMemcpyHtoDAsync_v2(
        dst_device: CUdeviceptr, src_host: *const c_void, bytes: usize, stream: CUstream,
    );
    fn cuMemcpyHtoD_v2(dst_device: CUdeviceptr, src_host: *const c_void, bytes: usize);
    fn cuMemsetD16Async(dst_device: CUdeviceptr, value: c_ushort, count: usize, stream: CUstream);
    fn cuMemsetD16_v2(dst_device: CUdeviceptr, value: c_ushort, count: usize);
    fn cuMemsetD32Async(dst_device: CUdeviceptr, value: c_uint, count: usize, stream: CUstream);
    fn cuMemsetD32_v2(dst_device: CUdeviceptr, value: c_uint, count: usize);
    fn cuMemsetD8Async(dst_device: CUdeviceptr, value: c_uchar, count: usize, stream: CUstream);
    fn cuMemsetD8_v2(dst_device: CUdeviceptr, value: c_uchar, count: usize);
    fn cuPointerGetAttribute(
        data: *mut c_void, attribute: CUpointer_attribute, address: CUdeviceptr,
    );
    fn cuSurfObjectCreate(surf_object: *mut CUsurfObject, res_desc: *const CUDA_RESOURCE_DESC);
    fn cuSurfObjectDestroy(surf_object: CUsurfObject);
    fn cuSurfObjectGetResourceDesc(res_desc: *mut CUDA_RESOURCE_DESC, surf_object: CUsurfObject);
    fn cuTexObjectCreate(
        tex_object: *mut CUtexObject, res_desc: *const CUDA_RESOURCE_DESC,
        tex_desc: *const CUDA_TEXTURE_DESC, res_view_desc: *const CUDA_RESOURCE_VIEW_DESC,
    );
    fn cuTexObjectDestroy(tex_object: CUtexObject);
    fn cuTexObjectGetResourceDesc(res_desc: *mut CUDA_RESOURCE_DESC, tex_object: CUtexObject);
    fn cuTexObjectGetResourceViewDesc(
        res_view_desc: *mut CUDA_RESOURCE_VIEW_DESC, tex_object: CUtexObject,
    );

    // Streams, events and launches.
    fn cuEventCreate(event: *mut CUevent, flags: c_uint);
    fn cuEventDestroy_v2(event: CUevent);
    fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
    fn cuEventQuery(event: CUevent);
    fn cuEventRecord(event: CUevent, stream: CUstream);
    fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: c_uint);
    fn cuEventSynchronize(event: CUevent);
    fn cuLaunchHostFunc(stream: CUstream, function: CUhostFn, user_data: *mut c_void);
    fn cuLaunchKernel(
        function: CUfunction, grid_dim_x: c_uint, grid_dim_y: c_uint, grid_dim_z: c_uint,
        block_dim_x: c_uint, block_dim_y: c_uint, block_dim_z: c_uint, shared_mem_bytes: c_uint,
        stream: CUstream, kernel_params: *mut *mut c_void, extra: *mut *mut c_void,
    );
    fn cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode);
    fn cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int);
    fn cuStreamDestroy_v2(stream: CUstream);
    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    fn cuStreamGetFlags(stream: CUstream, flags: *mut c_uint);
    fn cuStreamGetPriority(stream: CUstream, priority: *mut c_int);
    fn cuStreamIsCapturing(stream: CUstream, capture_status: *mut CUstreamCaptureStatus);
    fn cuStreamQuery(stream: CUstream);
    fn cuStreamSynchronize(stream: CUstream);
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);

    // Graphs.
    fn cuGraphAddKernelNode(
        graph_node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode,
        num_dependencies: usize, node_params: *const CUDA_KERNEL_NODE_PARAMS,
    );
    fn cuGraphCreate(graph: *mut CUgraph, flags: c_uint);
    fn cuGraphDebugDotPrint(graph: CUgraph, path: *const c_char, flags: c_uint);
    fn cuGraphDestroy(graph: CUgraph);
    fn cuGraphExecDestroy(graph_exec: CUgraphExec);
    fn cuGraphGetEdges(
        graph: CUgraph, from: *mut CUgraphNode, to: *mut CUgraphNode, num_edges: *mut usize,
    );
    fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, num_nodes: *mut usize);
    fn cuGraphInstantiateWithFlags(
        graph_exec: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong,
    );
    fn cuGraphInstantiate_v2(
        graph_exec: *mut CUgraphExec, graph: CUgraph, error_node: *mut CUgraphNode,
        log_buffer: *mut c_char, buffer_size: usize,
    );
    fn cuGraphKernelNodeGetParams(node: CUgraphNode, node_params: *mut CUDA_KERNEL_NODE_PARAMS);
    fn cuGraphLaunch(graph_exec: CUgraphExec, stream: CUstream);
    fn cuGraphNodeGetType(node: CUgraphNode, kind: *mut CUgraphNodeType);
    fn cuGraphUpload(graph_exec: CUgraphExec, stream: CUstream);
}

type Describe = unsafe extern "C" fn(CUresult, *mut *const c_char) -> c_int;

const _: unsafe extern "C" fn(CUresult, *mut *const c_char) -> CUresult = cust_raw::cuGetErrorName;
const _: unsafe extern "C" fn(CUresult, *mut *const c_char) -> CUresult =
    cust_raw::cuGetErrorString;

/// The name of a status. It works without a driver, so that the error "there is no driver" can be printed.
///
/// # Safety
/// `name` is valid for a write.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(error: CUresult, name: *mut *const c_char) -> CUresult {
    // SAFETY: `Describe` is the signature of the driver's cuGetErrorName.
    let function = unsafe { resolve::<Describe>(c"cuGetErrorName") };
    // SAFETY: `name` is valid for a write, as the caller promises.
    unsafe { describe(function, error, name, status::name(error)) }
}

/// The description of a status. It works without a driver, as [`cuGetErrorName`] does.
///
/// # Safety
/// `text` is valid for a write.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(error: CUresult, text: *mut *const c_char) -> CUresult {
    // SAFETY: `Describe` is the signature of the driver's cuGetErrorString.
    let function = unsafe { resolve::<Describe>(c"cuGetErrorString") };
    // SAFETY: `text` is valid for a write, as the caller promises.
    unsafe { describe(function, error, text, status::text(error)) }
}

/// Asks the driver for a text, or returns `fallback` if `function` was not found.
///
/// # Safety
/// `text` is valid for a write, and `function` is of the driver.
unsafe fn describe(
    function: Result<Describe, CUresult>,
    error: CUresult,
    text: *mut *const c_char,
    fallback: &'static std::ffi::CStr,
) -> CUresult {
    match function {
        // SAFETY: `text` is valid for a write.
        Ok(function) => status::from_code(unsafe { function(error, text) }),
        Err(_) => {
            // SAFETY: `text` is valid for a write.
            unsafe { text.write(fallback.as_ptr()) };
            CUresult::CUDA_SUCCESS
        }
    }
}
