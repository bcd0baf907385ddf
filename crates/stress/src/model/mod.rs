//! The reference model: the answers and the contents of a cache, computed from the history of tokens alone.
//!
//! It has no free list and no kernel. It cannot know which slot or block the cache takes. It reads that from the
//! answer, and checks that the slot or block was free.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | requests: admission, release, rewinding |
//! | `admissions.rs` | admissions with a prompt, forks, suspended requests, leases |
//! | `request.rs` | a request |
//! | `sharing.rs`, `reuse.rs` | prefixes that requests share |
//! | `tier.rs`, `wanted.rs` | the host tier, and its transfers |
//! | `refusals.rs` | which steps and commits are refused, and why |
//! | `step.rs` | a step from its begin to its end |
//! | `step_meta.rs` | StepMeta and the device's block table |

mod admissions;
mod refusals;
mod request;
mod reuse;
mod sharing;
mod step;
mod step_meta;
mod tier;
mod wanted;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use dsv4_kv::step_meta::NONE;
use dsv4_kv::{CacheConfig, KvError, LayerGroup, Ledger, RequestId, SlotId, StepRequest};
use kv_layout::geometry::LayerKind;

use super::answer::{Answer, answer};
use super::op::{Name, Part, Step};
use super::text::Text;
pub use request::{Progress, Request};
use sharing::Sharing;

/// One request's part of an open step.
#[derive(Clone, Copy, Debug)]
struct OpenPart {
    id: RequestId,
    tokens: u32,
    genuine: u32,
    /// Number of blocks that it took for the step.
    taken: usize,
}

/// The model of one cache.
#[derive(Debug)]
pub struct Model {
    config: CacheConfig,
    /// Rows of a slot's window ring: 128 + D - 1, where D is the number of tokens that a step may reject.
    ring: u32,
    has_entries: bool,
    names: HashMap<Name, RequestId>,
    live: BTreeMap<RequestId, Request>,
    /// For each slot, the generation of its last request.
    generations: HashMap<SlotId, u64>,
    /// A handle of a request of another cache.
    stranger: RequestId,
    /// The parts of each group's open step.
    open: [Option<Vec<OpenPart>>; 2],
    /// The block table on the device: `[max_requests, max_blocks]`.
    table: Vec<i32>,
    /// StepMeta after the last step of each group.
    arrays: [Vec<i32>; 2],
    sharing: Sharing,
}

impl Model {
    /// The model of an empty cache.
    ///
    /// # Panics
    /// If the configuration is out of range.
    #[must_use]
    pub fn new(config: &CacheConfig) -> Self {
        let mut other = Ledger::new(config).expect("a valid configuration");
        let layout = other.largest_layout();
        let blocks = config.max_context.div_ceil(128);
        Self {
            ring: 128 + config.max_draft,
            has_entries: config.model.layers.iter().any(|&kind| kind != LayerKind::Swa),
            names: HashMap::new(),
            live: BTreeMap::new(),
            generations: HashMap::new(),
            stranger: other.admit().expect("a slot"),
            open: [None, None],
            table: vec![NONE; (config.max_requests * blocks) as usize],
            arrays: LayerGroup::ALL.map(|_| vec![0; layout.elements()]),
            sharing: Sharing::default(),
            config: config.clone(),
        }
    }

    /// The configuration of the cache.
    #[must_use]
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// The admitted requests.
    pub fn live(&self) -> impl ExactSizeIterator<Item = (RequestId, &Request)> {
        self.live.iter().map(|(&id, request)| (id, request))
    }

    /// The handle of a name. The request may have been released. If no request had this name, it is the handle of a
    /// request of another cache.
    #[must_use]
    pub fn handle(&self, name: Name) -> RequestId {
        self.names.get(&name).copied().unwrap_or(self.stranger)
    }

    /// The request of this name, if it is admitted.
    #[must_use]
    pub fn named(&self, name: Name) -> Option<&Request> {
        self.live.get(&self.handle(name))
    }

    /// Number of free blocks.
    #[must_use]
    pub fn free_blocks(&self) -> u32 {
        let requests = self.live.values().chain(self.sharing.suspended.values());
        let held: BTreeSet<_> = requests.flat_map(|request| &request.blocks).collect();
        self.config.num_blocks - held.len() as u32
    }

    /// Most tokens of a request that a step may reject.
    #[must_use]
    pub fn max_decode_tokens(&self) -> u32 {
        self.config.max_draft + 1
    }

