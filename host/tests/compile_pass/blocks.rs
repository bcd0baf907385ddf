//! A block is taken, looked at and given back.

use dsv4_kv::block::BlockPool;

fn main() {
    let mut pool = BlockPool::new(1);
    let block = pool.take().unwrap();
    println!("{:?}", block.id());
    pool.give_back(block);
}
