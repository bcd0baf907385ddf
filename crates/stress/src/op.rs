//! What a script is made of. Requests go by name, so that a script still means something when
//! operations are taken out of it.

use dsv4_kv::CacheConfig;
use serde::{Deserialize, Serialize};

/// The name of a request: the number that its [`Op::Admit`] carries.
pub type Name = u32;

/// One operation. Every operation can be tried in every state; the model says what must come of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// Admit a request and call it so.
    Admit(Name),
    /// Release it. A name that is free already stands for a handle that was kept too long.
    Release(Name),
    /// Prepare a step, and with a device run it.
    Prepare(Vec<Part>),
    /// Accept the first tokens of the last step.
    Commit {
        /// The request.
        request: Name,
        /// Tokens that become final.
        accepted: u32,
    },
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