    /// The argument of `begin_step` for a step.
    #[must_use]
    pub fn requests_of(&self, step: &Step) -> Vec<StepRequest> {
        let request = |part: &Part| {
            let tokens = self.named(part.request).map_or(0, |of| of.group(step.group).tokens);
            let start = tokens.wrapping_add(part.ahead);
            StepRequest { id: self.handle(part.request), start, tokens: part.tokens }
        };
        step.parts.iter().map(request).collect()
    }

    /// Judges the answer to an admission.
    ///
    /// # Errors
    /// The fault of the answer.
    pub fn admitted(&mut self, name: Name, got: Result<RequestId, KvError>) -> Result<(), String> {
        let request = Request::new(name, Text::unshared(name));
        self.entered(&answer(got), None, request).map(drop)
    }

    /// Enters a request. Its slot must be free. It may be refused only if no slot is free, or for the given reason.
    /// Returns whether it was admitted.
    fn entered(
        &mut self,
        got: &Answer<RequestId>,
        refusal: Option<KvError>,
        request: Request,
    ) -> Result<bool, String> {
        let is_full = self.live.len() as u32 == self.config.max_requests;
        let full = is_full.then_some(KvError::NoFreeSlot { slots: self.config.max_requests });
        if let Some(want) = refusal.or(full) {
            return same(got, &answer(Err(want)));
        }
        let id = *got.as_ref().map_err(|error| format!("refused with a slot free: {error}"))?;
        let slot = id.slot();
        if slot.0 >= self.config.max_requests {
            return Err(format!("{id} is not a slot of the cache"));
        }
        if let Some(other) = self.live.keys().find(|other| other.slot() == slot) {
            return Err(format!("{id} was given to two requests; the other is {other}"));
        }
        let last = self.generations.insert(slot, id.generation());
        if last.is_some_and(|last| last >= id.generation()) {
            return Err(format!("{id} was given before"));
        }
        self.names.insert(request.name, id);
        let first = (slot.0 * self.config.max_context.div_ceil(128)) as usize;
        let entered = self.table[first..].iter_mut().zip(&request.blocks);
        entered.for_each(|(entry, block)| *entry = block.0 as i32);
        self.live.insert(id, request);
        Ok(true)
    }

    /// Judges the answer to a release.
    ///
    /// # Errors
    /// The fault of the answer.
    pub fn released(&mut self, name: Name, got: Result<(), KvError>) -> Result<(), String> {
        let id = self.handle(name);
        let want = self.check_known(id);
        same(&answer(got), &answer(want))?;
        self.live.remove(&id);
        Ok(())
    }

    /// Judges the answer to the rewinding of a request's draft layers.
    ///
    /// # Errors
    /// The fault of the answer.
    pub fn rewound(
        &mut self,
        name: Name,
        committed: u32,
        got: Result<(), KvError>,
    ) -> Result<(), String> {
        let (id, limit) = (self.handle(name), self.max_decode_tokens());
        let now = self.live.get(&id).map(|request| request.group(LayerGroup::Draft));
        let (request, to) = (id, committed);
        let want = match now {
            None => self.check_known(id),
            Some(now) if !now.is_whole_at(now.tokens, limit) => {
                let group = LayerGroup::Draft;
                Err(KvError::Overwritten { request, group, committed: now.tokens })
            }
            Some(now) if committed > now.tokens || !now.is_whole_at(committed, limit) => {
                let (committed, earliest) = (now.tokens, now.written_to.saturating_sub(limit));
                Err(KvError::CannotRewind { request, to, committed, earliest })
            }
            Some(_) => Ok(()),
        };
        if same(&answer(got), &answer(want))?
            && let Some(request) = self.live.get_mut(&id)
        {
            request.groups[LayerGroup::Draft.index()].tokens = committed;
        }
        Ok(())
    }

    /// The error for a handle of a request that is not admitted.
    fn check_known(&self, id: RequestId) -> Result<(), KvError> {
        if self.live.contains_key(&id) {
            Ok(())
        } else if id == self.stranger {
            Err(KvError::ForeignRequest { request: id })
        } else {
            Err(KvError::UnknownRequest { request: id })
        }
    }
}

/// Checks that both answers are the same; returns whether they are `Ok`.
fn same<T: std::fmt::Debug>(got: &Answer<T>, want: &Answer<T>) -> Result<bool, String> {
    let (answer, expected) = (format!("{got:?}"), format!("{want:?}"));
    if answer == expected {
        Ok(got.is_ok())
    } else {
        let text = format!("the answer is {answer}, should be {expected}");
        Err(without_cache_ids(&text))
    }
}

/// The text without the ids of caches, which differ in every run.
fn without_cache_ids(text: &str) -> String {
    let mut parts = text.split("cache: CacheId(");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |done, part| done + part.split_once("), ").map_or(part, |(_, rest)| rest))
}
