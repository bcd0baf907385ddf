//! The reference model: what a cache must answer and hold, from the history of tokens alone.
//!
//! It knows no free list and no kernel. What it cannot know, which slot or block is taken, it takes
//! from the answer and checks that nobody had it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use dsv4_kv::plan::{NONE, Section, StepLayout};
use dsv4_kv::{BlockId, CacheConfig, KvError, RequestId, SlotId, StepPlan, StepRequest};
use kv_layout::geometry::LayerKind;

use super::op::{Name, Part};

/// A request as the model sees it.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its name in the script.
    pub name: Name,
    /// Final tokens.
    pub tokens: u32,
    /// Tokens of the last step that are not final.
    pub written: u32,
    /// How many of those are of the request's own story.
    pub genuine: u32,
    /// Whether all final tokens are of its own story; else its bytes are nobody's business.
    pub known: bool,
    /// Its blocks, oldest first.
    pub blocks: Vec<BlockId>,
}

/// The model of one cache.
#[derive(Debug)]
pub struct Model {
    config: CacheConfig,
    /// Rows of a slot's window: 128, and one for each token a step may take back but one.
    ring: u32,
    has_entries: bool,
    names: HashMap<Name, RequestId>,
    live: BTreeMap<RequestId, Request>,
    /// The last generation that each slot was given with.
    generations: HashMap<SlotId, u32>,
    /// The block table on the device: `[max_requests, max_blocks]`.
    table: Vec<i32>,
    /// StepMeta as the last step left it.
    array: Vec<i32>,
}

/// A handle that no cache gives out.
const NOBODY: RequestId = RequestId { slot: SlotId(u32::MAX), generation: 0 };

impl Model {
    /// The model of an empty cache.
    #[must_use]
    pub fn new(config: &CacheConfig) -> Self {
        let layout = StepLayout::new(config.max_step_tokens, config.max_requests);
        let blocks = config.max_context.div_ceil(128);
        Self {
            ring: 128 + config.max_draft,
            has_entries: config.model.layers.iter().any(|&kind| kind != LayerKind::Swa),
            names: HashMap::new(),
            live: BTreeMap::new(),
            generations: HashMap::new(),
            table: vec![NONE; (config.max_requests * blocks) as usize],
            array: vec![0; layout.elements()],
            config: config.clone(),
        }
    }

    /// The configuration of the cache.
    #[must_use]
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// The requests that are admitted.
    pub fn live(&self) -> impl ExactSizeIterator<Item = (RequestId, &Request)> {
        self.live.iter().map(|(&id, request)| (id, request))
    }

    /// The handle a name stands for, of a request that may be gone.
    #[must_use]
    pub fn handle(&self, name: Name) -> RequestId {
        self.names.get(&name).copied().unwrap_or(NOBODY)
    }

    /// The request of that name, if it is admitted.
    #[must_use]
    pub fn named(&self, name: Name) -> Option<&Request> {
        self.live.get(&self.handle(name))
    }

    /// Blocks that nobody holds.
    #[must_use]
    pub fn free_blocks(&self) -> u32 {
        let held: usize = self.live.values().map(|request| request.blocks.len()).sum();
        self.config.num_blocks - held as u32
    }

    /// The steps that a script's parts stand for.
    #[must_use]
    pub fn requests_of(&self, parts: &[Part]) -> Vec<StepRequest> {
        let request = |part: &Part| {
            let tokens = self.named(part.request).map_or(0, |request| request.tokens);
            let start = tokens.wrapping_add(part.ahead);
            StepRequest { id: self.handle(part.request), start, tokens: part.tokens }
        };
        parts.iter().map(request).collect()
    }

