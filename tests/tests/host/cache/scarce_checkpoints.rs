//! Which positions have a checkpoint where there are too few for all.

use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{
    Accepted, Admission, CacheConfig, LayerGroup, Ledger, Prompt, RequestId, StepRequest,
};

const TRUNK: LayerGroup = LayerGroup::Trunk;

/// A ledger with few checkpoints, whose steps save inside their chunks.
struct Run {
    ledger: Ledger,
    array: Vec<i32>,
}

impl Run {
    fn new(num_checkpoints: u32, checkpoint_interval: u32) -> Self {
        let config = CacheConfig {
            max_requests: 4,
            num_blocks: 200,
            max_context: 8192,
            max_step_tokens: 8192,
            num_checkpoints,
            checkpoint_interval,
            ..CacheConfig::new(ModelConfig::preset("tiny").unwrap())
        };
        let ledger = Ledger::new(&config).unwrap();
        Self { array: vec![0; ledger.largest_layout().elements()], ledger }
    }

    fn admit(&mut self, tokens: &[u32]) -> Admission {
        self.ledger.admit_with(&Prompt { tokens, salt: b"", adapter: b"" }).unwrap()
    }

    /// Runs a chunk; with `told` its tokens are told when it is committed.
    fn chunk(&mut self, id: RequestId, tokens: &[u32], told: bool) {
        let (start, count) = (self.ledger.committed(id).unwrap(), tokens.len() as u32);
        let step = [StepRequest { id, start, tokens: count }];
        self.ledger.begin_step(TRUNK, &step, &mut self.array).unwrap();
        let accepted = if told {
            Accepted { id, accepted: count, tokens }
        } else {
            Accepted::count(id, count)
        };
        self.ledger.commit_step(TRUNK, &[accepted]).unwrap();
    }

    /// What a prompt reuses; it is computed by chunks of `chunk` tokens, and released.
    fn prompt(&mut self, tokens: &[u32], chunk: usize) -> u32 {
        let Admission { id, reused, .. } = self.admit(tokens);
        tokens[reused as usize..].chunks(chunk).for_each(|tokens| self.chunk(id, tokens, true));
        self.ledger.release(id).unwrap();
        self.ledger.audit().unwrap();
        reused
    }
}

/// A request that tells nothing of its tokens evicts no checkpoint of another: the prefix tree would not take its own.
#[test]
fn who_tells_nothing_evicts_nothing() {
    let mut run = Run::new(1, 0);
    let (told, private): (Vec<u32>, Vec<u32>) = ((0..300).collect(), (1000..1600).collect());
    assert_eq!(run.prompt(&told, 300), 0);
    let id = run.admit(&private).id;
    run.chunk(id, &private[..100], false);
    run.chunk(id, &private[100..], false);
    run.ledger.release(id).unwrap();
    assert_eq!(run.prompt(&told, 300), 256);
}

/// A prompt's end has the last checkpoint, not a position at an interval: in one chunk, and where the interval is chunks before.
#[test]
fn the_end_of_a_prompt_comes_before_its_intervals() {
    let prompt: Vec<u32> = (0..4000).collect();
    for chunk in [4000, 2100, 512] {
        let mut run = Run::new(1, 2048);
        assert_eq!(run.prompt(&prompt, chunk), 0);
        assert_eq!(run.prompt(&prompt, chunk), 3968, "chunks of {chunk}");
    }
    // With a second one there is room for the interval.
    let mut run = Run::new(2, 2048);
    assert_eq!(run.prompt(&prompt, 4000), 0);
    let other: Vec<u32> = (0..2500).chain(9000..9100).collect();
    assert_eq!(run.prompt(&other, 4000), 2048);
}

/// A request that was forked inside its prompt has checkpoints where it goes on by itself.
#[test]
fn a_fork_inside_a_prompt_is_saved() {
    let mut run = Run::new(4, 0);
    let prompt: Vec<u32> = (0..4000).collect();
    let parent = run.admit(&prompt).id;
    run.chunk(parent, &prompt[..1000], true);
    let fork = run.ledger.fork(parent).unwrap();
    let own: Vec<u32> = (5000..5600).collect();
    own.chunks(100).for_each(|tokens| run.chunk(fork, tokens, true));
    run.ledger.release(fork).unwrap();
    let said: Vec<u32> = prompt[..1000].iter().chain(&own).copied().chain([7]).collect();
    assert_eq!(run.admit(&said).reused, 1536);
    run.ledger.audit().unwrap();
}
