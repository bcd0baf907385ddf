//! A block has one owner.

use dsv4_kv::block::BlockPool;

fn main() {
    let mut pool = BlockPool::new(1);
    let block = pool.take().unwrap();
    let copy = block.clone(); //~ E0599
    pool.give_back(block);
    pool.give_back(copy);
}
