//! The operations of a script. Requests have names, so that a script is still meaningful after operations are removed
//! from it.

use dsv4_kv::{Bucket, CacheConfig, LayerGroup};
use serde::{Deserialize, Serialize};

use super::text::Text;

/// The name of a request: the number that its [`Op::Admit`] carries.
pub type Name = u32;

/// One operation. Every operation can be tried in every state; the model determines the expected answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// Admits a request and gives it this name.
    Admit(Name),
    /// Releases a request. The name of a released request stands for a handle that was kept too long. A name that was
    /// never used stands for a request of another cache.
    Release(Name),
    /// Begins a step, runs it, and commits or drops it.
    Step(Step),
    /// Rewinds the draft layers of a request.
    RewindDraft {
        /// The request.
        request: Name,
        /// Number of tokens that stay final.
        committed: u32,
    },
    /// Admits a request with its prompt.
    AdmitWith {
        /// The request's name.
        request: Name,
        /// The prompt and the answer.
        text: Text,
    },
    /// Admits a copy of a request.
    Fork {
        /// The request that is copied.
        of: Name,
        /// The name of the copy.
        request: Name,
        /// The token that the copy repeats from there.
        answer: u32,
    },
    /// Suspends a request.
    Suspend(Name),
    /// Resumes a suspended request.
    Resume(Name),
    /// Ends a suspended request.
    Discard(Name),
    /// Pins a prompt until a time, in seconds.
    Pin {
        /// The name of the lease.
        lease: Name,
        /// The prompt.
        text: Text,
        /// When the lease expires.
        until: u64,
    },
    /// Ends a lease.
    Unpin(Name),
    /// Ends the leases that expire before this time, in seconds.
    Expire(u64),
    /// An operation on the host tier.
    Tier(TierOp),
}

/// An operation on the host tier.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TierOp {
    /// Requests the prefix of a prompt that host memory has.
    Prefetch {
        /// The name of this prefetch.
        name: Name,
        /// The prompt.
        text: Text,
    },
    /// Cancels a prefetch.
    Cancel(Name),
    /// Admits a request with its prompt, and waits for the prefix that host memory has.
    AdmitWaiting {
        /// The request's name.
        request: Name,
        /// The prompt and the answer.
        text: Text,
    },
    /// Enters finished transfers, and begins the next.
    Advance,
    /// Repeats `Self::Advance` until no transfer is left.
    Settle,
    /// Lets the device finish all queued work. A late device does no work before it must.
    CatchUp,
}

/// A step of one layer group, from its begin to its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// The group.
    #[serde(default = "trunk")]
    pub group: LayerGroup,
    /// How its kernels are launched.
    #[serde(default)]
    pub launches: Launches,
    /// The part of each request.
    pub parts: Vec<Part>,
    /// The layers that are run before the first commit is tried. The remaining layers are run before the second.
    #[serde(default)]
    pub layers: Layers,
    /// A step of the other group that begins and ends while this one is open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub meanwhile: Option<Box<Step>>,
    /// Commits that are tried until one is accepted. If none is, the step is dropped.
    pub commits: Vec<Vec<Accept>>,
}

fn trunk() -> LayerGroup {
    LayerGroup::Trunk
}

impl Step {
    /// The step to run while this one is open. A step of the same group is not possible, and is ignored.
    #[must_use]
    pub fn meanwhile(&self) -> Option<&Self> {
        self.meanwhile.as_deref().filter(|other| other.group != self.group)
    }
}

/// How the kernels of a step are launched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Launches {
    /// Eager launches, for exactly the step's tokens.
    #[default]
    Eager,
    /// Eager launches, for all tokens of a bucket.
    Bucket(Bucket),
    /// The graph that was captured for a bucket, if there is one and all layers are run.
    Replay(Bucket),
}

impl Launches {
    /// The bucket.
    #[must_use]
    pub fn bucket(&self) -> Option<&Bucket> {
        match self {
            Self::Eager => None,
            Self::Bucket(bucket) | Self::Replay(bucket) => Some(bucket),
        }
    }
}

/// The layers of a step that are run before its first commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layers {
    /// All of the group.
    #[default]
    All,
    /// None.
    None,
    /// All but one, whose index in the group is this number modulo the number of layers.
    Without(u32),
    /// All, but one of them lacks its append.
    Unappended(u32),
}

/// The part of one request in a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The request.
    pub request: Name,
    /// How far the start is after the request's final tokens: 0 unless the step should be refused.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub ahead: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// Number of leading tokens that are those of its text; the others are wrong drafts.
    pub genuine: u32,
}

/// The part of one request in a commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accept {
    /// The request.
    pub request: Name,
    /// Number of tokens that become final.
    pub accepted: u32,
    /// Number of token ids that are passed; none if 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub told: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature serde asks for")]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

/// A cache and the operations on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Script {
    /// The configuration of the cache.
    pub config: CacheConfig,
    /// The seed of the cache and of its device: which rows are compared, and in which order threads run.
    #[serde(default)]
    pub seed: u64,
    /// The operations, in order.
    pub ops: Vec<Op>,
}
