//! Which requests have checkpoints taken: not those that tell nothing of their tokens, and forks inside a prompt too.

use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{
    Accepted, Admission, CacheConfig, LayerGroup, Ledger, Prompt, RequestId, StepRequest,
};

const TRUNK: LayerGroup = LayerGroup::Trunk;

/// A ledger whose steps save inside their chunks.
struct Run {
    ledger: Ledger,
    array: Vec<i32>,
}

impl Run {
    fn new(num_checkpoints: u32) -> Self {
        let config = CacheConfig {
            max_requests: 4,
            num_blocks: 200,
            max_context: 8192,
            max_step_tokens: 8192,
            num_checkpoints,
            checkpoint_interval: 0,
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

    /// What a prompt reuses; it is computed in one chunk, and released.
    fn prompt(&mut self, tokens: &[u32]) -> u32 {
        let Admission { id, reused, .. } = self.admit(tokens);
        self.chunk(id, &tokens[reused as usize..], true);
        self.ledger.release(id).unwrap();
        self.ledger.audit().unwrap();
        reused
    }
}

/// A request that tells nothing of its tokens evicts no checkpoint of another: the prefix tree would not take its own.
#[test]
fn who_tells_nothing_evicts_nothing() {
    let mut run = Run::new(1);
    let (told, private): (Vec<u32>, Vec<u32>) = ((0..300).collect(), (1000..1600).collect());
    assert_eq!(run.prompt(&told), 0);
    let id = run.admit(&private).id;
    run.chunk(id, &private[..100], false);
    run.chunk(id, &private[100..], false);
    run.ledger.release(id).unwrap();
    assert_eq!(run.prompt(&told), 256);
}

/// A request that was forked inside its prompt has checkpoints where it goes on by itself.
#[test]
fn a_fork_inside_a_prompt_is_saved() {
    let mut run = Run::new(4);
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
