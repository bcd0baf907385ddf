//! The turns of a conversation are stored one after the other, and the object of the first one is deleted meanwhile.

use dsv4_kv::RootKey;

use super::*;
use crate::image::BLOCK;

/// A prefix of the conversation, of whole blocks.
struct Turn {
    root: RootKey,
    tokens: Vec<[u32; BLOCK]>,
}

impl Turn {
    fn of(blocks: u32) -> Self {
        let root = RootKey::new(b"salt", b"adapter", b"model");
        Self { root, tokens: (0..blocks).map(|block| [block; BLOCK]).collect() }
    }

    fn keys(&self) -> Vec<Key> {
        Key::all(b"identity", self.root.bytes(), &self.tokens)
    }
}

impl Source for Turn {
    fn root(&self) -> &RootKey {
        &self.root
    }

    fn tokens(&self) -> &[[u32; BLOCK]] {
        &self.tokens
    }

    fn info(&self) -> CheckpointInfo {
        CheckpointInfo { origin: Origin::Prompt, has_draft: false }
    }

    /// The image of a block is its number.
    fn blocks(&self, first: usize, bytes: &mut Vec<u8>) {
        bytes.extend(self.tokens[first..].iter().map(|block| block[0] as u8));
    }

    fn checkpoint(&self, bytes: &mut Vec<u8>) {
        bytes.push(self.tokens.len() as u8);
    }
}

fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(work)
}

fn store(objects: &mut Objects, blocks: u32) {
    let (turn, mut errors): (Box<dyn Source>, _) = (Box::new(Turn::of(blocks)), Vec::new());
    let stored = run(objects.store(turn, &mut errors)).unwrap();
    assert!(stored > 0 && errors.is_empty(), "{stored} bytes, {errors:?}");
}

/// Reads a turn; returns the images of the blocks that were found.
fn read(objects: &mut Objects, blocks: u32) -> Vec<u8> {
    let (turn, queue) = (Turn::of(blocks), Arc::<Shared>::default());
    let keys = turn.keys().into();
    let Turn { root, tokens } = turn;
    let request = FetchRequest {
        id: 0,
        root,
        tokens: tokens.into(),
        keys,
        already_reusable: 0,
        in_host_memory: 0,
    };
    queue.queue().reading = Some(0);
    let (found, _) = run(objects.read(request, &queue));
    found.map_or(Vec::new(), |found| found.images(0).flatten().copied().collect())
}

/// Deletes the object of the first turn, as the rules of a store may do.
fn delete_first(store: &InMemory, objects: &Objects) {
    run(store.delete(&objects.path(&Turn::of(1).keys()[0]))).unwrap();
}

/// Another tier reads all three blocks of the third turn.
fn assert_whole(store: &Arc<InMemory>) {
    let mut other = over(store);
    run(other.list(Instant::now() + LIST_TIMEOUT)).unwrap();
    assert_eq!(read(&mut other, 3), [0, 1, 2]);
}

/// A chain counts as whole for [`WHOLE_TIME`] after all of it was seen, not after its last object was stored.
#[test]
fn a_chain_is_followed_again_after_its_time() {
    let memory = Arc::<InMemory>::default();
    let mut objects = over(&memory);
    for blocks in 1..=3 {
        store(&mut objects, blocks);
        if blocks == 1 {
            delete_first(&memory, &objects);
        }
        // The second turn comes within the time, the third one after it.
        objects.whole.0.values_mut().for_each(|seen| *seen -= WHOLE_TIME * 2 / 3);
    }
    assert_whole(&memory);
}

/// After an object was missing, no chain counts as whole: others may lead to it.
#[test]
fn a_chain_is_followed_again_after_a_miss() {
    let memory = Arc::<InMemory>::default();
    let mut objects = over(&memory);
    (1..=2).for_each(|blocks| store(&mut objects, blocks));
    delete_first(&memory, &objects);
    assert!(read(&mut objects, 1).is_empty(), "it is missing");
    store(&mut objects, 3);
    assert_whole(&memory);
}
