//! What a script is made of. Requests go by name, so that a script still means something when
//! operations are taken out of it.

use dsv4_kv::{Bucket, CacheConfig, LayerGroup};
use serde::{Deserialize, Serialize};

use super::text::Text;

/// The name of a request: the number that its [`Op::Admit`] carries.
pub type Name = u32;

/// One operation. Every operation can be tried in every state; the model says what must come of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// Admit a request and call it so.
    Admit(Name),
    /// Release it. A name that is free already stands for a handle that was kept too long, a name
    /// that nobody had for a request of another cache.
    Release(Name),
    /// Begin a step, run it, and commit or drop it.
    Step(Step),
    /// Take a request's draft layers back.
    RewindDraft {
        /// The request.
        request: Name,
        /// Tokens that stay final.
        committed: u32,
    },
    /// Admit a request with its prompt.
    AdmitWith {
        /// The name that it gets.
        request: Name,
        /// What it says.
        text: Text,
    },
    /// Admit a copy of a request.
    Fork {
        /// The request that is copied.
        of: Name,
        /// The name of the copy.
        request: Name,
        /// The token that the copy goes on with.
        answer: u32,
    },
    /// Take a request out of its slot.
    Suspend(Name),
    /// Let a suspended request go on.
    Resume(Name),
    /// End a suspended request.
    Discard(Name),
    /// Pin a prompt until a time in seconds.
    Pin {
        /// The name of the lease.
        lease: Name,
        /// The prompt.
        text: Text,
        /// When it ends.
        until: u64,
    },
    /// End a lease.
    Unpin(Name),
    /// End the leases whose time is before so many seconds.
    Expire(u64),
    /// Something of the host tier.
    Tier(TierOp),
}

/// An operation on what host memory keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TierOp {
    /// Ask for what host memory has of a prompt.
    Prefetch {
        /// The name that this goes by.
        name: Name,
        /// The prompt.
        text: Text,
    },
    /// Want it no more.
    Cancel(Name),
    /// Admit a request with its prompt, and wait for what host memory has of it.
    AdmitWaiting {
        /// The name that it gets.
        request: Name,
        /// What it says.
        text: Text,
    },
    /// Enter what has arrived, and begin what comes next.
    Advance,
    /// The same until nothing is left to do.
    Settle,
    /// The device does all that is queued. One that is late does nothing before it must.
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
    /// What each request does.
    pub parts: Vec<Part>,
    /// The layers that are run before the first commit is tried; before the second, the others are.
    #[serde(default)]
    pub layers: Layers,
    /// A step of the other group that begins and ends after this one has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub meanwhile: Option<Box<Step>>,
    /// Commits to try until one is not refused. If there is none the step is dropped.
    pub commits: Vec<Vec<Accept>>,
}

fn trunk() -> LayerGroup {
    LayerGroup::Trunk
}

impl Step {
    /// The step to run while this one is open: one of its own group cannot be.
    #[must_use]
    pub fn meanwhile(&self) -> Option<&Self> {
        self.meanwhile.as_deref().filter(|other| other.group != self.group)
    }
}

/// How the kernels of a step are launched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Launches {
    /// One by one, for exactly the step's tokens.
    #[default]
    Eager,
    /// One by one, for all tokens of a bucket.
    Bucket(Bucket),
    /// By the graph that was captured for a bucket, if there is one and all layers are run.
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

/// Which layers of a step are run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layers {
    /// All of the group.
    #[default]
    All,
    /// None.
    None,
    /// All but one, counted from the group's first, around its end.
    Without(u32),
    /// All, but one of them lacks its append.
    Unappended(u32),
}

/// What one request does in a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The request.
    pub request: Name,
    /// Where it starts, counted from where it must start: 0 unless the step is to be refused.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub ahead: u32,
    /// Tokens it adds.
    pub tokens: u32,
    /// Leading tokens that are its own story; the others are drafts that were never right.
    pub genuine: u32,
}

/// What a commit says of one request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accept {
    /// The request.
    pub request: Name,
    /// Tokens that become final.
    pub accepted: u32,
    /// Token ids that are told; none if 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub told: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature serde asks for")]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

/// A cache and what is done to it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Script {
    /// The cache.
    pub config: CacheConfig,
    /// What is done, in order.
    pub ops: Vec<Op>,
}
