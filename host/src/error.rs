//! What the cache answers instead of doing what it was asked. Every refusal leaves all state as it
//! was.

use crate::device::DeviceError;
use crate::ids::RequestId;
use crate::poison::PoisonRead;
use crate::schema::PoolKind;
use kv_layout::geometry::LayerKind;

/// Why the cache refused or failed.
#[derive(Debug, thiserror::Error)]
pub enum KvError {
    /// A setting outside its range.
    #[error("{setting} is {value}; it must be between {least} and {most}")]
    Config {
        /// The field of `CacheConfig`.
        setting: &'static str,
        /// Its value.
        value: u64,
        /// Least value allowed.
        least: u64,
        /// Greatest value allowed.
        most: u64,
    },
    /// The memory given does not hold the slots, blocks and buffers that are needed at least.
    #[error(
        "{memory} bytes do not hold {slots} slots of {slot_bytes} bytes, {blocks} blocks of \
         {block_bytes}, and {working_bytes} bytes that steps need; give more memory, or ask for fewer \
         slots or a shorter context"
    )]
    MemoryTooSmall {
        /// Bytes given.
        memory: u64,
        /// Request slots wanted.
        slots: u32,
        /// Bytes of one slot over all layers.
        slot_bytes: u64,
        /// Blocks needed at least.
        blocks: u32,
        /// Bytes of one block over all layers.
        block_bytes: u64,
        /// Bytes of the block table, the work lists and the metadata of a step.
        working_bytes: u64,
    },
    /// All request slots are taken.
    #[error("all {slots} request slots are taken")]
    NoFreeSlot {
        /// Slots there are.
        slots: u32,
    },
    /// The step needs more blocks than are free.
    #[error("the step needs {needed} new blocks and {free} are free: {} short", needed - free)]
    OutOfBlocks {
        /// New blocks the step needs.
        needed: u32,
        /// Blocks that are free.
        free: u32,
    },
    /// The handle is of a request that was released, or never admitted.
    #[error("no such request: {request}")]
    UnknownRequest {
        /// The handle.
        request: RequestId,
    },
    /// A request appears twice in one step.
    #[error("{request} appears twice in the step")]
    DuplicateRequest {
        /// The request.
        request: RequestId,
    },
    /// The step does not continue where the request stands.
    #[error("{request} has {committed} tokens; the step starts at {start}")]
    WrongStart {
        /// The request.
        request: RequestId,
        /// Tokens the request has.
        committed: u32,
        /// Where the step would start.
        start: u32,
    },
    /// A request takes part in a step with no tokens.
    #[error("{request} has no tokens in the step")]
    NoTokens {
        /// The request.
        request: RequestId,
    },
    /// The request would outgrow the configured context.
    #[error("{request} would have {end} tokens; the cache is configured for {most}")]
    ContextTooLong {
        /// The request.
        request: RequestId,
        /// Tokens it would have.
        end: u64,
        /// `CacheConfig::max_context`.
        most: u32,
    },
    /// More tokens than a step may have.
    #[error("the step has {tokens} tokens; the cache is configured for {most}")]
    StepTooLong {
        /// Tokens of the step.
        tokens: u64,
        /// `CacheConfig::max_step_tokens`.
        most: u32,
    },
    /// More requests than the cache has slots for.
    #[error("the step has {requests} requests; the cache is configured for {most}")]
    TooManyRequests {
        /// Requests of the step.
        requests: usize,
        /// `CacheConfig::max_requests`.
        most: u32,
    },
    /// More tokens accepted than the last step wrote.
    #[error("{request}: {accepted} tokens accepted, the step wrote {written}")]
    AcceptedTooMany {
        /// The request.
        request: RequestId,
        /// Tokens the caller accepted.
        accepted: u32,
        /// Tokens the last step wrote.
        written: u32,
    },
    /// A part of a step's tokens was accepted of a request that wrote too many to be undone.
    #[error(
        "{request}: {accepted} of {written} tokens accepted, but a step that can be rolled back \
         has at most {most} (max_draft + 1)"
    )]
    NotRollbackable {
        /// The request.
        request: RequestId,
        /// Tokens the caller accepted.
        accepted: u32,
        /// Tokens the last step wrote.
        written: u32,
        /// Most tokens of a step that can be partly rejected.
        most: u32,
    },
    /// The layer does not exist.
    #[error("layer {layer} does not exist; the model has {layers}")]
    NoSuchLayer {
        /// The layer asked for.
        layer: u32,
        /// Layers there are.
        layers: u32,
    },
    /// The layer has no such pool.
    #[error("layer {layer} has no {pool:?} pool")]
    NoSuchPool {
        /// The layer.
        layer: u32,
        /// The pool asked for.
        pool: PoolKind,
    },
    /// The layer is of another kind.
    #[error("layer {layer} is {found:?}; the operation is for {needed:?} layers")]
    WrongLayerKind {
        /// The layer.
        layer: u32,
        /// What it is.
        found: LayerKind,
        /// What the operation is for.
        needed: LayerKind,
    },
    /// A workspace that does not hold what one query of the indexer needs.
    #[error("the indexer's workspace has {bytes} bytes; one query needs {needed}")]
    WorkspaceTooSmall {
        /// Bytes given.
        bytes: u64,
        /// Bytes that one query needs.
        needed: u64,
    },
    /// Queries outside the step.
    #[error("queries {first}..{end} were asked for; the step covers {tokens} tokens")]
    NoSuchQueries {
        /// First query.
        first: u32,
        /// One past the last query.
        end: u32,
        /// Tokens of the step, or of the bucket being captured.
        tokens: u32,
    },
    /// The step is larger than the bucket that was captured.
    #[error("the step has {tokens} tokens; the graph was captured for at most {bucket}")]
    OverBucket {
        /// Tokens of the prepared step.
        tokens: u32,
        /// Tokens the graph was captured for.
        bucket: u32,
    },
    /// The graph reads another cache's StepMeta.
    #[error("the graph was captured over another cache")]
    ForeignGraph,
    /// A kernel met an index outside its buffers and skipped it. The cache contents are suspect.
    #[error("{kernel} refused {count} rows whose slot or row is out of range")]
    KernelRefused {
        /// The kernel.
        kernel: &'static str,
        /// Rows it refused since the last check.
        count: u32,
    },
    /// Attention was given rows, or the indexer scored keys, that nobody wrote. Reported by a cache with `CacheConfig::poison`.
    #[error(
        "{count} gathered rows or scored keys hold what nobody wrote; the first: {}",
        rows.first().map_or_else(String::new, |row| format!("{row:?}"))
    )]
    PoisonRead {
        /// Rows since the last check.
        count: u32,
        /// The first of them, in order of layer and slot.
        rows: Vec<PoisonRead>,
    },
    /// The device refused or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