    /// Judges the answer to an admission.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn admitted(&mut self, name: Name, got: Result<RequestId, KvError>) -> Result<(), String> {
        if self.live.len() as u32 == self.config.max_requests {
            let want = KvError::NoFreeSlot { slots: self.config.max_requests };
            return same(&got, &Err(want)).map(drop);
        }
        let id = got.map_err(|error| format!("admission refused with a slot free: {error}"))?;
        if id.slot.0 >= self.config.max_requests {
            return Err(format!("{id} is not a slot of the cache"));
        }
        if let Some((other, _)) = self.live.range(of_slot(id.slot)).next() {
            return Err(format!("{id} was given to two requests; the other is {other}"));
        }
        if self.generations.insert(id.slot, id.generation).is_some_and(|last| last >= id.generation)
        {
            return Err(format!("{id} was given before"));
        }
        let request =
            Request { name, tokens: 0, written: 0, genuine: 0, known: true, blocks: Vec::new() };
        self.live.insert(id, request);
        self.names.insert(name, id);
        Ok(())
    }

    /// Judges the answer to a release.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn released(&mut self, name: Name, got: Result<(), KvError>) -> Result<(), String> {
        let id = self.handle(name);
        let known = self.live.contains_key(&id);
        let want = if known { Ok(()) } else { Err(KvError::UnknownRequest { request: id }) };
        same(&got, &want)?;
        self.live.remove(&id);
        Ok(())
    }

    /// Judges the answer to a commit.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn committed(
        &mut self,
        name: Name,
        accepted: u32,
        got: Result<(), KvError>,
    ) -> Result<(), String> {
        let (request, most) = (self.handle(name), self.config.max_draft + 1);
        let want = match self.live.get(&request) {
            None => Err(KvError::UnknownRequest { request }),
            Some(&Request { written, .. }) if accepted > written => {
                Err(KvError::AcceptedTooMany { request, accepted, written })
            }
            Some(&Request { written, .. }) if accepted < written && written > most => {
                Err(KvError::NotRollbackable { request, accepted, written, most })
            }
            Some(_) => Ok(()),
        };
        if same(&got, &want)?
            && let Some(request) = self.live.get_mut(&request)
        {
            request.known &= accepted <= request.genuine;
            request.tokens += accepted;
            (request.written, request.genuine) = (0, 0);
        }
        Ok(())
    }

    /// Judges the answer to a step: `array` is StepMeta after it, `tables` reads a block table.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn prepared(
        &mut self,
        parts: &[Part],
        got: Result<StepPlan, KvError>,
        array: &[i32],
        tables: impl Fn(RequestId) -> Option<Vec<BlockId>>,
    ) -> Result<(), String> {
        let step = self.requests_of(parts);
        let want = self.refusal(&step).map_or_else(|| Ok(self.plan_of(&step)), Err);
        if !same(&got, &want)? {
            return differs(array, &self.array, "StepMeta after a refusal");
        }
        let new = want.map_or(0, |plan| plan.new_blocks);
        for (part, request) in parts.iter().zip(&step) {
            let table = tables(request.id).ok_or("a request of the step has no block table")?;
            self.take_blocks(request, &table)?;
            let entry = self.live.get_mut(&request.id).ok_or("checked above")?;
            entry.written = part.tokens;
            entry.genuine = part.genuine.min(part.tokens);
        }
        self.check_array(&step, new, array)
    }

    /// Why a step must be refused, if it must: the first request that cannot take part, then the
    /// step as a whole.
    fn refusal(&self, step: &[StepRequest]) -> Option<KvError> {
        let CacheConfig { max_requests, max_context, max_step_tokens, max_draft, .. } = self.config;
        if step.len() > max_requests as usize {
            return Some(KvError::TooManyRequests { requests: step.len(), most: max_requests });
        }
        let mut before = BTreeSet::new();
        for &StepRequest { id: request, start, tokens } in step {
            let Some(&Request { tokens: committed, written, .. }) = self.live.get(&request) else {
                return Some(KvError::UnknownRequest { request });
            };
            let most = max_draft + 1;
            if written > most {
                return Some(KvError::NotRollbackable { request, accepted: 0, written, most });
            }
            if start != committed {
                return Some(KvError::WrongStart { request, committed, start });
            }
            if tokens == 0 {
                return Some(KvError::NoTokens { request });
            }
            let end = u64::from(start) + u64::from(tokens);
            if end > u64::from(max_context) {
                return Some(KvError::ContextTooLong { request, end, most: max_context });
            }
            if !before.insert(request) {
                return Some(KvError::DuplicateRequest { request });
            }
        }
        let tokens: u64 = step.iter().map(|part| u64::from(part.tokens)).sum();
        if tokens > u64::from(max_step_tokens) {
            return Some(KvError::StepTooLong { tokens, most: max_step_tokens });
        }
        let (needed, free) = (self.plan_of(step).new_blocks, self.free_blocks());
        (needed > free).then_some(KvError::OutOfBlocks { needed, free })
    }

    /// The numbers of a step that is not refused.
    fn plan_of(&self, step: &[StepRequest]) -> StepPlan {
        let new = |part: &StepRequest| {
            let held = self.live.get(&part.id).map_or(0, |request| request.blocks.len() as u32);
            self.blocks_of(part.start + part.tokens).saturating_sub(held)
        };
        StepPlan {
            tokens: step.iter().map(|part| part.tokens).sum(),
            requests: step.len() as u32,
            new_blocks: step.iter().map(new).sum(),
        }
    }

    /// Blocks in which `tokens` tokens have an entry: one for each four tokens, 32 to a block.
    fn blocks_of(&self, tokens: u32) -> u32 {
        let newest = (tokens / 4).checked_sub(1).filter(|_| self.has_entries);
        newest.map_or(0, |entry| entry / 32 + 1)
    }

    /// The request kept its blocks and got as many as it needs, each of which nobody held.
    fn take_blocks(&mut self, part: &StepRequest, table: &[BlockId]) -> Result<(), String> {
        let StepRequest { id, start, tokens } = *part;
        let held = self.live.get(&id).map_or(&[][..], |request| &request.blocks);
        let needed = (self.blocks_of(start + tokens) as usize).max(held.len());
        if table.len() != needed || !table.starts_with(held) {
            return Err(format!("{id}: blocks {table:?} after {held:?}; {needed} are needed"));
        }
        for (at, &block) in table.iter().enumerate().skip(held.len()) {
            let taken = self.live.values().any(|request| request.blocks.contains(&block));
            if taken || table[..at].contains(&block) || block.0 >= self.config.num_blocks {
                return Err(format!("{id}: {block:?} was not free"));
            }
        }
        if let Some(request) = self.live.get_mut(&id) {
            request.blocks = table.to_vec();
        }
        Ok(())
    }

    /// StepMeta says of every token what its history says, and carries every new block.
    fn check_array(&mut self, step: &[StepRequest], new: u32, array: &[i32]) -> Result<(), String> {
        let layout = StepLayout::new(self.config.max_step_tokens, self.config.max_requests);
        let mut tokens = Vec::new();
        for &StepRequest { id, start, tokens: count } in step {
            for index in 0..count {
                let (position, after) = (start + index, count - 1 - index);
                // Of more tokens than the ring has rows, the last ones stay.
                let row = id.slot.0 * self.ring + position % self.ring;
                let row = if after < self.ring { row as i32 } else { NONE };
                tokens.push([position as i32, id.slot.0 as i32, index as i32, after as i32, row]);
            }
        }
        let sections = [
            Section::Position,
            Section::Slot,
            Section::Index,
            Section::Remaining,
            Section::RingRow,
        ];
        tokens.resize(layout.capacity(Section::Slot) as usize, [0, NONE, 0, 0, NONE]);
        for (at, section) in sections.into_iter().enumerate() {
            let want = tokens.iter().map(|token| token[at]);
            if !array[layout.range(section)].iter().copied().eq(want) {
                return Err(format!("StepMeta: section {section:?} of {step:?}"));
            }
        }
        let updates = |section| &array[layout.range(section)][..new as usize];
        for (&at, &block) in updates(Section::TableIndex).iter().zip(updates(Section::TableBlock)) {
            *self.table.get_mut(at as usize).ok_or("a block outside the table")? = block;
        }
        self.array.clear();
        self.array.extend_from_slice(array);
        let width = self.table.len() / self.config.max_requests as usize;
        for part in step {
            let row = &self.table[part.id.slot.0 as usize * width..][..width];
            let blocks = self.live.get(&part.id).map_or(&[][..], |request| &request.blocks);
            if !blocks.iter().zip(row).all(|(block, &entry)| block.0 as i32 == entry) {
                return Err(format!("{}: the device's table is {row:?}, not {blocks:?}", part.id));
            }
        }
        Ok(())
    }
}

/// All handles of a slot.
fn of_slot(slot: SlotId) -> std::ops::RangeInclusive<RequestId> {
    RequestId { slot, generation: 0 }..=RequestId { slot, generation: u32::MAX }
}

/// Both answers are the same; whether they are no refusal.
fn same<T: std::fmt::Debug>(
    got: &Result<T, KvError>,
    want: &Result<T, KvError>,
) -> Result<bool, String> {
    let (answer, expected) = (format!("{got:?}"), format!("{want:?}"));
    if answer == expected {
        Ok(got.is_ok())
    } else {
        Err(format!("the answer is {answer}, should be {expected}"))
    }
}

fn differs(got: &[i32], want: &[i32], what: &str) -> Result<(), String> {
    let at = (0..got.len().max(want.len())).find(|&at| got.get(at) != want.get(at));
    at.map_or(Ok(()), |at| Err(format!("{what}: element {at} changed")))
}
