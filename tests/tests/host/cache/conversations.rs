//! Conversations: the part of the last answer that the next turn reuses, with and without checkpoints of answers.

use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::reuse::ReuseStats;
use dsv4_kv::{Accepted, CacheConfig, LayerGroup, Ledger, Prompt, RequestId, StepRequest};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const TRUNK: LayerGroup = LayerGroup::Trunk;

pub(super) fn config(keep_outputs: bool, num_blocks: u32, num_checkpoints: u32) -> CacheConfig {
    CacheConfig {
        max_requests: 8,
        num_blocks,
        max_context: 8192,
        max_step_tokens: 8192,
        num_checkpoints,
        keep_outputs,
        ..CacheConfig::new(ModelConfig::preset("tiny").unwrap())
    }
}

/// A ledger whose requests run as in a cache: a prompt in one step, then an answer in steps of two tokens, which save
/// the checkpoints that are due.
pub(super) struct Run {
    pub ledger: Ledger,
    array: Vec<i32>,
}

impl Run {
    pub fn new(config: &CacheConfig) -> Self {
        let ledger = Ledger::new(config).unwrap();
        Self { array: vec![0; ledger.largest_layout().elements()], ledger }
    }

    /// Runs tokens of a request in a step, and commits their ids. With more than one token the step saves the
    /// checkpoints that it passes.
    pub fn step(&mut self, id: RequestId, tokens: &[u32]) {
        self.step_told(id, tokens.len() as u32, tokens);
    }

    /// Runs `count` tokens of a request in a step, and commits the ids `tokens`.
    pub fn step_told(&mut self, id: RequestId, count: u32, tokens: &[u32]) {
        let start = self.ledger.committed(id).unwrap();
        let step = [StepRequest { id, start, tokens: count }];
        self.ledger.begin_step(TRUNK, &step, &mut self.array).unwrap();
        let accepted = [Accepted { id, accepted: count, tokens }];
        self.ledger.commit_step(TRUNK, &accepted).unwrap();
    }

    /// Runs a turn: the prompt `said`, then the answer. Returns the number of reused tokens.
    pub fn turn(&mut self, said: &mut Vec<u32>, answer: &[u32]) -> u32 {
        let prompt = Prompt { tokens: said, salt: b"", adapter: b"" };
        let admission = self.ledger.admit_with(&prompt).unwrap();
        self.step(admission.id, &said[admission.reused as usize..]);
        // A ledger alone has no copies after steps of one token; chunks of two tokens pass each boundary inside a step.
        answer.chunks(2).for_each(|tokens| self.step(admission.id, tokens));
        said.extend_from_slice(answer);
        self.ledger.release(admission.id).unwrap();
        self.ledger.audit().unwrap();
        let (ledger, counts) = (&self.ledger, self.ledger.tree_counts());
        assert_eq!(ledger.output_checkpoints(), 0, "an idle cache has none aside");
        assert_eq!(ledger.free_checkpoints() + counts.checkpoints, ledger.total_checkpoints());
        admission.reused
    }
}

/// The next turn continues from the last boundary of the answer; without checkpoints of answers, from that of the
/// prompt.
#[test]
fn a_turn_goes_on_from_the_answer_before() {
    for keep_outputs in [true, false] {
        let mut run = Run::new(&config(keep_outputs, 64, 4));
        let mut said: Vec<u32> = (0..300).collect();
        let mut next = 300;
        let mut say = |count: u32| -> Vec<u32> {
            next += count;
            (next - count..next).collect()
        };
        assert_eq!(run.turn(&mut said, &say(260)), 0);
        said.extend(say(20));
        // 560 tokens were computed: 512 of them are reused, or 256 of the prompt.
        assert_eq!(run.turn(&mut said, &say(100)), if keep_outputs { 512 } else { 256 });
        said.extend(say(300));
        // 680 tokens were computed, and the answer closed a block; the prompt's 580 did not.
        assert_eq!(run.turn(&mut said, &[]), if keep_outputs { 640 } else { 512 });
    }
}

/// The checkpoint of a running answer is given up for that of a prompt; no request is refused because of it.
#[test]
fn an_answer_that_goes_on_makes_room() {
    let mut run = Run::new(&config(true, 64, 2));
    let prompts = [0, 1000].map(|first| (first..first + 200).collect::<Vec<u32>>());
    let admit_with = |run: &mut Run, tokens: &[u32]| {
        run.ledger.admit_with(&Prompt { tokens, salt: b"", adapter: b"" }).unwrap()
    };
    let admit = |run: &mut Run, tokens: &[u32]| admit_with(run, tokens).id;
    let one = admit(&mut run, &prompts[0]);
    run.step(one, &prompts[0]);
    let answer: Vec<u32> = (500..700).collect();
    answer.chunks(2).for_each(|tokens| run.step(one, tokens));
    assert_eq!((run.ledger.free_checkpoints(), run.ledger.output_checkpoints()), (0, 1));
    // The first request runs and uses the checkpoint of its prompt; that of its answer is given up.
    let two = admit(&mut run, &prompts[1]);
    run.step(two, &prompts[1]);
    assert_eq!((run.ledger.free_checkpoints(), run.ledger.output_checkpoints()), (0, 0));
    run.ledger.release(one).unwrap();
    run.ledger.release(two).unwrap();
    assert_eq!(prompts.map(|prompt| admit_with(&mut run, &prompt).reused), [128; 2]);
}

/// Simulates conversations with long answers. Returns the reuse statistics.
fn load(keep_outputs: bool, num_blocks: u32, num_checkpoints: u32) -> ReuseStats {
    let mut random = SmallRng::seed_from_u64(5);
    let mut run = Run::new(&config(keep_outputs, num_blocks, num_checkpoints));
    let mut said: Vec<Vec<u32>> = vec![Vec::new(); 24];
    for _ in 0..200 {
        let number = random.random_range(0..said.len());
        if said[number].len() > 6000 {
            said[number].clear();
        }
        let mut tokens = |most: u32| -> Vec<u32> {
            let count = random.random_range(20..most);
            (0..count).map(|_| random.random()).collect()
        };
        let (question, answer) = (tokens(300), tokens(900));
        said[number].extend(question);
        run.turn(&mut said[number], &answer);
    }
    run.ledger.reuse_stats()
}

/// Checkpoints of answers increase reuse, both where all fits and where much is evicted.
#[test]
fn answers_are_reused() {
    for (blocks, checkpoints, gain) in [(2000, 400, 0.1), (500, 60, 0.0)] {
        let [with, without] = [true, false].map(|keep| load(keep, blocks, checkpoints));
        let share = |stats: &ReuseStats| stats.reused as f64 / stats.prompt_tokens as f64;
        println!(
            "{blocks} blocks, {checkpoints} checkpoints: {:.3} of prompt tokens reused, {:.3} without; {with:?}",
            share(&with),
            share(&without),
        );
        assert_eq!(with.prompt_tokens, without.prompt_tokens);
        assert!(with.hits_by_origin[3] > 20 && without.hits_by_origin[3] == 0, "{with:?}");
        assert!(share(&with) > share(&without) + gain, "{with:?} {without:?}");
    }
}
