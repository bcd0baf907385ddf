//! Errors of the cache. A refusal leaves all state as it was. If a call of the device failed, the documentation of the
//! function that returns the error says what is left.

mod limited_by;
mod memory_too_small;
mod mismatch;
mod model_file;
pub(crate) mod poison_read;
mod refusal;
mod text;

pub use limited_by::LimitedBy;
pub use memory_too_small::MemoryTooSmall;
pub use mismatch::{ListsMismatch, RowsMismatch, TokenMismatch};
pub use refusal::Refusal;

use crate::bucket::Bucket;
use crate::device::DeviceError;
use crate::ids::{LayerGroup, LayerId, RequestId};
use crate::layer_progress::LayerProgress;
use crate::pool_kind::PoolKind;
use dsv4_kv_linear::LinearError;
use dsv4_kv_model_files::ModelFileError;
use kv_layout::config::ConfigError;
use kv_layout::geometry::LayerKind;
use poison_read::{PoisonRead, describe_first};
use refusal::describe;
use text::still_there;

/// Why the cache refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// A setting outside its range.
    #[error("{setting} is {value}; it must be between {least} and {most}")]
    Config {
        /// The field of `CacheConfig`, or another setting.
        setting: &'static str,
        /// Its value.
        value: u64,
        /// Least value allowed.
        least: u64,
        /// Greatest value allowed.
        most: u64,
    },
    /// A tensor of the model's files that is missing, or of another shape or type.
    #[error(transparent)]
    ModelFile(Box<ModelFileError>),
    /// A constant of the model that the kernels do not support.
    #[error("model: {0}")]
    Model(Box<ConfigError>),
    /// A weight in NVFP4 that the products do not support.
    #[error(transparent)]
    Linear(#[from] LinearError),
    /// A draft layer that stores compressed entries.
    #[error("draft (MTP) layer {} has {kind:?} attention; draft layers have windows alone", layer.0)]
    DraftLayerKind {
        /// The layer.
        layer: LayerId,
        /// Its kind.
        kind: LayerKind,
    },
    /// A field of a bucket outside the range of its cache.
    #[error("the bucket's {field} is {value}; {}", text::bucket_range(field, *most))]
    Bucket {
        /// The field of [`crate::Bucket`].
        field: &'static str,
        /// Its value.
        value: u32,
        /// Greatest value allowed.
        most: u32,
    },
    /// The memory given is too small for the slots, blocks and buffers that are needed at least.
    #[error(transparent)]
    MemoryTooSmall(Box<MemoryTooSmall>),
    /// All request slots are taken.
    #[error("all {slots} request slots are taken; release or suspend a request first")]
    NoFreeSlot {
        /// Number of slots.
        slots: u32,
    },
    /// The step needs more blocks than are free. A request that computed the same prompt as another one at the same time holds the
    /// prefix tree's blocks besides its own: released and admitted again it shares them.
    #[error(
        "{needed} new blocks are needed, and {free} are free or can be evicted; release a request, or leave one out of the step"
    )]
    OutOfBlocks {
        /// New blocks that are needed.
        needed: u32,
        /// Blocks that are free, or held by nothing but the prefix tree.
        free: u32,
    },
    /// More checkpoints are needed than are free.
    #[error(
        "{needed} checkpoints are needed, and {free} are free or can be evicted; discard some, or set num_checkpoints higher"
    )]
    OutOfCheckpoints {
        /// Checkpoints that are needed.
        needed: u32,
        /// Checkpoints that are free, or held by nothing but the prefix tree and outputs.
        free: u32,
    },
    /// The queue of prefetches is full.
    #[error("{most} prompts wait to come from host memory; ask again when one has arrived")]
    TooManyPrefetches {
        /// Most prompts that can wait.
        most: usize,
    },
    /// No memory is left for the slot of another suspended request.
    #[error(
        "the slots of all {suspended} requests that can be suspended are taken; see CacheConfig::max_suspended"
    )]
    NoRoomToSuspend {
        /// Requests that can be suspended at once.
        suspended: u32,
    },
    /// The request was suspended in another cache.
    #[error("the request was suspended in another cache; resume or discard it in that one")]
    ForeignSuspended,
    /// The checkpoint was saved in another cache.
    #[error("the checkpoint was saved in another cache; use it in that one")]
    ForeignCheckpoint,
    /// A position at which the request cannot be saved.
    #[error(
        "{request} cannot be saved at {boundary}: that must be a multiple of 128, at most {committed} (its final tokens), \
         and {}",
        still_there(*written, *limit)
    )]
    NotSavable {
        /// The request.
        request: RequestId,
        /// The position asked for.
        boundary: u32,
        /// Final tokens it has.
        committed: u32,
        /// Tokens that were or may have been written, rejected ones included; `u32::MAX` after a restore that failed.
        written: u32,
        /// Tokens that may be written beyond the position: `max_draft` + 1.
        limit: u32,
    },
    /// The request cannot continue from the checkpoint: it has too few tokens, or other blocks than those before it.
    #[error(
        "{request} has {committed} tokens in {blocks} blocks; to continue at position {boundary} it needs at least \
         {boundary} tokens, in exactly {needed} blocks"
    )]
    NotRestorable {
        /// The request.
        request: RequestId,
        /// The position of the checkpoint.
        boundary: u32,
        /// Final tokens it has.
        committed: u32,
        /// Blocks of its final tokens.
        blocks: u32,
        /// Blocks of `boundary` tokens.
        needed: u32,
    },
    /// The checkpoint was saved from another request, whose tokens are not those of this request's blocks.
    #[error("the checkpoint belongs to {saved}; {request} cannot be restored from it")]
    OtherRequest {
        /// The request.
        request: RequestId,
        /// The request that was saved, by the id that it was admitted under.
        saved: RequestId,
    },
    /// The id is of a request that was released, or never admitted.
    #[error("no such request: {request}; it was released, or never admitted")]
    UnknownRequest {
        /// The id.
        request: RequestId,
    },
    /// The id was given out by another cache.
    #[error("{request} was admitted by another cache; use it with that one")]
    ForeignRequest {
        /// The id.
        request: RequestId,
    },
    /// The request takes part in a step that is open.
    #[error("{request} takes part in the open {group} step; commit or drop the step first")]
    RequestInStep {
        /// The request.
        request: RequestId,
        /// The step's layer group.
        group: LayerGroup,
    },
    /// Rows that the request needs to continue are overwritten: by a step that was rejected, by a restore that failed,
    /// or by draft layers that ran further ahead of the trunk than can be taken back.
    #[error("{request} cannot go on at token {committed}: {}", text::overwritten(*group))]
    Overwritten {
        /// The request.
        request: RequestId,
        /// The layer group.
        group: LayerGroup,
        /// Final tokens it has.
        committed: u32,
    },
    /// A request is named twice in one step, or one commit.
    #[error("{request} is named twice; name each request once")]
    DuplicateRequest {
        /// The request.
        request: RequestId,
    },
    /// The step does not start at the request's next token.
    #[error("{request} has {committed} tokens, the step starts at {start}; start at {committed}")]
    WrongStart {
        /// The request.
        request: RequestId,
        /// Tokens the request has.
        committed: u32,
        /// Where the step would start.
        start: u32,
    },
    /// A request takes part in a step with no tokens.
    #[error("{request} has no tokens in the step; give it at least one, or leave it out")]
    NoTokens {
        /// The request.
        request: RequestId,
    },
    /// The request would outgrow the configured context.
    #[error("{request} would have {end} tokens; {by} {limit} ({})", by.setting("max_context", "context"))]
    ContextTooLong {
        /// The request.
        request: RequestId,
        /// Tokens it would have.
        end: u64,
        /// The longest context allowed, in tokens.
        limit: u32,
        /// Who set it.
        by: LimitedBy,
    },
    /// More tokens than a step may have.
    #[error("the step has {tokens} tokens; {by} {limit} ({})", by.setting("max_step_tokens", "tokens"))]
    StepTooLong {
        /// Tokens of the step.
        tokens: u64,
        /// Most tokens allowed.
        limit: u32,
        /// Who set it.
        by: LimitedBy,
    },
    /// More tokens of one request than a step may have.
    #[error("{request} has {tokens} tokens in the step; {by} {limit} a request ({})", by.chunk_setting())]
    ChunkTooLong {
        /// The request.
        request: RequestId,
        /// Its tokens in the step.
        tokens: u32,
        /// Most tokens allowed.
        limit: u32,
        /// Who set it.
        by: LimitedBy,
    },
    /// More requests than a step may have: the cache's `max_requests`, or its bucket's.
    #[error("the step has {requests} requests; {by} {limit} ({})", by.setting("max_requests", "requests"))]
    TooManyRequests {
        /// Requests of the step.
        requests: usize,
        /// Most requests allowed.
        limit: u32,
        /// Who set it.
        by: LimitedBy,
    },
    /// More tokens accepted than the last step wrote.
    #[error(
        "{request}: {accepted} tokens accepted, but its last step wrote {written}; accept at most {written}"
    )]
    AcceptedTooMany {
        /// The request.
        request: RequestId,
        /// Tokens the caller accepted.
        accepted: u32,
        /// Tokens the last step wrote.
        written: u32,
    },
    /// Only some tokens of a request were accepted, and it wrote too many in the step for the others to be undone.
    #[error(
        "{request}: {accepted} of {written} tokens accepted, but a step that can be rolled back \
         has at most {limit} (max_draft + 1)"
    )]
    NotRollbackable {
        /// The request.
        request: RequestId,
        /// Tokens the caller accepted.
        accepted: u32,
        /// Tokens the last step wrote.
        written: u32,
        /// Most tokens of a step that can be partly rejected.
        limit: u32,
    },
    /// The draft layers cannot go back to that token.
    #[error(
        "{request}: the draft layers can go back to between {earliest} and {committed} tokens, not to {to}: {}",
        text::not_there(*to, *committed)
    )]
    CannotRewind {
        /// The request.
        request: RequestId,
        /// Tokens to rewind to.
        to: u32,
        /// Tokens that the draft layers have.
        committed: u32,
        /// Fewest tokens to which they can go back: `max_draft` + 1 before the last one written, or where a request
        /// that came from a checkpoint or another cache began.
        earliest: u32,
    },
    /// No step of the group is open.
    #[error("no {group} step is open; begin one first")]
    NoOpenStep {
        /// The group.
        group: LayerGroup,
    },
    /// The request takes no part in the open step.
    #[error("{request} takes no part in the open {group} step")]
    NotInStep {
        /// The request.
        request: RequestId,
        /// The step's layer group.
        group: LayerGroup,
    },
    /// A commit that does not name every request of the step.
    #[error("the commit names {named} requests, the step has {requests}; name each once")]
    CommitMismatch {
        /// Requests that the commit names.
        named: usize,
        /// Requests of the step.
        requests: usize,
    },
    /// Token ids that are not those of the prompt that the request was admitted with. The step is still open.
    #[error(transparent)]
    PromptMismatch(TokenMismatch),
    /// Window rows in other memory than those that the layer was updated with.
    #[error(transparent)]
    RowsMismatch(RowsMismatch),
    /// Lists of entries that do not cover all queries that read them.
    #[error(transparent)]
    ListsMismatch(ListsMismatch),
    /// Token ids whose number is not that of the accepted tokens.
    #[error(
        "{request}: {given} token ids for {accepted} accepted tokens; give one for each, or none"
    )]
    TokenCount {
        /// The request.
        request: RequestId,
        /// Tokens accepted.
        accepted: u32,
        /// Token ids given.
        given: usize,
    },
    /// A layer that the step has not finished: it was left out, lacks its append, or failed.
    #[error("layer {} is {progress}; finish every layer of the group (update and append), or reject the step", layer.0)]
    LayerUnfinished {
        /// The first such layer.
        layer: LayerId,
        /// Its progress.
        progress: LayerProgress,
    },
    /// A layer that the step has updated already.
    #[error("layer {} is {progress}; a step updates each layer once", layer.0)]
    LayerRepeated {
        /// The layer.
        layer: LayerId,
        /// Its progress.
        progress: LayerProgress,
    },
    /// Reads of a layer that the step has not updated.
    #[error("layer {} is {progress}; update it before its rows are read", layer.0)]
    LayerNotUpdated {
        /// The layer.
        layer: LayerId,
        /// Its progress.
        progress: LayerProgress,
    },
    /// A layer of another group.
    #[error("layer {} is not of the {group} group, whose layers are {first}..{end}", layer.0)]
    WrongLayerGroup {
        /// The layer.
        layer: LayerId,
        /// The step's group.
        group: LayerGroup,
        /// First layer of the group.
        first: u32,
        /// One past its last layer.
        end: u32,
    },
    /// The sliding window of a long chunk, after the chunk overwrote the oldest rows.
    #[error(
        "windows of this chunk of {tokens} tokens can be read only before the layer's `append`; after it, only in steps of at most {limit} tokens of a request (max_draft + 1)"
    )]
    WindowOverwritten {
        /// Tokens of the longest chunk.
        tokens: u32,
        /// Most tokens per request whose append leaves every window whole.
        limit: u32,
    },
    /// A query weight of the indexer that is not of the model's shape.
    #[error(
        "the indexer's query weight is {} x {}; the model's is {} x {} (heads * 128 x q_lora_rank)",
        found[0], found[1], expected[0], expected[1]
    )]
    QueryWeight {
        /// Columns of its product, and values per row.
        found: [u64; 2],
        /// The same of the model's.
        expected: [u64; 2],
    },
    /// An indexer and a workspace for different numbers of heads.
    #[error("the indexer has {indexer} heads, its workspace {workspace}; make one for this model")]
    IndexerHeads {
        /// Heads of the indexer.
        indexer: u32,
        /// Heads that the workspace was made for.
        workspace: u32,
    },
    /// A workspace that belongs to another cache, whose step has selected with it.
    #[error("the indexer's workspace belongs to another cache; make one for each cache")]
    ForeignWorkspace,
    /// The layer does not exist.
    #[error("layer {} does not exist; the model has {layers}", layer.0)]
    NoSuchLayer {
        /// The layer asked for.
        layer: LayerId,
        /// Number of layers.
        layers: u32,
    },
    /// The model has no layers of the group.
    #[error("the model has no {group} layers")]
    NoSuchGroup {
        /// The group.
        group: LayerGroup,
    },
    /// The layer has no such pool.
    #[error("layer {} has no {pool:?} pool", layer.0)]
    NoSuchPool {
        /// The layer.
        layer: LayerId,
        /// The pool asked for.
        pool: PoolKind,
    },
    /// The layer is of another kind.
    #[error("layer {} is {found:?}; the operation is for {needed:?} layers", layer.0)]
    WrongLayerKind {
        /// The layer.
        layer: LayerId,
        /// Its kind.
        found: LayerKind,
        /// The kind that the operation is for.
        needed: LayerKind,
    },
    /// A workspace too small for one query of the indexer.
    #[error("the indexer's workspace has {bytes} bytes; one query needs {needed}")]
    WorkspaceTooSmall {
        /// Bytes given.
        bytes: u64,
        /// Bytes that one query needs.
        needed: u64,
    },
    /// Queries outside the step, or a range that is reversed.
    #[error("queries {first}..{end} were asked for; {}", text::queries(*first, *end, *tokens))]
    NoSuchQueries {
        /// First query.
        first: u32,
        /// One past the last query.
        end: u32,
        /// Tokens of the step, or of the bucket being captured.
        tokens: u32,
    },
    /// A graph that was captured for another bucket than the step's.
    #[error("the graph was captured for {captured:?}; the step was begun with {}", text::begun_with(step.as_ref()))]
    WrongBucket {
        /// Bucket of the graph.
        captured: Bucket,
        /// Bucket of the step; `None` if it was begun for eager launches.
        step: Option<Bucket>,
    },
    /// The graph was captured over another cache or layer group.
    #[error("the graph is of another cache or layer group; replay it in a step of that one")]
    ForeignGraph,
    /// Kernels met indices that are out of range and skipped them. [`Refusal::writes`] says what that means: after a
    /// kernel that writes the cache, the bytes of all requests are suspect.
    #[error("kernels refused rows, slots or blocks that are out of range: {}", describe(refusals))]
    KernelRefused {
        /// Every kernel that refused rows since the last check.
        refusals: Vec<Refusal>,
    },
    /// A gather returned rows, or the indexer scored keys, that were never written. Rows that attention in place reads
    /// are not searched: they make its result NaN. Reported by a cache with `CacheConfig::poison`.
    #[error(
        "{count} gathered rows or scored keys were read before any kernel wrote them; {}",
        describe_first(rows)
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
